"""The linter: every mistake is found at its line, and correct manifests have no findings.

manifests/ has clean files, one for each kind. A mistake is an edit of one of them.
"""

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from llmtrain.commands.lint import command
from llmtrain.config.load import load_config
from llmtrain.errors import UsageError
from llmtrain.launch.manifests import dump_manifests, render
from llmtrain.launch.plan import plan_job
from llmtrain.launch.work import Work
from llmtrain.lint.check_manifests import RULES, lint
from llmtrain.lint.report import ManifestFinding
from llmtrain.lint.source import Sources, objects_of, read_sources
from llmtrain.lint.yaml_nodes import LineFinder, NotAManifest, parse
from llmtrain.registry import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = Path(__file__).parent / "manifests"
GOLDEN = ROOT / "tests" / "launch" / "golden"
KINDS = ["job", "statefulset", "pytorchjob", "jobset", "trainjob"]
# Has the format of a Hugging Face token.
TOKEN = "hf_" + "Abcdefgh" * 4


class Edit(NamedTuple):
    kind: str
    old: str
    new: str
    at: str
    """The finding is at the first line with this text."""
    also: frozenset[str] = frozenset()
    """Rules that the edit violates as well."""


def find(text: str, name: str = "a.yaml") -> list[ManifestFinding]:
    return lint(Sources(parse(text, name), [name], [])).findings


def edited(kind: str, *changes: tuple[str, str]) -> str:
    text = (DIRECTORY / f"{kind}.yaml").read_text()
    for old, new in changes:
        assert old in text, f"{kind}.yaml has no {old!r}"
        text = text.replace(old, new, 1)
    return text


def line_with(text: str, part: str) -> int:
    """The number of the first line with a part. A line break before the part anchors it to the start of a line."""
    start = text.index(part) + len(part) - len(part.lstrip("\n"))
    return text.count("\n", 0, start) + 1


ENV = "    - name: NCCL_DEBUG"
RESOURCES = "        resources:\n"
TRAP = "          trap 'kill -TERM $child; wait $child' TERM\n"
POLICY = "  podReplacementPolicy: Failed\n"

POLICY_END = '              status: "True"\n'
JOBSET_POLICY = "        podFailurePolicy" + re.split("        podFailurePolicy|restartPolicy: N", edited("jobset"))[1]


def variable(name: str, value: str) -> tuple[str, str]:
    """One more entry of env in a manifest of a Job or StatefulSet."""
    return f"    {ENV}\n", f"        - name: {name}\n          value: {value}\n    {ENV}\n"


def script(line: str) -> tuple[str, str]:
    return TRAP, f"{TRAP}          {line}\n"


def probe(name: str, handler: str) -> tuple[str, str]:
    return RESOURCES, f"        {name}:\n          {handler}\n{RESOURCES}"


def not_indexed() -> tuple[str, str]:
    """A Job without indexes whose variables do not refer to one; its endpoint does."""
    found = re.search(
        r"  completionMode: Indexed\n.*        - name: POD_NUMBER\n.*?(?=        - name: HF)", edited("job"), re.S
    )
    assert found
    kept = found[0].partition("        - name: POD_NUMBER\n")[0]
    return found[0], kept.replace("  completionMode: Indexed\n", "")


def namespace(label: str) -> str:
    return f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: lab\n  labels:\n    {label}\n---\n"


def one_gpu(kind: str) -> tuple[str, str]:
    found = re.search(r"requests: .*gpu: 2}\n.*gpu: 2}", edited(kind))
    assert found
    return found[0], found[0].replace("gpu: 2", "gpu: 1")


NO_SIDECAR = '        sidecar.istio.io/inject: "false"\n'
SIDECAR = "apiVersion: batch/v1\n" + edited("job").partition("apiVersion: batch/v1\n")[2].partition("    spec:\n")[0]

MISTAKES: dict[str, list[Edit]] = {
    "rdzv-endpoint-is-service": [
        Edit("job", "translator-0.peers:29500", "peers:29500", "--rdzv-endpoint"),
        Edit("job", "translator-0.peers:29500", "peers.default.svc.cluster.local:29500", "--rdzv-endpoint"),
        Edit("jobset", "translator-node-0-0.peers", "peers", "--rdzv-endpoint"),
        Edit("statefulset", "MASTER_ADDR=translator-0.peers", "MASTER_ADDR=peers", "export MASTER_ADDR"),
        Edit("job", *variable("MASTER_ADDR", "peers"), "value: peers"),
    ],
    "local-rank-is-pod-index": [
        Edit("job", *variable("LOCAL_RANK", "$(JOB_COMPLETION_INDEX)"), "value: $(JOB_"),
        Edit("statefulset", *script("export LOCAL_RANK=$NODE_RANK"), "export LOCAL_RANK"),
        Edit("statefulset", *script("export LOCAL_RANK=${HOSTNAME##*-}"), "export LOCAL_RANK"),
        Edit(
            "job",
            f"    {ENV}\n",
            "        - name: LOCAL_RANK\n          valueFrom:\n            fieldRef:\n              fieldPath: "
            f"metadata.annotations['batch.kubernetes.io/job-completion-index']\n    {ENV}\n",
            "valueFrom:\n            fieldRef:\n              fieldPath: metadata.annotations",
        ),
    ],
    "world-size-mismatch": [
        Edit("job", *variable("WORLD_SIZE", '"4"'), 'value: "4"'),
        Edit("statefulset", *script("export WORLD_SIZE=16"), "export WORLD_SIZE"),
    ],
    "nnodes-mismatch": [
        Edit("job", "--nnodes=4", "--nnodes=2", "--nnodes"),
        Edit("job", "--nnodes=4", "--nnodes=1:3", "--nnodes"),
        Edit("statefulset", "replicas: 4", "replicas: 3", "torchrun --nnodes"),
        Edit("job", *variable("NNODES", '"8"'), 'value: "8"'),
        Edit("jobset", "--nnodes=4", "--nnodes=5", "--nnodes"),
    ],
    "rdzv-timeout-ignored": [
        Edit("job", "join_timeout=600", "timeout=900", "timeout=900"),
        Edit("job", "join_timeout=600", "read_timeout=60,timeout=900", "timeout=900"),
        Edit(
            "pytorchjob",
            '  nprocPerNode: "2"\n',
            '  nprocPerNode: "2"\n  elasticPolicy:\n    rdzvBackend: c10d\n    rdzvConf:\n    - key: timeout\n'
            '      value: "900"\n',
            "key: timeout",
        ),
    ],
    "rdzv-etcd": [
        Edit("job", "--rdzv-backend=c10d", "--rdzv-backend=etcd-v2", "etcd-v2"),
        Edit(
            "pytorchjob",
            '  nprocPerNode: "2"\n',
            '  nprocPerNode: "2"\n  elasticPolicy:\n    rdzvBackend: etcd\n',
            "rdzvBackend",
        ),
    ],
    "static-without-node-rank": [Edit("statefulset", "--node_rank $NODE_RANK ", "", "torchrun --nnodes")],
    "nested-launcher": [
        Edit(
            "job",
            "        - train.py",
            "        - torchrun\n        - train.py",
            "\n        - torchrun\n        - train.py",
        ),
        Edit(
            "job",
            "        - train.py",
            "        - --no-python\n        - accelerate\n        - launch\n        - train.py",
            "- accelerate",
        ),
        Edit(
            "job",
            "        - train.py",
            "        - -m\n        - torch.distributed.run\n        - train.py",
            "- torch.dist",
        ),
        Edit(
            "job",
            "        - train.py",
            "        - --no-python\n        - bash\n        - -c\n        - exec torchrun train.py",
            "exec torchrun",
        ),
        Edit("statefulset", " train.py &", " --no_python deepspeed train.py &", "deepspeed"),
        Edit("pytorchjob", "[torchrun, train.py]", "[llmtrain, node, --, torchrun, train.py]", "[llmtrain"),
        Edit(
            "trainjob",
            "[torchrun, train.py]",
            "[python, -m, llmtrain, node, --nodes, '4', --, torchrun, x.py]",
            "[python",
        ),
    ],
    "probe-on-rendezvous-port": [
        Edit("job", *probe("livenessProbe", "tcpSocket: {port: 29500}"), "tcpSocket"),
        Edit("statefulset", *probe("startupProbe", "httpGet: {path: /, port: 29500}"), "httpGet"),
        Edit(
            "job",
            "        resources:\n",
            "        ports: [{name: rdzv, containerPort: 29500}]\n"
            "        readinessProbe: {tcpSocket: {port: rdzv}}\n        resources:\n",
            "readinessProbe",
        ),
    ],
    "node-rank-ignored": [
        Edit("job", "        - --nnodes=4", "        - --node-rank=0\n        - --nnodes=4", "node-rank")
    ],
    "socket-interface-fixed": [
        Edit("job", *variable("NCCL_SOCKET_IFNAME", "eth0"), "value: eth0"),
        Edit("statefulset", *script("export GLOO_SOCKET_IFNAME=ens5"), "export GLOO"),
    ],
    "sleep-random": [
        Edit("statefulset", *script("sleep $RANDOM"), "sleep $RANDOM"),
        Edit("statefulset", *script("sleep $((RANDOM % 30))"), "sleep $(("),
    ],
    "api-lookup": [
        Edit("statefulset", *script("IP=$(kubectl get pod translator-0 -o jsonpath={.status.podIP})"), "kubectl"),
        Edit("statefulset", *script("curl -sk https://kubernetes.default/api/v1/pods"), "curl"),
    ],
    "service-selects-nothing": [
        Edit("job", "    app: translator\n  ports", "    role: master\n  ports", "selector:"),
        Edit("statefulset", "    app: translator\n  ports", "    app: translater\n  ports", "selector:"),
    ],
    "service-not-headless": [
        Edit("job", "  clusterIP: None\n", "", "spec:"),
        Edit("statefulset", "clusterIP: None", "clusterIP: 10.0.0.7", "clusterIP"),
    ],
    "service-hides-unready-pods": [Edit("job", "  publishNotReadyAddresses: true\n", "", "spec:")],
    "pods-without-names": [
        Edit("job", "      subdomain: peers\n", "", "\n    spec:"),
        Edit("statefulset", "  serviceName: peers\n", "", "\nspec:\n  replicas"),
    ],
    "subdomain-without-service": [Edit("job", "subdomain: peers", "subdomain: pairs", "subdomain: pairs")],
    "endpoint-without-service": [
        Edit("job", "translator-0.peers:29500", "master:29500", "--rdzv-endpoint"),
        Edit("job", "translator-0.peers:29500", "translator-0.pairs:29500", "--rdzv-endpoint"),
        Edit("statefulset", "MASTER_ADDR=translator-0.peers", "MASTER_ADDR=master", "export MASTER_ADDR"),
        Edit("jobset", "translator-node-0-0.peers:29500", "master:29500", "--rdzv-endpoint"),
    ],
    "name-too-long": [
        Edit("job", "kind: Job\nmetadata:\n  name: translator", f"kind: Job\nmetadata:\n  name: {'t' * 62}", "ttt"),
        Edit(
            "trainjob", "kind: TrainJob\nmetadata:\n  name: t", f"kind: TrainJob\nmetadata:\n  name: {'t' * 50}", "ttt"
        ),
    ],
    "job-not-indexed": [
        Edit("job", "  completionMode: Indexed\n", "", "\nspec:\n  completions"),
        Edit("job", "completionMode: Indexed", "completionMode: NonIndexed", "completionMode"),
        Edit("job", *not_indexed(), "\nspec:\n  completions"),
    ],
    "completions-not-parallelism": [
        Edit("job", "  parallelism: 4\n", "  parallelism: 2\n", "parallelism: 2"),
        Edit("job", "  parallelism: 4\n", "", "completions: 4"),
    ],
    "job-restart-policy": [
        Edit("job", "      restartPolicy: Never\n", "", "\n    spec:"),
        Edit("job", "restartPolicy: Never", "restartPolicy: Always", "restartPolicy: Always"),
        Edit("job", "restartPolicy: Never", "restartPolicy: never", "restartPolicy: never"),
        Edit("jobset", "restartPolicy: Never", "restartPolicy: Always", "restartPolicy: Always"),
    ],
    "failure-policy-restart": [
        Edit("job", "restartPolicy: Never", "restartPolicy: OnFailure", "restartPolicy: OnFailure"),
        Edit("jobset", "            restartPolicy: Never\n", "", "\n          spec:"),
    ],
    "no-failure-policy": [
        Edit("job", re.search(r"  podFailure.*?(?=  template)", edited("job"), re.S)[0], "", "\nspec:\n  comp")
    ],
    "disruption-without-status": [
        Edit("jobset", '              status: "True"\n', "", "type: DisruptionTarget"),
        Edit("trainjob", 'status: "True"', "status: true", "type: DisruptionTarget"),
    ],
    "replacement-policy": [
        Edit("job", "podReplacementPolicy: Failed", "podReplacementPolicy: TerminatingOrFailed", "Terminating")
    ],
    "backoff-per-index": [Edit("job", POLICY, f"{POLICY}  backoffLimitPerIndex: 1\n", "backoffLimitPerIndex")],
    "success-policy": [
        Edit("job", POLICY, f'{POLICY}  successPolicy:\n    rules:\n    - succeededIndexes: "0"\n', "successPolicy")
    ],
    "jobset-restarts-in-place": [
        Edit(
            "jobset",
            f"{JOBSET_POLICY}restartPolicy: Never",
            f"{JOBSET_POLICY.partition(POLICY_END)[2]}restartPolicy: OnFailure",
            "restartPolicy: On",
            frozenset({"no-failure-policy"}),
        )
    ],
    "statefulset-in-order": [
        Edit("statefulset", "  podManagementPolicy: Parallel\n", "", "\nspec:\n  replicas"),
        Edit("statefulset", "podManagementPolicy: Parallel", "podManagementPolicy: OrderedReady", "OrderedReady"),
    ],
    "statefulset-restart-policy": [
        Edit("statefulset", "    spec:\n", "    spec:\n      restartPolicy: Never\n", "restartPolicy: Never")
    ],
    "statefulset-never-ends": [Edit("statefulset", "          sleep infinity & wait\n", "", "kind: StatefulSet")],
    "training-in-deployment": [
        Edit("statefulset", "kind: StatefulSet", "kind: Deployment", "kind: Deployment"),
        Edit("statefulset", "kind: StatefulSet", "kind: ReplicaSet", "kind: ReplicaSet"),
    ],
    "nproc-misspelt": [
        Edit("pytorchjob", 'nprocPerNode: "2"', 'nProcPerNode: "2"', "nProcPerNode", frozenset({"idle-gpus"})),
        Edit("pytorchjob", 'nprocPerNode: "2"', 'nproc_per_node: "2"', "nproc_per_node", frozenset({"idle-gpus"})),
    ],
    "nproc-not-a-string": [Edit("pytorchjob", 'nprocPerNode: "2"', "nprocPerNode: 2", "nprocPerNode")],
    "pytorch-container-name": [Edit("pytorchjob", "name: pytorch", "name: main", "name: main")],
    "master-replicas": [
        Edit("pytorchjob", "      replicas: 1\n", "", "Master:"),
        Edit("pytorchjob", "replicas: 1", "replicas: 2", "replicas: 2"),
    ],
    "master-in-restricted": [
        Edit(
            "pytorchjob",
            "apiVersion: kubeflow.org/v1\n",
            "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: lab\n  labels:\n"
            "    pod-security.kubernetes.io/enforce: restricted\n---\napiVersion: kubeflow.org/v1\n",
            "Master:",
        )
    ],
    "exit-code-permanent": [Edit("pytorchjob", "restartPolicy: OnFailure", "restartPolicy: ExitCode", "ExitCode")],
    "never-restarts": [Edit("pytorchjob", "restartPolicy: OnFailure", "restartPolicy: Never", "Never")],
    "endless-restarts": [Edit("pytorchjob", "  runPolicy:\n    backoffLimit: 5\n", "", "\nspec:\n  nproc")],
    "pod-rank-as-process-rank": [
        Edit("pytorchjob", "[torchrun, train.py]", "[python, train.py]", "[python, train.py]"),
        Edit("pytorchjob", "[torchrun, train.py]", "[torchrun, --nnodes=$(WORLD_SIZE), train.py]", "$(WORLD_SIZE)"),
    ],
    "trainjob-sets-pet": [Edit("trainjob", "name: LOG_EVERY", "name: PET_RDZV_ID", "PET_RDZV_ID")],
    "trainjob-name": [
        Edit("trainjob", "kind: TrainJob\nmetadata:\n  name: t", "kind: TrainJob\nmetadata:\n  name: 7t", "7t")
    ],
    "trainjob-override-field": [
        Edit(
            "trainjob",
            "  trainer:\n    numNodes",
            "  podTemplateOverrides:\n  - targetJobs: [{name: node}]\n    spec:\n"
            "      securityContext: {fsGroup: 1000}\n  trainer:\n    numNodes",
            "fsGroup: 1000",
        )
    ],
    "trainjob-stock-runtime": [
        Edit(
            "trainjob",
            "    kind: TrainingRuntime\n    name: translator",
            "    kind: ClusterTrainingRuntime\n    name: torch-distributed",
            "runtimeRef:",
        )
    ],
    "runtime-container-name": [
        Edit("trainjob", "          - name: node\n", "          - name: main\n", "- name: main")
    ],
    "gpu-without-limit": [
        Edit("job", "memory: 64Gi, nvidia.com/gpu: 2}\n        sec", "memory: 64Gi}\n        sec", "requests: {cpu"),
        Edit(
            "job",
            "requests: {cpu: 8, memory: 64Gi, nvidia.com/gpu: 2}",
            "requests: {nvidia.com/gpu: 4}",
            "requests: {nv",
        ),
        Edit("job", "requests: {cpu: 8,", "requests: {rdma/ib: 1,", "requests: {rdma"),
        Edit(
            "trainjob",
            "    numProcPerNode: 2\n    env",
            "    numProcPerNode: 2\n    resourcesPerNode:\n      requests: {amd.com/gpu: 2}\n    env",
            "requests: {amd",
        ),
    ],
    "more-processes-than-gpus": [
        Edit("job", *one_gpu("job"), "--nproc-per-node"),
        Edit("statefulset", *one_gpu("statefulset"), "torchrun --nnodes"),
        Edit("pytorchjob", *one_gpu("pytorchjob"), "nprocPerNode"),
        Edit("job", "--nproc-per-node=2", "--nproc-per-node=8", "--nproc-per-node"),
        Edit("trainjob", "    numProcPerNode: 2\n    env", "    numProcPerNode: 4\n    env", "numProcPerNode: 4"),
    ],
    "idle-gpus": [
        Edit("job", "--nproc-per-node=2", "--nproc-per-node=1", "--nproc-per-node"),
        Edit("job", "        - --nproc-per-node=2\n", "", "- torchrun"),
        Edit("pytorchjob", 'nprocPerNode: "2"', 'nprocPerNode: "1"', "nprocPerNode"),
    ],
    "value-not-a-string": [
        Edit("job", *variable("STEPS", "100"), "value: 100"),
        Edit("job", *variable("FAST", "true"), "value: true"),
        Edit("job", *variable("LR", "1e-4"), "value: 1e-4"),
        Edit("job", *variable("LIST", "[a]"), "value: [a]"),
        Edit("job", "        - train.py", "        - train.py\n        - 100", "\n        - 100"),
        Edit("trainjob", 'value: "10"', "value: 10", "value: 10"),
    ],
    "image-not-pinned": [
        Edit("job", "nlp/translator:7", "nlp/translator", "image: "),
        Edit("job", "nlp/translator:7", "nlp/translator:latest", "image: "),
        Edit("pytorchjob", "registry.example.org/nlp/translator:7", "registry.example.org:5000/translator", "image: "),
    ],
    "install-at-start": [
        Edit("statefulset", *script("pip install -r requirements.txt"), "pip install"),
        Edit("statefulset", *script("python -m pip --quiet install torch"), "pip --quiet"),
        Edit("statefulset", *script("apt-get -y install git && true"), "apt-get"),
    ],
    "artifacts-in-pod": [
        Edit("job", "persistentVolumeClaim:\n          claimName: results", "emptyDir: {}", "      volumes:"),
        Edit("job", "mountPath: /results}", "mountPath: /results, readOnly: true}", "      volumes:"),
    ],
    "rwo-on-many-nodes": [
        Edit("job", "[ReadWriteMany]", "[ReadWriteOnce]", "claimName: results"),
        Edit("trainjob", "[ReadWriteMany]", "[ReadWriteOncePod]", "claimName: results"),
    ],
    "small-shm": [
        Edit("job", "        - {name: shm, mountPath: /dev/shm}\n", "", "volumeMounts:"),
        Edit("statefulset", "emptyDir: {medium: Memory, sizeLimit: 8Gi}", "emptyDir: {}", "volumeMounts:"),
    ],
    "istio-sidecar": [
        Edit("job", 'inject: "false"', "inject: false", "inject: false"),
        Edit("job", "sidecar.istio.io/inject", "sidecar.istio.io/proxyCPU", "    metadata:"),
        Edit(
            "job",
            SIDECAR,
            f"{namespace('istio-injection: enabled')}{SIDECAR.replace(NO_SIDECAR, '')}",
            "    metadata:\n      labels:\n        app",
        ),
        Edit(
            "job",
            SIDECAR,
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: web}\n---\n"
            + SIDECAR.replace(NO_SIDECAR, ""),
            "    metadata:\n      labels:\n        app",
        ),
    ],
    "grace-too-short": [
        Edit("job", "      terminationGracePeriodSeconds: 300\n", "", "\n    spec:"),
        Edit("job", "PeriodSeconds: 300", "PeriodSeconds: 30", "terminationGrace"),
        Edit(
            "job", "        - --nnodes=4", "        - --shutdown-timeout=300\n        - --nnodes=4", "terminationGrace"
        ),
    ],
    "shell-without-exec": [
        Edit("statefulset", TRAP, "", "torchrun --nnodes"),
        Edit("pytorchjob", "[torchrun, train.py]", '[/bin/sh, -c, "mkdir -p x && torchrun train.py"]', "/bin/sh"),
    ],
    "env-dump": [
        Edit("statefulset", *script("env > /results/env.txt"), "env >"),
        Edit("statefulset", *script("printenv | sort >> /results/env.txt"), "printenv"),
        Edit("statefulset", *script("env | tee /results/env.txt"), "env |"),
    ],
    "secret-in-manifest": [
        Edit("job", *variable("WANDB_API_KEY", "0123abcd"), "value: 0123abcd"),
        Edit("job", *variable("SETTINGS", TOKEN), f"value: {TOKEN}"),
        Edit("job", "        - train.py", f"        - train.py\n        - --hub={TOKEN}", "--hub="),
        Edit("job", "        - train.py", "        - train.py\n        - --hf_token=letmein", "--hf_token"),
        Edit("statefulset", *script("export HF_TOKEN=letmein"), "export HF_TOKEN"),
        Edit("statefulset", *script("export TRACKER=https://me:letmein@tracker.example.org"), "export TRACKER"),
    ],
    "may-run-as-root": [
        Edit("job", "        runAsNonRoot: true\n", "", "        securityContext:\n          all"),
        Edit("job", "runAsUser: 2000", "runAsUser: 0", "runAsUser: 0"),
    ],
    "no-seccomp": [
        Edit("job", "        seccompProfile: {type: RuntimeDefault}\n", "", "        securityContext:\n          all")
    ],
    "privilege-escalation": [Edit("job", "Escalation: false", "Escalation: true", "allowPrivilegeEscalation")],
    "capabilities-kept": [Edit("job", "drop: [ALL]", "drop: [NET_RAW]", "capabilities")],
    "writable-root": [
        Edit("job", "          readOnlyRootFilesystem: true\n", "", "        securityContext:\n          all")
    ],
    "service-account-token": [Edit("job", "      automountServiceAccountToken: false\n", "", "\n    spec:")],
    "service-links": [Edit("job", "enableServiceLinks: false", "enableServiceLinks: true", "enableServiceLinks")],
    "no-resources": [
        Edit(
            "job",
            "limits: {cpu: 8, memory: 64Gi, nvidia.com/gpu: 2}",
            "limits: {nvidia.com/gpu: 2}",
            "        resources:",
        )
    ],
}
ROWS = [(rule, edit) for rule, edits in MISTAKES.items() for edit in edits]
# Correct manifests that resemble mistakes.
NEAR_MISSES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "a Service of pod 0 alone": (
        "job",
        [
            ("translator-0.peers:29500", "first:29500"),
            (
                "---\n",
                "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: first\nspec:\n  clusterIP: None\n  selector:\n"
                "    batch.kubernetes.io/job-name: translator\n"
                '    batch.kubernetes.io/job-completion-index: "0"\n---\n',
            ),
        ],
    ),
    "a selector of a label that the Job gives": (
        "job",
        [("    app: translator\n  p", "    job-name: translator\n  p")],
    ),
    "one pod at its Service": (
        "job",
        [
            ("completions: 4", "completions: 1"),
            ("parallelism: 4", "parallelism: 1"),
            ("--nnodes=4", "--nnodes=1"),
            ("translator-0.peers", "peers"),
            ("[ReadWriteMany]", "[ReadWriteOnce]"),
        ],
    ),
    "elastic": (
        "job",
        [
            ("--nnodes=4", "--nnodes=1:4"),
            (POLICY, f'{POLICY}  successPolicy: {{rules: [{{succeededIndexes: "0"}}]}}\n'),
        ],
    ),
    "elastic, in two words": ("job", [("--nnodes=4", "--nnodes\n        - 1:4")]),
    "LOCAL_RANK 0": ("job", [variable("LOCAL_RANK", '"0"')]),
    "the right WORLD_SIZE": ("job", [variable("WORLD_SIZE", '"8"')]),
    "WORLD_SIZE as the number of nodes": (
        "job",
        [variable("WORLD_SIZE", '"4"'), ("--nnodes=4", "--nnodes=$(WORLD_SIZE)")],
    ),
    "timeout with static": ("statefulset", [("--node_rank", "--rdzv_conf timeout=900 --node_rank")]),
    "an interface left out": ("job", [variable("NCCL_SOCKET_IFNAME", "^lo,docker0")]),
    "sleep without chance": ("statefulset", [script("sleep 5")]),
    "a comment": ("statefulset", [script("# env > x; sleep $RANDOM; kubectl get pods; NCCL_SOCKET_IFNAME=eth0")]),
    "one variable into a file": ("statefulset", [script("env | grep ^NCCL_ > /results/nccl.txt")]),
    "env before a command": ("statefulset", [script("env LANG=C date > /results/date.txt")]),
    "env into nothing": ("statefulset", [script("env > /dev/null")]),
    "exec in a script": (
        "pytorchjob",
        [("[torchrun, train.py]", '[sh, -c, "mkdir -p x && exec torchrun train.py"]')],
    ),
    "a token from elsewhere": ("job", [variable("API_KEY", "$(OTHER)")]),
    "a login from elsewhere": ("statefulset", [script("curl https://$NAME:$WORD@example.org/data -o /tmp/data")]),
    "a token's path": ("job", [variable("HF_TOKEN", "/run/secrets/token")]),
    "a word of a tokenizer": ("job", [variable("PAD_TOKEN", "<pad>"), variable("TOKENIZERS_PARALLELISM", '"false"')]),
    "a long grace for a long shutdown": (
        "job",
        [("        - --nnodes=4", "        - --shutdown-timeout=200\n        - --nnodes=4")],
    ),
    "results in an object store": (
        "job",
        [
            ("persistentVolumeClaim:\n          claimName: results", "emptyDir: {}"),
            ("- train.py", "- train.py\n        - --to=s3://b"),
        ],
    ),
    "ExitCode with a program that knows": (
        "pytorchjob",
        [
            ("restartPolicy: OnFailure", "restartPolicy: ExitCode"),
            (
                "            env:\n",
                "            env:\n            - name: LLMTRAIN_EXIT_CODES\n              value: pytorchjob\n",
            ),
        ],
    ),
    "a namespace without a mesh": (
        "job",
        [
            ("sidecar.istio.io/inject", "sidecar.istio.io/proxyCPU"),
            ("kind: Job\nmetadata:\n", "kind: Job\nmetadata:\n  namespace: lab\n"),
            ("apiVersion: batch/v1\n", f"{namespace('istio-injection: disabled')}apiVersion: batch/v1\n"),
        ],
    ),
    "a mesh in another namespace": (
        "job",
        [
            (NO_SIDECAR, ""),
            ("kind: Job\nmetadata:\n", "kind: Job\nmetadata:\n  namespace: other\n"),
            ("apiVersion: batch/v1\n", f"{namespace('istio-injection: enabled')}apiVersion: batch/v1\n"),
        ],
    ),
    "no sign of Istio": ("job", [(NO_SIDECAR, "")]),
    "a probe of another port": ("job", [probe("livenessProbe", "httpGet: {path: /healthz, port: 8080}")]),
    "a probe by command": ("job", [probe("livenessProbe", "exec: {command: [test, -f, /tmp/alive]}")]),
    "a probe of the master": (
        "pytorchjob",
        [(f"    {RESOURCES}", f"            livenessProbe: {{tcpSocket: {{port: 23456}}}}\n    {RESOURCES}")],
    ),
    "a probe of the default port": (
        "job",
        [probe("livenessProbe", "tcpSocket: {port: 29500}"), ("translator-0.peers:29500", "translator-0.peers:1234")],
    ),
    "an address": ("job", [("translator-0.peers:29500", "10.0.0.7:29500")]),
    "a name in another namespace": ("job", [("translator-0.peers:29500", "master.lab.svc.cluster.local:29500")]),
    "a name outside the cluster": ("job", [("translator-0.peers:29500", "master.example.org:29500")]),
    "a Service in files that are not given": (
        "job",
        [
            ("translator-0.peers:29500", "master:29500"),
            ("apiVersion: batch/v1\n", "apiVersion: ray.io/v1\nkind: RayCluster\n---\napiVersion: batch/v1\n"),
        ],
    ),
    "as many processes as GPUs": ("job", [("--nproc-per-node=2", "--nproc-per-node=gpu")]),
    "processes without GPUs": (
        "job",
        [("64Gi, nvidia.com/gpu: 2", "64Gi"), ("64Gi, nvidia.com/gpu: 2", "64Gi")],
    ),
    "numbers in quotes": ("job", [variable("STEPS", '"100"'), variable("LR", "'1e-4'"), variable("EMPTY", "")]),
    "a digest": ("job", [("nlp/translator:7", f"nlp/translator@sha256:{'0' * 64}")]),
    "a registry with a port": ("job", [("registry.example.org/nlp", "registry.example.org:5000/nlp")]),
    "pip without install": ("statefulset", [script("pip list && pip check")]),
    "limits alone": ("job", [("          requests: {cpu: 8, memory: 64Gi, nvidia.com/gpu: 2}\n", "")]),
    "a Service of something elsewhere": (
        "job",
        [
            (
                "---\n",
                "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: tracker\n"
                "spec:\n  selector: {app: tracker}\n  ports: [{port: 80}]\n---\n",
            )
        ],
    ),
}
# Rule, and what its line has.
GUIDE = {
    "service-selects-nothing": "selector:",
    "artifacts-in-pod": "\n    spec:",
    "grace-too-short": "\n    spec:",
    "small-shm": "- name: trainer",
    "sleep-random": "sleep $((",
    "local-rank-is-pod-index": "export LOCAL_RANK",
    "shell-without-exec": "torchrun \\",
    "rdzv-timeout-ignored": "--rdzv_conf",
    "env-dump": "env > ",
    "nnodes-mismatch": "name: NNODES",
    "rdzv-endpoint-is-service": "value: ddp-master",
    "world-size-mismatch": 'value: "4"',
    "socket-interface-fixed": "value: eth0",
    "secret-in-manifest": "value: letmein",
}
SEARCH = """
apiVersion: batch/v1
kind: Job
metadata: {name: search}
spec:
  completions: 20
  parallelism: 4
  completionMode: Indexed
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 100
      containers:
      - name: main
        image: pytorch/pytorch
        command: [torchrun, --standalone, --nproc-per-node=2, train.py, --trial, $(JOB_COMPLETION_INDEX)]
        volumeMounts: [{name: results, mountPath: /results}, {name: shm, mountPath: /dev/shm}]
      volumes:
      - {name: results, persistentVolumeClaim: {claimName: results}}
      - {name: shm, emptyDir: {medium: Memory}}
"""
OTHERS_WORK = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  replicas: 3
  serviceName: db
  template:
    spec:
      containers:
      - {name: db, image: postgres:17}
---
apiVersion: batch/v1
kind: Job
metadata: {name: shards}
spec:
  completions: 100
  parallelism: 5
  completionMode: Indexed
  backoffLimitPerIndex: 1
  template:
    spec:
      restartPolicy: Never
      containers:
      - {name: main, image: "python:3", command: [python, shard.py, $(JOB_COMPLETION_INDEX)]}
---
apiVersion: example.org/v1
kind: Aquarium
spec: {fish: [1, 2]}
"""


def test_every_rule_has_an_example() -> None:
    ids = [rule.id for rule in RULES]
    assert sorted(MISTAKES) == sorted(ids)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_clean_manifests_have_no_findings(kind: str) -> None:
    assert find((DIRECTORY / f"{kind}.yaml").read_text()) == []


@pytest.mark.parametrize(("rule", "edit"), ROWS, ids=[f"{rule}-{edit.kind}" for rule, edit in ROWS])
def test_mistake_is_found_at_its_line_and_nothing_else(rule: str, edit: Edit) -> None:
    text = edited(edit.kind, (edit.old, edit.new))
    found = [one for one in find(text) if one.name not in edit.also]
    assert {(one.name, one.line) for one in found} == {(rule, line_with(text, edit.at))}
    (row,) = [row for row in RULES if row.id == rule]
    assert {(one.severity, one.why, one.recommendation) for one in found} == {(row.severity, row.why, row.fix)}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_correct_manifest_has_no_findings(name: str) -> None:
    kind, changes = NEAR_MISSES[name]
    assert find(edited(kind, *changes)) == []


def test_many_mistakes_in_one_file() -> None:
    """guide.yaml has the mistakes of well-known guides; advice is not compared."""
    text = (DIRECTORY / "guide.yaml").read_text()
    found = {(one.name, one.line) for one in find(text) if one.severity != "advice"}
    assert found == {(rule, line_with(text, at)) for rule, at in GUIDE.items()}


def split_job(address: str) -> tuple[str, str]:
    """The clean Job as a master and three workers, each a Job of its own."""
    service, claim, job = edited("job", ("    app: translator\n  p", "    job-name: head\n  p")).split("---\n")
    job = job.replace("translator-0.peers", address)
    head = job.replace("name: translator", "name: head")
    for part in ("completions", "parallelism"):
        head, job = head.replace(f"{part}: 4", f"{part}: 1"), job.replace(f"{part}: 4", f"{part}: 3")
    return "---\n".join([service, claim, head]), "---\n".join([service, claim, job])


@pytest.mark.parametrize("address", ["peers", "head-0.peers"])
def test_master_and_workers_may_be_two_jobs(address: str) -> None:
    head, workers = split_job(address)
    both = head + "---\n" + workers.rpartition("---\n")[2]
    assert find(both) == []
    wrong = both.replace("--nnodes=4", "--nnodes=5")
    assert {one.name for one in find(wrong)} <= {"nnodes-mismatch"}


def test_pods_with_external_master_are_not_counted() -> None:
    _, workers = split_job("master.lab.svc")
    assert [one.name for one in find(workers.rpartition("---\n")[2])] == ["subdomain-without-service"]
    pod = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - command: [torchrun, --nnodes=4, train.py]\n"
    assert [one.name for one in find(pod) if one.severity == "error"] == []


def test_pods_that_do_not_train_are_skipped() -> None:
    assert find(OTHERS_WORK) == []
    assert {one.severity for one in find(SEARCH)} == {"advice"}  # its pods train, each for itself


@pytest.mark.parametrize(
    ("words", "is_found"),
    [
        ("[python, train.py]", True),
        ("[python, -m, mine.finetuning.train]", True),
        ("[llmtrain, train, --config, gpt_smoke]", True),
        ("[python, -m, vllm.entrypoints.openai.api_server]", False),
        ("[torchrun, --nproc-per-node=1, serve.py]", False),
        ("[python, -m, llmtrain, guard, watch]", False),
        ("[sleep, infinity]", False),
    ],
)
def test_only_training_programs_are_found_in_a_deployment(words: str, is_found: bool) -> None:
    container = f"{{name: a, image: 'pytorch:2', command: {words}, resources: {{limits: {{nvidia.com/gpu: 1}}}}}}"
    text = "apiVersion: apps/v1\nkind: Deployment\nspec: {template: {spec: {containers: [" + container + "]}}}\n"
    assert ("training-in-deployment" in {one.name for one in find(text)}) is is_found


def test_onfailure_is_valid_in_a_job() -> None:
    text = SEARCH.replace("restartPolicy: Never", "restartPolicy: OnFailure")
    assert {one.severity for one in find(text)} == {"advice"}


def test_missing_service_is_found_only_in_complete_files() -> None:
    text = edited("job", ("translator-0.peers:29500", "master:29500"), ("      subdomain: peers\n", ""))
    assert [one.name for one in find(text)] == ["endpoint-without-service"]
    assert find(text.rpartition("---\n")[2]) == []


Lint = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Lint:
    """The command as cli.py calls it: (exit code, output)."""
    app = typer.Typer(add_completion=False)
    app.command()(command)

    def call(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = app(args=[str(one) for one in arguments], standalone_mode=False)
        return int(code or 0), capsys.readouterr().out

    return call


def refusal(run: Lint, *arguments: object) -> str:
    with pytest.raises(UsageError) as caught:
        run(*arguments)
    assert caught.value.exit_code == 64
    return str(caught.value)


class TestLlmtrainManifests:
    """No false alarm about what this project renders."""

    def test_golden_manifests_are_clean(self) -> None:
        """shaped_*.yaml have what a user added with launch.pod_patch: a sidecar without limits, a service account."""
        report = lint(read_sources([str(GOLDEN)]))
        assert [one for one in report.findings if not Path(one.file).name.startswith("shaped_")] == []
        assert report.is_ok(is_strict=False)
        assert report.training >= 9

    @pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "configs/presets").glob("k8s_*.yaml")))
    def test_presets_are_clean(self, preset: str) -> None:
        config = load_config(preset, ["launch.image=registry.example.org/llmtrain:1"])
        assert find(dump_manifests(render(plan_job(config)))) == []

    @pytest.mark.parametrize("kind", WORKLOADS)
    @pytest.mark.parametrize("launcher", ["llmtrain", "torchrun"])
    @pytest.mark.parametrize("nodes", ["1", "2", "1:2"])
    def test_user_commands_are_clean(self, kind: str, launcher: Any, nodes: str) -> None:
        if kind == "stateful_set" and launcher == "torchrun":
            pytest.skip("launch refuses it")
        sets = [f"launch.kind={kind}", f"launch.nodes={nodes}", "launch.processes_per_node=2", "output.run_id=mine"]
        sets += ["launch.image=registry.example.org/mine:1"]
        config = load_config("ddp_smoke", sets)
        plan = plan_job(config, work=Work("command", ("python", "train.py"), launcher))
        assert find(dump_manifests(render(plan))) == []


class TestCommand:
    def test_clean_manifest_exits_with_0(self, run: Lint) -> None:
        code, out = run(DIRECTORY / "job.yaml")
        assert code == 0
        assert "3 objects in 1 file, 1 training pod template" in out

    def test_findings_exit_with_1_and_have_line_reason_and_fix(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        text = edited("job", ("translator-0.peers:29500", "peers:29500"))
        path.write_text(text)
        code, out = run(path)
        assert code == 1
        (rule,) = [rule for rule in RULES if rule.id == "rdzv-endpoint-is-service"]
        line = line_with(text, "--rdzv-endpoint")
        first, *rest = out.splitlines()
        assert first.startswith(f"{path}:{line}: error: peers ")
        assert first.endswith("[rdzv-endpoint-is-service]")
        assert rest[:2] == [f"    why: {rule.why}", f"    fix: {rule.fix}"]
        assert rest[2].startswith("1 error, 0 warnings, 0 suggestions: 3 objects")

    def test_advice_fails_only_with_strict(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(edited("job", ("enableServiceLinks: false", "enableServiceLinks: true")))
        assert run(path)[0] == 0
        assert "service-links" in run(path)[1]
        assert run("--strict", path)[0] == 1

    def test_json_output(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(edited("job", ("--nnodes=4", "--nnodes=3")))
        code, out = run("--json", path)
        value = json.loads(out)
        assert code == 1
        assert value["ok"] is False
        assert value["counts"] == {"error": 1, "warning": 0, "advice": 0}
        (found,) = value["findings"]
        assert set(found) == {"rule", "severity", "file", "line", "also_lines", "what", "why", "fix"}
        assert (found["rule"], found["file"]) == ("nnodes-mismatch", str(path))

    def test_reads_standard_input(self, run: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
        text = edited("job", ("--nnodes=4", "--nnodes=3"))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code, out = run("-")
        assert code == 1
        assert out.startswith("<stdin>:")

    def test_service_in_another_file_is_found(self, run: Lint, tmp_path: Path) -> None:
        service, _, rest = edited("job").partition("---\n")
        (tmp_path / "job.yaml").write_text(rest)
        (tmp_path / "service.yml").write_text(service)
        (tmp_path / "values.yaml").write_text("image: a\n")
        (tmp_path / ".hidden.yaml").write_text("{")
        code, out = run(tmp_path / "job.yaml")
        assert code == 1
        assert "[subdomain-without-service]" in out
        code, out = run(tmp_path)
        assert code == 0
        assert f"{tmp_path / 'values.yaml'}: skipped" in out
        assert run(tmp_path / "service.yml")[1].endswith("0 training pod templates.\n")

    def test_secrets_are_not_printed(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        changes = [
            variable("HF_TOKEN", TOKEN),
            variable("PASSWORD", "opensesame"),
            ("- train.py", f"- a --token {TOKEN}"),
        ]
        path.write_text(edited("job", *changes))
        for arguments in ((path,), ("--json", path)):
            code, out = run(*arguments)
            assert code == 1
            assert out.count("secret-in-manifest") == 3
            assert TOKEN not in out
            assert "opensesame" not in out

    def test_control_characters_are_removed(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        lookup = f'curl -H "Authorization: Bearer {"x" * 9}" https://kubernetes.default/api'
        nodes = ("  name: translator\nspec:\n  replicas", '  name: "t\\e[31m"\nspec:\n  replicas')
        path.write_text(edited("statefulset", script(lookup), nodes, ("  serviceName: peers\n", "")))
        out = run(path)[1]
        assert "api-lookup" in out
        assert "x" * 9 not in out
        assert "\x1b" not in out


class TestSources:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("a: [1, 2\nb: 3\n", "not YAML"),
            ("a: b: c\n", ":1: not YAML"),
            ("\tkind: Job\n", "not YAML"),
            ("kind: *nobody\n", "no anchor nobody"),
            ("apiVersion: v1\nkind: List\nitems: &a\n- *a\n", "an alias inside its own anchor"),
            ("[" * 100_000, "nested more than"),
            ("kind: {[a]: b}\n", "a key is a list"),
            ("services:\n  web: {image: a}\n", ":1: not a Kubernetes manifest"),
            ("- 1\n- 2\n", "not a Kubernetes manifest"),
            ("just words\n", "not a Kubernetes manifest"),
            ("", ": empty"),
            ("# nothing\n---\n---\n", ": empty"),
            ("kind: Job\nmetadata:\n  name: {{ .Values.name }}\n", ":3: a template"),
            ("{{- if .Values.on }}\nkind: Job\n{{- end }}\n", "helm template CHART | llmtrain lint -"),
            ('kind: Job\nname: "{{ .Release.Name }}"\n', ":2: a template"),
            ("kind: Job\nname: {{ name }}\n", ":2: a template"),
        ],
    )
    def test_invalid_file_exits_with_64_and_a_reason(self, run: Lint, tmp_path: Path, text: str, reason: str) -> None:
        path = tmp_path / "a.yaml"
        path.write_text(text)
        message = refusal(run, path)
        assert reason in message
        assert str(path) in message

    def test_binary_file_is_refused(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_bytes(b"\xff\xfe\x00\x01")
        assert "not UTF-8" in refusal(run, path)
        path.write_bytes(b"kind: a\x00b\n")
        assert "not YAML" in refusal(run, path)

    def test_all_unreadable_files_are_reported_at_once(self, run: Lint, tmp_path: Path) -> None:
        (tmp_path / "b.yaml").write_text("{")
        message = refusal(run, tmp_path / "a.yaml", tmp_path / "b.yaml", DIRECTORY / "job.yaml")
        assert "2 files" in message
        assert "no such file" in message

    def test_file_with_another_document_is_refused(self, run: Lint, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(edited("job") + "---\nimage: a\n")
        assert "`apiVersion` or `kind` is missing" in refusal(run, tmp_path)

    def test_file_named_twice_is_read_once(self, run: Lint) -> None:
        assert "3 objects in 1 file" in run(DIRECTORY / "job.yaml", DIRECTORY / ".." / "manifests" / "job.yaml")[1]

    def test_directory_without_manifests_is_refused(self, run: Lint, tmp_path: Path) -> None:
        assert "No Kubernetes manifest" in refusal(run, tmp_path)

    def test_braces_of_other_programs_are_accepted(self) -> None:
        assert find(edited("job", variable("FORMAT", "'{{ level }}'"))) == []
        assert find(edited("job", variable("VAULT", """'{{- with secret "a" -}}{{ .Data }}{{- end }}'"""))) == []

    def test_lists_are_expanded(self) -> None:
        text = edited("job", ("--nnodes=4", "--nnodes=3"))
        items = "".join("- " + document.strip().replace("\n", "\n  ") + "\n" for document in text.split("---\n"))
        text = f"apiVersion: v1\nkind: List\nitems:\n{items}".replace("- # A ", "# A ").replace("  apiV", "- apiV", 1)
        (found,) = find_in_objects(text)
        assert (found.name, found.line) == ("nnodes-mismatch", line_with(text, "--nnodes"))

    def test_json_manifests_are_read(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "all.json"
        objects = list(yaml.safe_load_all(edited("job")))
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1))
        assert run("--strict", path)[0] == 0

    def test_anchors_and_merge_keys(self) -> None:
        shared = "        resources: &all\n          limits: {cpu: 8, memory: 64Gi}\n"
        old = edited("job").partition("        resources:\n")[2].partition("        securityContext")[0]
        assert find(edited("job", (f"        resources:\n{old}", shared))) == []
        merged = "        resources:\n          <<: {limits: {cpu: 8, memory: 64Gi}}\n"
        assert find(edited("job", (f"        resources:\n{old}", merged))) == []
        nodes = edited("job", ("completions: 4", "completions: &n 3"), ("parallelism: 4", "parallelism: *n"))
        assert [one.name for one in find(nodes)] == ["nnodes-mismatch"]

    def test_nested_aliases_take_linear_time(self) -> None:
        rows = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30))]
        text = "apiVersion: v1\nkind: Pod\n" + "\n".join(rows) + "\nspec:\n  containers: *a29\n"
        assert find(text) == []

    @pytest.mark.parametrize(
        "text",
        [
            "apiVersion: batch/v1\nkind: Job\n",
            "apiVersion: batch/v1\nkind: Job\nmetadata: x\nspec: [1]\n",
            "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec:\n  pytorchReplicaSpecs: {Master: null, Worker: 3}\n",
            "apiVersion: x/v1\nkind: JobSet\nspec: {replicatedJobs: {a: 1}}\n",
            "apiVersion: x/v1\nkind: TrainJob\nspec: {trainer: {env: {a: b}, command: x}, podSpecOverrides: 1}\n",
            "apiVersion: v1\nkind: Service\nspec: {selector: [a], ports: x}\n",
            "apiVersion: v1\nkind: Pod\nspec: {containers: [1, null, {command: [torchrun, null, [1]], env: [1]}]}\n",
        ],
    )
    def test_unexpected_types_do_not_crash(self, text: str) -> None:
        find(text + "---\n" + edited("job"))

    def test_large_file_takes_seconds(self) -> None:
        body = edited("job").partition("---\n")[2]
        text = "\n---\n".join(body.replace("translator", f"run-{n}").replace("peers", f"p-{n}") for n in range(300))
        started = time.monotonic()
        found = find(text)
        assert time.monotonic() - started < 60  # some 2 s on an idle core
        assert {one.name for one in found} == {"subdomain-without-service"}
        assert len(found) == 300

    def test_long_line_takes_seconds(self) -> None:
        started = time.monotonic()
        find(edited("statefulset", script("echo " + "a$(b 'c\"" * 20_000)))
        assert time.monotonic() - started < 30

    def test_lines_inside_a_folded_string(self) -> None:
        folded = ("        - |\n          # which of the pods this is\n", "        - >-\n")
        text = edited("statefulset", folded, script("sleep $RANDOM;"))
        assert ("sleep-random", line_with(text, "sleep $RANDOM")) in {(one.name, one.line) for one in find(text)}

    def test_parse_error_has_a_line(self) -> None:
        with pytest.raises(NotAManifest) as caught:
            parse("a: 1\nb: [\n", "x")
        assert caught.value.line >= 2


def find_in_objects(text: str) -> list[ManifestFinding]:
    """As find, with Lists expanded."""
    return lint(Sources(list(objects_of(parse(text, "a.yaml"))), ["a.yaml"], [])).findings


def test_docs_page_lists_the_rules() -> None:
    page = (ROOT / "docs" / "lint.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{r.id}` | {r.severity} | {r.what} | {r.why} | {r.fix} |" for r in RULES]


def test_linting_does_not_import_torch() -> None:
    code = "import sys, llmtrain.lint.check_manifests; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class TestSize:
    """Time is linear in the size of a script: at these sizes a quadratic linter takes many minutes."""

    @pytest.mark.parametrize(
        ("shape", "count"),
        [
            ("\n", 300_000),
            ("x", 300_000),
            pytest.param("$(", 300_000, marks=pytest.mark.slow),
            pytest.param("kubectl -a ", 60_000, marks=pytest.mark.slow),
            pytest.param("A{}=1\n", 60_000, marks=pytest.mark.slow),
            ("A{}=1 ", 40_000),
            ("--flag{} 1 ", 40_000),
            pytest.param("  --flag{} 1 \\\n", 60_000, marks=pytest.mark.slow),
            pytest.param(f"echo {TOKEN}{{}}\n", 20_000, marks=pytest.mark.slow),
        ],
    )
    def test_long_script(self, shape: str, count: int) -> None:
        script = "torchrun --nnodes 2 " + "".join(shape.format(n) for n in range(count)) + "\necho done"
        lines = "".join(f"\n          {line}" if line else "\n" for line in script.split("\n"))
        head = (
            "apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\nspec:\n  template:\n    spec:\n      containers:\n"
        )
        assert find(
            f"{head}      - name: a\n        image: b\n        command: [bash, -c]\n        args:\n        - |{lines}\n"
        )

    def test_lines_of_repeated_parts(self) -> None:
        node = parse("a: |\n  A=1\n  B=2\n  A=3\n", "a.yaml")[0].get("a")
        finder = LineFinder(node)
        assert [finder.line_of(part) for part in ("A=", "A=", "B=", "C=", "C=")] == [2, 4, 3, 1, 1]
        assert node.line_of("B=") == 3

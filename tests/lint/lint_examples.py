"""Manifests with mistakes, and correct ones that resemble mistakes.

manifests/ has clean files, one for each kind. A mistake is an edit of one of them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llmtrain.lint.check_manifests import lint
from llmtrain.lint.report import ManifestFinding
from llmtrain.lint.source import Sources
from llmtrain.lint.yaml_nodes import parse

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = Path(__file__).parent / "manifests"
GOLDEN = ROOT / "tests" / "launch" / "golden"
KINDS = ["job", "statefulset", "pytorchjob", "jobset", "trainjob"]
# Has the format of a Hugging Face token.
TOKEN = "hf_" + "Abcdefgh" * 4
Lint = Callable[..., tuple[int, str]]
"""The command as the fixture `run` calls it: (exit code, output)."""


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

NATIVE = """      initContainers:
      - name: shipper
        restartPolicy: Always
"""


def shipper(indent: int = 6, security: bool = True) -> str:
    """A container beside the trainer that ships logs and never ends."""
    lines = [
        "- name: shipper",
        "  image: registry.example.org/logs:3",
        "  resources: {limits: {cpu: 1, memory: 64Mi}}",
    ]
    if security:
        lines += [
            "  securityContext:",
            "    allowPrivilegeEscalation: false",
            "    readOnlyRootFilesystem: true",
            "    capabilities: {drop: [ALL]}",
        ]
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


NOT_RESTRICTED = frozenset({"privilege-escalation", "capabilities-kept", "writable-root"})
"""Advice about a container without securityContext."""

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
        Edit("statefulset", " train.py &", " --no_python colossalai run train.py &", "colossalai"),
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
    "sidecar-keeps-job-alive": [
        Edit("job", "      volumes:\n", f"{shipper()}      volumes:\n", "- name: shipper"),
        Edit("jobset", "            volumes:\n", f"{shipper(12)}            volumes:\n", "- name: shipper"),
        Edit("pytorchjob", "          volumes:\n", f"{shipper(10)}          volumes:\n", "- name: shipper"),
        Edit("trainjob", "                volumes:\n", f"{shipper(16)}                volumes:\n", "- name: shipper"),
    ],
    "container-not-restricted": [
        Edit(
            "job",
            "      volumes:\n",
            f"{shipper(security=False)}      volumes:\n",
            "- name: shipper",
            NOT_RESTRICTED | {"sidecar-keeps-job-alive"},
        ),
        Edit(
            "statefulset",
            "      containers:\n",
            f"      initContainers:\n{shipper(security=False)}      containers:\n",
            "- name: shipper",
            NOT_RESTRICTED,
        ),
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
    "a native sidecar": (
        "job",
        [
            (
                "      containers:\n",
                f"{NATIVE}{shipper().partition(chr(10))[2]}      containers:\n",
            )
        ],
    ),
    "a sidecar of pods that do not end": ("statefulset", [("      volumes:\n", f"{shipper()}      volumes:\n")]),
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

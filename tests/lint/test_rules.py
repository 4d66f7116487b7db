"""Every mistake is found at its line, and correct manifests have no findings."""

from pathlib import Path
from typing import Any

import pytest
from lint_examples import (
    DIRECTORY,
    GOLDEN,
    GUIDE,
    KINDS,
    MISTAKES,
    NEAR_MISSES,
    OTHERS_WORK,
    ROOT,
    ROWS,
    Edit,
    edited,
    find,
    line_with,
    namespace,
    shipper,
)

from llmtrain import registry
from llmtrain.config.load import load_config
from llmtrain.launch.manifests import dump_manifests, render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import PodTask
from llmtrain.lint.check_manifests import RULES, lint
from llmtrain.lint.source import read_sources

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
    assert {(one.severity, one.why, one.remedy) for one in found} == {(row.severity, row.why, row.remedy)}


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


def test_containers_that_a_restricted_namespace_rejects() -> None:
    level = namespace("pod-security.kubernetes.io/enforce: restricted")
    job = f"{level}{edited('job', ('Escalation: false', 'Escalation: true'))}"

    def errors(text: str) -> list[tuple[str, int]]:
        return [(one.name, one.line) for one in find(text) if one.severity == "error"]

    rejected = [("container-not-restricted", line_with(job, "        securityContext:\n          allow"))]
    assert errors(job) == rejected
    in_namespace = job.replace("  name: translator\nspec", "  name: translator\n  namespace: lab\nspec")
    assert [name for name, _ in errors(in_namespace)] == ["container-not-restricted"]
    assert errors(in_namespace.replace("namespace: lab", "namespace: other")) == []
    added = edited("job", ("capabilities: {drop: [ALL]}", "capabilities: {drop: [ALL], add: [IPC_LOCK]}"))
    assert [name for name, _ in errors(f"{level}{added}")] == ["container-not-restricted"]


def test_hardened_pod_may_have_a_container_that_runs_as_root_on_purpose() -> None:
    root = shipper(security=False) + "        securityContext: {runAsUser: 0}\n"
    text = edited("job", ("      containers:\n", f"      initContainers:\n{root}      containers:\n"))
    assert {one.severity for one in find(text)} == {"advice"}


@pytest.mark.parametrize("field", ["hostNetwork: true", "hostPID: true"])
def test_pod_that_uses_the_host_is_not_made_for_restricted(field: str) -> None:
    text = edited(
        "statefulset",
        ("      containers:\n", f"      {field}\n      initContainers:\n{shipper(security=False)}      containers:\n"),
    )
    assert "container-not-restricted" not in {one.name for one in find(text)}


def test_onfailure_is_valid_in_a_job() -> None:
    text = SEARCH.replace("restartPolicy: Never", "restartPolicy: OnFailure")
    assert {one.severity for one in find(text)} == {"advice"}


def test_missing_service_is_found_only_in_complete_files() -> None:
    text = edited("job", ("translator-0.peers:29500", "master:29500"), ("      subdomain: peers\n", ""))
    assert [one.name for one in find(text)] == ["endpoint-without-service"]
    assert find(text.rpartition("---\n")[2]) == []


class TestLlmtrainManifests:
    """No false alarm about what this project renders."""

    def test_golden_manifests_are_clean(self) -> None:
        """shaped_*.yaml have what a user added with launch.pod_patch: a sidecar without limits, a service account."""
        report = lint(read_sources([str(GOLDEN)]))
        assert [one for one in report.findings if not Path(one.file).name.startswith("shaped_")] == []
        warnings = [one for one in report.findings if one.severity != "advice"]
        assert {one.name for one in warnings} == {"sidecar-keeps-job-alive"}
        with_sidecar = {Path(one.file).stem for one in warnings}
        assert with_sidecar == {f"shaped_{kind}" for kind in registry.KINDS if kind != "stateful_set"}
        assert report.training >= 9

    @pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "configs/presets").glob("k8s_*.yaml")))
    def test_presets_are_clean(self, preset: str) -> None:
        config = load_config(preset, ["launch.image=registry.example.org/llmtrain:1"])
        assert find(dump_manifests(render(plan_job(config)))) == []

    @pytest.mark.parametrize("kind", registry.KINDS)
    @pytest.mark.parametrize("launcher", ["llmtrain", "torchrun"])
    @pytest.mark.parametrize("nodes", ["1", "2", "1:2"])
    def test_user_commands_are_clean(self, kind: str, launcher: Any, nodes: str) -> None:
        if kind == "stateful_set" and launcher == "torchrun":
            pytest.skip("launch refuses it")
        sets = [f"launch.kind={kind}", f"launch.nodes={nodes}", "launch.processes_per_node=2", "output.run_id=mine"]
        sets += ["launch.image=registry.example.org/mine:1"]
        config = load_config("ddp_smoke", sets)
        plan = plan_job(config, task=PodTask("command", ("python", "train.py"), launcher))
        assert find(dump_manifests(render(plan))) == []


def test_docs_page_lists_the_rules() -> None:
    page = (ROOT / "docs" / "lint.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{r.id}` | {r.severity} | {r.what} | {r.why} | {r.remedy} |" for r in RULES]

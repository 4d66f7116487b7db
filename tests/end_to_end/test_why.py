"""llmtrain why on a real cluster: each failure has one cause, with evidence and a remedy. (Lost nodes are in
test_lost_node.py.)

Every diagnosis is made by a user who may not read logs: exit reports, pod conditions, events and heartbeats suffice."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cluster_faults import processes_of
from kube import Kube
from rbac_user import rights_of_the_guide, user

from llmtrain.kubernetes.client import Cluster
from llmtrain.operate.cluster_run import ClusterRun
from llmtrain.operate.why import explain as why_module

Why = dict[str, Any]
KINDS = ["stateful_set", "pytorch_job", "job_set", "train_job"]
STARTING = ("starting", "healthy", "pulling_image")
LONG = ["trainer.max_steps=100000", "model.d_model=128", "model.block_size=128"]
ROWS = ['{"instruction": "say a", "output": "a"}', '{"instruction": "say b", "answer": "b"}']


@dataclass(frozen=True)
class Expected:
    """Settings that make a run fail; its cause, and facts in the evidence and the remedy."""

    settings: list[str]
    cause: str
    evidence: list[str]
    remedy: list[str]
    nodes: int = 1
    image: str = ""


SMALL = ["launch.resources.cpu=10m"]
NO_IMAGE = Expected(
    SMALL, "image_pull", ["nobody/has-this:1", "1 of 1 pods"], ["--image IMAGE"], image="nobody/has-this:1"
)
TOO_SMALL = Expected(
    ["launch.resources.memory=96Mi", "launch.resources.shm_size=16Mi"],
    "oom_killed",
    ["limit is 96Mi", "exit code 137 (OOMKilled)"],
    ["--set launch.resources.memory=192Mi"],
)
NO_CUDA = Expected(
    ["run.device=cuda", "launch.pod_patch={metadata: {annotations: {gpus: none}}}"],  # else `launch` refuses it
    "bad_config",
    ["exit code 64", "no usable CUDA device"],
    ["Set run.device to auto or cpu", "--set FIELD=VALUE"],
)
TOO_LATE = Expected(
    ["launch.active_deadline_sec=12", *LONG],
    "deadline_exceeded",
    ["Condition Fail", "deadline"],  # Failed, or FailureTarget while pods are still ending
    ["--set launch.active_deadline_sec=SECONDS"],
)
# The token of a run that downloads nothing is in no container, unless a patch adds it.
TOKEN_IN_TRAINER = (
    "{spec: {containers: [{name: trainer, env: "
    "[{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: my-token, key: token}}}]}]}}"
)
# Their pods never run, so they use no resources.
NEVER_RUN = {
    "no-image": NO_IMAGE,
    "no-token": Expected(
        ["launch.hf_token_secret.name=my-token", f"launch.pod_patch={TOKEN_IN_TRAINER}", "launch.resources.cpu=400m"],
        "container_config",
        ['secret "my-token" not found'],
        ["llmtrain secret hf-token --from-env-file .env --name my-token -n e2e-why"],
    ),
    "no-login": Expected(
        [*SMALL, "launch.env_secrets=[s3-login]"],
        "container_config",
        ['secret "s3-login" not found'],
        ["kubectl create secret generic s3-login -n e2e-why", "launch.env_secrets"],
    ),
    "no-gpus": Expected(
        [*SMALL, "launch.resources.gpus=2", "launch.processes_per_node=2"],
        "unschedulable",
        ["2 of 2 pods", "Insufficient nvidia.com/gpu", "0 of 2 pods are scheduled"],
        ["launch.resources.gpus", "--set FIELD=VALUE"],
        nodes=2,
    ),
    "over-quota": Expected(
        [*SMALL, "launch.resources.memory=90Gi"],
        "quota_exceeded",
        ["requested: requests.memory=90Gi", "limited: requests.memory=64Gi", "0 of 1 pods exist"],
        ["launch.resources", "launch.nodes", "--set FIELD=VALUE"],
    ),
}
ENDED = {
    "too-small": TOO_SMALL,
    "no-cuda": NO_CUDA,
    "too-late": TOO_LATE,
    "bad-data": Expected(
        ["data.name=instruct_jsonl", "data.packing=false", "data.train_file=/out/rows.jsonl"],
        "bad_data",
        ["exit code 65", "/out/rows.jsonl, line 2: field 'output' is missing"],
        ["Set data.output_field", "--set FIELD=VALUE"],
    ),
    "nan": Expected(
        ["trainer.lr=1e30", "trainer.warmup_steps=0"],
        "nan",
        ["exit code 65", "The loss of step 2 is nan"],
        ["trainer.lr", "llmtrain launch --config CONFIG --name NEW --set FIELD=VALUE -n e2e-why"],
    ),
}
NO_MASTER = Expected(
    ["distributed.master_ready_timeout_sec=5", "distributed.join_timeout_sec=15"],
    "master_unreachable",
    ["Service no-master: not found.", "the name no-master-0.no-master does not resolve", "exit code 69"],
    ["llmtrain resume no-master"],
    nodes=2,
)
WAITING = {
    "hung": Expected(["distributed.timeout_sec=8", *LONG], "rank_hung", [], [], nodes=2),
    "silent": Expected(["launch.processes_per_node=2", *LONG], "rank_hung", [], []),
    "no-master": NO_MASTER,
}


def launch(kube: Kube, run: str, expected: Expected, kind: str = "indexed_job") -> None:
    own = replace(kube, image=expected.image or kube.image)
    words = [word for setting in ["launch.resources.cpu=400m", *expected.settings] for word in ("--set", setting)]
    kube.llmtrain(*own.launch_words(kind, run, *words, nodes=expected.nodes), "--detach")


@pytest.fixture(scope="module")
def no_logs(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Kube:
    rules = [rule for rule in rights_of_the_guide() if rule["resources"] != ["pods/log"]]
    found = user(kube, "no-logs", rules, tmp_path_factory.mktemp("no-logs"))
    assert found.kubectl("auth", "can-i", "get", "pods", "--subresource=log", expect=1).strip() == "no"
    return found


def ask(user: Kube, run: str, within: float = 60) -> Why:
    """The first cause other than starting: a wrong cause before the right one is an error too."""
    deadline = time.monotonic() + within
    while is_starting(why := user.llmtrain("why", run, "--json").json):
        assert time.monotonic() < deadline, why
        time.sleep(1)
    return why


def is_starting(why: Why) -> bool:
    """Other users of the cluster may leave no CPU for a while."""
    return why["cause"] in STARTING or (why["cause"] == "unschedulable" and "Insufficient cpu" in why["what"])


def check(why: Why, expected: Expected) -> None:
    details = json.dumps(why, indent=1)
    assert why["cause"] == expected.cause, details
    shown = "\n".join([why["what"], *why["evidence"]])
    assert [fact for fact in expected.evidence if fact not in shown] == [], details
    assert [fact for fact in expected.remedy if fact not in why["remedy"]] == [], details


@pytest.fixture(scope="module")
def never_run(kube: Kube) -> None:
    """All at once, to wait only once. They are deleted with the namespace."""
    quota: dict[str, Any] = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "memory"}}
    kube.apply({**quota, "spec": {"hard": {"requests.memory": "64Gi"}}})
    for run, expected in NEVER_RUN.items():
        launch(kube, run, expected)


@pytest.fixture(scope="module")
def ended(kube: Kube) -> None:
    (kube.volume("runs") / "rows.jsonl").write_text("\n".join(ROWS) + "\n")
    for run, expected in ENDED.items():
        launch(kube, run, expected)


@pytest.fixture(scope="module")
def waiting(kube: Kube) -> None:
    for run, expected in WAITING.items():
        launch(kube, run, expected)
        if expected is NO_MASTER:
            kube.kubectl("delete", "service", run)


@pytest.mark.parametrize("run", NEVER_RUN)
@pytest.mark.usefixtures("never_run")
def test_pods_that_never_run(no_logs: Kube, run: str) -> None:
    check(ask(no_logs, run), NEVER_RUN[run])


@pytest.mark.usefixtures("never_run")
def test_text_output(no_logs: Kube) -> None:
    ask(no_logs, "no-login")
    first, *evidence, remedy = no_logs.llmtrain("why", "no-login").out.splitlines()
    assert " no-login-0-" in first
    assert first.endswith('secret "s3-login" not found')
    assert evidence[0] == "Evidence:"
    assert evidence[1].startswith("  Pod 0 (no-login-0-")
    assert "CreateContainerConfigError:" in evidence[1]
    assert evidence[2:] == ["  1 of 1 pods are affected."]
    assert remedy.startswith("Remedy: Create it: ")


@pytest.mark.slow
@pytest.mark.usefixtures("never_run", "ended")  # they start in the meantime
def test_remedy_fixes_the_run(kube: Kube, no_logs: Kube) -> None:
    """Runs the command of the remedy, with an .env file."""
    remedy = ask(no_logs, "no-token")["remedy"]
    words = remedy.removeprefix("Create it: llmtrain ").partition(". Or ")[0].split()
    (kube.folder / ".env").write_text("HF_TOKEN=hf_made_up\n")
    kube.local(*words)
    kube.wait("no-token", lambda status: status["state"] in ("starting", "running", "finished"))
    assert no_logs.llmtrain("why", "no-token", "--json").json["cause"] in (*STARTING, "finished")


def test_missing_claim(kube: Kube, no_logs: Kube) -> None:
    """`llmtrain launch` refuses it, so the manifests are applied with kubectl."""
    words = kube.launch_words("indexed_job", "no-claim", "--set", "launch.data_volume.claim=corpus", nodes=1)
    kube.local(*words, "--namespace", kube.namespace, "--dry-run", "-o", "no-claim/")
    kube.kubectl("apply", "-k", str(kube.folder / "no-claim"))
    named = ["The claim corpus does not exist.", 'persistentvolumeclaim "corpus" not found', "Claim runs: Bound."]
    check(ask(no_logs, "no-claim"), Expected([], "claim", named, ["--set launch.data_volume.claim=NAME"]))
    kube.llmtrain("delete", "no-claim")


@pytest.mark.parametrize("run", ENDED)
@pytest.mark.usefixtures("ended")
def test_runs_that_end_badly(no_logs: Kube, run: str) -> None:
    check(ask(no_logs, run), ENDED[run])


@pytest.mark.slow
@pytest.mark.usefixtures("waiting")
def test_unreachable_master(kube: Kube, no_logs: Kube) -> None:
    check(ask(no_logs, "no-master"), NO_MASTER)
    kube.kubectl("delete", "job", "no-master", "--wait=false")  # frees its resources


@contextmanager
def frozen(kube: Kube, pod: str) -> Iterator[None]:
    found = processes_of(kube, pod)
    if not found:
        pytest.skip("the processes of pods are not on this machine")
    for process in found:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in found:
            if Path(f"/proc/{process}").exists():
                os.kill(process, signal.SIGCONT)


def steps(number: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status["state"] == "running" and (status["step"] or 0) >= number


@pytest.mark.usefixtures("waiting")
@pytest.mark.slow
def test_hanging_rank(kube: Kube, no_logs: Kube) -> None:
    """The other rank reports it and exits; the hung one stays."""
    healthy = kube.wait("hung", steps(5))
    right = Expected([], "healthy", ["at step", "2 Running"], ["llmtrain status hung"])
    check(no_logs.llmtrain("why", "hung", "--json").json, right)
    pod = next(pod["name"] for pod in healthy["pods"] if pod["index"] == 1)
    with frozen(kube, pod):
        facts = [
            "Rank 1 hung: No progress for",
            f"Rank 1 is in pod 1 ({pod}) on ",
            f"{pod} is still running",
            "exit code 75",
        ]
        heartbeats = Expected([], "rank_hung", ["Rank 1 ", pod], ["llmtrain recover hung"])
        check(ask(no_logs, "hung"), heartbeats)
        # With the log, which tells a run that waits for its peer from one that trains, also the report of the peer.
        deadline = time.monotonic() + 60
        while "exit code 75" not in "\n".join((why := ask(kube, "hung"))["evidence"]) and time.monotonic() < deadline:
            time.sleep(1)
        check(why, Expected([], "rank_hung", facts, ["llmtrain recover hung"]))
        done = kube.llmtrain("recover", "hung", "--json").json
        assert [row["name"] for row in done["frozen"]] == [pod]
        kube.wait("hung", lambda status: all(row["name"] != pod for row in status["pods"]))
    kube.wait("hung", steps(6))
    kube.kubectl("delete", "job", "hung", "--wait=false")


@pytest.mark.slow
@pytest.mark.usefixtures("waiting")
def test_all_ranks_hang(kube: Kube, no_logs: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank is left to report them: only their heartbeats, which another pod reads from the volume, show it."""
    monkeypatch.setattr(why_module, "STALL_AFTER_SEC", 2.0)
    [pod] = kube.wait("silent", steps(5))["pods"]
    with frozen(kube, pod["name"]):
        time.sleep(3)
        cluster = Cluster.connect(str(no_logs.kubeconfig), None)  # in this process, with the shorter STALL_AFTER_SEC
        why = ClusterRun.find(cluster, "silent", kube.namespace).why().as_dict()
    where = f"{pod['name']} on {pod['node']}"
    heartbeats = ["No rank ", f"Rank 0 ({where}): no heartbeat since step", f"Rank 1 ({where}): no heartbeat"]
    check(why, Expected([], "rank_hung", heartbeats, ["llmtrain recover silent", pod["name"]]))
    readers = kube.objects("pods", "-l", "llmtrain/reader=silent")
    assert [pod for pod in readers if "deletionTimestamp" not in pod["metadata"]] == []  # it is deleted
    kube.kubectl("delete", "job", "silent", "--wait=false")


# Other kinds report the same failures differently.
# The operator of a PyTorchJob deletes a killed pod, and OOMKilled with it.
KILLED = replace(TOO_SMALL, cause="killed", evidence=["its pod was deleted", "exit code 137", "limit is 96Mi"])
# Another test creates the Secret of no-token.
ON_EVERY_KIND = {name: case for name, case in {**NEVER_RUN, **ENDED}.items() if name != "no-token"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("never_run", "ended")  # they make the quota and the data
def test_on_every_kind(kube: Kube, no_logs: Kube, kind: str) -> None:
    runs = {f"{name}-{kind.replace('_', '-')}": expected for name, expected in ON_EVERY_KIND.items()}
    if kind == "stateful_set":  # it has no deadline
        del runs["too-late-stateful-set"]
    for run, expected in runs.items():
        launch(kube, run, expected, kind)
    for run, expected in runs.items():
        if kind == "pytorch_job" and expected is TOO_LATE:
            trigger_operator(kube, run)
        why = ask(no_logs, run)
        is_deleted = kind == "pytorch_job" and why["cause"] == KILLED.cause
        check(why, KILLED if is_deleted and expected is TOO_SMALL else expected)
        kube.llmtrain("delete", run)


def trigger_operator(kube: Kube, run: str) -> None:
    """Training Operator 1.9 checks the deadline only when the object changes."""
    kube.wait(run, lambda status: status["age_sec"] > 20)
    kube.kubectl("annotate", "pytorchjob", run, "e2e/touched=yes")

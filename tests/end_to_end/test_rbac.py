"""Users of one namespace, without rights to machines or to other namespaces: each command works, or says the one right
that it misses and changes nothing."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kube import Done, Kube
from rbac_user import rights_of_the_guide, user

from llmtrain import registry
from llmtrain.launch.pod import CONTAINER_SECURITY, POD_SECURITY

RUN = "shared-run"
SECRET = ["secret", "hf-token", "--from-env-file", ".env"]
OBJECTS = "configmaps,services,jobs,networkpolicies,persistentvolumeclaims,secrets,pods"
# The others take as long again, and bring no other rights than those to their own objects.
KINDS = [
    pytest.param(kind, marks=pytest.mark.slow) if kind != "indexed_job" else kind for kind in sorted(registry.KINDS)
]
READER = [
    {"apiGroups": [""], "resources": ["pods", "configmaps", "events"], "verbs": ["get", "list"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]},
]


@pytest.fixture(scope="module")
def member(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Kube:
    return user(kube, "member", rights_of_the_guide(), tmp_path_factory.mktemp("member"))


@pytest.fixture(scope="module")
def reader(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Kube:
    return user(kube, "reader", READER, tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def nobody(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Kube:
    return user(kube, "nobody", [], tmp_path_factory.mktemp("nobody"))


def launch_words(kube: Kube, run: str, *more: str) -> list[str]:
    return kube.launch_words("indexed_job", run, "--set", "launch.resources.cpu=600m", *more, nodes=1)


@pytest.fixture(scope="module")
def launched(member: Kube) -> Done:
    """The run that all of them look at, launched and watched to its end by the one who may."""
    return member.llmtrain(*launch_words(member, RUN))


@pytest.fixture
def lost_pod(kube: Kube) -> Iterator[str]:
    """A pod of the run, on a machine that is not there: what `recover` gives up. The cluster itself does so, too, but
    not within a minute."""
    name = f"{RUN}-lost"
    meta = {"name": name, "labels": {"app": "llmtrain", "llmtrain.dev/run": RUN}}
    container = {"name": "trainer", "image": kube.image, "securityContext": CONTAINER_SECURITY}
    spec = {"nodeName": "gone", "containers": [container], "securityContext": POD_SECURITY}
    kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    at = "2026-01-01T00:00:00Z"
    silent = {"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": at}
    status = json.dumps({"status": {"phase": "Running", "conditions": [silent]}})
    kube.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", status)
    yield name
    kube.kubectl("delete", "pod", name, "--ignore-not-found", "--force", "--grace-period=0")


def everything(kube: Kube) -> dict[tuple[str, str], str]:
    """Each object with its version, which any change moves on; without those that are on their way out."""
    found = [each for each in kube.objects(OBJECTS) if "deletionTimestamp" not in each["metadata"]]
    return {(each["kind"], each["metadata"]["name"]): each["metadata"]["resourceVersion"] for each in found}


def test_launch_and_follow(launched: Done) -> None:
    assert "step 30/30" in launched.out
    assert f"Run {RUN} finished." in launched.out


def refused(kube: Kube, who: Kube, right: str, words: list[str]) -> None:
    before = everything(kube)
    done = who.llmtrain(*words, expect=64)
    told = [line for line in done.err.splitlines() if not line.startswith("warning:")]
    assert told[0] == f"error: Not allowed to {right} in namespace '{who.namespace}' (RBAC)."
    assert f"kubectl auth can-i {right} -n {who.namespace}" in told[1]
    assert len(told) == 2
    assert done.out == ""
    assert everything(kube) == before


# Command -> the right it misses first.
OF_READER = {
    "launch": "get persistentvolumeclaims",
    "launch --dry-run=server": "get persistentvolumeclaims",
    "logs": "get pods/log",
    "fetch": "get persistentvolumeclaims",
    "stop": "delete jobs",
    "resume": "get persistentvolumeclaims",
    "delete": "delete jobs",
    "secret": "get secrets",
}
OF_NOBODY = {
    "launch": "get persistentvolumeclaims",
    "launch --dry-run=server": "get persistentvolumeclaims",
    "status": "get configmaps",
    "status of all": "list configmaps",
    "logs": "get configmaps",
    "why": "get configmaps",
    "recover": "get configmaps",
    "fetch": "get persistentvolumeclaims",
    "stop": "get configmaps",
    "resume": "get configmaps",
    "delete": "get configmaps",
    "delete all": "list configmaps",
    "secret": "get secrets",
}


# Rights that a command needs late: it finds out before it has changed anything, or takes that back.
LATE = {"launch": "create jobs", "fetch": "get pods/exec", "stop": "delete jobs", "resume": "create jobs"}


def words_of(kube: Kube, command: str) -> list[str]:
    special = {
        "launch": launch_words(kube, "another", "--detach"),
        "launch --dry-run=server": launch_words(kube, "another", "--dry-run=server"),
        "status of all": ["status"],
        "delete all": ["delete", "--all", "--yes"],
        "secret": SECRET,
    }
    return special.get(command, [command, RUN])


@pytest.mark.usefixtures("launched")
class TestOneWhoMayOnlyLook:
    def test_status(self, reader: Kube) -> None:
        [status] = reader.llmtrain("status", "--json").json["runs"]
        assert (status["run_id"], status["state"], status["exit_code"]) == (RUN, "finished", 0)
        assert [pod["phase"] for pod in status["pods"]] == ["Succeeded"]
        assert "finished" in reader.llmtrain("status", RUN).out

    def test_status_tells_what_it_may_not_see(self, reader: Kube) -> None:
        assert "pods/log" in reader.llmtrain("status", RUN).out

    def test_why(self, reader: Kube) -> None:
        why = reader.llmtrain("why", RUN, "--json").json
        assert why["cause"] == "finished"
        assert any(line.startswith("Warning: ") and "log" in line for line in why["evidence"])

    def test_recover_where_nothing_is_lost(self, reader: Kube) -> None:
        assert reader.llmtrain("recover", RUN, "--json").json["recovered"] == []

    @pytest.mark.parametrize("command", OF_READER)
    def test_missing_permission_is_named(self, kube: Kube, reader: Kube, command: str) -> None:
        refused(kube, reader, OF_READER[command], words_of(reader, command))

    @pytest.mark.usefixtures("lost_pod")
    def test_recover(self, kube: Kube, reader: Kube) -> None:
        refused(kube, reader, "patch pods/status", ["recover", RUN])


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("command", OF_NOBODY)
def test_one_without_rights(kube: Kube, nobody: Kube, command: str) -> None:
    refused(kube, nobody, OF_NOBODY[command], words_of(nobody, command))


def test_other_namespaces(kube: Kube, member: Kube) -> None:
    done = member.local("status", "-A", "--kubeconfig", str(member.kubeconfig), expect=64)
    assert done.err.startswith("error: Not allowed to list configmaps in all namespaces (RBAC).\n")
    refused(kube, replace(member, namespace="kube-system"), "list configmaps", ["status"])


@pytest.mark.usefixtures("launched")
class TestOneWhoHasTheRightsOfTheGuide:
    def test_recover(self, member: Kube, lost_pod: str) -> None:
        assert [pod["name"] for pod in member.llmtrain("recover", RUN, "--json").json["recovered"]] == [lost_pod]

    @pytest.mark.slow
    def test_looking(self, member: Kube) -> None:
        status = member.llmtrain("status", RUN, "--json").json
        assert (status["state"], status["step"]) == ("finished", 30)
        assert [run["run_id"] for run in member.llmtrain("status", "--json").json["runs"]] == [RUN]
        why = member.llmtrain("why", RUN, "--json").json
        assert why["cause"] == "finished"
        assert not any(line.startswith("Warning: ") for line in why["evidence"])
        assert "[TRAIN]" in member.llmtrain("logs", RUN).out
        assert member.llmtrain("fetch", RUN, "--only", "metrics", "--json").json["files"]

    def test_secret(self, member: Kube) -> None:
        assert member.llmtrain(*SECRET, "--json").json["done"] == "created"
        (member.folder / ".env").write_text("HF_TOKEN=hf_" + "fedcba9876543210" * 2 + "\n")
        assert member.llmtrain(*SECRET, "--json").json["done"] == "updated"

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind(self, kube: Kube, member: Kube, kind: str) -> None:
        """Its objects are made and removed. No machine has the label that its pods look for, and nobody makes volumes
        for its claim."""
        run = kind.replace("_", "-")
        settings = ["node_selector={no-such: label}", "runs_volume.storage_class=none", "pod_disruption_budget=true"]
        more = [word for setting in settings for word in ("--set", f"launch.{setting}")]
        words = member.launch_words(kind, run, *more, nodes=1, claim=None)
        member.llmtrain(*words, "--dry-run=server")
        member.llmtrain(*words, "--detach")
        assert member.llmtrain("status", run, "--json").json["state"] == "pending"
        member.llmtrain("delete", run, "--data", "--yes")
        assert kube.objects(f"{OBJECTS},poddisruptionbudgets", "-l", f"llmtrain.dev/run={run}") == []

    @pytest.mark.parametrize("command", LATE)
    def test_all_rights_but_one(self, kube: Kube, tmp_path: Path, command: str) -> None:
        verb, resource = LATE[command].split()
        rules = [
            {**rule, "resources": [name], "verbs": [each for each in rule["verbs"] if (each, name) != (verb, resource)]}
            for rule in rights_of_the_guide()
            for name in rule["resources"]
        ]
        almost = user(kube, f"cannot-{command}", rules, tmp_path)
        refused(kube, almost, LATE[command], words_of(almost, command))

    @pytest.mark.slow
    def test_from_stop_to_delete(self, kube: Kube, member: Kube) -> None:
        member.llmtrain("resume", RUN, "--set", "trainer.max_steps=100000", "--detach")
        member.wait(RUN, lambda status: (status["step"] or 0) > 30)
        member.llmtrain("stop", RUN)
        status = member.llmtrain("status", RUN, "--json").json
        assert (status["state"], status["pods"]) == ("stopped", [])
        assert "[SAVE]" in member.llmtrain("logs", RUN).out  # from the volume, by a pod that reads it
        member.llmtrain("delete", RUN)
        assert kube.objects(OBJECTS, "-l", f"llmtrain.dev/run={RUN}") == []

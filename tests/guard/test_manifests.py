"""The guard's manifests, and the way of its objects into a namespace and out again."""

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube_server import KubeServer, kube_server
from limits import limit
from llmtrain.errors import ClusterError, ExitCode, UsageError
from llmtrain.guard import status as status_module
from llmtrain.guard.install import apply_plan, remove_guard
from llmtrain.guard.manifests import LABELS, NAME, GuardPlan, render_guard
from llmtrain.guard.status import guard_status, wait_until_watching
from llmtrain.kubernetes.labels import COMMON_LABELS, run_id_of

Cli = Callable[..., Any]
Object = dict[str, Any]
URL = "https://hooks.example.com/T000/secret-word"
PLAN = GuardPlan("team", "me/llmtrain:1", "IfNotPresent", 60.0, "2026-01-01T00:00:00+00:00")
EVERYTHING = replace(PLAN, webhook=URL, image_pull_secrets=["registry"])
PLURALS = ("secrets", "serviceaccounts", "roles", "rolebindings", "deployments")


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with kube_server() as server:
        yield server


@pytest.fixture
def guard(call: Cli) -> Cli:
    return partial(call, "guard")


def found(manifests: list[Object], kind: str) -> Object:
    (one,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return one


def there(kube: KubeServer, namespace: str = "team") -> list[str]:
    return sorted(plural for plural, where, name in kube.objects if name == NAME and where == namespace)


def make_ready(kube: KubeServer) -> None:
    kube.change("Deployment", NAME, {"status": {"updatedReplicas": 1, "availableReplicas": 1}})


def add_pod(kube: KubeServer, state: Object, *said: str, conditions: list[Object] | None = None) -> None:
    rows = [{"name": "guard", "state": state}] if state else []
    installed = kube.objects.get(("deployments", "team", NAME))
    notes = installed["spec"]["template"]["metadata"]["annotations"] if installed else {}
    kube.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{NAME}-x", "namespace": "team", "labels": LABELS, "annotations": notes},
            "spec": {},
            "status": {"phase": "Pending", "containerStatuses": rows, "conditions": conditions or []},
        }
    )
    if said:
        kube.say(f"{NAME}-x", *said, container="guard")


class TestManifests:
    def test_role_is_minimal(self) -> None:
        pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]}
        state = {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}
        for plan in (PLAN, EVERYTHING):
            manifests = render_guard(plan)
            assert found(manifests, "Role")["rules"] == [pods, state]
            assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"team"}
            assert not [manifest for manifest in manifests if manifest["kind"].startswith("Cluster")]
            binding = found(manifests, "RoleBinding")
            assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME}
            assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": "team"}]

    def test_pod_is_restricted_and_small(self) -> None:
        spec = found(render_guard(PLAN), "Deployment")["spec"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert container["resources"]["limits"] == {"cpu": "500m", "memory": "256Mi"}
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
        assert set(spec["selector"]["matchLabels"].items()) <= set(spec["template"]["metadata"]["labels"].items())
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        tolerated = {(row["key"], row["tolerationSeconds"]) for row in pod["tolerations"]}
        assert tolerated == {("node.kubernetes.io/not-ready", 10), ("node.kubernetes.io/unreachable", 10)}

    def test_guard_has_no_run_label(self) -> None:
        for manifest in render_guard(EVERYTHING):
            assert manifest["metadata"]["labels"] == {**COMMON_LABELS, "llmtrain/guard": "true"}
        spec = found(render_guard(PLAN), "Deployment")["spec"]
        assert run_id_of(spec["template"]) is None
        # Immutable, so it stays as the first version wrote it.
        assert spec["selector"] == {"matchLabels": {"app": "llmtrain", "llmtrain/guard": "true"}}

    def test_webhook_is_only_in_the_secret(self) -> None:
        manifests = render_guard(EVERYTHING)
        assert "secret-word" not in json.dumps(manifests)
        import base64

        secret = found(manifests, "Secret")
        assert base64.b64decode(secret["data"]["webhook"]).decode() == URL
        others = json.dumps([manifest for manifest in manifests if manifest is not secret])
        assert secret["data"]["webhook"] not in others
        (container,) = found(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
        (row,) = [row for row in container["env"] if row["name"] == "LLMTRAIN_WEBHOOK"]
        assert row["valueFrom"] == {"secretKeyRef": {"name": NAME, "key": "webhook"}}
        assert not [manifest for manifest in render_guard(PLAN) if manifest["kind"] == "Secret"]

    def test_command(self) -> None:
        def command(plan: GuardPlan) -> list[str]:
            words: list[str] = found(render_guard(plan), "Deployment")["spec"]["template"]["spec"]["containers"][0][
                "command"
            ]
            return words

        base = ["python", "-m", "llmtrain", "guard", "watch", "--after"]
        assert command(PLAN) == [*base, "60"]
        assert command(replace(EVERYTHING, after_sec=7.5)) == [*base, "7.5"]

    @pytest.mark.parametrize("plan", [PLAN, EVERYTHING], ids=["least", "all"])
    def test_lint_finds_no_error(self, cli: Cli, workdir: Path, plan: GuardPlan) -> None:
        (workdir / "guard.yaml").write_text(yaml.safe_dump_all(render_guard(plan)))
        findings = cli("lint", "guard.yaml", "--json").json["findings"]
        assert [row for row in findings if row["severity"] == "error"] == []

    @pytest.mark.parametrize("plan", [PLAN, EVERYTHING], ids=["least", "all"])
    def test_lint_finds_nothing(self, cli: Cli, workdir: Path, plan: GuardPlan) -> None:
        (workdir / "guard.yaml").write_text(yaml.safe_dump_all(render_guard(plan)))
        done = cli("lint", "guard.yaml", "--json")
        assert (done.code, done.json["findings"]) == (ExitCode.CANNOT_TELL, [])  # the guard does not train


class TestInstall:
    def test_install_and_remove(self, kube: KubeServer) -> None:
        cluster = kube.cluster()
        assert apply_plan(cluster, EVERYTHING) == "installed"
        assert there(kube) == sorted(PLURALS)
        assert remove_guard(cluster, "team")
        assert there(kube) == []
        assert not remove_guard(cluster, "team")
        assert apply_plan(cluster, PLAN) == "installed"
        assert there(kube) == sorted(set(PLURALS) - {"secrets"})

    def test_second_install_updates(self, kube: KubeServer) -> None:
        cluster = kube.cluster()
        apply_plan(cluster, EVERYTHING)
        later = replace(PLAN, image="me/llmtrain:2", after_sec=5.0, installed_at="later")
        assert apply_plan(cluster, later) == "changed"
        assert there(kube) == sorted(set(PLURALS) - {"secrets"}), "the address is forgotten"
        deployment = kube.objects["deployments", "team", NAME]
        wanted = found(render_guard(later), "Deployment")
        assert deployment["spec"]["template"]["metadata"] == wanted["spec"]["template"]["metadata"]
        assert deployment["spec"]["template"]["spec"]["containers"] == wanted["spec"]["template"]["spec"]["containers"]
        assert deployment["metadata"]["annotations"] == wanted["metadata"]["annotations"]
        assert not deployment["spec"]["template"]["spec"].get("imagePullSecrets")
        assert apply_plan(cluster, replace(EVERYTHING, webhook="http://other")) == "changed"
        assert there(kube) == sorted(PLURALS)
        assert kube.objects["secrets", "team", NAME]["data"] != found(render_guard(EVERYTHING), "Secret")["data"]

    def test_install_over_the_first_version_withdraws_access_to_logs(self, kube: KubeServer) -> None:
        apply_plan(kube.cluster(), PLAN)
        role = kube.objects["roles", "team", NAME]
        current = copy.deepcopy(role["rules"])
        role["rules"].append({"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]})
        apply_plan(kube.cluster(), PLAN)
        assert kube.objects["roles", "team", NAME]["rules"] == current

    @pytest.mark.parametrize("plural", PLURALS)
    def test_incomplete_install_is_completed(self, kube: KubeServer, plural: str) -> None:
        cluster = kube.cluster()
        apply_plan(cluster, EVERYTHING)
        del kube.objects[plural, "team", NAME]
        assert apply_plan(cluster, EVERYTHING) == ("installed" if plural == "deployments" else "changed")
        assert there(kube) == sorted(PLURALS)
        del kube.objects[plural, "team", NAME]
        assert remove_guard(cluster, "team") == (plural != "deployments")
        assert there(kube) == [], "what was left goes too"

    @pytest.mark.parametrize("kind", ["Secret", "ServiceAccount", "Role", "RoleBinding", "Deployment"])
    def test_foreign_objects_are_refused(self, kube: KubeServer, kind: str) -> None:
        foreign = copy.deepcopy(found(render_guard(EVERYTHING), kind))
        foreign["metadata"]["labels"] = {"app": "llmtrain"}
        kube.add(foreign)
        before = copy.deepcopy(kube.objects)
        with pytest.raises(UsageError, match=f"{kind} llmtrain-guard"):
            apply_plan(kube.cluster(), EVERYTHING)
        assert kube.objects == before
        remove_guard(kube.cluster(), "team")
        assert kube.objects == before

    def test_foreign_secret_is_ignored_without_a_webhook(self, kube: KubeServer) -> None:
        kube.add({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME, "namespace": "team"}, "data": {}})
        assert apply_plan(kube.cluster(), PLAN) == "installed"
        assert "secrets" in there(kube)

    def test_other_namespaces_are_unchanged(self, kube: KubeServer) -> None:
        apply_plan(kube.cluster(), replace(EVERYTHING, namespace="lab"))
        apply_plan(kube.cluster(), EVERYTHING)
        remove_guard(kube.cluster(), "team")
        assert there(kube, "lab") == sorted(PLURALS)


class TestStatus:
    def test_status_without_a_guard(self, kube: KubeServer, guard: Cli) -> None:
        assert guard_status(kube.cluster(), "team") is None
        done = guard("status")
        assert done.code == 0
        assert done.out.startswith("Namespace team has no guard. Install one: llmtrain guard install")
        assert guard("status", "--json").json == {"namespace": "team", "installed": False}
        assert guard("remove").out == "Namespace team has no guard.\n"

    def test_status_of_a_running_guard(self, kube: KubeServer, guard: Cli) -> None:
        apply_plan(kube.cluster(), EVERYTHING)
        make_ready(kube)
        add_pod(kube, {"running": {}}, *(f"[GUARD] {number}" for number in range(9)))
        value = guard("status", "--json").json
        assert value == {
            "namespace": "team",
            "installed": True,
            "watching": True,
            "image": "me/llmtrain:1",
            "after_sec": 60.0,
            "webhook": True,
            "image_pull_policy": "IfNotPresent",
            "image_pull_secrets": ["registry"],
            "reason": None,
            "message": "",
            "log": [f"[GUARD] {number}" for number in range(4, 9)],
        }
        text = guard("status").out
        assert text.startswith("Namespace team: the guard is watching.\n")
        assert "secret-word" not in text
        kube.forbidden.add("log")
        assert guard("status", "--json").json["log"] == [], "the rest can be told"

    def test_unobserved_change_is_not_ready(self, kube: KubeServer) -> None:
        apply_plan(kube.cluster(), PLAN)
        make_ready(kube)
        kube.change("Deployment", NAME, {"metadata": {"generation": 2}, "status": {"observedGeneration": 1}})
        status = guard_status(kube.cluster(), "team")
        assert status is not None
        assert not status.watching

    @pytest.mark.parametrize(
        ("state", "conditions", "reason", "message"),
        [
            ({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, [], "ImagePullBackOff", "not found"),
            ({"waiting": {"reason": "ContainerCreating"}}, [], None, ""),
            (
                {},
                [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no cpu"}],
                "Unschedulable",
                "no cpu",
            ),
        ],
    )
    def test_status_has_the_reason(
        self, kube: KubeServer, state: Object, conditions: list[Object], reason: str | None, message: str
    ) -> None:
        apply_plan(kube.cluster(), PLAN)
        add_pod(kube, state, conditions=conditions)
        status = guard_status(kube.cluster(), "team")
        assert status is not None
        assert (status.watching, status.reason, status.message) == (False, reason, message)
        assert ("problem " in status.text) == bool(reason)

    def test_wait_fails_at_once_if_it_cannot_start(self, kube: KubeServer) -> None:
        apply_plan(kube.cluster(), PLAN)
        add_pod(kube, {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}, "No module named llmtrain")
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"CrashLoopBackOff: back-off\..*No module") as caught:
            wait_until_watching(kube.cluster(), "team")
        assert time.monotonic() - began < limit(3)
        assert "llmtrain guard remove" in str(caught.value)

    def test_wait_times_out(self, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(status_module, "START_SEC", 0.0)
        apply_plan(kube.cluster(), PLAN)
        with pytest.raises(ClusterError, match="its pod is not ready"):
            wait_until_watching(kube.cluster(), "team")


class TestCommand:
    def test_commands_install_update_remove(self, kube: KubeServer, guard: Cli) -> None:
        def start() -> None:
            while ("deployments", "team", NAME) not in kube.objects:
                time.sleep(0.005)
            make_ready(kube)

        threading.Thread(target=start, daemon=True).start()
        done = guard("install", "--image", "me/llmtrain:1", "--webhook", URL, "--json")
        assert done.code == 0, done.err
        value = {"namespace": "team", "done": "installed", "image": "me/llmtrain:1", "after_sec": 60.0, "webhook": True}
        assert done.json == value
        assert "secret-word" not in done.out + done.err
        first = kube.objects["deployments", "team", NAME]["spec"]["template"]["metadata"]["annotations"]
        again = guard("install", "--after", "5", "--json").json
        assert again == {**value, "done": "changed", "after_sec": 5.0}, "the rest is as it was"
        assert ("secrets", "team", NAME) in kube.objects
        env = kube.objects["deployments", "team", NAME]["spec"]["template"]["spec"]["containers"][0]["env"]
        assert "LLMTRAIN_WEBHOOK" in [row["name"] for row in env]
        changed = guard("install", "--webhook", "").out
        assert "5 s" in changed
        assert "no webhook" in changed
        assert ("secrets", "team", NAME) not in kube.objects
        second = kube.objects["deployments", "team", NAME]["spec"]["template"]["metadata"]["annotations"]
        assert first != second, "its pod is made anew"
        assert guard("remove", "--json").json == {"namespace": "team", "removed": True}
        assert there(kube) == []

    @pytest.mark.parametrize(
        "words",
        [
            ("--webhook", "ftp://x/secret-word"),
            ("--webhook", "secret-word"),
            ("--webhook", "http:///secret-word"),
            ("--image-pull-policy", "Sometimes"),
            ("--after", "-1"),
        ],
    )
    def test_user_errors_exit_with_64(self, kube: KubeServer, guard: Cli, words: tuple[str, ...]) -> None:
        done = guard("install", *words)
        assert done.code == 64
        assert "secret-word" not in done.err
        assert kube.requests == []

    @pytest.mark.parametrize(
        "url", ["http://hooks.example.com/secret word", "http://hooks.example.com:port/secret-word"]
    )
    def test_invalid_webhook_is_refused(
        self, kube: KubeServer, guard: Cli, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(status_module, "START_SEC", 0.0)
        assert guard("install", "--webhook", url).code == 64
        assert kube.objects == {}

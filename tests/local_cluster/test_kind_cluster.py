"""The commands cluster up, down and load-image with fakes for kind and docker (fake_kind.py), and the make targets that
use them. The volume that `up` creates is tested on a real cluster in end_to_end/test_make.py."""

import inspect
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kube_server import KubeServer, kube_server
from limits import limit, wait_until
from llmtrain.core.install import install_command
from llmtrain.local_cluster import kind_cluster as local_cluster
from llmtrain.local_cluster.operators import OPERATORS

Cli = Callable[..., Any]
CLAIM = ("persistentvolumeclaims", "default", "runs")


@dataclass
class FakeTools:
    """Fake kind and docker: their directory, their state and the calls they received."""

    directory: Path
    bin: Path
    state: Path
    kubeconfig: Path

    def install(self, *programs: str) -> None:
        for program in programs:
            source = Path(__file__).with_name("fake_kind.py").read_text()
            (self.bin / program).write_text(f"#!{sys.executable}\n{source}")
            (self.bin / program).chmod(0o755)

    def remove(self, *programs: str) -> None:
        for program in programs:
            (self.bin / program).unlink()

    def fail(self, what: str) -> None:
        (self.state / "fail").write_text(what)

    @property
    def containers(self) -> dict[str, Any]:
        file = self.state / "containers.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def create_by_hand(self, name: str, mounted_at: str = "/files") -> None:
        """A cluster created with kind directly."""
        mounts = [{"Type": "bind", "Source": "/somewhere", "Destination": mounted_at}]
        made = {"Id": "f00", "Name": f"/{name}-control-plane", "Cluster": name, "Mounts": mounts}
        (self.state / "containers.json").write_text(json.dumps({f"{name}-control-plane": made}))

    @property
    def calls(self) -> list[list[str]]:
        file = self.state / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def asked(self, *words: str) -> list[list[str]]:
        return [call for call in self.calls if call[: len(words)] == list(words)]

    @property
    def records(self) -> list[Path]:
        return sorted((self.directory / "state" / "llmtrain" / "clusters").glob("*"))


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with kube_server() as server:
        yield server


@pytest.fixture
def tools(tmp_path: Path, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    found = FakeTools(tmp_path, tmp_path / "bin", tmp_path / "containers", tmp_path / "kubeconfig")
    found.bin.mkdir()
    found.state.mkdir()
    found.install("kind", "docker")
    monkeypatch.setenv("PATH", str(found.bin))
    monkeypatch.setenv("FAKE_KIND", str(found.state))
    monkeypatch.setenv("FAKE_SERVER", f"http://127.0.0.1:{kube.port}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig))
    monkeypatch.delenv("KIND_EXPERIMENTAL_PROVIDER", raising=False)
    # The client reads KUBECONFIG on import, which may have happened in another test.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(found.kubeconfig))
    return found


@pytest.fixture
def call(cli: Cli, tools: FakeTools) -> Cli:  # noqa: ARG001 (its programs are used)
    def run(*words: object) -> Any:
        done = cli("cluster", *words)
        assert "Traceback" not in done.err, done.err
        return done

    return run


class TestUp:
    def test_up_creates_cluster_and_claim(self, call: Cli, tools: FakeTools, kube: KubeServer, workdir: Path) -> None:
        done = call("up", "--json")
        assert done.code == 0, done.err
        runs = workdir / "runs"
        assert done.json == {
            "cluster": "llmtrain",
            "context": "kind-llmtrain",
            "nodes": 2,
            "runs": str(runs),
            "claim": "runs",
            "namespace": "default",
            "made": True,
            "claim_made": True,
            "operators": [],
        }
        assert 'Creating cluster "llmtrain"' in done.err, "the output of kind is shown"
        nodes = ["llmtrain-control-plane", "llmtrain-worker", "llmtrain-worker2"]
        assert sorted(tools.containers) == nodes
        (token,) = [record.stem for record in tools.records]
        for node in tools.containers.values():
            assert {"Type": "bind", "Source": str(runs), "Destination": f"/llmtrain/{token}"} in node["Mounts"]
        claim = kube.objects[CLAIM]["spec"]
        volume = kube.objects["persistentvolumes", "", claim["volumeName"]]["spec"]
        assert volume["hostPath"] == {"path": f"/llmtrain/{token}", "type": "Directory"}
        assert volume["accessModes"] == claim["accessModes"] == ["ReadWriteMany"]
        assert volume["storageClassName"] == claim["storageClassName"] == "", "not kind's own class"
        assert (volume["claimRef"]["namespace"], volume["claimRef"]["name"]) == ("default", "runs")
        assert volume["persistentVolumeReclaimPolicy"] == "Retain"

    def test_runs_directory_is_made_writable_for_pods(self, call: Cli, workdir: Path) -> None:
        (workdir / "mine").mkdir(mode=0o750)
        done = call("up", "--runs", "mine")
        assert stat.S_IMODE((workdir / "mine").stat().st_mode) == 0o1757
        assert f"{workdir}/mine" in done.out
        assert "user 1000" in done.out

    def test_mode_of_a_writable_directory_is_kept(self, call: Cli, workdir: Path) -> None:
        (workdir / "runs").mkdir()
        (workdir / "runs").chmod(0o777)
        assert call("up").code == 0
        assert stat.S_IMODE((workdir / "runs").stat().st_mode) == 0o777

    def test_options_are_passed_to_kind(self, call: Cli, tools: FakeTools, tmp_path: Path) -> None:
        file = tmp_path / "another"
        done = call("up", "--name", "mine", "--nodes", 1, "--image", "node:v1", "--kubeconfig", file, "--json")
        assert done.json["context"] == "kind-mine"
        assert sorted(tools.containers) == ["mine-control-plane"], "a single node runs pods itself"
        ((_, _, _, *options),) = tools.asked("kind", "create")
        assert options == ["--name=mine", f"--kubeconfig={file}", "--config=-", "--wait=180s", "--image=node:v1"]
        assert not tools.kubeconfig.exists()

    def test_up_is_idempotent(self, call: Cli, tools: FakeTools, kube: KubeServer) -> None:
        first = call("up", "--json").json
        before, objects = tools.containers, dict(kube.objects)
        tools.kubeconfig.unlink()
        again = call("up", "--json")
        assert again.code == 0, again.err
        assert again.json == {**first, "made": False, "claim_made": False}
        assert tools.containers == before
        assert kube.objects == objects
        assert len(tools.asked("kind", "create")) == 1
        assert tools.kubeconfig.exists(), "its context is restored"
        assert "already exists" in call("up").out

    def test_missing_claim_is_recreated(self, call: Cli, kube: KubeServer) -> None:
        call("up")
        old = kube.objects.pop(CLAIM)["spec"]["volumeName"]
        done = call("up")
        assert done.code == 0, done.err
        assert "was missing" in done.out
        # The old volume can only be bound by its deleted claim.
        assert kube.objects[CLAIM]["spec"]["volumeName"] != old

    def test_runs_directory_of_a_cluster_cannot_be_changed(self, call: Cli, workdir: Path) -> None:
        call("up")
        done = call("up", "--runs", "other")
        assert done.code == 64
        assert f"{workdir}/runs" in done.err
        assert not (workdir / "other").exists()
        assert call("up", "--runs", "runs").code == 0

    @pytest.mark.parametrize("mounted_at", ["/files", "/llmtrain/0123456789abcdef", "/llmtrain/../x"])
    def test_up_refuses_cluster_created_by_hand(
        self, call: Cli, tools: FakeTools, kube: KubeServer, workdir: Path, mounted_at: str
    ) -> None:
        tools.create_by_hand("llmtrain", mounted_at)
        before = tools.containers
        done = call("up", "--json")
        assert done.code == 64
        assert "`llmtrain cluster up`" in done.json["what"]
        assert "kind delete cluster --name llmtrain" in done.json["remedy"]
        assert tools.containers == before
        assert kube.objects == {}
        assert list(workdir.iterdir()) == []
        assert [call[:3] for call in tools.calls] == [["kind", "get", "clusters"], ["docker", "container", "inspect"]]

    def test_up_refuses_cluster_that_replaced_ours(self, call: Cli, tools: FakeTools) -> None:
        call("up")
        tools.create_by_hand("llmtrain")
        assert call("up").code == 64

    def test_up_with_another_name(self, call: Cli, tools: FakeTools) -> None:
        tools.create_by_hand("llmtrain")
        assert call("up", "--name", "mine").code == 0
        assert "llmtrain-control-plane" in tools.containers

    def test_up_with_stopped_containers(self, call: Cli, tools: FakeTools) -> None:
        call("up")
        tools.fail("export")
        done = call("up")
        assert done.code == 69
        assert "container is not running" in done.err
        assert "llmtrain cluster down --name llmtrain" in done.err


class TestUpFailures:
    @pytest.mark.parametrize(
        ("what", "message"), [("create", "no route to host"), ("half", "failed to lock config file")]
    )
    def test_failure_in_kind_is_rolled_back(
        self, call: Cli, tools: FakeTools, kube: KubeServer, what: str, message: str
    ) -> None:
        tools.fail(what)
        done = call("up", "--json")
        assert done.code == 69
        assert message in done.json["what"]
        assert tools.containers == {}
        assert tools.records == []
        assert kube.objects == {}

    def test_failure_to_create_the_claim_is_rolled_back(self, call: Cli, tools: FakeTools, kube: KubeServer) -> None:
        kube.gate = lambda method, path, headers: (500, "no") if method == "POST" else None  # noqa: ARG005
        done = call("up")
        assert done.code == 69
        assert tools.containers == {}
        assert tools.records == []
        assert not tools.kubeconfig.exists()

    def test_cluster_created_concurrently_by_another_process_is_kept(self, call: Cli, tools: FakeTools) -> None:
        tools.fail("raced")
        done = call("up")
        assert done.code == 69
        assert "already exist" in done.err
        assert list(tools.containers) == ["llmtrain-control-plane"]
        assert tools.asked("kind", "delete") == []
        assert call("down").code == 64

    def test_failed_rollback_reports_the_first_error(self, call: Cli, tools: FakeTools) -> None:
        tools.fail("half delete")
        done = call("up")
        assert done.code == 69
        assert "failed to lock config file" in done.err
        tools.fail("")
        assert call("down").code == 0, "the rest is still recognized as ours"
        assert tools.containers == {}

    def test_rollback_deletes_nothing_without_proof_of_ownership(self, call: Cli, tools: FakeTools) -> None:
        tools.fail("half inspect")
        assert call("up").code == 69
        assert len(tools.containers) == 3
        tools.fail("")
        assert call("down").code == 0
        assert tools.containers == {}

    def test_ctrl_c_is_rolled_back(self, call: Cli, tools: FakeTools) -> None:
        tools.fail("hang")

        def interrupt() -> None:
            wait_until(lambda: tools.containers)
            tools.fail("")
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        started = time.monotonic()
        assert call("up").code == 130
        thread.join(limit(5))
        assert time.monotonic() - started < limit(20)
        assert tools.containers == {}
        assert tools.records == []

    def test_invalid_runs_directory_is_refused(self, call: Cli, tools: FakeTools, workdir: Path) -> None:
        (workdir / "runs").write_text("")
        for runs in ("runs", "runs/below", "/proc/self/task", "with:colon"):
            done = call("up", "--runs", runs)
            assert done.code == 64, runs
            assert "--runs" in done.err
        assert tools.asked("kind", "create") == []

    def test_unwritable_state_directory_is_refused(self, call: Cli, tools: FakeTools) -> None:
        (tools.directory / "state").write_text("")
        done = call("up")
        assert done.code == 64
        assert "XDG_STATE_HOME" in done.err
        assert tools.asked("kind", "create") == []

    def test_missing_kubernetes_client_is_reported_first(
        self, call: Cli, tools: FakeTools, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(local_cluster, "find_spec", lambda name: None)  # noqa: ARG005
        done = call("up")
        assert done.code == 64
        assert install_command("k8s") in done.err
        assert tools.calls == []

    def test_invalid_options_are_refused(self, call: Cli, tools: FakeTools) -> None:
        for words in (("--name", "-x"), ("--name", "A"), ("--name", "../x"), ("--name", "x" * 51), ("--nodes", "0")):
            assert call("up", *words).code == 64, words
        assert tools.calls == []


class TestWith:
    """The option --with, which installs operators with kubectl."""

    @pytest.mark.parametrize(
        ("names", "installed"),
        [
            ("training-operator,jobset,trainer", ["training-operator", "trainer"]),  # the Trainer includes JobSet
            ("jobset", ["jobset"]),
            (" jobset , training-operator ", ["training-operator", "jobset"]),
            ("trainer,trainer", ["trainer"]),
        ],
    )
    def test_operators_are_applied_and_waited_for(
        self, call: Cli, tools: FakeTools, names: str, installed: list[str]
    ) -> None:
        tools.install("kubectl")
        done = call("up", "--json", "--with", names)
        assert done.code == 0, done.err
        assert done.json["operators"] == installed
        expected = []
        for operator in (OPERATORS[name] for name in installed):
            expected.append(["apply", "--server-side", *operator.source, "--context=kind-llmtrain"])
            wait = [f"--namespace={operator.namespace}", "--for=condition=Available", "--timeout=300s"]
            expected += [
                ["wait", f"deployment/{name}", *wait, "--context=kind-llmtrain"] for name in operator.deployments
            ]
        assert [words for _, *words in tools.asked("kubectl")] == expected
        assert tools.calls.index(tools.asked("kind", "create")[0]) < tools.calls.index(tools.asked("kubectl")[0])

    def test_operators_are_installed_later_with_the_kubeconfig_of_the_cluster(
        self, call: Cli, tools: FakeTools, tmp_path: Path
    ) -> None:
        tools.install("kubectl")
        file = tmp_path / "own"
        assert call("up", "--kubeconfig", file).code == 0
        assert tools.asked("kubectl") == []
        assert call("up", "--with", "training-operator").code == 0
        assert len(tools.asked("kind", "create")) == 1
        assert all(words[-1] == f"--kubeconfig={file}" for words in tools.asked("kubectl"))

    @pytest.mark.parametrize("names", ["kueue", "jobset,", "", "jobset trainer"])
    def test_unknown_names(self, call: Cli, tools: FakeTools, names: str) -> None:
        tools.install("kubectl")
        done = call("up", "--json", "--with", names)
        assert (done.code, done.json["known"]) == (64, ["jobset", "trainer", "training-operator"])
        assert tools.calls == []

    def test_without_kubectl(self, call: Cli, tools: FakeTools) -> None:
        done = call("up", "--with", "jobset")
        assert done.code == 64
        assert "kubectl" in done.err
        assert tools.calls == []

    @pytest.mark.parametrize("what", [pytest.param("apply", marks=pytest.mark.slow), "wait"])
    def test_failed_install_keeps_the_cluster(self, call: Cli, tools: FakeTools, what: str) -> None:
        tools.install("kubectl")
        tools.fail(what)
        done = call("up", "--json", "--with", "jobset")
        assert (done.code, done.json["error"]) == (69, "ClusterError")
        assert tools.containers
        tools.fail("")
        again = call("up", "--json", "--with", "jobset")
        assert (again.code, again.json["made"]) == (0, False)

    def test_second_jobset_controller_is_refused(self, call: Cli, tools: FakeTools, kube: KubeServer) -> None:
        tools.install("kubectl")
        assert call("up").code == 0
        meta = {"name": "jobset-controller-manager", "namespace": "jobset-system"}
        kube.add({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta})
        assert call("up", "--with", "trainer").code == 64
        assert tools.asked("kubectl") == []
        kube.add({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {**meta, "namespace": "kubeflow-system"}})
        assert call("up", "--with", "jobset").code == 0
        assert tools.asked("kubectl") == [], "the one of the Trainer is installed"

    @pytest.mark.parametrize(
        ("name", "page"), [("training-operator", "pytorch_job"), ("jobset", "job_set"), ("trainer", "train_job")]
    )
    def test_docs_of_the_kinds_show_the_same_commands(self, repo: Path, name: str, page: str) -> None:
        operator, text = OPERATORS[name], (repo / "docs" / "kinds" / f"{page}.md").read_text()
        assert f'kubectl apply --server-side {operator.source[0]} "{operator.source[1]}"' in text
        assert f"kubectl get pods -n {operator.namespace}" in text
        assert f'kubectl delete {operator.source[0]} "{operator.source[1]}"' in text


class TestLaunchBuild:
    """launch --build on a cluster that `up` created."""

    @pytest.fixture
    def launch(self, call: Cli, cli: Cli, tools: FakeTools) -> Cli:
        assert call("up").code == 0
        words = ("launch", "--config", "ddp_smoke", "--name", "demo", "--set", "launch.runs_volume.claim=runs", "-d")
        return lambda *more: cli(*words, "--build", "--kubeconfig", tools.kubeconfig, *more)

    @pytest.mark.parametrize("engine", ["docker", pytest.param("podman", marks=pytest.mark.slow), "buildah"])
    def test_image_is_loaded(self, launch: Cli, tools: FakeTools, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
        monkeypatch.setattr("llmtrain.launch.image_build.BUILDERS", (engine,))
        tools.install(engine)
        done = launch()
        assert done.code == 0, done.err
        assert "warning" not in done.err
        (build,) = tools.asked(engine, "build")
        built = build[build.index("--tag") + 1]
        assert built.startswith("docker.io/library/llmtrain:0.")
        assert (tools.state / "loaded").read_text() == f"{built} llmtrain"
        assert tools.asked(engine, "push") == [] or engine == "buildah", "pushed to a file, not to a registry"
        assert bool(tools.asked("kind", "load", "docker-image")) == (engine == "docker")

    def test_cluster_of_another_owner_is_left_alone(self, launch: Cli, tools: FakeTools) -> None:
        for record in tools.records:
            record.unlink()
        assert launch().code == 0
        assert tools.asked("docker", "build")
        assert not (tools.state / "loaded").exists()


class TestMissingPrograms:
    COMMANDS = (("up",), ("down",), ("load-image", "llmtrain:dev"))

    def test_kind_not_installed(self, call: Cli, tools: FakeTools) -> None:
        tools.remove("kind")
        for words in self.COMMANDS:
            done = call(*words, "--json")
            assert (done.code, done.json["what"]) == (64, "kind is not installed."), words
            assert "kind.sigs.k8s.io" in done.json["remedy"]

    def test_docker_not_installed(self, call: Cli, tools: FakeTools) -> None:
        tools.remove("docker")
        for words in self.COMMANDS:
            done = call(*words, "--json")
            assert (done.code, done.json["what"]) == (64, "docker is not installed."), words

    def test_docker_daemon_not_running(self, call: Cli, tools: FakeTools, workdir: Path) -> None:
        tools.fail("daemon")
        for words in self.COMMANDS:
            done = call(*words, "--json")
            assert done.code == 64
            assert "Cannot connect to the Docker daemon" in done.json["what"]
            assert "`docker ps`" in done.json["remedy"]
        assert list(workdir.iterdir()) == []

    def test_podman(self, call: Cli, tools: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
        tools.remove("docker")
        monkeypatch.setenv("KIND_EXPERIMENTAL_PROVIDER", "podman")
        assert "podman is not installed." in call("up").err
        tools.install("podman")
        (tools.state / "images").write_text("llmtrain:dev")
        assert call("up").code == 0
        done = call("load-image", "llmtrain:dev")
        assert done.code == 0, done.err
        assert (tools.state / "loaded").read_text() == "llmtrain:dev llmtrain"
        assert tools.asked("kind", "load", "docker-image") == [], "it only works with docker"
        assert call("load-image", "missing").code == 64
        assert call("down").code == 0
        assert tools.containers == {}


class TestDown:
    def test_down_deletes_our_cluster_and_keeps_runs(
        self, call: Cli, tools: FakeTools, kube: KubeServer, workdir: Path
    ) -> None:
        call("up")
        (workdir / "runs" / "first").mkdir()
        kube.is_away = True  # works without the API server
        done = call("down", "--json")
        assert done.code == 0, done.err
        assert done.json == {"cluster": "llmtrain", "removed": True, "runs": str(workdir / "runs")}
        assert tools.containers == {}
        assert tools.records == []
        assert (workdir / "runs" / "first").is_dir()

    def test_down_names_the_runs_directory(self, call: Cli, workdir: Path) -> None:
        call("up")
        assert f"{workdir}/runs" in call("down").out

    def test_down_without_cluster(self, call: Cli, tools: FakeTools) -> None:
        done = call("down")
        assert (done.code, done.out) == (0, "There is no kind cluster llmtrain.\n")
        assert tools.asked("kind", "delete") == []

    @pytest.mark.parametrize("mounted_at", ["/files", "/llmtrain/0123456789abcdef"], ids=["kind", "another account"])
    def test_down_refuses_cluster_created_by_hand(self, call: Cli, tools: FakeTools, mounted_at: str) -> None:
        tools.create_by_hand("llmtrain", mounted_at)
        done = call("down", "--json")
        assert done.code == 64
        assert "kind delete cluster --name llmtrain" in done.json["remedy"]
        assert tools.containers
        assert tools.asked("kind", "delete") == []

    def test_down_refuses_cluster_that_replaced_ours(self, call: Cli, tools: FakeTools) -> None:
        call("up")
        tools.create_by_hand("llmtrain")
        assert call("down").code == 64
        assert tools.containers
        assert tools.asked("kind", "delete") == []

    def test_token_of_one_cluster_does_not_match_another_name(self, call: Cli, tools: FakeTools) -> None:
        call("up")
        (token,) = [record.stem for record in tools.records]
        tools.create_by_hand("other", f"/llmtrain/{token}")
        assert call("down", "--name", "other").code == 64

    def test_down_refuses_cluster_without_record(self, call: Cli, tools: FakeTools) -> None:
        call("up")
        tools.records[0].write_text("not JSON")
        assert call("down").code == 64
        tools.records[0].unlink()
        assert call("down").code == 64
        assert len(tools.containers) == 3

    def test_failed_delete_can_be_retried(self, call: Cli, tools: FakeTools) -> None:
        call("up")
        tools.fail("delete")
        done = call("down")
        assert done.code == 69
        assert "failed to delete nodes" in done.err
        tools.fail("")
        assert call("down").code == 0

    def test_down_removes_the_context_from_its_kubeconfig(
        self, call: Cli, tools: FakeTools, workdir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call("up", "--kubeconfig", "mine")
        assert (workdir / "mine").exists()
        monkeypatch.chdir(tools.directory)
        assert call("down").code == 0
        assert not (workdir / "mine").exists()


class TestLoadImage:
    def test_load_image_into_any_kind_cluster(self, call: Cli, tools: FakeTools) -> None:
        (tools.state / "images").write_text("llmtrain:dev")
        tools.create_by_hand("theirs")
        done = call("load-image", "llmtrain:dev", "--name", "theirs", "--json")
        assert (done.code, done.json["loaded"]) == (0, True)
        assert (tools.state / "loaded").read_text() == "llmtrain:dev theirs"

    def test_load_missing_image(self, call: Cli, tools: FakeTools) -> None:
        tools.create_by_hand("llmtrain")
        done = call("load-image", "llmtrain:dev", "--json")
        assert done.code == 64
        assert 'image: "llmtrain:dev" not present locally' in done.json["what"]
        assert "make k8s-build" in done.json["remedy"]

    def test_load_image_into_missing_cluster(self, call: Cli, tools: FakeTools) -> None:
        tools.create_by_hand("theirs")
        done = call("load-image", "llmtrain:dev", "--json")
        assert (done.code, done.json["known"]) == (64, ["theirs"])

    def test_if_reached_checks_the_selected_context(self, call: Cli, tools: FakeTools) -> None:
        (tools.state / "images").write_text("llmtrain:dev")
        words = ("load-image", "llmtrain:dev", "--if-reached")
        none = call(*words)
        assert none.code == 0
        assert "was not loaded" in none.out
        call("up", "--name", "other")
        other = call(*words, "--json")
        assert (other.code, other.json["loaded"]) == (0, False)
        assert "kind-other" in call(*words).out
        assert not (tools.state / "loaded").exists()
        assert call(*words, "--name", "other").code == 0
        assert (tools.state / "loaded").read_text() == "llmtrain:dev other"

    def test_context_without_if_reached_is_refused(self, call: Cli, tools: FakeTools) -> None:
        assert call("load-image", "llmtrain:dev", "--context", "x").code == 64
        assert tools.calls == []


class TestDocs:
    def test_commands_of_the_page_work(self, call: Cli, cli: Cli, tools: FakeTools, repo: Path) -> None:
        """In order; launch with --dry-run."""
        tools.install("kubectl")
        (tools.state / "images").write_text("llmtrain:dev")
        page = (repo / "docs" / "local-cluster.md").read_text()
        ran = []
        for line in re.findall(r"^    llmtrain ((?:cluster|launch) .*)$", page, re.M):
            words = line.split()
            done = call(*words[1:]) if words[0] == "cluster" else cli(*words, "--dry-run")
            assert done.code == 0, done.err
            ran.append(" ".join(words[:2]))
        assert ran == ["cluster up", "cluster up", "cluster load-image", "launch --config", "cluster down"]
        assert (tools.state / "loaded").exists()
        assert tools.containers == {}

    def test_page_lists_every_option_of_up(self, repo: Path) -> None:
        from llmtrain.commands.cluster import up_command

        page = (repo / "docs" / "local-cluster.md").read_text()
        shown = re.findall(r"^\| `--([a-z]+)` \|", page, re.M)
        assert sorted(shown) == sorted(
            name.rstrip("_") for name in set(inspect.signature(up_command).parameters) - {"json_"}
        )


class TestMake:
    """The commands of the targets; end_to_end/test_make.py runs them."""

    @pytest.fixture
    def stamp(self, tmp_path: Path) -> str:
        """Marks setup as done; unlike -o, also for recursive make."""
        (tmp_path / "installed").touch()
        return f"STAMP={tmp_path / 'installed'}"

    @pytest.fixture
    def make(self, repo: Path, stamp: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
        for name in ("KIND_CLUSTER", "K8S_IMAGE", "K8S_RUN", "K8S_NAMESPACE", "MAKEFLAGS", "MAKELEVEL"):
            monkeypatch.delenv(name, raising=False)

        def run(*words: str) -> list[str]:
            command = ["make", "-C", str(repo), "-n", "-j4", stamp, "--no-print-directory", *words]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            lines = " ".join(output.replace("\\\n", " ").split(" ")).splitlines()
            commands = (" ".join(line.split()) for line in lines)
            return [line for line in commands if line and not line.startswith(("make ", "echo ", "test "))]

        return run

    LLMTRAIN = ".venv/bin/llmtrain"
    BUILD = "docker build -t llmtrain:dev -f docker/Dockerfile ."
    TRAIN = f'{LLMTRAIN} launch --config k8s_indexed_job --name "$(cat .k8s-run)" --image llmtrain:dev'
    TRAIN += " --set launch.runs_volume.claim=runs"
    LOGS = f'{LLMTRAIN} logs "$(cat .k8s-run)"'

    def test_k8s_full_on_a_local_cluster(self, make: Callable[..., list[str]]) -> None:
        load = f"{self.LLMTRAIN} cluster load-image llmtrain:dev --name llmtrain --if-reached"
        first = f"{self.LLMTRAIN} cluster up --name llmtrain"
        assert make("k8s-full") == [first, self.BUILD, load, self.TRAIN, self.LOGS]

    def test_k8s_full_on_an_existing_cluster(self, make: Callable[..., list[str]]) -> None:
        assert make("k8s-full", "KIND_CLUSTER=") == [self.BUILD, self.TRAIN, self.LOGS]

    def test_cluster_options_are_passed_to_every_command(self, make: Callable[..., list[str]]) -> None:
        words = ("K8S_ARGS=--context lab", "K8S_NAMESPACE=team", "K8S_SET=--set launch.nodes=1", "K8S_RUN=mine")
        place = "--context lab --namespace team"
        assert make("k8s-logs", *words) == [f'{self.LLMTRAIN} logs "mine" {place}']
        assert make("k8s-clean", *words) == [f'{self.LLMTRAIN} delete "mine" {place}']
        assert make("k8s-train", *words)[0].endswith(f"claim=runs --set launch.nodes=1 {place}")
        assert make("k8s-build", *words)[1].endswith("--name llmtrain --if-reached --context lab")

    @pytest.fixture
    def run_target(self, repo: Path, stamp: str, tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
        """Runs the targets with a fake llmtrain that prints its arguments."""
        program = tmp_path / "bin" / "llmtrain"
        program.parent.mkdir()
        program.write_text('#!/bin/sh\necho "$@"\n')
        program.chmod(0o755)
        places = (f"BIN={program.parent}", f"K8S_LAST={tmp_path / 'last'}")

        def run(*words: str) -> "subprocess.CompletedProcess[str]":
            kept = {name: value for name, value in os.environ.items() if not name.startswith(("K8S_", "KIND_", "MAKE"))}
            command = ["make", "-C", str(repo), "-s", stamp, "--no-print-directory", *places, *words]
            return subprocess.run(command, capture_output=True, text=True, env=kept, check=False)

        return run

    def test_k8s_train_creates_a_new_run_each_time(self, run_target: Callable[..., Any], tmp_path: Path) -> None:
        from llmtrain.config.load import load_config

        (tmp_path / "last").write_text("k8s-demo-0101-000000\n")
        name = run_target("k8s-train").stdout.split("--name ")[1].split()[0]
        assert name != "k8s-demo-0101-000000"
        assert load_config("k8s_indexed_job", [f"output.run_id={name}"]).output.run_id == name, "a valid run id"
        assert run_target("k8s-logs").stdout.split() == ["logs", name]
        assert run_target("k8s-clean").stdout.split() == ["delete", name]
        full = run_target("k8s-full", "KIND_CLUSTER=", "K8S_BUILD=true").stdout.split()
        assert full[full.index("--name") + 1] == full[full.index("logs") + 1]

    def test_k8s_run_selects_the_run(self, run_target: Callable[..., Any]) -> None:
        assert "--name mine " in run_target("k8s-train", "K8S_RUN=mine").stdout
        assert run_target("k8s-logs").stdout.split() == ["logs", "mine"]
        assert run_target("k8s-logs", "K8S_RUN=older").stdout.split() == ["logs", "older"]
        assert run_target("k8s-clean", "K8S_NAMESPACE=team").stdout.split() == ["delete", "mine", "--namespace", "team"]

    @pytest.mark.parametrize("target", ["k8s-logs", "k8s-clean"])
    def test_targets_before_the_first_run(self, run_target: Callable[..., Any], target: str) -> None:
        done = run_target(target)
        assert done.returncode != 0
        assert done.stdout == ""
        assert "K8S_RUN" in done.stderr

    def test_k8s_cluster_delete_uses_cluster_down(self, make: Callable[..., list[str]]) -> None:
        assert make("k8s-cluster-delete", "KIND_CLUSTER=x") == [f"{self.LLMTRAIN} cluster down --name x"]

    def test_page_lists_every_target_and_variable(self, repo: Path) -> None:
        page, makefile = (repo / "docs" / "local-cluster.md").read_text(), (repo / "Makefile").read_text()
        targets = re.findall(r"^(k8s-[a-z-]+):", makefile, re.M)
        variables = re.findall(r"^((?:K8S|KIND)_[A-Z]+) *\?= *(.*)$", makefile, re.M)
        assert len(targets) == 7
        assert sorted(re.findall(r"^\| `(k8s-[a-z-]+)` \|", page, re.M)) == sorted(targets)
        shown = re.findall(r"^\| `((?:K8S|KIND)_[A-Z]+)` \| (?:`(.*?)`)? ?\|", page, re.M)
        assert sorted(shown) == sorted(variables)

    def test_preset_of_the_targets_runs_on_kind(self, cli: Cli) -> None:
        words = [word.replace('"$(cat', "demo") for word in self.TRAIN.split()[1:] if word != '.k8s-run)"']
        done = cli(*words, "--dry-run", "--json")
        kinds = {manifest["kind"]: manifest for manifest in done.json["manifests"]}
        assert "PersistentVolumeClaim" not in kinds, "kind has no ReadWriteMany class"
        pod = kinds["Job"]["spec"]["template"]["spec"]
        assert pod["containers"][0]["imagePullPolicy"] == "IfNotPresent", "the loaded image must not be pulled"
        assert pod["securityContext"]["runAsUser"] == 1000

"""cluster up, down and load-image as they are typed, with stand-ins for kind and docker (fake_kind.py), and the make
targets around them. The volume that `up` makes is tried on a real cluster in end_to_end/test_make.py."""

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
from llmtrain.local_cluster import kind_cluster as local_cluster
from llmtrain.local_cluster.operators import OPERATORS

Cli = Callable[..., Any]
CLAIM = ("persistentvolumeclaims", "default", "runs")


@dataclass
class Machine:
    """Where kind and docker are, what they hold, and what they were asked."""

    folder: Path
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

    def make_by_hand(self, name: str, mounted_at: str = "/files") -> None:
        """What somebody else makes with kind."""
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
        return sorted((self.folder / "state" / "llmtrain" / "clusters").glob("*"))


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with kube_server() as server:
        yield server


@pytest.fixture
def machine(tmp_path: Path, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path, tmp_path / "bin", tmp_path / "containers", tmp_path / "kubeconfig")
    found.bin.mkdir()
    found.state.mkdir()
    found.install("kind", "docker")
    monkeypatch.setenv("PATH", str(found.bin))
    monkeypatch.setenv("FAKE_KIND", str(found.state))
    monkeypatch.setenv("FAKE_SERVER", f"http://127.0.0.1:{kube.port}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig))
    monkeypatch.delenv("KIND_EXPERIMENTAL_PROVIDER", raising=False)
    # The client reads KUBECONFIG when it is imported, which another test may have done.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(found.kubeconfig))
    return found


@pytest.fixture
def call(cli: Cli, machine: Machine) -> Cli:  # noqa: ARG001 (its programs are used)
    def run(*words: object) -> Any:
        done = cli("cluster", *words)
        assert "Traceback" not in done.err, done.err
        return done

    return run


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestUp:
    def test_it_makes_a_cluster_with_a_claim_on_a_folder(
        self, call: Cli, machine: Machine, kube: KubeServer, workdir: Path
    ) -> None:
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
        assert 'Creating cluster "llmtrain"' in done.err, "what kind says is shown"
        nodes = ["llmtrain-control-plane", "llmtrain-worker", "llmtrain-worker2"]
        assert sorted(machine.containers) == nodes
        (mark,) = [record.stem for record in machine.records]
        for node in machine.containers.values():
            assert {"Type": "bind", "Source": str(runs), "Destination": f"/llmtrain/{mark}"} in node["Mounts"]
        claim = kube.objects[CLAIM]["spec"]
        volume = kube.objects["persistentvolumes", "", claim["volumeName"]]["spec"]
        assert volume["hostPath"] == {"path": f"/llmtrain/{mark}", "type": "Directory"}
        assert volume["accessModes"] == claim["accessModes"] == ["ReadWriteMany"]
        assert volume["storageClassName"] == claim["storageClassName"] == "", "kind's own class must not be asked"
        assert (volume["claimRef"]["namespace"], volume["claimRef"]["name"]) == ("default", "runs")
        assert volume["persistentVolumeReclaimPolicy"] == "Retain"

    def test_pods_may_write_the_folder(self, call: Cli, workdir: Path) -> None:
        (workdir / "mine").mkdir(mode=0o750)
        done = call("up", "--runs", "mine")
        assert stat.S_IMODE((workdir / "mine").stat().st_mode) == 0o1757
        assert f"Runs are in {workdir}/mine" in done.out
        assert "Any user of this machine can write there" in done.out

    def test_a_folder_that_is_open_stays_as_it_is(self, call: Cli, workdir: Path) -> None:
        (workdir / "runs").mkdir()
        (workdir / "runs").chmod(0o777)
        assert call("up").code == 0
        assert stat.S_IMODE((workdir / "runs").stat().st_mode) == 0o777

    def test_what_kind_is_told(self, call: Cli, machine: Machine, tmp_path: Path) -> None:
        file = tmp_path / "another"
        done = call("up", "--name", "mine", "--nodes", 1, "--image", "node:v1", "--kubeconfig", file, "--json")
        assert done.json["context"] == "kind-mine"
        assert sorted(machine.containers) == ["mine-control-plane"], "alone it runs pods itself"
        ((_, _, _, *options),) = machine.asked("kind", "create")
        assert options == ["--name=mine", f"--kubeconfig={file}", "--config=-", "--wait=180s", "--image=node:v1"]
        assert not machine.kubeconfig.exists()

    def test_twice_is_once(self, call: Cli, machine: Machine, kube: KubeServer) -> None:
        first = call("up", "--json").json
        before, objects = machine.containers, dict(kube.objects)
        machine.kubeconfig.unlink()
        again = call("up", "--json")
        assert again.code == 0, again.err
        assert again.json == {**first, "made": False, "claim_made": False}
        assert machine.containers == before
        assert kube.objects == objects
        assert len(machine.asked("kind", "create")) == 1
        assert machine.kubeconfig.exists(), "its context is there again"
        assert "is there already" in call("up").out

    def test_a_claim_that_is_gone_is_made_again(self, call: Cli, kube: KubeServer) -> None:
        call("up")
        old = kube.objects.pop(CLAIM)["spec"]["volumeName"]
        done = call("up")
        assert done.code == 0, done.err
        assert "was missing, and was made again" in done.out
        # The old volume waits for its old claim, for ever.
        assert kube.objects[CLAIM]["spec"]["volumeName"] != old

    def test_the_folder_of_a_cluster_cannot_be_changed(self, call: Cli, workdir: Path) -> None:
        call("up")
        done = call("up", "--runs", "other")
        assert done.code == 64
        assert f"keeps its runs in {workdir}/runs" in done.err
        assert not (workdir / "other").exists()
        assert call("up", "--runs", "runs").code == 0

    @pytest.mark.parametrize("mounted_at", ["/files", "/llmtrain/0123456789abcdef", "/llmtrain/../x"])
    def test_somebody_elses_is_refused(
        self, call: Cli, machine: Machine, kube: KubeServer, workdir: Path, mounted_at: str
    ) -> None:
        machine.make_by_hand("llmtrain", mounted_at)
        before = machine.containers
        done = call("up", "--json")
        assert done.code == 64
        assert "was not made by `llmtrain cluster up`" in done.json["what"]
        assert "kind delete cluster --name llmtrain" in done.json["remedy"]
        assert machine.containers == before
        assert kube.objects == {}
        assert list(workdir.iterdir()) == []
        assert [call[:3] for call in machine.calls] == [["kind", "get", "clusters"], ["docker", "container", "inspect"]]

    def test_one_that_took_the_place_of_ours_is_refused(self, call: Cli, machine: Machine) -> None:
        call("up")
        machine.make_by_hand("llmtrain")
        assert call("up").code == 64

    def test_another_name_beside_it(self, call: Cli, machine: Machine) -> None:
        machine.make_by_hand("llmtrain")
        assert call("up", "--name", "mine").code == 0
        assert "llmtrain-control-plane" in machine.containers

    def test_it_is_there_but_stopped(self, call: Cli, machine: Machine) -> None:
        call("up")
        machine.fail("export")
        done = call("up")
        assert done.code == 69
        assert "container is not running" in done.err
        assert "llmtrain cluster down --name llmtrain" in done.err


class TestUpFails:
    @pytest.mark.parametrize(("what", "said"), [("create", "no route to host"), ("half", "failed to lock config file")])
    def test_in_kind(self, call: Cli, machine: Machine, kube: KubeServer, what: str, said: str) -> None:
        machine.fail(what)
        done = call("up", "--json")
        assert done.code == 69
        assert said in done.json["what"]
        assert machine.containers == {}
        assert machine.records == []
        assert kube.objects == {}

    def test_at_the_claim(self, call: Cli, machine: Machine, kube: KubeServer) -> None:
        kube.gate = lambda method, path, headers: (500, "no") if method == "POST" else None  # noqa: ARG005
        done = call("up")
        assert done.code == 69
        assert machine.containers == {}
        assert machine.records == []
        assert not machine.kubeconfig.exists()

    def test_because_somebody_was_faster(self, call: Cli, machine: Machine) -> None:
        machine.fail("raced")
        done = call("up")
        assert done.code == 69
        assert "already exist" in done.err
        assert list(machine.containers) == ["llmtrain-control-plane"]
        assert machine.asked("kind", "delete") == []
        assert call("down").code == 64

    def test_and_cannot_be_taken_back(self, call: Cli, machine: Machine) -> None:
        machine.fail("half delete")
        done = call("up")
        assert done.code == 69
        assert "failed to lock config file" in done.err, "the first cause is told"
        machine.fail("")
        assert call("down").code == 0, "what was left is known as ours"
        assert machine.containers == {}

    def test_and_docker_does_not_say_what_is_left(self, call: Cli, machine: Machine) -> None:
        machine.fail("half inspect")
        assert call("up").code == 69
        assert len(machine.containers) == 3, "nothing is removed without proof"
        machine.fail("")
        assert call("down").code == 0
        assert machine.containers == {}

    def test_by_ctrl_c(self, call: Cli, machine: Machine) -> None:
        machine.fail("hang")

        def interrupt() -> None:
            wait_for(lambda: machine.containers)
            machine.fail("")
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        began = time.monotonic()
        assert call("up").code == 130
        thread.join(5)
        assert time.monotonic() - began < 20, "kind was not waited for"
        assert machine.containers == {}
        assert machine.records == []

    def test_on_a_folder_that_is_none(self, call: Cli, machine: Machine, workdir: Path) -> None:
        (workdir / "runs").write_text("")
        for runs in ("runs", "runs/below", "/proc/self/task", "with:colon"):
            done = call("up", "--runs", runs)
            assert done.code == 64, runs
            assert "--runs" in done.err
        assert machine.asked("kind", "create") == []

    def test_where_nothing_can_be_written_down(self, call: Cli, machine: Machine) -> None:
        (machine.folder / "state").write_text("")
        done = call("up")
        assert done.code == 64
        assert "XDG_STATE_HOME" in done.err
        assert machine.asked("kind", "create") == []

    def test_without_the_client(self, call: Cli, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_cluster, "find_spec", lambda name: None)  # noqa: ARG005
        done = call("up")
        assert done.code == 64
        assert "llmtrain[k8s]" in done.err
        assert machine.calls == []

    def test_on_words_that_mean_nothing(self, call: Cli, machine: Machine) -> None:
        for words in (("--name", "-x"), ("--name", "A"), ("--name", "../x"), ("--name", "x" * 51), ("--nodes", "0")):
            assert call("up", *words).code == 64, words
        assert machine.calls == []


class TestWith:
    """--with: operators, which are installed by kubectl."""

    @pytest.mark.parametrize(
        ("given", "installed"),
        [
            ("training-operator,jobset,trainer", ["training-operator", "trainer"]),  # the Trainer brings JobSet
            ("jobset", ["jobset"]),
            (" jobset , training-operator ", ["training-operator", "jobset"]),
            ("trainer,trainer", ["trainer"]),
        ],
    )
    def test_operators_are_applied_and_waited_for(
        self, call: Cli, machine: Machine, given: str, installed: list[str]
    ) -> None:
        machine.install("kubectl")
        done = call("up", "--json", "--with", given)
        assert done.code == 0, done.err
        assert done.json["operators"] == installed
        expected = []
        for operator in (OPERATORS[name] for name in installed):
            expected.append(["apply", "--server-side", *operator.source, "--context=kind-llmtrain"])
            wait = [f"--namespace={operator.namespace}", "--for=condition=Available", "--timeout=300s"]
            expected += [
                ["wait", f"deployment/{name}", *wait, "--context=kind-llmtrain"] for name in operator.deployments
            ]
        assert [words for _, *words in machine.asked("kubectl")] == expected
        assert machine.calls.index(machine.asked("kind", "create")[0]) < machine.calls.index(
            machine.asked("kubectl")[0]
        )

    def test_later_and_in_a_kubeconfig_of_its_own(self, call: Cli, machine: Machine, tmp_path: Path) -> None:
        machine.install("kubectl")
        file = tmp_path / "own"
        assert call("up", "--kubeconfig", file).code == 0
        assert machine.asked("kubectl") == []
        assert call("up", "--with", "training-operator").code == 0
        assert len(machine.asked("kind", "create")) == 1
        assert all(words[-1] == f"--kubeconfig={file}" for words in machine.asked("kubectl"))

    @pytest.mark.parametrize("given", ["kueue", "jobset,", "", "jobset trainer"])
    def test_unknown_names(self, call: Cli, machine: Machine, given: str) -> None:
        machine.install("kubectl")
        done = call("up", "--json", "--with", given)
        assert (done.code, done.json["known"]) == (64, ["jobset", "trainer", "training-operator"])
        assert machine.calls == [], "nothing was made"

    def test_without_kubectl(self, call: Cli, machine: Machine) -> None:
        done = call("up", "--with", "jobset")
        assert done.code == 64
        assert "kubectl" in done.err
        assert machine.calls == []

    @pytest.mark.parametrize("what", ["apply", "wait"])
    def test_an_install_that_fails_leaves_the_cluster(self, call: Cli, machine: Machine, what: str) -> None:
        machine.install("kubectl")
        machine.fail(what)
        done = call("up", "--json", "--with", "jobset")
        assert (done.code, done.json["error"]) == (69, "ClusterError")
        assert machine.containers
        machine.fail("")
        again = call("up", "--json", "--with", "jobset")
        assert (again.code, again.json["made"]) == (0, False)

    def test_two_of_jobset_are_refused(self, call: Cli, machine: Machine, kube: KubeServer) -> None:
        machine.install("kubectl")
        assert call("up").code == 0
        there = {"name": "jobset-controller-manager", "namespace": "jobset-system"}
        kube.add({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": there})
        assert call("up", "--with", "trainer").code == 64
        assert machine.asked("kubectl") == []
        kube.add({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {**there, "namespace": "kubeflow-system"}})
        assert call("up", "--with", "jobset").code == 0
        assert machine.asked("kubectl") == [], "the Trainer's is there"

    @pytest.mark.parametrize(
        ("name", "page"), [("training-operator", "pytorch_job"), ("jobset", "job_set"), ("trainer", "train_job")]
    )
    def test_the_pages_of_the_kinds_have_the_same_commands(self, repo: Path, name: str, page: str) -> None:
        operator, text = OPERATORS[name], (repo / "docs" / "kinds" / f"{page}.md").read_text()
        assert f'kubectl apply --server-side {operator.source[0]} "{operator.source[1]}"' in text
        assert f"kubectl get pods -n {operator.namespace}" in text
        assert f'kubectl delete {operator.source[0]} "{operator.source[1]}"' in text


class TestWithoutPrograms:
    COMMANDS = (("up",), ("down",), ("load-image", "llmtrain:dev"))

    def test_no_kind(self, call: Cli, machine: Machine) -> None:
        machine.remove("kind")
        for words in self.COMMANDS:
            done = call(*words, "--json")
            assert (done.code, done.json["what"]) == (64, "kind is not installed."), words
            assert "kind.sigs.k8s.io" in done.json["remedy"]

    def test_no_docker(self, call: Cli, machine: Machine) -> None:
        machine.remove("docker")
        for words in self.COMMANDS:
            done = call(*words, "--json")
            assert (done.code, done.json["what"]) == (64, "docker is not installed."), words

    def test_docker_does_not_run(self, call: Cli, machine: Machine, workdir: Path) -> None:
        machine.fail("daemon")
        for words in self.COMMANDS:
            done = call(*words, "--json")
            assert done.code == 64
            assert done.json["what"].startswith("docker does not answer kind: Cannot connect to the Docker daemon")
            assert "`docker ps`" in done.json["remedy"]
        assert list(workdir.iterdir()) == []

    def test_podman_instead(self, call: Cli, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.remove("docker")
        monkeypatch.setenv("KIND_EXPERIMENTAL_PROVIDER", "podman")
        assert "podman is not installed." in call("up").err
        machine.install("podman")
        (machine.state / "images").write_text("llmtrain:dev")
        assert call("up").code == 0
        done = call("load-image", "llmtrain:dev")
        assert done.code == 0, done.err
        assert (machine.state / "loaded").read_text() == "llmtrain:dev llmtrain"
        assert machine.asked("kind", "load", "docker-image") == [], "it would ask docker"
        assert call("load-image", "missing").code == 64
        assert call("down").code == 0
        assert machine.containers == {}


class TestDown:
    def test_ours(self, call: Cli, machine: Machine, kube: KubeServer, workdir: Path) -> None:
        call("up")
        (workdir / "runs" / "first").mkdir()
        kube.is_away = True  # nothing in the cluster answers any more
        done = call("down", "--json")
        assert done.code == 0, done.err
        assert done.json == {"cluster": "llmtrain", "removed": True, "runs": str(workdir / "runs")}
        assert machine.containers == {}
        assert machine.records == []
        assert (workdir / "runs" / "first").is_dir()

    def test_it_says_that_runs_stay(self, call: Cli, workdir: Path) -> None:
        call("up")
        assert call("down").out == f"Cluster llmtrain is removed. Its runs stay in {workdir}/runs.\n"

    def test_none_is_there(self, call: Cli, machine: Machine) -> None:
        done = call("down")
        assert (done.code, done.out) == (0, "There is no kind cluster llmtrain.\n")
        assert machine.asked("kind", "delete") == []

    @pytest.mark.parametrize("mounted_at", ["/files", "/llmtrain/0123456789abcdef"], ids=["kind", "another account"])
    def test_somebody_elses(self, call: Cli, machine: Machine, mounted_at: str) -> None:
        machine.make_by_hand("llmtrain", mounted_at)
        done = call("down", "--json")
        assert done.code == 64
        assert "kind delete cluster --name llmtrain" in done.json["remedy"]
        assert machine.containers
        assert machine.asked("kind", "delete") == []

    def test_one_that_took_the_place_of_ours(self, call: Cli, machine: Machine) -> None:
        call("up")
        machine.make_by_hand("llmtrain")
        assert call("down").code == 64
        assert machine.containers
        assert machine.asked("kind", "delete") == []

    def test_the_mark_of_one_cluster_does_not_give_another_away(self, call: Cli, machine: Machine) -> None:
        call("up")
        (mark,) = [record.stem for record in machine.records]
        machine.make_by_hand("other", f"/llmtrain/{mark}")
        assert call("down", "--name", "other").code == 64

    def test_what_is_written_down_is_lost(self, call: Cli, machine: Machine) -> None:
        call("up")
        machine.records[0].write_text("not JSON")
        assert call("down").code == 64
        machine.records[0].unlink()
        assert call("down").code == 64
        assert len(machine.containers) == 3

    def test_it_cannot_be_removed(self, call: Cli, machine: Machine) -> None:
        call("up")
        machine.fail("delete")
        done = call("down")
        assert done.code == 69
        assert "failed to delete nodes" in done.err
        machine.fail("")
        assert call("down").code == 0

    def test_its_context_goes_from_the_file_it_is_in(
        self, call: Cli, machine: Machine, workdir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call("up", "--kubeconfig", "mine")
        assert (workdir / "mine").exists()
        monkeypatch.chdir(machine.folder)
        assert call("down").code == 0
        assert not (workdir / "mine").exists()


class TestLoadImage:
    def test_into_any_kind_cluster(self, call: Cli, machine: Machine) -> None:
        (machine.state / "images").write_text("llmtrain:dev")
        machine.make_by_hand("theirs")
        done = call("load-image", "llmtrain:dev", "--name", "theirs", "--json")
        assert (done.code, done.json["loaded"]) == (0, True)
        assert (machine.state / "loaded").read_text() == "llmtrain:dev theirs"

    def test_an_image_that_is_not_there(self, call: Cli, machine: Machine) -> None:
        machine.make_by_hand("llmtrain")
        done = call("load-image", "llmtrain:dev", "--json")
        assert done.code == 64
        assert 'image: "llmtrain:dev" not present locally' in done.json["what"]
        assert "make k8s-build" in done.json["remedy"]

    def test_a_cluster_that_is_not_there(self, call: Cli, machine: Machine) -> None:
        machine.make_by_hand("theirs")
        done = call("load-image", "llmtrain:dev", "--json")
        assert (done.code, done.json["known"]) == (64, ["theirs"])

    def test_only_if_it_is_reached(self, call: Cli, machine: Machine) -> None:
        (machine.state / "images").write_text("llmtrain:dev")
        words = ("load-image", "llmtrain:dev", "--if-reached")
        none = call(*words)
        assert none.code == 0
        assert "commands reach no cluster (No cluster is known" in none.out
        call("up", "--name", "other")
        other = call(*words, "--json")
        assert (other.code, other.json["loaded"]) == (0, False)
        assert "commands reach kind-other, not it" in call(*words).out
        assert not (machine.state / "loaded").exists()
        assert call(*words, "--name", "other").code == 0
        assert (machine.state / "loaded").read_text() == "llmtrain:dev other"

    def test_only_there_a_kubeconfig_is_of_use(self, call: Cli, machine: Machine) -> None:
        assert call("load-image", "llmtrain:dev", "--context", "x").code == 64
        assert machine.calls == []


class TestPage:
    def test_its_commands_work(self, call: Cli, cli: Cli, machine: Machine, repo: Path) -> None:
        """In order; where training would begin, what would be sent."""
        machine.install("kubectl")
        (machine.state / "images").write_text("llmtrain:dev")
        page = (repo / "docs" / "local-cluster.md").read_text()
        ran = []
        for line in re.findall(r"^    llmtrain ((?:cluster|launch) .*)$", page, re.M):
            words = line.split()
            done = call(*words[1:]) if words[0] == "cluster" else cli(*words, "--dry-run")
            assert done.code == 0, done.err
            ran.append(" ".join(words[:2]))
        assert ran == ["cluster up", "cluster up", "cluster load-image", "launch --config", "cluster down"]
        assert (machine.state / "loaded").exists()
        assert machine.containers == {}

    def test_it_has_every_option_of_up(self, repo: Path) -> None:
        from llmtrain.commands.cluster import up_command

        page = (repo / "docs" / "local-cluster.md").read_text()
        shown = re.findall(r"^\| `--([a-z]+)` \|", page, re.M)
        assert sorted(shown) == sorted(
            name.rstrip("_") for name in set(inspect.signature(up_command).parameters) - {"json_"}
        )


class TestMake:
    """What the targets would run; that they work is shown in end_to_end/test_make.py."""

    @pytest.fixture
    def stamp(self, tmp_path: Path) -> str:
        """Says that setup has been done; unlike -o, it goes to a make below too."""
        (tmp_path / "installed").touch()
        return f"STAMP={tmp_path / 'installed'}"

    @pytest.fixture
    def make(self, repo: Path, stamp: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
        for name in ("KIND_CLUSTER", "K8S_IMAGE", "K8S_RUN", "K8S_NAMESPACE", "MAKEFLAGS", "MAKELEVEL"):
            monkeypatch.delenv(name, raising=False)

        def run(*words: str) -> list[str]:
            command = ["make", "-C", str(repo), "-n", "-j4", stamp, "--no-print-directory", *words]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            lines = " ".join(said.replace("\\\n", " ").split(" ")).splitlines()
            said = (" ".join(line.split()) for line in lines)
            return [line for line in said if line and not line.startswith(("make ", "echo ", "test "))]

        return run

    LLMTRAIN = ".venv/bin/llmtrain"
    BUILD = "docker build -t llmtrain:dev -f docker/Dockerfile ."
    TRAIN = f'{LLMTRAIN} launch --config k8s_indexed_job --name "$(cat .k8s-run)" --image llmtrain:dev'
    TRAIN += " --set launch.runs_volume.claim=runs"
    LOGS = f'{LLMTRAIN} logs "$(cat .k8s-run)"'

    def test_everything_on_a_cluster_of_ones_own(self, make: Callable[..., list[str]]) -> None:
        load = f"{self.LLMTRAIN} cluster load-image llmtrain:dev --name llmtrain --if-reached"
        first = f"{self.LLMTRAIN} cluster up --name llmtrain"
        assert make("k8s-full") == [first, self.BUILD, load, self.TRAIN, self.LOGS]

    def test_everything_on_a_cluster_that_is_there(self, make: Callable[..., list[str]]) -> None:
        assert make("k8s-full", "KIND_CLUSTER=") == [self.BUILD, self.TRAIN, self.LOGS]

    def test_the_place_goes_to_every_command(self, make: Callable[..., list[str]]) -> None:
        words = ("K8S_ARGS=--context lab", "K8S_NAMESPACE=team", "K8S_SET=--set launch.nodes=1", "K8S_RUN=mine")
        place = "--context lab --namespace team"
        assert make("k8s-logs", *words) == [f'{self.LLMTRAIN} logs "mine" {place}']
        assert make("k8s-clean", *words) == [f'{self.LLMTRAIN} delete "mine" {place}']
        assert make("k8s-train", *words)[0].endswith(f"claim=runs --set launch.nodes=1 {place}")
        assert make("k8s-build", *words)[1].endswith("--name llmtrain --if-reached --context lab")

    @pytest.fixture
    def really(self, repo: Path, stamp: str, tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
        """The targets, run with a stand-in for llmtrain that prints what it is called with."""
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

    def test_training_again_is_another_run(self, really: Callable[..., Any], tmp_path: Path) -> None:
        from llmtrain.config.load import load_config

        (tmp_path / "last").write_text("k8s-demo-0101-000000\n")
        name = really("k8s-train").stdout.split("--name ")[1].split()[0]
        assert name != "k8s-demo-0101-000000"
        assert load_config("k8s_indexed_job", [f"output.run_id={name}"]).output.run_id == name, (
            "a name that launch takes"
        )
        assert really("k8s-logs").stdout.split() == ["logs", name]
        assert really("k8s-clean").stdout.split() == ["delete", name]
        full = really("k8s-full", "KIND_CLUSTER=", "K8S_BUILD=true").stdout.split()
        assert full[full.index("--name") + 1] == full[full.index("logs") + 1]

    def test_a_name_that_is_given_is_taken_and_kept(self, really: Callable[..., Any]) -> None:
        assert "--name mine " in really("k8s-train", "K8S_RUN=mine").stdout
        assert really("k8s-logs").stdout.split() == ["logs", "mine"]
        assert really("k8s-logs", "K8S_RUN=older").stdout.split() == ["logs", "older"]
        assert really("k8s-clean", "K8S_NAMESPACE=team").stdout.split() == ["delete", "mine", "--namespace", "team"]

    @pytest.mark.parametrize("target", ["k8s-logs", "k8s-clean"])
    def test_before_the_first_run(self, really: Callable[..., Any], target: str) -> None:
        done = really(target)
        assert done.returncode != 0
        assert done.stdout == ""
        assert "K8S_RUN" in done.stderr

    def test_only_our_own_cluster_is_removed(self, make: Callable[..., list[str]]) -> None:
        assert make("k8s-cluster-delete", "KIND_CLUSTER=x") == [f"{self.LLMTRAIN} cluster down --name x"]

    def test_the_page_has_every_target_and_variable(self, repo: Path) -> None:
        page, makefile = (repo / "docs" / "local-cluster.md").read_text(), (repo / "Makefile").read_text()
        targets = re.findall(r"^(k8s-[a-z-]+):", makefile, re.M)
        variables = re.findall(r"^((?:K8S|KIND)_[A-Z]+) *\?= *(.*)$", makefile, re.M)
        assert len(targets) == 7
        assert sorted(re.findall(r"^\| `(k8s-[a-z-]+)` \|", page, re.M)) == sorted(targets)
        shown = re.findall(r"^\| `((?:K8S|KIND)_[A-Z]+)` \| (?:`(.*?)`)? ?\|", page, re.M)
        assert sorted(shown) == sorted(variables)

    def test_the_preset_of_the_targets_runs_on_kind(self, cli: Cli) -> None:
        words = [word.replace('"$(cat', "demo") for word in self.TRAIN.split()[1:] if word != '.k8s-run)"']
        done = cli(*words, "--dry-run", "--json")
        kinds = {manifest["kind"]: manifest for manifest in done.json["manifests"]}
        assert "PersistentVolumeClaim" not in kinds, "kind could make none for two nodes"
        pod = kinds["Job"]["spec"]["template"]["spec"]
        assert pod["containers"][0]["imagePullPolicy"] == "IfNotPresent", "what kind loaded must not be pulled"
        assert pod["securityContext"]["runAsUser"] == 1000

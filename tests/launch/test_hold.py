"""launch --hold: pods that wait, for push and exec."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from kube_runs import FakeRun, ended, waiting

from kube_server import KubeServer, kube_server
from limits import limit, wait_until
from llmtrain import registry
from llmtrain.config.load import load_config
from llmtrain.core.env import HOLD_SCRIPT
from llmtrain.errors import UsageError
from llmtrain.launch import lifecycle
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_scripts import hold as held_pod
from llmtrain.launch.pod_task import HELD_COMMAND, PodTask
from llmtrain.launch.record import find_record

Cli = Callable[..., Any]
Object = dict[str, Any]
KINDS = sorted(registry.KINDS)
HOLD = ("launch", "--hold", "--config", "ddp_smoke", "--name", "demo", "--image", "me/train:1", "--nodes", "2")
SOURCE = Path(held_pod.__file__).read_text(encoding="utf-8")


@lru_cache
def make(kind: str, *sets: str, mode: str = "hold") -> JobPlan:
    base = [
        "output.run_id=demo",
        "launch.namespace=team",
        f"launch.kind={kind}",
        "launch.nodes=2",
        "launch.image=me/train:1",
    ]
    return plan_job(load_config("ddp_smoke", [*base, *sets]), PodTask(mode))  # type: ignore[arg-type]


def specs(value: Any) -> Iterator[Object]:
    """All pod specs in a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from specs(inner)


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_held_pods_differ_from_training_pods_only_in_their_command(self, kind: str) -> None:
        plan = make(kind)
        assert plan.command == [*HELD_COMMAND, "hold"]
        for spec, usual in zip(specs(render(plan)), specs(render(make(kind, mode="train"))), strict=True):
            (container,), (trained,) = spec["containers"], usual["containers"]
            assert container["command"] == plan.command
            env = {row["name"]: row.get("value") for row in container["env"]}
            assert env.pop(HOLD_SCRIPT) == SOURCE
            assert env.pop("LLMTRAIN_RUN_DIR") == "/out/demo"
            assert env == {row["name"]: row.get("value") for row in trained["env"]}
            assert {"name": "work", "mountPath": "/work"} in container["volumeMounts"]
            assert {"name": "work", "emptyDir": {}} in spec["volumes"]
            same = ("name", "image", "resources", "securityContext", "ports")
            assert [container[key] for key in same] == [trained[key] for key in same]
            assert "work" not in [row["name"] for row in usual["volumes"]]

    def test_pytorchjob_exit_codes_are_set(self, kind: str) -> None:
        """A PyTorchJob decides by exit codes whether to restart pods."""
        (container,) = next(specs(render(make(kind))))["containers"]
        codes = [row["value"] for row in container["env"] if row["name"] == "LLMTRAIN_EXIT_CODES"]
        assert (codes == ["pytorchjob"]) == (kind == "pytorch_job")

    def test_training_config_is_not_checked(self, kind: str) -> None:
        """The commands are not known yet: batch and model are not checked, and hub access is allowed."""
        sets = ("launch.nodes=3", "distributed.strategy=none", "distributed.reproducible_reduce=false")
        sets += ("launch.runs_volume.claim=runs",)  # a claim to be created is warned about
        plan = make(kind, *sets, "model.name=hf_causal_lm", "model.path=somebody/tiny", "trainer.grad_accum_steps=1")
        assert (plan.nodes, plan.egress_ports, plan.warnings) == (3, [443], [])

    def test_model_and_data_are_prefetched(self, kind: str) -> None:
        """By the same init container as for training; other models can be fetched by hand later."""
        sets = ("model.name=hf_causal_lm", "model.path=somebody/tiny", "launch.hf_token_secret.name=hf-secrets")
        for spec, usual in zip(
            specs(render(make(kind, *sets))), specs(render(make(kind, *sets, mode="train"))), strict=True
        ):
            (fetching,), (usual_fetching,) = spec["initContainers"], usual["initContainers"]
            same = ("name", "image", "command", "resources", "securityContext")
            assert [fetching[key] for key in same] == [usual_fetching[key] for key in same]
            (container,) = spec["containers"]
            env = {row["name"]: row for row in container["env"]}
            assert "HF_HUB_OFFLINE" not in env
            assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hf-secrets", "key": "token"}}
            assert env["HF_HOME"] in fetching["env"], "the same cache"
            assert {"name": "cache", "mountPath": "/cache"} in [*fetching["volumeMounts"], *container["volumeMounts"]]

    @pytest.mark.parametrize("more", [("launch.env={HF_HUB_OFFLINE: 1}",), ("model.local_files_only=true",)])
    def test_nothing_is_prefetched_offline(self, kind: str, more: tuple[str, ...]) -> None:
        plan = make(kind, "model.name=hf_causal_lm", "model.path=somebody/tiny", *more)
        assert not plan.is_fetching
        assert "initContainers" not in next(specs(render(plan)))

    def test_lint_finds_nothing(self, cli: Cli, kind: str) -> None:
        done = cli(*HOLD, "--kind", kind, "--dry-run", "-o", "out/")
        assert done.code == 0, done.err
        checked = cli("lint", "out", "--json")
        assert (checked.code, checked.json["findings"]) == (0, [])

    def test_elastic_node_count_is_refused(self, kind: str) -> None:
        with pytest.raises(UsageError, match=r"launch.nodes is 1:2"):
            make(kind, "launch.nodes=1:2", "distributed.reproducible_reduce=false")


def test_kubernetes_does_not_expand_the_script() -> None:
    """Kubernetes expands $(NAME) and $$ in variables; the kernel allows at most 128 KiB."""
    assert "$(" not in SOURCE
    assert "$$" not in SOURCE
    assert len(SOURCE.encode()) < 2**17 - len(HOLD_SCRIPT) - 1


@pytest.mark.parametrize(
    ("volume", "path", "is_fine"),
    [
        ("runs_volume", "/work", False),
        ("data_volume", "/work/data", False),
        ("models_volume", "/work", False),
        ("data_volume", "/workspace", True),
    ],
)
def test_volume_mounted_over_the_work_directory_is_refused(volume: str, path: str, is_fine: bool) -> None:
    field = "output.root_dir" if volume == "runs_volume" else f"launch.{volume}.mount_path"
    sets = (f"{field}={path}", f"launch.{volume}.claim=mine")
    assert make("indexed_job", *sets, mode="train").nodes == 2, "allowed in other modes"
    if is_fine:
        assert make("indexed_job", *sets).nodes == 2
    else:
        with pytest.raises(UsageError, match=f"{path}.*/work"):
            make("indexed_job", *sets)


@pytest.mark.parametrize("words", [("--smoke",), ("--doctor",), ("--", "python", "train.py")])
def test_hold_cannot_be_combined_with_other_modes(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli(*HOLD, *words)
    assert done.code == 64
    for option in ("--doctor", "--smoke", "--hold"):
        assert option in done.err


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    from llmtrain.operate.status import watch as follow

    monkeypatch.setattr(lifecycle, "POLL_SEC", 0.02)
    for name, value in {"POLL_SEC": 0.03, "START_FAILURE_SEC": 0.15, "DRAIN_SEC": 0.3, "EVENTS_SEC": 0.0}.items():
        monkeypatch.setattr(follow, name, value)
    with kube_server() as server:
        yield server


class Player(threading.Thread):
    """Plays the cluster once the job is made."""

    def __init__(self, kube: KubeServer, act: Callable[[FakeRun], None]) -> None:
        super().__init__(daemon=True)
        self._kube, self._act = kube, act
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            wait_until(lambda: ("jobs", "team", "demo") in self._kube.objects, 10)
            self._act(FakeRun(self._kube, find_record(self._kube.cluster(), "demo", "team").plan))
        except BaseException as error:
            self.error = error

    def done(self) -> None:
        self.join(limit(10))
        assert self.error is None, self.error


def one_after_the_other(run: FakeRun) -> None:
    run.pod(0)
    run.pod(1, waiting("ContainerCreating"))
    run.say(0, "[HOLD] demo-0 waits")
    time.sleep(0.2)
    run.set(1, {"running": {}})


def held(call: Cli, kube: KubeServer) -> FakeRun:
    """A run whose pods wait."""
    player = Player(kube, one_after_the_other)
    assert call(*HOLD).code == 0
    player.done()
    run = FakeRun(kube, find_record(kube.cluster(), "demo", "team").plan)
    run.pods = {0: "demo-0-00001", 1: "demo-1-00002"}
    return run


class TestLaunch:
    def test_launch_returns_when_all_pods_run(self, call: Cli, kube: KubeServer, tmp_path: Path) -> None:
        player = Player(kube, one_after_the_other)
        done = call(*HOLD)
        player.done()
        assert done.code == 0, done.err
        demo = f"demo --kubeconfig {tmp_path}/kubeconfig"
        for command in (f"push {demo} FILE", f"exec {demo} -- torchrun FILE", f"stop {demo}"):
            assert f"llmtrain {command}" in done.out.splitlines()[-1]
        assert "[K8S] pod 1 (demo-1-00002): Running on k8s-node1" in done.out
        assert find_record(kube.cluster(), "demo", "team").task == PodTask("hold")

    def test_launch_json(self, call: Cli, kube: KubeServer) -> None:
        player = Player(kube, one_after_the_other)
        done = call(*HOLD, "--json")
        player.done()
        value = done.json
        assert (done.code, value["state"], value["mode"], value["max_steps"]) == (0, "running", "hold", None)
        assert [pod["phase"] for pod in value["pods"]] == ["Running", "Running"]

    def test_launch_with_image_that_cannot_be_pulled_is_rolled_back(self, call: Cli, kube: KubeServer) -> None:
        def act(run: FakeRun) -> None:
            for index in (0, 1):
                run.pod(index, waiting("ImagePullBackOff", "manifest unknown"))

        player = Player(kube, act)
        done = call(*HOLD)
        player.done()
        assert done.code == 64
        assert "me/train:1" in done.err
        assert "rolled back" in done.err
        assert not [key for key in kube.objects if key[0] != "pods"]

    def test_pods_that_cannot_start_the_script(self, call: Cli, kube: KubeServer) -> None:
        """An image without python3."""

        def act(run: FakeRun) -> None:
            run.pod(0, ended(127, "StartError"))
            run.finish("Failed", reason="BackoffLimitExceeded")

        player = Player(kube, act)
        done = call(*HOLD)
        player.done()
        assert done.code == 127
        assert "StartError" in done.err or "exit code 127" in done.err

    def test_detached_launch_returns_at_once(self, call: Cli) -> None:
        done = call(*HOLD, "-d")
        assert done.code == 0
        assert done.out.startswith("Run demo launched. Watch it: llmtrain status demo")


class TestHeldRun:
    def test_status_and_why(self, call: Cli, kube: KubeServer) -> None:
        run = held(call, kube)
        page = call("status", "demo").out
        assert page.splitlines()[0] == "run        demo (hold)"
        assert "state      running" in page
        assert "step" not in page
        assert call("status").out.splitlines()[1].split()[:5] == ["demo", "running", "indexed_job", "2/2", "-"]
        why = call("why", "demo", "--json")
        assert (why.code, why.json["state"], why.json["cause"]) == (0, "running", "healthy")
        run.end(1, 137)
        assert call("status", "demo", "--json").json["state"] == "restarting"
        assert call("why", "demo", "--json").json["cause"] != "healthy"

    def test_stop_resume_and_stop_again(self, call: Cli, kube: KubeServer, tmp_path: Path) -> None:
        run = held(call, kube)
        place = f" --kubeconfig {tmp_path}/kubeconfig"
        for name in run.pods.values():
            kube.remove("Pod", name)
        stopped = call("stop", "demo")
        assert stopped.code == 0, stopped.err
        assert f"llmtrain resume demo{place}" in stopped.out
        assert f"llmtrain fetch demo{place}" in stopped.out
        player = Player(kube, one_after_the_other)
        again = call("resume", "demo", "--nodes", "2")
        player.done()
        assert again.code == 0, again.err
        assert again.out.splitlines()[-1].startswith("The pods of run demo are ready.")
        record = find_record(kube.cluster(), "demo", "team")
        assert (record.task.mode, record.number) == ("hold", 2)
        assert kube.objects["jobs", "team", "demo"]["spec"]["template"]["spec"]["containers"][0]["command"] == [
            *HELD_COMMAND,
            "hold",
        ]

    def test_resume_with_elastic_node_count_is_refused(self, call: Cli, kube: KubeServer) -> None:
        assert call(*HOLD, "-d").code == 0
        assert call("stop", "demo").code == 0
        done = call("resume", "demo", "--nodes", "1:2", "--set", "distributed.reproducible_reduce=false")
        assert done.code == 64
        assert "1:2" in done.err
        assert ("jobs", "team", "demo") not in kube.objects

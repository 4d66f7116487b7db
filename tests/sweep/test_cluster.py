"""`sweep --launch` against the API server of the tests. What a kubelet would do, the test does: it trains the config of
each Job for real, and ends its pod."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sweep_workers import InThisProcess, MakeSweep

from kube_server import KubeServer, kube_server
from llmtrain.core.arguments import ClusterPlace
from llmtrain.errors import ClusterError, ExitCode, LlmtrainError, UsageError
from llmtrain.kubernetes.client import plural_of
from llmtrain.kubernetes.labels import CODE_LABEL, has_labels
from llmtrain.launch import lifecycle
from llmtrain.launch.job import config_map_name
from llmtrain.launch.record import find_record
from llmtrain.operate import cluster_run
from llmtrain.operate.fetch.choice import is_selected
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.runs.exit_report import ExitReport
from llmtrain.sweep import cluster as cluster_module
from llmtrain.sweep.cluster import ClusterWorkers
from llmtrain.sweep.driver import drive
from llmtrain.sweep.jobs import Job
from llmtrain.sweep.prepare import Sweep, prepare, reopen
from llmtrain.sweep.record import find_sweep
from llmtrain.sweep.spec import read_spec

SPACE = {"trainer.lr": "log(1e-3,1e-1)", "trainer.weight_decay": "[0.0,0.1,0.5]"}
SETS = ["trainer.max_steps=12", "trainer.schedule=wsd", "trainer.schedule_steps=12", "trainer.log_every_steps=2"]
SETS += ["output.report=false"]
LAUNCH = ["launch.image=me/train:1", "launch.nodes=1", "launch.runs_volume.claim=runs", "launch.queue=team-queue"]


class Kubelet:
    """Trains the Jobs of the server, one per step."""

    def __init__(self, kube: KubeServer, volume: Path) -> None:
        self.kube = kube
        self.volume = volume
        self.trained: list[tuple[str, int]] = []

    def step(self) -> None:
        from llmtrain.training.run import run_training

        for (plural, _, name), job in list(self.kube.objects.items()):
            if plural != plural_of("Job") or "status" in job:
                continue
            assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
            config = find_record(self.kube.cluster(), name, "team").config
            config = config.with_values("output", root_dir=str(self.volume))
            self.trained.append((name, config.trainer.max_steps or 0))
            condition = "Complete"
            try:
                run_training(config, "auto", progress="none")
            except LlmtrainError as error:
                condition = "Failed"
                self.pod(job, error)
            self.kube.change("Job", name, {"status": {"conditions": [{"type": condition, "status": "True"}]}})
            return

    def pod(self, job: dict[str, Any], error: LlmtrainError) -> None:
        message = ExitReport.of(error).as_termination_message()
        ended = {"exitCode": int(error.exit_code), "reason": "Error", "message": message}
        labels = job["spec"]["template"]["metadata"]["labels"] | {"batch.kubernetes.io/job-completion-index": "0"}
        status = {"name": "trainer", "state": {"terminated": ended}, "lastState": {}, "restartCount": 0}
        self.kube.add(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{job['metadata']['name']}-0-x", "labels": labels},
                "spec": {},
                "status": {"phase": "Failed", "containerStatuses": [status]},
            }
        )


@pytest.fixture
def kubelet(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubelet]:
    """With what a reader pod would fetch taken from the volume."""
    monkeypatch.setattr(lifecycle, "POLL_SEC", 0.01)
    with kube_server() as server:
        kubelet = Kubelet(server, workdir / "volume")
        server.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}, "spec": {}})
        server.add({"apiVersion": "v1", "kind": "LocalQueue", "metadata": {"name": "team-queue"}, "spec": {}})

        def fetch(observed: ObservedRun, to: Path, only: Any, _: object) -> None:
            source = kubelet.volume / observed.run_id
            if not source.is_dir():
                raise UsageError("no files")
            (to / observed.run_id).mkdir(parents=True, exist_ok=True)
            for path in source.iterdir():
                if path.is_file() and is_selected(path.name, only):
                    shutil.copy(path, to / observed.run_id)

        monkeypatch.setattr(cluster_run, "fetch_run", fetch)
        yield kubelet


@pytest.fixture
def workers(kubelet: Kubelet, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sweep], ClusterWorkers]:
    monkeypatch.setattr(ClusterWorkers, "poll_seconds", 0.0)
    place = ClusterPlace(kubeconfig=str(kubelet.kube.kubeconfig(workdir)))

    def make(sweep: Sweep) -> ClusterWorkers:
        made = ClusterWorkers(sweep.directory, place, sweep.code)
        ended = made.ended

        def step_and_ended() -> list[Job]:
            kubelet.step()
            return ended()

        monkeypatch.setattr(made, "ended", step_and_ended)
        return made

    return make


@pytest.fixture
def make_launched(workdir: Path, tiny: list[str]) -> Callable[..., Sweep]:
    def make(*overrides: str, **values: Any) -> Sweep:
        fields = {"name": "demo", "config": "gpt_smoke", "space": SPACE, "trials": 9, "halving": {"first_rung": 4}}
        spec, space = read_spec({**fields, **values}, "test")
        sets = [*tiny, *SETS, *LAUNCH, *overrides]
        sweep, trials = prepare(spec, space, spec.config, sets, launch_root=str(workdir / "runs"))
        sweep.create(trials)
        return sweep

    return make


def test_trials_are_runs_in_the_queue_and_promotion_is_resume(
    make_launched: Callable[..., Sweep], workers: Any, kubelet: Kubelet, make_sweep: MakeSweep
) -> None:
    sweep = make_launched()
    table = drive(sweep, workers(sweep), 9)
    assert kubelet.trained[:9] == [(f"demo-{number}", 4) for number in range(9)]
    assert [steps for _, steps in kubelet.trained[9:]] == [12, 12, 12]
    assert table["winner"]["run_id"] in [run_id for run_id, _ in kubelet.trained[9:]]
    # The same table as on this machine.
    assert drive(make_sweep("local"), InThisProcess(0), 2) == table


def test_driver_that_ended_finds_its_runs_again(
    make_launched: Callable[..., Sweep], workers: Any, kubelet: Kubelet
) -> None:
    sweep = make_launched()
    first = workers(sweep)
    count = 0
    ended = first.ended

    def end_after_five() -> list[Job]:
        nonlocal count
        count += 1
        if count > 5:
            raise ClusterError("the laptop was closed")
        return list(ended())

    first.ended = end_after_five
    with pytest.raises(ClusterError):
        drive(sweep, first, 9)
    kubelet.step()  # one ends while there is no driver
    kubelet.step()
    before = list(kubelet.trained)
    table = drive(reopen(sweep.directory), workers(sweep), 9)
    assert table["is_complete"]
    assert len(set(kubelet.trained)) == len(kubelet.trained) == 12  # none was trained twice
    assert kubelet.trained[: len(before)] == before


def test_trial_that_diverges_on_the_cluster_counts_as_worst(make_launched: Callable[..., Sweep], workers: Any) -> None:
    sweep = make_launched(space={"trainer.lr": [0.01, 1e30]}, trials=2, search="grid", halving=None)
    rows = drive(sweep, workers(sweep), 2)["rows"]
    assert [row["status"] for row in rows] == ["finished", "diverged"]


def test_server_that_is_away_is_asked_again(
    make_launched: Callable[..., Sweep], workers: Any, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make_launched(trials=2, halving=None)
    made = workers(sweep)
    ended = made.ended
    calls = 0

    def away_for_a_while() -> list[Job]:
        nonlocal calls
        calls += 1
        monkeypatch.setattr(cluster_module.ClusterRun, "status", original if calls % 2 else unreachable)
        return list(ended())

    original = cluster_module.ClusterRun.status

    def unreachable(*_: Any, **__: Any) -> None:
        raise ClusterError("the API server is away")

    made.ended = away_for_a_while
    assert drive(sweep, made, 2)["is_complete"]
    assert calls > 2
    assert len(kubelet.trained) == 2


MODEL = """
from pydantic import BaseModel
from torch import nn

from llmtrain.models.base import ModelAdapter


class Own(ModelAdapter):
    class Options(BaseModel):
        width: int = 8

    def build(self):
        width = self.options.width
        return nn.Sequential(nn.Embedding(self.vocab_size, width), nn.Linear(width, self.vocab_size))
"""


@pytest.fixture
def sweep_cli(cli: Any, kubelet: Kubelet, workdir: Path, tiny: list[str]) -> Callable[..., Any]:
    """`llmtrain sweep --launch` with a model class in code/own_model.py."""
    (workdir / "code").mkdir()
    (workdir / "code" / "own_model.py").write_text(MODEL)
    sets = [*[each for each in tiny if not each.startswith("model.")], *SETS, *LAUNCH, "launch.namespace=team"]
    sets += ["model.name=own_model:Own", "model.block_size=16"]
    words = [word for each in sets for word in ("--set", each)]
    kubeconfig = kubelet.kube.kubeconfig(workdir)

    def run(*more: Any) -> Any:
        return cli("sweep", "--config", "gpt_smoke", "--name", "demo", *words, "--launch", *more)

    run.place = ("--kubeconfig", kubeconfig)  # type: ignore[attr-defined]
    return run


def test_trials_are_launched_with_the_code_of_the_start(
    sweep_cli: Callable[..., Any],
    kubelet: Kubelet,
    workdir: Path,
    workers: Any,
    cli: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those that a second driver launches, after the directory has changed; and promotions."""
    space = ["--space", "model.options.width=[4,8,12]", "--search", "grid", "--halving", "4", "--with-code", "code"]

    def close_laptop(_: ClusterWorkers) -> None:
        raise UsageError("the laptop was closed")

    with monkeypatch.context() as patched:
        patched.setattr(ClusterWorkers, "ended", close_laptop)
        assert sweep_cli(*space, *sweep_cli.place, "--parallel", "1").code == ExitCode.USAGE  # type: ignore[attr-defined]
    (workdir / "code" / "own_model.py").write_text("raise SystemExit(1)")
    directory = find_sweep(str(workdir / "runs"), "demo")
    assert (directory.code / "own_model.py").read_text() == MODEL
    sweep = reopen(directory)
    assert sweep.code is not None
    made = workers(sweep)
    assert drive(sweep, made, 3)["is_complete"]
    shipped = [each for each in kubelet.kube.objects.values() if has_labels(each, CODE_LABEL)]
    assert len(shipped) == 3
    assert all(MODEL in each["data"].values() for each in shipped)
    (directory.code / "own_model.py").write_text("# another\n")
    damaged = cli("sweep", "--resume", "demo")
    assert damaged.code == ExitCode.FAILED
    assert "code" in damaged.err


def test_runs_of_others_in_the_namespace_are_not_taken_over(
    sweep_cli: Callable[..., Any], kubelet: Kubelet, workdir: Path
) -> None:
    name = config_map_name("demo-1")
    kubelet.kube.add({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {}})
    space = ["--space", "model.options.width=[4,8,12]", "--search", "grid", "--with-code", "code"]
    done = sweep_cli(*space, *sweep_cli.place)  # type: ignore[attr-defined]
    assert done.code == ExitCode.USAGE, done.err
    assert "demo-1" in done.err
    assert not (workdir / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--space", "model.options.width=[4,x]", "--with-code", "code"], "width"),
        (["--space", "model.options.height=[4,8]", "--with-code", "code"], "height"),
        (["--space", "trainer.lr=[0.1,0.2]", "--with-code", "nothing"], "nothing is missing"),
        (["--space", "trainer.lr=[0.1,0.2]", "--detach"], "--resume NAME"),
        (["--space", "trainer.lr=[0.1,0.2]", "--build"], "--set launch.image=IMAGE"),
        (["--space", "trainer.lr=[0.1,0.2]", "--image", "me/other:1"], "--set launch.image=me/other:1"),
    ],
)
def test_bad_code_and_other_options_are_refused_before_the_first_trial(
    sweep_cli: Callable[..., Any], workdir: Path, words: list[str], message: str
) -> None:
    done = sweep_cli("--search", "grid", *words)
    assert done.code == ExitCode.USAGE, done.err
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (workdir / "runs").exists()


def test_options_of_a_cluster_need_launch(cli: Any, workdir: Path) -> None:
    for words in (["--with-code", "code"], ["--namespace", "team"]):
        done = cli("sweep", "--config", "gpt_smoke", "--seeds", "2", *words)
        assert done.code == ExitCode.USAGE
        assert f"{words[0]} only applies with --launch" in done.err
    done = cli("sweep", "--resume", "demo", "--with-code", "code")
    assert done.code == ExitCode.USAGE
    assert not (workdir / "runs").exists()


def test_config_without_an_image_is_refused_before_the_first_trial(cli: Any, kubelet: Kubelet, workdir: Path) -> None:
    words = ["--config", "gpt_smoke", "--space", "trainer.lr=log(1e-3,1e-1)", "--trials", "2", "--name", "demo"]
    kubeconfig = kubelet.kube.kubeconfig(workdir)
    done = cli("sweep", *words, "--launch", "--kubeconfig", kubeconfig, "--json")
    assert done.code == ExitCode.USAGE, done.err
    assert "launch.image" in json.loads(done.out.strip().splitlines()[-1])["what"]
    assert not [key for key in kubelet.kube.objects if key[0] in ("configmaps", "jobs")]
    assert not (workdir / "runs").exists()

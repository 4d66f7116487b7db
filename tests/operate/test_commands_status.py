"""The commands llmtrain status and llmtrain logs."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from kube_runs import STEP, launch
from typer.testing import CliRunner, Result

from kube_server import KubeServer
from llmtrain.commands import logs, status
from llmtrain.errors import UsageError
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.log_curves import log_curves

pytestmark = pytest.mark.usefixtures("hurry")


@pytest.fixture
def kubeconfig(kube: KubeServer, tmp_path: Path) -> Path:
    """For the fake API server; its context selects namespace team."""
    return kube.kubeconfig(tmp_path)


def call(command: object, kubeconfig: Path, *words: str) -> Result:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    result = CliRunner().invoke(app, [*words, "--kubeconfig", str(kubeconfig)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_status_of_all_runs_and_of_one(kube: KubeServer, kubeconfig: Path) -> None:
    assert call(status.command, kubeconfig).stdout == "No runs in namespace team of here.\n"
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    table = call(status.command, kubeconfig).stdout.splitlines()
    assert table[0].split() == [
        "run",
        "state",
        "kind",
        "pods",
        "step",
        "loss",
        "tok/s",
        "left",
        "restarts",
        "age",
        "why",
    ]
    assert table[1].split()[:7] == ["demo", "running", "indexed_job", "2/2", "5/30", "5.1922", "27,610"]
    assert call(status.command, kubeconfig, "-A").stdout.splitlines()[1].split()[:2] == ["team", "demo"]
    assert "No runs in namespace other" in call(status.command, kubeconfig, "-n", "other").stdout
    page = call(status.command, kubeconfig, "demo").stdout
    assert "step       5/30, loss 5.1922, 27,610 tok/s, 0:00:09 left" in page
    assert run.pods[1] in page


def test_status_json(kube: KubeServer, kubeconfig: Path) -> None:
    run = launch(kube)
    run.pod(0)
    one = json.loads(call(status.command, kubeconfig, "demo", "--json").stdout)
    assert (one["run_id"], one["state"], one["pods"][0]["name"]) == ("demo", "starting", run.pods[0])
    every = json.loads(call(status.command, kubeconfig, "--json").stdout)
    assert (every["context"], every["namespace"]) == ("here", "team")
    assert every["runs"][0]["run_id"] == "demo"
    assert set(every["runs"][0]) == set(one)


def test_watch_one_run_until_it_ends(kube: KubeServer, kubeconfig: Path) -> None:
    run = launch(kube)
    run.pod(0)
    run.say(0, STEP.format(30))
    run.end(0)
    run.finish()
    shown = call(status.command, kubeconfig, "demo", "--watch").stdout.splitlines()
    assert STEP.format(30) in shown
    assert any(line.endswith("is finished") for line in shown)
    done = call(status.command, kubeconfig, "demo", "--watch", "--json")
    assert json.loads(done.stdout)["state"] == "finished"


def test_watch_all_runs_until_ctrl_c(kube: KubeServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch(kube)
    turns = iter(range(4))

    def sleep(seconds: float) -> None:
        assert seconds == status.REFRESH_SEC
        match next(turns):
            case 0:
                run.pod(0)
            case 1:
                kube.is_away = True
            case 2:
                kube.is_away = False
            case 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=sleep))
    shown = call(status.command, kubeconfig, "--watch").stdout
    words = [word for word in ("pending", "starting", "Unable to connect") for _ in range(shown.count(word))]
    assert words == ["pending", "starting", "starting", "Unable to connect"]


@pytest.mark.parametrize("words", [("demo", "-A"), ("-A", "-n", "x"), ("--watch", "--json")])
def test_conflicting_options_are_refused(kubeconfig: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        call(status.command, kubeconfig, *words)


def test_unknown_run_suggests_a_similar_name(kube: KubeServer, kubeconfig: Path) -> None:
    launch(kube)
    for command in (status.command, logs.command):
        with pytest.raises(UsageError, match="Did you mean 'demo'"):
            call(command, kubeconfig, "demp")


def test_logs_command(kube: KubeServer, kubeconfig: Path) -> None:
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, "a", "b")
    run.say(1, "c")
    assert call(logs.command, kubeconfig, "demo").stdout == "[0] a\n[0] b\n[1] c\n"
    assert call(logs.command, kubeconfig, "demo", "--tail", "1", "--rank", "0").stdout == "[0] b\n"
    rows = [json.loads(line) for line in call(logs.command, kubeconfig, "demo", "--json").stdout.splitlines()]
    assert [(line["pod"], line["rank"], line["text"]) for line in rows] == [
        (run.pods[0], 0, "a"),
        (run.pods[0], 0, "b"),
        (run.pods[1], 1, "c"),
    ]
    run.end(0)
    run.end(1)
    run.finish()
    assert sorted(call(logs.command, kubeconfig, "demo", "-f").stdout.split("\n")) == ["", "[0] a", "[0] b", "[1] c"]


def test_plot_of_a_run(kube: KubeServer, kubeconfig: Path) -> None:
    """From the log of rank 0; a step that was trained again after a restart counts once."""
    run = launch(kube)
    run.pod(0)
    line = "[TRAIN] step {}/30 | loss {} | lr 3.00e-03 | 27,610 tok/s | 0:00:09 left"
    run.say(0, *(line.format(step, 9 - step / 5) for step in range(1, 21)), "[EVAL] step 20/30 | val loss 5.5 | x")
    run.say(0, *(line.format(step, 9 - step / 5) for step in range(11, 31)))
    curves = log_curves(ObservedRun(run.cluster, run.record))
    assert curves["training"][0] == list(range(1, 31))
    assert curves["validation"] == ([20], [5.5])
    shown = call(status.command, kubeconfig, "demo", "--plot").stdout
    assert "training" in shown
    assert "validation" in shown
    assert max(map(len, shown.splitlines())) <= 110


def test_plot_without_losses(kube: KubeServer, kubeconfig: Path) -> None:
    run = launch(kube)
    run.pod(0)
    assert call(status.command, kubeconfig, "demo", "--plot").exit_code == 0
    assert log_curves(ObservedRun(run.cluster, run.record)) == {"training": ([], []), "validation": ([], [])}


@pytest.mark.parametrize("words", [["--plot"], ["demo", "--plot", "--json"], ["demo", "--plot", "--watch"]])
def test_plot_needs_one_run(kubeconfig: Path, words: list[str]) -> None:
    with pytest.raises(UsageError, match="--plot"):
        call(status.command, kubeconfig, *words)

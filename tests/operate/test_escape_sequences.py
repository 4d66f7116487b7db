"""Text from a cluster must not reach a terminal as escape sequences."""

import ast
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from kube_runs import STEP, ended, launch, running, waiting
from typer.testing import CliRunner, Result

from kube_server import KubeServer
from llmtrain import cli
from llmtrain.commands import logs, status, why
from llmtrain.core.findings import Finding
from llmtrain.core.terminal import printable, printable_line
from llmtrain.doctor.report import Report
from llmtrain.errors import UsageError
from llmtrain.launch.record import find_record
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.status.display import LiveView, PlainLines
from llmtrain.operate.status.progress import read_progress

pytestmark = pytest.mark.usefixtures("hurry")
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202eevil"
CONTROL_CHARACTERS = ("\x1b", "\x07", "\x9b", "\r", "\u202e")


def controls(text: str) -> list[str]:
    return [character for character in CONTROL_CHARACTERS if character in text]


def call(command: Callable[..., None], kubeconfig: Path, *words: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [*words, "--kubeconfig", str(kubeconfig)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("\x1b[1;32mgreen\x1b[0m", "green"),
        ("\x1b]0;title\x07", "\ufffd]0;title\ufffd"),
        ("a\tb\nc", "a\tb\nc"),
        ("naïve 日本　語 \N{ZERO WIDTH JOINER} é", "naïve 日本　語 \N{ZERO WIDTH JOINER} é"),
        ("\x1b[" * 3, "\ufffd[" * 3),
        ("\ud800", "\ufffd"),
    ],
)
def test_printable(text: str, clean: str) -> None:
    assert printable(text) == clean


def test_printable_line_joins_lines() -> None:
    assert printable_line("a\nrun  finished\r\nb") == "a run  finished b"


@pytest.fixture
def kubeconfig(kube: KubeServer, tmp_path: Path) -> Path:
    """Of a cluster with runs whose containers, events and conditions contain escape sequences."""
    waits = launch(kube, name="waits")
    waits.pod(0, waiting("CreateContainerError", EVIL))
    fails = launch(kube, name="fails")
    fails.pod(0, {"terminated": {**ended(1)["terminated"], "message": EVIL}})
    fails.say(0, EVIL)
    fails.finish("Failed", reason="PodFailurePolicy", message=EVIL)
    refused = launch(kube, name="refused")
    refused.event("FailedCreate", EVIL)
    unscheduled = launch(kube, name="unscheduled")
    row = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": EVIL}
    unscheduled.pod(0, {}, conditions=[row])
    talks = launch(kube, name="talks")
    talks.pod(0, running())
    talks.say(0, EVIL, f"{STEP.format(5).rpartition('|')[0]}| {EVIL} left")
    return kube.kubeconfig(tmp_path)


def test_status_and_why_are_clean(kubeconfig: Path) -> None:
    shown = [call(status.command, kubeconfig).stdout]
    for run in ("waits", "fails", "refused", "unscheduled"):
        shown += [call(command, kubeconfig, run).stdout for command in (status.command, why.command)]
    shown.append(call(status.command, kubeconfig, "talks").stdout)
    shown.append(call(status.command, kubeconfig, "talks", "--json").stdout)
    assert [controls(text) for text in shown] == [[]] * len(shown)
    assert sum("evil" in text for text in shown) > 6  # the text itself is shown


@pytest.mark.usefixtures("kubeconfig")
def test_watch_output_is_clean(kube: KubeServer) -> None:
    for run in ("waits", "refused", "unscheduled", "talks"):
        record = find_record(kube.cluster(), run, "team")
        for make in (PlainLines, LiveView):
            out = io.StringIO()
            with make(out) as display:
                display.status(ObservedRun(kube.cluster(), record).status)
                display.line(EVIL)
                display.note(EVIL)
                display.connection(None)
            shown = out.getvalue()  # rich itself uses escape sequences
            assert "\x1b]" not in shown
            assert "\x07" not in shown
            assert "\x1b[2J" not in shown


def test_errors_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._report(UsageError(EVIL, remedy=EVIL), []) == 64
    assert controls(capsys.readouterr().err) == []


def test_findings_are_clean() -> None:
    report = Report([Finding("x", "fail", EVIL, EVIL)])
    assert controls(report.text(is_terminal=False)) == []


def test_logs_are_clean_in_a_terminal_and_unchanged_in_a_pipe(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert EVIL in call(logs.command, kubeconfig, "talks").stdout
    stdout = SimpleNamespace(isatty=lambda: True, write=logs.sys.stdout.write, flush=lambda: None)
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stdout=stdout))
    logs.command("talks", kubeconfig=str(kubeconfig))
    shown = capsys.readouterr().out
    assert "evil" in shown
    assert controls(shown) == []


@pytest.mark.parametrize("line", [f"[TRAIN] step {'1' * 5000}/2 | loss 1", f"[TRAIN] {'1' * 100_000}", '{"a":' * 5000])
def test_malicious_log_lines_do_not_break_read_progress(line: str) -> None:
    assert read_progress([line]).step is None


def test_every_command_prints_through_say(repo: Path) -> None:
    """`print` is only for JSON, and for the exceptions listed here."""
    allowed = {
        "commands/doctor.py": 3,  # a table colored by rich; each finding is cleaned
        "commands/train.py": 1,  # the same
        "commands/exec.py": 1,  # the output of the user's own command
        "commands/logs.py": 1,
        "cli.py": 1,  # the version
        "commands/chat.py": 1,  # an empty line
        "commands/data_text.py": 1,  # samples, cleaned, with colors of their own
        "commands/stream.py": 1,  # generated text, cleaned, without a line end
        "commands/loss_plot.py": 1,  # colored by plotext; its title is cleaned
    }
    source = repo / "src" / "llmtrain"
    found: dict[str, int] = {}
    for path in [source / "cli.py", *source.glob("commands/*.py"), *source.glob("operate/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "typer.echo", "typer.secho"):
                is_json = bool(node.args) and ast.unparse(node.args[0]).startswith("json.dumps(")
                if not is_json or str(path.relative_to(source)) in ("commands/doctor.py",):
                    name = str(path.relative_to(source))
                    found[name] = found.get(name, 0) + 1
    assert found == allowed

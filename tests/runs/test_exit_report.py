"""Exit reports: what a process that ends writes to the container's termination message and to the run directory."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rank_harness import Cli, end_clis, start_cli

from llmtrain.errors import LlmtrainError, PeerLost, TrainingFailed
from llmtrain.runs.exit_report import MAX_BYTES, ExitReport, parse_report, read_termination_message


def node(folder: Path, *words: str, **env: str) -> Cli:
    """`llmtrain node` in a pod whose termination message is a file of this machine."""
    message = folder / "termination-log"
    message.touch()
    return start_cli("node", *words, env={"LLMTRAIN_TERMINATION_LOG": str(message), **env}, cwd=folder)


@pytest.fixture(autouse=True)
def _end_nodes() -> Iterator[None]:
    yield
    end_clis()


def report_of(folder: Path) -> ExitReport | None:
    return read_termination_message((folder / "termination-log").read_text())


def test_report_survives_the_termination_message() -> None:
    error = PeerLost("No progress for 30 s.", remedy="Look at rank 1.", reason="no_progress")
    error.details = {"silent_ranks": [1, 3]}
    report = ExitReport.of(error)
    assert read_termination_message(report.as_termination_message()) == report
    assert (report.exit_code, report.error, report.silent_ranks) == (75, "PeerLost", (1, 3))


@pytest.mark.parametrize("character", ["x", "é", "😀", "\0", '"'])
def test_report_is_never_cut_by_the_kubelet(character: str) -> None:
    error = TrainingFailed(character * 9000, remedy=character * 9000, reason="disk_full")
    text = ExitReport.of(error).as_termination_message()
    assert len(text.encode()) <= MAX_BYTES
    report = read_termination_message(text)
    assert report is not None
    assert (report.exit_code, report.reason) == (65, "disk_full")


OTHERS = [
    "",
    "killed",
    "{}",
    "[]",
    "[" * 100_000,
    '{"llmtrain": 3}',
    '{"llmtrain": {"exit_code": "x", "error": "A"}}',
    '{"llmtrain": {"exit_code": 1, "error": 3}}',
    '{"llmtrain": {"exit_code": 1, "error": "A", "silent_ranks": 7}}',
    '{"llmtrain": {"exit_code": 1, "error": "A", "silent_ranks": [Infinity]}}',
    '{"llmtrain": {"exit_code": 1, "error": "A", "silent_ranks": [1e400]}}',
    '{"llmtrain": {"exit_code": 1, "error": "A", "silent_ranks": [NaN]}}',
    '{"llmtrain": {"exit_code": Infinity, "error": "A"}}',
    '{"llmtrain": {"exit_code": true, "error": "A"}}',
]


@pytest.mark.parametrize("text", OTHERS)
def test_messages_of_others_are_not_reports(text: str) -> None:
    assert read_termination_message(text) is None


def test_only_so_many_ranks_are_read() -> None:
    text = json.dumps({"llmtrain": {"exit_code": 1, "error": "A", "silent_ranks": list(range(2000))}})
    report = read_termination_message(text)
    assert report is not None
    assert 0 < len(report.silent_ranks) < 100


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_CanaryOfTheReport")
    report = ExitReport.of(LlmtrainError("token hf_CanaryOfTheReport", remedy="drop hf_CanaryOfTheReport"))
    assert "Canary" not in report.as_termination_message()


def test_config_error_of_a_node_is_reported(tmp_path: Path) -> None:
    code = node(tmp_path, "--config", "gpt_smoke", "--set", "model.name=gtp").wait()
    report = report_of(tmp_path)
    assert report is not None
    assert (code, report.exit_code, report.error) == (64, 64, "ConfigError")


def test_report_names_the_rank_that_failed(tmp_path: Path) -> None:
    """Of two processes of a pod; on a platform with codes of its own, where a child is the node."""
    words = ["--config", "gpt_smoke", "--processes-per-node", "2", "--set", "data.name=text_files"]
    words += ["--set", "data.files=missing.txt"]
    code = node(tmp_path, *words, LLMTRAIN_EXIT_CODES="pytorchjob").wait()
    report = report_of(tmp_path)
    assert report is not None
    assert code == report.exit_code == 65
    assert (report.error, report.rank) == ("DataError", 0)


def test_sigterm_is_reported(tmp_path: Path) -> None:
    process = node(
        tmp_path, "--config", "gpt_smoke", "--set", "output.run_id=demo", "--set", "trainer.max_steps=100000"
    )
    process.wait_for((tmp_path / "runs" / "demo" / "metrics.jsonl").is_file)
    process.send(signal.SIGTERM)
    code = process.wait()
    report = report_of(tmp_path)
    assert report is not None
    assert (code, report.exit_code, report.error) == (75, 75, "Interrupted")


def test_finished_run_and_other_commands_leave_no_message(tmp_path: Path) -> None:
    code = node(tmp_path, "--config", "gpt_smoke", "--set", "trainer.max_steps=6").wait()
    assert (code, (tmp_path / "termination-log").read_text()) == (0, "")
    # What somebody types in the pod is not how the pod ends.
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "validate", "--set", "model.name=gtp"],
        env={**os.environ, "LLMTRAIN_TERMINATION_LOG": str(tmp_path / "termination-log")},
        capture_output=True,
    )
    assert (done.returncode, (tmp_path / "termination-log").read_text()) == (64, "")


def test_crash_is_reported_with_its_exception(tmp_path: Path) -> None:
    script = "from llmtrain import cli\nimport llmtrain.commands.node as node\n"
    script += "def crash(*_, **__): raise ZeroDivisionError('by zero')\n"
    script += "cli.load_command = crash\ncli.main(['node', '--config', 'gpt_smoke'])"
    (tmp_path / "termination-log").touch()
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LLMTRAIN_TERMINATION_LOG": str(tmp_path / "termination-log")},
        capture_output=True,
    )
    report = report_of(tmp_path)
    assert report is not None
    assert (done.returncode, report.exit_code, report.message) == (1, 1, "ZeroDivisionError: by zero")
    assert json.loads((tmp_path / "termination-log").read_text())["llmtrain"]["error"] == "LlmtrainError"


FIELDS = ("exit_code", "error", "message", "remedy", "step", "generation", "rank", "pod", "node", "time")


def newest_report(run: Path) -> ExitReport:
    """Of the reports in the run directory."""
    values = [json.loads(path.read_text()) for path in (run / "exits").glob("*.json")]
    newest = max(values, key=lambda report: report["generation"])
    assert set(FIELDS) <= set(newest)
    report = parse_report(newest)
    assert report is not None
    assert (report.pod, report.node) == (socket.gethostname(), "")
    assert datetime.fromisoformat(report.time).tzinfo is not None
    return report


def test_train_reports_to_the_run_directory(
    train: Callable[..., Any], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted, then failed, then finished."""
    run = workdir / "runs" / "mine"
    monkeypatch.setenv("LLMTRAIN_FAULT", "after_optimizer:2:0:term")
    assert train("output.run_id=mine").code == 75
    report = newest_report(run)
    assert (report.exit_code, report.error, report.step, report.generation) == (75, "Interrupted", 2, 1)
    assert report.message
    assert report.remedy

    monkeypatch.setenv("LLMTRAIN_FAULT", "loss:4:0:nan")
    assert train("output.run_id=mine", more=["--resume", "mine"]).code == 65
    report = newest_report(run)
    assert (report.exit_code, report.error, report.reason) == (65, "TrainingFailed", "not_finite")
    assert (report.step, report.generation) == (3, 2)

    monkeypatch.delenv("LLMTRAIN_FAULT")
    assert train("output.run_id=mine", more=["--resume", "mine"]).code == 0
    report = newest_report(run)
    assert (report.exit_code, report.error, report.message, report.step, report.generation) == (0, "", "", 4, 3)


def test_bad_data_of_a_new_run_leaves_no_directory(train: Callable[..., Any], workdir: Path) -> None:
    """The run has not started: there is nothing to report about."""
    (workdir / "empty.txt").touch()
    assert train("output.run_id=mine", "data.name=text_files", "data.files=[empty.txt]").code == 65
    assert not (workdir / "runs" / "mine").exists()


def test_bad_data_of_a_restartable_run_is_reported(
    train: Callable[..., Any], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that exists and whose data has become unusable, under an agent that restarts it."""
    text = workdir / "some.txt"
    text.write_text("the pod counts its steps. " * 400)
    options = ("output.run_id=mine", "data.name=text_files", "data.files=[some.txt]", "data.cache_dir=cache")
    monkeypatch.setenv("LLMTRAIN_FAULT", "after_optimizer:2:0:term")
    assert train(*options).code == 75
    text.write_text("")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert train(*options, more=["--resume", "mine"]).code == 65
    report = newest_report(workdir / "runs" / "mine")
    assert (report.exit_code, report.error, report.generation) == (65, "DataError", 2)

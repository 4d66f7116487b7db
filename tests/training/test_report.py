"""report.html of a finished run: written without being asked, and never a reason to fail."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import RUN_ID

from llmtrain.config.schema import Config
from llmtrain.runs.directory import RunDirectory
from llmtrain.training import result
from llmtrain.training.result import write_report

MakeConfig = Callable[..., Config]


def directory(config: Config) -> Path:
    return Path(config.output.root_dir) / RUN_ID


def test_finished_run_has_a_report(make_config: MakeConfig) -> None:
    config = make_config()
    ended = harness.run(config)
    assert ended.code == 0, ended.output
    text = (directory(config) / "report.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    [run] = data["runs"]
    assert run["row"]["state"] == "finished"
    assert run["details"]["generations"][-1]["ended"] == "finished"
    assert len(run["curves"]["train/loss"]["x"]) == 8


def test_interrupted_run_has_none_and_it_can_be_disabled(make_config: MakeConfig) -> None:
    config = make_config(output__report=False)
    assert harness.run(config, fault="after_optimizer:5:0:term").code == 75
    assert not (directory(config) / "report.html").exists()
    assert harness.run(config, RUN_ID).code == 0
    assert not (directory(config) / "report.html").exists()


def test_report_of_a_killed_process_is_written_later(make_config: MakeConfig) -> None:
    config = make_config()
    assert harness.run(config).code == 0
    (directory(config) / "report.html").unlink()
    assert harness.run(config, RUN_ID).code == 0
    assert (directory(config) / "report.html").exists()


@pytest.mark.parametrize("problem", ["disk limit", "damaged", "a directory", "read-only"])
def test_failing_report_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: str
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(result, "warn", lambda _, text: warnings.append(text))
    run = RunDirectory(tmp_path / "first")
    run.path.mkdir()

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if problem == "read-only" and os.getuid() == 0:
        pytest.skip("root may write everywhere")
    elif problem == "disk limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    elif problem == "damaged":
        monkeypatch.setattr("llmtrain.page.report.run_row", lambda _: {}["missing"])
    elif problem == "read-only":
        run.path.chmod(0o500)
    else:
        run.report.mkdir()
    try:
        write_report(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        run.path.chmod(0o700)
    assert len(warnings) == 1
    assert not run.report.is_file()
    assert list(run.path.glob(".*")) == [], "nothing half-written stays"
    assert capsys.readouterr().out == ""

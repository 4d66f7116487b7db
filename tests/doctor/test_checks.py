"""Findings, the running of checks, and the tables of the report."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from llmtrain.config.schema import Config
from llmtrain.core.findings import at_rank, is_ok, passed, run_checks
from llmtrain.diagnose import Finding
from llmtrain.doctor.collective import Timing
from llmtrain.doctor.examine import explain_failed_start
from llmtrain.doctor.report import Report, findings_table, grouped
from llmtrain.errors import JoinError


def test_raising_check_is_a_warning_and_keeps_findings() -> None:
    def breaks() -> Iterator[Finding]:
        yield passed("first", "seen")
        raise OSError(5, "Input/output error")

    found = run_checks([("disk", breaks), ("next", lambda: [passed("next", "still run")])])
    assert [(f.name, f.status) for f in found] == [("first", "pass"), ("disk", "warn"), ("next", "pass")]
    assert "Input/output error" in found[1].evidence
    assert is_ok(found)


def test_one_failure_is_not_ok() -> None:
    assert not is_ok([passed("a", "b"), Finding("c", "fail", "d")])


def test_equal_findings_of_ranks_are_one_row() -> None:
    findings = [*at_rank([passed("gpu", "none"), passed("free_space", "1 GB")], 0)]
    findings += at_rank([passed("gpu", "none"), passed("free_space", "2 GB")], 1)
    assert [(f.name, f.evidence, ranks) for f, ranks in grouped(findings)] == [
        ("gpu", "none", [0, 1]),
        ("free_space", "1 GB", [0]),
        ("free_space", "2 GB", [1]),
    ]
    lines = findings_table(findings, 2, is_terminal=False).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["pass", "gpu", "all"],
        ["pass", "free_space", "0"],
        ["pass", "free_space", "1"],
    ]


def test_rank_spans() -> None:
    findings = [found for rank in (0, 1, 2, 5) for found in at_rank([passed("gpu", "one")], rank)]
    assert " 0-2,5 " in findings_table(findings, 8, is_terminal=False)


def test_log_lines_are_not_wrapped() -> None:
    long = "[Errno 98] " + "word " * 200 + "end"
    finding = Finding("port", "fail", long, "do " * 200 + "that")
    table = findings_table([finding], 1, is_terminal=False)
    assert len(table.splitlines()) == 3
    assert long in table
    assert "\x1b" not in table


def test_terminal_lines_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = findings_table([Finding("port", "fail", "word " * 100)], 1, is_terminal=True)
    assert "\x1b[" in table
    assert len(table.splitlines()) > 5


def test_passing_variants_are_limited() -> None:
    findings = [found for rank in range(64) for found in at_rank([passed("environment", f"RANK={rank}")], rank)]
    table = findings_table(findings, 64, is_terminal=False)
    assert len(table.splitlines()) < 10
    assert "60 more" in table
    failing = [Finding("port", "fail", f"refused {rank}", rank=rank) for rank in range(64)]
    assert len(findings_table(failing, 64, is_terminal=False).splitlines()) == 65


def test_report_as_json_and_verdict() -> None:
    report = Report([passed("a", "b"), Finding("c", "fail", "d", "e", 1)], [Timing(4, 1e-3, 4e3, [])], 2)
    value = json.loads(json.dumps(report.as_dict()))
    assert value["ok"] is False
    assert value["findings"][1] == {"name": "c", "status": "fail", "evidence": "d", "recommendation": "e", "rank": 1}
    assert value["allreduce"] == [{"bytes": 4, "latency_sec": 1e-3, "bus_bytes_per_sec": 4e3, "wrong_ranks": []}]
    assert "Not ready to train: 1 pass, 1 fail." in report.text(is_terminal=False)


def test_doctor_import_does_not_import_torch() -> None:
    code = "import sys, llmtrain.doctor.report, llmtrain.doctor.collective, llmtrain.doctor.examine\n"
    code += "import llmtrain.diagnose\nassert callable(llmtrain.diagnose.diagnose)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_explain_failed_start(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    config = Config().with_values("output", root_dir=str(tmp_path)).with_values("data", cache_dir=str(tmp_path))
    error = JoinError("no")
    error.details = {"host": "no-such-host.invalid", "port": 29500}
    explain_failed_start(error, config, {"GLOO_SOCKET_IFNAME": "nope7"})
    out, err = capsys.readouterr()
    assert out == ""
    assert "nope7" in err
    assert "no-such-host.invalid does not resolve" in err
    assert "pass" not in err
    explain_failed_start(JoinError("no"), config, {})
    assert "the local checks pass" in capsys.readouterr().err


def test_explain_failed_start_never_raises(capsys: pytest.CaptureFixture[str]) -> None:
    explain_failed_start(JoinError("no"), None, {})  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""

"""The tables of docs/planning.md are what `llmtrain plan` computes."""

import subprocess
import sys
from pathlib import Path

import planning_table
import pytest

from limits import limit

PAGE = planning_table.PAGE.read_text().splitlines()


def test_first_measured_row_is_what_plan_computes(tmp_path: Path) -> None:
    assert planning_table.measured_row(tmp_path, 0) in PAGE


@pytest.mark.slow
@pytest.mark.hf
@pytest.mark.timeout(1500)
def test_whole_page_is_what_plan_computes(repo: Path) -> None:
    pytest.importorskip("peft")
    words = [sys.executable, str(repo / "tools" / "planning_table.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit(1200), check=False)
    assert done.returncode == 0, done.stderr

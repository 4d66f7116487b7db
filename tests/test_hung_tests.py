import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW_FAILURES = """
import time, pytest

@pytest.mark.parametrize("number", range(12))
def test_it(number):
    time.sleep(0.2 if number else 0)
    assert number < 0
"""


@pytest.mark.parametrize(("processes", "at_most"), [("0", 4), ("2", 10)])
def test_three_hung_tests_end_the_run(tmp_path: Path, processes: str, at_most: int) -> None:
    """The first one fails at once, which is no hang."""
    (tmp_path / "test_slow.py").write_text(SLOW_FAILURES)
    environment = {**os.environ, "LLMTRAIN_TEST_HUNG_SEC": "0.15", "PYTHONPATH": str(Path(__file__).parent)}
    words = ["-m", "pytest", "-p", "hung_tests", "-p", "no:cacheprovider", "-n", processes, "test_slow.py"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (1, 2), done.stdout
    assert "3 tests hung" in done.stdout
    failed = int(done.stdout.rpartition(" failed")[0].split()[-1])
    assert 4 <= failed <= at_most

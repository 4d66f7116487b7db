import json
import math
from pathlib import Path

import pytest

from llmtrain.runs.metrics import MetricsLog, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *steps: int, keep: int = 0) -> None:
    log = MetricsLog(path, keep, keep)
    for step in steps:
        log.append({"step": step, "train/loss": step / 10})
    log.sync()
    log.close()


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_rows_come_back_in_order(path: Path) -> None:
    write(path, 1, 2, 3)
    assert list(read_metrics(path)) == [{"step": s, "train/loss": s / 10} for s in (1, 2, 3)]


def test_a_row_can_be_read_before_the_log_is_closed(path: Path) -> None:
    log = MetricsLog(path, 0, 0)
    log.append({"step": 1})
    assert steps(path) == [1]
    log.close()


def test_a_resumed_run_drops_what_it_redoes(path: Path) -> None:
    write(path, 1, 2, 3, 4)
    write(path, 3, 4, 5, keep=2)
    assert steps(path) == [1, 2, 3, 4, 5]


def test_all_rows_of_the_kept_step_stay(path: Path) -> None:
    write(path, 1, 2, 2, 3)
    write(path, keep=2)
    assert steps(path) == [1, 2, 2]


@pytest.mark.parametrize("torn", ['{"step": 3, "train/lo', "{", "null", "[1, 2]", '"text"'])
def test_a_torn_last_line_is_passed_over_and_removed(path: Path, torn: str) -> None:
    write(path, 1, 2)
    with path.open("a") as file:
        file.write(torn)
    assert steps(path) == [1, 2]
    write(path, 3, keep=2)
    assert steps(path) == [1, 2, 3]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_bytes_that_are_no_text_do_not_stop_a_reader(path: Path) -> None:
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "x": "\xff"}\n')
    assert steps(path)[:2] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_becomes_null(path: Path, value: float) -> None:
    log = MetricsLog(path, 0, 0)
    log.append({"step": 1, "val/loss": value})
    log.close()
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"step": 1, "val/loss": None}


def test_no_file_means_no_rows(path: Path) -> None:
    assert list(read_metrics(path)) == []

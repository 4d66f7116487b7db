"""Runs with too few steps to learn are warned about, once."""

from pathlib import Path

import pytest

from llmtrain.core import logs


@pytest.fixture
def words(workdir: Path) -> list[str]:
    (workdir / "text.txt").write_text("some words of text\n" * 40)
    return ["data.name=text_files", "data.files=text.txt", "data.val_fraction=0.3"]


def warnings(err: str) -> list[str]:
    return [line for line in err.splitlines() if "warning" in line]


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (19, 1), (20, 0)])
def test_fewer_than_20_steps(train, words: list[str], steps: int, count: int) -> None:
    done = train(*words, f"trainer.max_steps={steps}")
    assert done.code == 0, done.err
    found = warnings(done.err)
    assert len(found) == count, found
    assert all(str(steps) in line and "trainer.max_steps" in line for line in found)


def test_steps_that_follow_from_epochs(train, words: list[str]) -> None:
    done = train(*words, "trainer.max_steps=null", "trainer.max_epochs=1", "trainer.micro_batch_size=8")
    assert done.code == 0, done.err
    assert len(warnings(done.err)) == 1


@pytest.mark.parametrize(("warmup", "count"), [(5, 1), (4, 0)])
def test_warmup_that_does_not_end(train, warmup: int, count: int) -> None:
    """A constant schedule may have any warmup; other schedules with such a warmup are refused."""
    done = train("trainer.max_steps=4", f"trainer.warmup_steps={warmup}", "trainer.schedule=constant")
    assert done.code == 0, done.err
    found = warnings(done.err)
    assert len(found) == count, found
    assert all("trainer.warmup_steps 5" in line for line in found)


def test_generated_text_is_for_smoke_tests(train) -> None:
    assert warnings(train("trainer.max_steps=4").err) == []


def test_dry_run_warns(train, words: list[str]) -> None:
    done = train(*words, "trainer.max_steps=3", more=["--dry-run"])
    assert done.code == 0, done.err
    assert len(warnings(done.err)) == 1


def test_only_rank_0_warns(caplog: pytest.LogCaptureFixture) -> None:
    from llmtrain.config.load import load_config
    from llmtrain.training.schedule import warn_if_short

    config = load_config("gpt_smoke", ["data.name=python_stdlib", "trainer.max_steps=3", "trainer.warmup_steps=0"])
    logs.set_rank(1, 2)
    try:
        warn_if_short(config.trainer, is_smoke_test=False)
    finally:
        logs.set_rank(0, 1)
    assert caplog.records == []

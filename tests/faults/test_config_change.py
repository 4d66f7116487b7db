"""Resuming with a changed config: refused with a list, allowed for fields that do not affect the result."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import RUN_ID, Outcome

from llmtrain.config.schema import Config

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer__lr": 1e-3}, "trainer.lr: 0.003 -> 0.001"),
        ({"run__seed": 8}, "run.seed: 7 -> 8"),
        ({"model__dropout": 0.2}, "model.dropout: 0.1 -> 0.2"),
        ({"model__d_model": 64}, "model.d_model: 32 -> 64"),
        ({"trainer__micro_batch_size": 4}, "trainer.micro_batch_size: 2 -> 4"),
        ({"trainer__grad_accum_steps": 4}, "trainer.grad_accum_steps: 2 -> 4"),
        ({"trainer__schedule": "linear"}, "trainer.schedule: 'cosine' -> 'linear'"),
        ({"trainer__precision": "bf16"}, "trainer.precision: 'fp32' -> 'bf16'"),
        ({"data__tokenizer": "char"}, "vocab_size: "),
        ({"data__name": "python_stdlib"}, "data.name: 'dummy_text' -> 'python_stdlib'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_resume_refuses_a_change_that_affects_the_result(
    make_config: MakeConfig, killed_root: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    if change.get("data__name") == "python_stdlib":
        text = tmp_path / "text.txt"
        text.write_text("another text entirely\n" * 200)
        change, message = {"data__name": "text_files", "data__files": [str(text)]}, "'dummy_text' -> 'text_files'"
    before = harness.tree(killed_root)
    ended = harness.run(make_config(**change), RUN_ID)
    assert ended.code == 64, ended.output
    assert message in ended.output
    assert "--allow-config-change" in ended.output
    assert harness.tree(killed_root) == before


def test_resume_lists_every_change(make_config: MakeConfig, killed_root: Path) -> None:
    ended = harness.run(make_config(trainer__lr=1e-3, run__seed=9, model__n_layers=3), RUN_ID)
    assert ended.code == 64
    for field in ("trainer.lr", "run.seed", "model.n_layers"):
        assert f"- {field}: " in ended.output
    assert killed_root.exists()


def test_fields_that_do_not_affect_the_result_may_change(
    make_config: MakeConfig, killed_root: Path, tmp_path: Path, golden: Outcome
) -> None:
    config = make_config(
        run__name="renamed",
        run__notes="moved",
        data__cache_dir=str(tmp_path / "another-cache"),
        data__num_workers=1,
        trainer__keep_checkpoints=5,
        logging__level="WARNING",
        logging__json_output=True,
        logging__file_name="second.log",
    )
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    assert harness.outcome(killed_root, ended.result) == golden


def test_raised_max_steps_equals_the_longer_run(make_config: MakeConfig, root: Path, tmp_path: Path) -> None:
    """With a schedule that does not depend on max_steps, an interruption has no effect."""
    longer = make_config(trainer__schedule="constant", trainer__max_steps=12)
    uninterrupted = longer.with_values("output", root_dir=str(tmp_path / "uninterrupted"))
    ended = harness.run(uninterrupted)
    assert ended.code == 0, ended.output
    expected = harness.outcome(tmp_path / "uninterrupted", ended.result)

    assert harness.run(make_config(trainer__schedule="constant", trainer__max_steps=8)).code == 0
    ended = harness.run(longer, RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 8
    assert harness.outcome(root, ended.result) == expected


def test_max_steps_may_change_with_schedule_steps(make_config: MakeConfig, root: Path, tmp_path: Path) -> None:
    longer = make_config(trainer__schedule_steps=12, trainer__max_steps=12)
    ended = harness.run(longer.with_values("output", root_dir=str(tmp_path / "uninterrupted")))
    expected = harness.outcome(tmp_path / "uninterrupted", ended.result)
    assert harness.run(make_config(trainer__schedule_steps=12, trainer__max_steps=8)).code == 0
    ended = harness.run(longer, RUN_ID)
    assert harness.outcome(root, ended.result) == expected


def test_allow_config_change_resumes(make_config: MakeConfig, killed_root: Path, golden: Outcome) -> None:
    ended = harness.run(make_config(trainer__lr=1e-3), RUN_ID, allow_config_change=True)
    assert ended.code == 0, ended.output
    assert "trainer.lr: 0.003 -> 0.001" in ended.output
    assert ended.result["resumed_from"] == 6
    assert ended.result["state_sha256"] != golden.state_sha256
    assert harness.train_rows(killed_root / RUN_ID)[:6] == golden.train[:6]


def test_allow_config_change_still_refuses_another_shape(make_config: MakeConfig, killed_root: Path) -> None:
    before = {name: data for name, data in harness.tree(killed_root / RUN_ID).items() if name.startswith("checkpoints")}
    ended = harness.run(make_config(model__d_model=64), RUN_ID, allow_config_change=True)
    assert ended.code == 65, ended.output
    assert ended.error["error"] == "CheckpointError"
    after = {name: data for name, data in harness.tree(killed_root / RUN_ID).items() if name.startswith("checkpoints")}
    assert after == before


@pytest.mark.parametrize("allow_config_change", [False, True])
def test_resume_refuses_another_optimizer(
    make_config: MakeConfig, killed_root: Path, allow_config_change: bool
) -> None:
    before = harness.tree(killed_root)
    config = make_config(trainer__optimizer="muon")
    ended = harness.run(config, RUN_ID, allow_config_change=allow_config_change)
    assert (ended.code, ended.error["error"]) == (64, "UsageError"), ended.output
    assert "adamw" in ended.error["what"]
    assert "muon" in ended.error["what"]
    assert "--from" in ended.error["remedy"]
    assert harness.tree(killed_root) == before


def test_changed_number_of_threads_warns(make_config: MakeConfig, killed_root: Path) -> None:
    ended = harness.run(make_config(run__threads=2), RUN_ID, fault="forward:7:0:term")
    assert ended.code == 75, ended.output
    assert "run.threads changed from 1 to 2" in ended.output
    assert killed_root.exists()


def test_resume_uses_the_recorded_number_of_threads(make_config: MakeConfig, killed_root: Path) -> None:
    ended = harness.run(make_config(run__threads=None), RUN_ID)
    assert ended.code == 0, ended.output
    assert ended.result["threads"] == 1
    assert killed_root.exists()


@pytest.mark.parametrize("spelling", ["step_4", "step_4.pt"])
def test_resume_from_an_older_checkpoint(config: Config, finished_root: Path, golden: Outcome, spelling: str) -> None:
    """Newer checkpoints are set aside, and the run ends with the same result."""
    folder = finished_root / RUN_ID / "checkpoints"
    newer = harness.tree(folder / "step_8")
    ended = harness.run(config, str(folder / spelling))
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 4
    assert harness.outcome(finished_root, ended.result) == golden
    assert harness.tree(folder / "superseded-step_8") == newer
    assert (folder / "superseded-step_6").is_dir()


@pytest.mark.parametrize("pointer", ["latest", "best"])
def test_resume_from_the_path_of_a_pointer(config: Config, killed_root: Path, golden: Outcome, pointer: str) -> None:
    ended = harness.run(config, str(killed_root / RUN_ID / "checkpoints" / pointer))
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == {"latest": 6, "best": 4}[pointer]
    assert harness.outcome(killed_root, ended.result) == golden


def test_resume_by_the_path_of_a_run(config: Config, killed_root: Path, golden: Outcome) -> None:
    ended = harness.run(config, str(killed_root / RUN_ID))
    assert ended.code == 0, ended.output
    assert harness.outcome(killed_root, ended.result) == golden


def test_auto_starts_then_resumes_then_returns_the_result(make_config: MakeConfig, root: Path, golden: Outcome) -> None:
    config = make_config()
    ended = harness.run(config, "auto", fault="after_optimizer:5:0:kill")
    assert ended.code == -9, ended.output
    ended = harness.run(config, "auto")
    assert ended.code == 0, ended.output
    assert ended.result["resumed_from"] == 4
    assert harness.outcome(root, ended.result) == golden
    before = harness.tree(root)
    assert harness.run(config, "auto").code == 0
    assert harness.tree(root) == before


def test_auto_without_run_id_finds_the_unfinished_run_of_this_name(
    make_config: MakeConfig, killed_root: Path, golden: Outcome
) -> None:
    ended = harness.run(make_config(output__run_id=None), "auto")
    assert ended.code == 0, ended.output
    assert ended.result["run_id"] == RUN_ID
    assert harness.outcome(killed_root, ended.result) == golden


@pytest.mark.parametrize("what", ["off", "damaged", "both off", "killed before a checkpoint", "another type"])
def test_auto_finds_a_run_without_meta_json(
    make_config: MakeConfig, killed_root: Path, golden: Outcome, what: str
) -> None:
    run = killed_root / RUN_ID
    if "killed" in what:
        shutil.rmtree(killed_root)
        ended = harness.run(make_config(output__save_meta_json=False), fault="forward:1:0:kill")
        assert ended.code == -9, ended.output
    elif what in ("damaged", "another type"):
        (run / "meta.json").write_text('{"name"' if what == "damaged" else '{"name": 5}')
    else:
        (run / "meta.json").unlink()
        if "both" in what:
            (run / "config.yaml").unlink()
    ended = harness.run(make_config(output__run_id=None), "auto")
    assert ended.code == 0, ended.output
    assert ended.result["run_id"] == RUN_ID
    assert harness.outcome(killed_root, ended.result) == golden


def test_resume_refuses_an_unknown_run(config: Config, root: Path) -> None:
    ended = harness.run(config, "nothing-here")
    assert ended.code == 64, ended.output
    assert "nothing-here" in ended.output
    assert not root.exists()


def test_new_run_does_not_overwrite_an_existing_one(config: Config, finished_root: Path) -> None:
    before = harness.tree(finished_root)
    ended = harness.run(config)
    assert ended.code == 64, ended.output
    assert f"--resume {RUN_ID}" in ended.output
    assert harness.tree(finished_root) == before


def test_allow_config_change_returns_the_result_of_a_finished_run(make_config: MakeConfig) -> None:
    """There is nothing to resume, which is not an error."""
    config = make_config()
    assert harness.run(config).code == 0
    other = config.with_values("trainer", lr=1e-3)
    refused = harness.run(other, RUN_ID)
    assert refused.code == 64
    assert "--allow-config-change" in refused.output
    ended = harness.run(other, RUN_ID, allow_config_change=True)
    assert ended.code == 0, ended.output

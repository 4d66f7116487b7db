"""`train --from`: a new run that starts from another's weights."""

import json
import shutil
from pathlib import Path

import pytest
import rank_harness as ranks
import torch

from llmtrain.checkpoint.store import CheckpointStore
from tiny_llama import make_examples, make_model


@pytest.fixture
def first(train, workdir: Path) -> Path:
    """A finished run `first` with checkpoints at steps 2 and 4."""
    done = train("output.run_id=first", "trainer.keep_checkpoints=all")
    assert done.code == 0, done.err
    return workdir / "runs" / "first"


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return CheckpointStore(run / "checkpoints").at(step).tensors("model")


def sets(*overrides: str) -> list[str]:
    return [part for text in overrides for part in ("--set", text)]


# A learning rate at which one step does not change the weights.
STILL = ("trainer.lr=1e-30", "trainer.weight_decay=0", "trainer.max_steps=1")


@pytest.mark.parametrize(("at", "step"), [("", 4), ("@best", 4), ("@latest", 4), ("@2", 2), ("@step_2", 2)])
def test_new_run_has_the_weights_of_the_checkpoint(cli, first: Path, at: str, step: int) -> None:
    done = cli("train", "--from", f"first{at}", *sets("output.run_id=second", *STILL), "--json")
    assert done.code == 0, done.err
    assert (done.json["steps"], done.json["resumed_from"]) == (1, None)
    before, after = weights(first, step), weights(first.parent / "second", 1)
    assert all(torch.equal(before[name], after[name]) for name in before)
    origin = json.loads((first.parent / "second" / "meta.json").read_text())["origin"]
    assert (origin["run_id"], origin["step"]) == ("first", step)


def test_new_run_gets_its_own_id_and_the_config_of_its_origin(cli, first: Path) -> None:
    done = cli("train", "--from", "first", *sets("trainer.lr=5e-3", "run.threads=1"), "--json")
    assert done.code == 0, done.err
    assert done.json["run_id"] != first.name
    differences = cli("runs", "compare", "first", done.json["run_id"], "--json").json["config_differences"]
    assert [row["field"] for row in differences] == ["trainer.lr"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--from", "nowhere"], 64),
        (["--from", "first@7"], 65),
        (["--from", "first@yesterday"], 64),
        (["--from", "first@"], 64),
        (["--from", "first@-1"], 64),
        (["--from", "first@2@4"], 64),
        (["--from", ""], 64),
        (["--from", "first", "--resume", "first"], 64),
        (["--from", "first", "--dry-run"], 64),
        (["--from", "first", "--set", "output.run_id=first"], 64),
        (["--from", "first", "--set", "model.d_model=32"], 64),
        (["--from", "first", "--set", "model.name=gpt"], 64),
        (["--from", "first", "--set", "data.tokenizer=char"], 64),
    ],
)
def test_invalid_origin_is_refused_and_nothing_is_written(cli, first: Path, words: list[str], code: int) -> None:
    done = cli("train", *words, "--json")
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert [path.name for path in first.parent.iterdir()] == ["first"]


def test_another_architecture_is_refused_with_its_fields(cli, first: Path) -> None:
    done = cli("train", "--from", "first", *sets("model.d_model=32"), "--json")
    assert "model.d_model: 16 -> 32" in done.json["what"]
    assert "trainer" not in done.json["what"]
    assert first.is_dir()


class TestKilledBeforeItsFirstCheckpoint:
    @pytest.fixture
    def second(self, first: Path) -> Path:
        """A run from `first` whose process was killed at its first step."""
        killed = ranks.start_cli(
            "train",
            "--from",
            "first@2",
            *sets("output.run_id=second", *STILL),
            cwd=first.parents[1],
            env={"LLMTRAIN_FAULT": "save_begin:1:0:kill"},
        )
        assert killed.wait() not in (0, 64, 65), killed.err
        return first.parent / "second"

    def test_resume_starts_from_the_origin_again(self, cli, first: Path, second: Path) -> None:
        assert CheckpointStore(second / "checkpoints").steps() == []
        done = cli("train", "--resume", "second", "--json")
        assert done.code == 0, done.err
        before, after = weights(first, 2), weights(second, 1)
        assert all(torch.equal(before[name], after[name]) for name in before)

    @pytest.mark.parametrize("how", ["gone", "changed"])
    def test_lost_origin_is_an_error(self, cli, first: Path, second: Path, how: str) -> None:
        assert second.is_dir()
        shutil.rmtree(first / "checkpoints" / "step_2")
        if how == "changed":
            shutil.copytree(first / "checkpoints" / "step_4", first / "checkpoints" / "step_2")
        done = cli("train", "--resume", "second", "--json")
        assert done.code == 65
        assert "step_2" in done.json["what"]
        assert "Traceback" not in done.err


def test_resume_after_a_checkpoint_needs_no_origin(cli, first: Path) -> None:
    assert cli("train", "--from", "first", *sets("output.run_id=second", "trainer.max_steps=2")).code == 0
    shutil.rmtree(first)
    done = cli("train", "--resume", "second", *sets("trainer.max_steps=4"), "--json")
    assert done.code == 0, done.err
    assert done.json["resumed_from"] == 2


def test_origin_is_recorded_without_meta_json(cli, first: Path) -> None:
    """Otherwise a run that is killed early would start from random weights."""
    assert cli("train", "--from", "first", *sets("output.run_id=second", "output.save_meta_json=false")).code == 0
    assert set(json.loads((first.parent / "second" / "meta.json").read_text())) == {"origin"}


@pytest.mark.slow
def test_two_processes_start_from_the_same_weights(first: Path) -> None:
    done = ranks.start_cli(
        "train",
        "--from",
        "first@2",
        "--processes",
        "2",
        *sets("output.run_id=pair", "trainer.grad_accum_steps=2", *STILL),
        cwd=first.parents[1],
    )
    assert done.wait() == 0, done.err
    before, after = weights(first, 2), weights(first.parent / "pair", 1)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_lora_adapter_is_the_start_of_a_new_run(cli, workdir: Path, cache: Path) -> None:
    make_model(workdir / "base")
    make_examples(workdir / "train.jsonl", 12)
    common = ["model.path=base", "model.block_size=64", "data.train_file=train.jsonl", "data.val_file=null"]
    common += [f"data.cache_dir={cache}", "run.device=cpu", "run.threads=1", "trainer.max_steps=2"]
    common += [
        "trainer.micro_batch_size=2",
        "trainer.grad_accum_steps=1",
        "model.lora.rank=4",
        "trainer.warmup_steps=0",
    ]
    done = cli("train", "--config", "lora_instruct", *sets("output.run_id=first", *common))
    assert done.code == 0, done.err
    done = cli("train", "--from", "first", *sets("output.run_id=second", *STILL), "--json")
    assert done.code == 0, done.err
    before, after = weights(workdir / "runs/first", 2), weights(workdir / "runs/second", 1)
    assert any("lora" in name for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    done = cli("train", "--from", "first", *sets("model.lora.rank=8"), "--json")
    assert done.code == 64
    assert "model.lora" in done.json["what"]

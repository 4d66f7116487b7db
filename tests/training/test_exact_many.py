"""The world size does not affect the result: same samples and, with reproducible_reduce, the same bits."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import rank_harness as ranks

from llmtrain.checkpoint.state import model_tensors, optimizer_tensors, state_sha256
from llmtrain.config.schema import Config
from llmtrain.training.run import run_training
from llmtrain.training.step import Stepper

COMMON: dict[str, Any] = {
    "trainer__grad_accum_steps": 4,
    "trainer__eval_batches": 4,
    "distributed__strategy": "ddp",
    "distributed__reproducible_reduce": True,
}
PLAIN = {"distributed__reproducible_reduce": False}
MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> MakeConfig:
    def config(**changes: Any) -> Config:
        return harness.tiny_config(tmp_path_factory.mktemp("many") / "runs", cache, **{**COMMON, **changes})

    return config


_steps: list[dict[str, Any]] = []


def watch() -> None:
    """In a rank: record the samples and the resulting state of every step."""
    before = Stepper.train_step

    def noting(self: Stepper, step: int, batches: Any, first_micro: int, counts: Any) -> Any:
        result = before(self, step, batches, first_micro, counts)
        module = self.model.module
        digest = state_sha256(model_tensors(module), optimizer_tensors(module, self.optimizer))
        with_targets = [batch for batch in batches if batch.target_count]
        samples = [(batch.first_sample, tuple(batch.inputs.reshape(-1).tolist())) for batch in with_targets]
        _steps.append({"step": step, "samples": samples, "hash": digest, "passes": len(batches)})
        return result

    Stepper.train_step = noting  # type: ignore[method-assign]


Watched = tuple[list[list[dict[str, Any]]], dict[str, Any], Path]


def watched(config: Config, count: int, resume: str | None = None) -> Watched:
    """For each rank its steps; the result; the run's directory."""
    ended = ranks.train_ranks(config, count, resume, before=watch, after=lambda: list(_steps))
    root = Path(config.output.root_dir)
    return ranks.values(ended), harness.read_result(root), root / harness.RUN_ID


@pytest.fixture(scope="module")
def by_size(make: MakeConfig) -> dict[int, Watched]:
    return {size: watched(make(), size) for size in (1, 2, 4)}


@pytest.mark.parametrize("size", [2, 4])
def test_every_step_is_bit_exact_on_any_world_size(by_size: dict[int, Watched], size: int) -> None:
    (alone,), result, folder = by_size[1]
    steps, other, other_folder = by_size[size]
    expected = [step["hash"] for step in alone]
    assert len(set(expected)) == harness.STEPS
    for rank in range(size):
        assert [step["hash"] for step in steps[rank]] == expected, f"rank {rank}"
    assert harness.train_rows(other_folder) == harness.train_rows(folder), "losses and norms, as float.hex"
    assert harness.val_rows(other_folder) == harness.val_rows(folder)
    assert other["state_sha256"] == result["state_sha256"]
    assert (other["world_size"], result["world_size"]) == (size, 1)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_read_the_samples_of_one(by_size: dict[int, Watched], size: int) -> None:
    (alone,), _, _ = by_size[1]
    steps = by_size[size][0]
    for number in range(harness.STEPS):
        shares = [steps[rank][number]["samples"] for rank in range(size)]
        assert {len(share) for share in shares} == {4 // size}
        assert [sample for share in shares for sample in share] == alone[number]["samples"], f"step {number}"
    everything = [first for step in alone for first, _ in step["samples"]]
    assert everything == [2 * number for number in range(4 * harness.STEPS)], "each sample once, in order"


def test_plain_ddp_on_four_ranks_is_not_bit_exact(make: MakeConfig, by_size: dict[int, Watched]) -> None:
    """Otherwise the first test would show nothing."""
    plain = ranks.trained(make(distributed__reproducible_reduce=False), 4)
    assert plain["state_sha256"] != by_size[1][1]["state_sha256"]
    assert plain["final_train_loss"] == pytest.approx(by_size[1][1]["final_train_loss"], rel=1e-4)


UNEVEN: dict[str, Any] = {"trainer__grad_accum_steps": 5, "model__dropout": 0.1, **PLAIN}


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (3, "fsdp"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, "ddp"), (2, "fsdp"), (4, "fsdp"))),
    ],
)
def test_world_sizes_that_do_not_divide_the_micro_batches(make: MakeConfig, size: int, strategy: str) -> None:
    """Of 5 micro-batches, ranks of 3 have 2, 2 and 1: the same samples, dropout and gradient as on one process."""
    (alone,), expected, folder = watched(make(**UNEVEN), 1)
    steps, result, other = watched(make(**UNEVEN, distributed__strategy=strategy), size)
    rounds = -(-5 // size)
    assert {step["passes"] for rank in steps for step in rank} == {rounds}, "every rank makes the same collectives"
    for number in range(harness.STEPS):
        shares = [steps[rank][number]["samples"] for rank in range(size)]
        assert {len(share) for share in shares} == {rounds, rounds - 1}
        assert [sample for share in shares for sample in share] == alone[number]["samples"], f"step {number}"
    assert result["tokens"] == expected["tokens"]
    for key in ("final_train_loss", "final_val_loss"):
        assert result[key] == pytest.approx(expected[key], rel=1e-5)
    norms = [[float.fromhex(row[1][2]) for row in harness.train_rows(path)] for path in (folder, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_resume_on_three_processes(make: MakeConfig) -> None:
    """As when a job is scaled from 2 pods to 3."""
    config = make(**PLAIN)
    expected = ranks.trained(make(**PLAIN), 2)
    ended = ranks.train_ranks(config, 2, env={"LLMTRAIN_FAULT": "after_optimizer:3:1:term"})
    assert [end.code for end in ended] == [75, 75]
    result = ranks.trained(config, 3, harness.RUN_ID)
    assert (result["world_size"], result["tokens"]) == (3, expected["tokens"])
    assert result["final_val_loss"] == pytest.approx(expected["final_val_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, 24])
def test_odd_numbers_of_micro_batches(make: MakeConfig, count: int) -> None:
    changes = {"trainer__grad_accum_steps": count, "trainer__max_steps": 3, "trainer__micro_batch_size": 1}
    found = [ranks.trained(make(**changes), size)["state_sha256"] for size in (1, 2, 4)]
    assert found[0] == found[1] == found[2]


def test_scale_batch_multiplies_the_batch_by_the_world_size(make: MakeConfig) -> None:
    """2 micro-batches on each of 2 processes are the step of 4 on one; without it they are half of that."""
    four = make(trainer__grad_accum_steps=4)
    scaled = make(trainer__grad_accum_steps=2, trainer__scale_batch=True)
    unscaled = make(trainer__grad_accum_steps=2)
    results = [ranks.trained(four, 1), ranks.trained(scaled, 2), ranks.trained(unscaled, 2)]
    assert results[0]["state_sha256"] == results[1]["state_sha256"]
    assert results[0]["tokens"] == results[1]["tokens"] == 2 * results[2]["tokens"]
    assert results[2]["state_sha256"] != results[0]["state_sha256"]


def test_scale_batch_refuses_another_world_size_on_resume(make: MakeConfig) -> None:
    """It would be a different step."""
    config = make(
        trainer__grad_accum_steps=2, trainer__scale_batch=True, trainer__max_steps=2, trainer__schedule_steps=4
    )
    ranks.trained(config, 2)
    longer = config.with_values("trainer", max_steps=4)
    ended = ranks.train_ranks(longer, 4, harness.RUN_ID)
    assert [end.code for end in ended] == [64] * 4
    assert all("8 micro-batches instead of 4" in end.output for end in ended)


@pytest.mark.parametrize(
    ("changes", "size", "facts"),
    [
        ({"trainer__grad_accum_steps": 4}, 3, ["reproducible_reduce", ": 1, 2, 4;"]),
        ({"trainer__grad_accum_steps": 6}, 4, ["reproducible_reduce", ": 1, 2;"]),
        ({"trainer__scale_batch": True}, 3, ["reproducible_reduce", ": 1, 2, 4, 8, ...;"]),
        ({"trainer__grad_accum_steps": 2, **PLAIN}, 3, ["must be 1 to 2.", "grad_accum_steps=3", "6 micro-batches"]),
    ],
)
def test_invalid_world_size_is_refused_before_joining(
    make: MakeConfig, changes: dict[str, Any], size: int, facts: list[str]
) -> None:
    """One rank without a master: it must not wait for it."""
    config = make(**changes)
    lonely = {"RANK": "1", "WORLD_SIZE": str(size), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(size)}
    nowhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    (ended,) = ranks.train_ranks(config, 1, env={**lonely, **nowhere, "LLMTRAIN_DEBUG": "1"})
    assert "joining as rank" not in ended.output
    assert ended.code == 64, ended.output
    for fact in facts:
        assert fact in ended.output
    assert not Path(config.output.root_dir).exists()


def test_killed_run_resumes_on_any_world_size(make: MakeConfig, by_size: dict[int, Watched]) -> None:
    """Killed with 4 ranks after step 5, resumed with 1 to step 6, then with 2 to the end: bit-exact."""
    config = make()
    ended = ranks.train_ranks(config, 4, env={"LLMTRAIN_FAULT": "after_optimizer:5:2:kill"})
    assert ended[2].code == -signal.SIGKILL
    assert {ended[rank].code for rank in (0, 1, 3)} == {75}, "\n".join(end.output for end in ended)
    (stopped,) = ranks.train_ranks(config, 1, harness.RUN_ID, env={"LLMTRAIN_FAULT": "after_optimizer:6:0:term"})
    assert stopped.code == 75
    assert harness.steps_saved(Path(config.output.root_dir))[-1] == 6
    steps, result, folder = watched(config, 2, harness.RUN_ID)
    (alone,), expected, expected_folder = by_size[1]
    assert result["state_sha256"] == expected["state_sha256"]
    assert [step["hash"] for step in steps[0]] == [step["hash"] for step in alone[6:]]
    assert [[step["samples"][0] for step in share] for share in steps] == [
        [step["samples"][0] for step in alone[6:]],
        [step["samples"][2] for step in alone[6:]],
    ]
    assert harness.train_rows(folder) == harness.train_rows(expected_folder)


def test_only_rank_0_writes_metrics_and_logs(make: MakeConfig) -> None:
    config = make(trainer__max_steps=2, trainer__warmup_steps=1)
    ended = ranks.train_ranks(config, 2)
    assert all(end.value is not None for end in ended), "every rank has the result"
    folder = Path(config.output.root_dir) / harness.RUN_ID
    assert len(harness.train_rows(folder)) == 2
    beats = sorted(path.name for path in (folder / "heartbeats").glob("rank-*.json"))
    assert beats == ["rank-0.json", "rank-1.json"]
    assert "step_2 in" in ended[0].output
    for end in ended[1:]:
        lines = [line for line in end.output.splitlines() if line.startswith("[")]
        assert lines == [], "ranks other than 0 print only warnings"


def test_ranks_with_different_data_are_refused(make: MakeConfig, tmp_path: Path) -> None:
    """The same path may have different text on two nodes."""
    config = make(data__name="text_files", data__files=["~/text.txt"], data__cache_dir="~/cache")

    def body(rank: int) -> Any:
        home = tmp_path / str(rank)
        home.mkdir()
        os.environ["HOME"] = str(home)
        (home / "text.txt").write_text("".join(f"{number} times {number + rank}\n" for number in range(400)))
        return run_training(config).as_dict()

    ended = ranks.start_ranks(2, body).wait()
    assert [end.code for end in ended] == [64, 64], "\n".join(end.output for end in ended)
    assert all(end.error and end.error[0] == "UsageError" and "data of rank 1" in end.error[1] for end in ended)
    assert not (Path(config.output.root_dir) / harness.RUN_ID).exists()

"""What is wrong for one process of several ends all of them alike: damage, a full disk, NaN, other data."""

import errno
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import RUN_ID, Outcome

from llmtrain.config.schema import Config

MakeConfig = Callable[..., Config]


# Damaged checkpoints.


@pytest.fixture(scope="session")
def _sharded_root(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    root = tmp_path_factory.mktemp("sharded") / "runs"
    config = harness.world_config(root, cache, distributed__strategy="fsdp")
    ends = harness.run_world(config, 2, fault="forward:8:0:kill")
    assert [ended.code for ended in ends] == [-9, 75], ends[1].output
    assert harness.steps_saved(root) == [2, 4, 6]
    return root


@pytest.fixture
def sharded_root(root: Path, _sharded_root: Path) -> Path:
    """A sliced run killed at step 8, with checkpoints of steps 2, 4 and 6: a copy to do anything with."""
    return harness.copy_root(_sharded_root, root)


def flip(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    position = random.Random(seed).randrange(len(data) * 8)
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(bytes(data))


def truncate(path: Path, seed: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: random.Random(seed).randrange(len(data))])


def remove(path: Path, seed: int) -> None:  # noqa: ARG001
    path.unlink()


SHARDS = [f"{group}-{rank:05d}-of-00002.safetensors" for group in ("model", "optimizer") for rank in (1, 2)]
FILES = [*SHARDS, "index.json", "state.json", "manifest.json"]


def test_a_sharded_checkpoint_has_a_file_of_every_rank(sharded_root: Path) -> None:
    names = {path.name for path in (sharded_root / RUN_ID / "checkpoints" / "step_6").iterdir()}
    assert names == set(FILES)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(
            name,
            damage,
            marks=[] if (name, damage) == (SHARDS[1], flip) else pytest.mark.slow,
            id=f"{name}-{damage.__name__}",
        )
        for name in FILES
        for damage in (flip, truncate, remove)
    ],
)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_used(
    make_world_config: MakeConfig,
    sharded_root: Path,
    fsdp_golden: Outcome,
    name: str,
    damage: Callable[[Path, int], None],
) -> None:
    file = sharded_root / RUN_ID / "checkpoints" / "step_6" / name
    damage(file, seed=len(name))
    config = make_world_config(distributed__strategy="fsdp")
    ends = harness.run_world(config, 2, RUN_ID)
    assert [ended.code for ended in ends] == [0, 0], ends[0].output
    assert str(file.parent if damage is remove and name == "manifest.json" else file) in ends[0].output
    result = ends[0].result or {}
    assert result["resumed_from"] == 4
    assert harness.outcome(sharded_root, result) == fsdp_golden


@pytest.mark.slow
def test_all_checkpoints_damaged_is_never_a_fresh_start(make_world_config: MakeConfig, sharded_root: Path) -> None:
    for step, name in ((2, SHARDS[0]), (4, SHARDS[1]), (6, SHARDS[3])):
        flip(sharded_root / RUN_ID / "checkpoints" / f"step_{step}" / name, step)
    before = harness.tree(sharded_root, without=("logs",))
    ends = harness.run_world(make_world_config(distributed__strategy="fsdp"), 2, RUN_ID)
    for ended in ends:
        assert ended.code == 65, ended.output
        assert ended.error["error"] == "CheckpointError"
    assert harness.tree(sharded_root, without=("logs",)) == before


# A full disk.


@pytest.mark.parametrize(
    ("point", "rank", "in_background"),
    [
        ("save_model_written", 1, False),
        pytest.param("save_model_written", 1, True, marks=pytest.mark.slow),
        pytest.param("save_model_written", 0, False, marks=pytest.mark.slow),
        pytest.param("save_begin", 0, False, marks=pytest.mark.slow),
        pytest.param("save_before_manifest", 0, False, marks=pytest.mark.slow),
        pytest.param("save_before_rename", 0, True, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_of_one_rank(
    make_world_config: MakeConfig, root: Path, world_golden: Outcome, point: str, rank: int, in_background: bool
) -> None:
    """The save fails for all, training goes on, the next save works, nothing is left behind."""
    config = make_world_config(trainer__async_save=in_background)
    ends = harness.run_world(config, 2, fault=f"{point}:4:{rank}:enospc")
    assert [ended.code for ended in ends] == [0, 0], ends[0].output + ends[1].output
    for number, ended in enumerate(ends):
        assert "The checkpoint of step 4 could not be written" in ended.output
        assert "No space left on device" in ended.output
        if number != rank:
            assert f"rank {rank}: " in ended.output
    found = harness.outcome(root, ends[0].result or {})
    assert (found.state_sha256, found.train, found.val) == (
        world_golden.state_sha256,
        world_golden.train,
        world_golden.val,
    )
    steps = harness.steps_saved(root)
    assert 4 not in steps
    assert steps[-2:] == [6, 8]
    assert [path.name for path in (root / RUN_ID / "checkpoints").iterdir() if path.name.startswith(".")] == []
    harness.verify_all(root)


@pytest.mark.slow
def test_a_full_disk_at_the_last_save(world_config: Config, root: Path, world_golden: Outcome) -> None:
    ends = harness.run_world(world_config, 2, fault="save_model_written:8:1:enospc")
    for ended in ends:
        assert ended.code == 65, ended.output
        assert ended.error["reason"] == "disk_full"
        assert "step 8" in ended.error["what"]
    assert not (root / RUN_ID / "finished.json").exists()
    assert harness.go_on(world_config, 2, world_golden) == 6


@pytest.mark.slow
def test_a_full_disk_found_before_anything_is_written(world_config: Config, root: Path, world_golden: Outcome) -> None:
    """Free space is asked for by rank 0, for what all ranks need."""

    def little_space(rank: int) -> None:
        from llmtrain.checkpoint import store as checkpoint

        usage = shutil.disk_usage(root.parent)
        if rank == 0:
            checkpoint.shutil = type(  # type: ignore[assignment]
                "shutil", (), {"rmtree": shutil.rmtree, "disk_usage": staticmethod(lambda _: usage._replace(free=10))}
            )

    ends = harness.run_world(world_config, 2, before=little_space)
    for ended in ends:
        assert ended.code == 65, ended.output
        assert ended.error["reason"] == "disk_full"
        assert "0 MB free" in ended.output
        assert errno.errorcode[errno.ENOSPC] not in ended.output
    assert harness.steps_saved(root) == []
    assert harness.go_on(world_config, 2, world_golden) == 0


# Not a number.


@pytest.mark.parametrize(
    ("step", "rank", "changes"),
    [
        (3, 1, {}),
        pytest.param(1, 1, {}, marks=pytest.mark.slow),
        pytest.param(4, 0, {}, marks=pytest.mark.slow),
        pytest.param(5, 1, {"trainer__log_every_steps": 100}, marks=pytest.mark.slow),
        pytest.param(8, 1, {"trainer__log_every_steps": 100}, marks=pytest.mark.slow),
        pytest.param(3, 1, {"trainer__async_save": True}, marks=pytest.mark.slow),
    ],
)
def test_nan_of_one_rank(
    make_world_config: MakeConfig, root: Path, step: int, rank: int, changes: dict[str, object]
) -> None:
    ends = harness.run_world(make_world_config(**changes), 2, fault=f"loss:{step}:{rank}:nan")
    for ended in ends:
        assert ended.code == 65, ended.output
        assert ended.error["reason"] == "not_finite"
        assert f"samples {(step - 1) * 8} to {step * 8 - 1}" in ended.error["what"]
    assert all(saved < step for saved in harness.steps_saved(root))
    assert not (root / RUN_ID / "finished.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nan_with_plain_reduction(make_world_config: MakeConfig, root: Path, strategy: str) -> None:
    config = make_world_config(distributed__strategy=strategy, distributed__reproducible_reduce=False)
    ends = harness.run_world(config, 2, fault="loss:3:1:nan")
    for ended in ends:
        assert ended.code == 65, ended.output
        assert ended.error["reason"] == "not_finite"
    assert harness.steps_saved(root) == [2]


@pytest.mark.slow
def test_nan_while_a_save_goes_on_in_the_background(
    make_world_config: MakeConfig, root: Path, world_golden: Outcome
) -> None:
    """The threads that save are in the middle of talking to each other when their processes leave."""

    def slow_disk(rank: int) -> None:
        from llmtrain.checkpoint import store as checkpoint

        describe = checkpoint.manifest_entry

        def slowly(path: Path) -> dict[str, object]:
            if rank == 1:
                time.sleep(1.0)
            return describe(path)

        checkpoint.manifest_entry = slowly

    config = make_world_config(trainer__async_save=True)
    ends = harness.run_world(config, 2, fault="loss:3:1:nan", before=slow_disk)
    for ended in ends:
        assert ended.code == 65, ended.output
        assert ended.error["reason"] == "not_finite"
    assert harness.steps_saved(root) in ([], [2])
    harness.go_on(config, 2, world_golden)


# Data that is not the same for all, or not there for one.


def two_places(tmp_path: Path, texts: list[str | None]) -> Callable[[int], None]:
    """A directory for each rank, as on machines with disks of their own."""
    for rank, text in enumerate(texts):
        place = tmp_path / f"place-{rank}"
        place.mkdir()
        if text is not None:
            (place / "text.txt").write_text(text)

    def move(rank: int) -> None:
        import os

        os.chdir(tmp_path / f"place-{rank}")

    return move


GOOD = "one text that every process reads alike\n" * 400


def with_own_files(make: MakeConfig) -> Config:
    return make(data__name="text_files", data__files=["text.txt"], data__cache_dir="cache")


def test_other_data_on_one_rank(make_world_config: MakeConfig, root: Path, tmp_path: Path) -> None:
    move = two_places(tmp_path, [GOOD, GOOD.replace("alike", "other")])
    for ended in harness.run_world(with_own_files(make_world_config), 2, before=move):
        assert ended.code == 64, ended.output
        assert ended.error["error"] == "UsageError"
        assert "data of rank 1" in ended.error["what"]
        assert "Traceback" not in ended.output
    assert not (root / RUN_ID).exists()


@pytest.mark.parametrize(
    ("rank", "text"),
    [(1, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, None), (1, ""), (1, "short\n")))],
)
def test_bad_data_on_one_rank(
    make_world_config: MakeConfig, root: Path, tmp_path: Path, rank: int, text: str | None
) -> None:
    texts: list[str | None] = [GOOD, GOOD]
    texts[rank] = text
    ends = harness.run_world(with_own_files(make_world_config), 2, before=two_places(tmp_path, texts))
    assert ends[0].code == ends[1].code, ends[0].output + ends[1].output
    for number, ended in enumerate(ends):
        assert ended.code in (64, 65), ended.output
        assert "Traceback" not in ended.output
        if number != rank:
            assert f"rank {rank}: " in ended.output
    assert not (root / RUN_ID).exists()


def test_a_run_directory_that_one_rank_does_not_see(
    make_world_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines without shared storage: said at once, not when the first checkpoint lacks its half."""
    monkeypatch.chdir(tmp_path)
    move = two_places(tmp_path, [None, None])

    def see_soon(rank: int) -> None:
        from llmtrain.training import rank_checks

        rank_checks.SHARED_STORAGE_SEC = 0.5
        move(rank)

    ends = harness.run_world(make_world_config(output__root_dir="runs"), 2, before=see_soon)
    for ended in ends:
        assert ended.code == 64, ended.output
        assert ended.error["error"] == "UsageError"
        assert str(Path("runs") / RUN_ID) in ended.error["what"]
    assert not (tmp_path / "place-1" / "runs").exists()

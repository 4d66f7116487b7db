"""An error on one rank ends all ranks the same way: damage, a full disk, NaN, different data."""

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
    """A copy of an fsdp run that was killed at step 8, with checkpoints of steps 2, 4 and 6."""
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


def test_sharded_checkpoint_has_files_of_every_rank(sharded_root: Path) -> None:
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
def test_resume_skips_a_checkpoint_with_a_damaged_shard(
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
def test_resume_refuses_when_all_sharded_checkpoints_are_damaged(
    make_world_config: MakeConfig, sharded_root: Path
) -> None:
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
def test_full_disk_on_one_rank(
    make_world_config: MakeConfig, root: Path, world_golden: Outcome, point: str, rank: int, in_background: bool
) -> None:
    """The save fails on all ranks, training continues, the next save succeeds."""
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
def test_full_disk_on_one_rank_at_the_last_save(world_config: Config, root: Path, world_golden: Outcome) -> None:
    ends = harness.run_world(world_config, 2, fault="save_model_written:8:1:enospc")
    for ended in ends:
        assert ended.code == 65, ended.output
        assert ended.error["reason"] == "disk_full"
        assert "step 8" in ended.error["what"]
    assert not (root / RUN_ID / "finished.json").exists()
    assert harness.resume_and_check(world_config, 2, world_golden) == 6


@pytest.mark.slow
def test_full_disk_is_detected_before_writing(world_config: Config, root: Path, world_golden: Outcome) -> None:
    """Rank 0 checks the free space for all ranks."""

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
        assert errno.errorcode[errno.ENOSPC] not in ended.output
    assert harness.steps_saved(root) == []
    assert harness.resume_and_check(world_config, 2, world_golden) == 0


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
def test_nan_on_one_rank(
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
def test_nan_with_plain_ddp(make_world_config: MakeConfig, root: Path, strategy: str) -> None:
    config = make_world_config(distributed__strategy=strategy, distributed__reproducible_reduce=False)
    ends = harness.run_world(config, 2, fault="loss:3:1:nan")
    for ended in ends:
        assert ended.code == 65, ended.output
        assert ended.error["reason"] == "not_finite"
    assert harness.steps_saved(root) == [2]


@pytest.mark.slow
def test_nan_during_a_background_save(make_world_config: MakeConfig, root: Path, world_golden: Outcome) -> None:
    """The saver threads are communicating while their processes exit."""

    def slow_disk(rank: int) -> None:
        from llmtrain.checkpoint import store as checkpoint

        describe = checkpoint.checksum_entry

        def slowly(path: Path) -> dict[str, object]:
            if rank == 1:
                time.sleep(1.0)
            return describe(path)

        checkpoint.checksum_entry = slowly

    config = make_world_config(trainer__async_save=True)
    ends = harness.run_world(config, 2, fault="loss:3:1:nan", before=slow_disk)
    for ended in ends:
        assert ended.code == 65, ended.output
        assert ended.error["reason"] == "not_finite"
    assert harness.steps_saved(root) in ([], [2])
    harness.resume_and_check(config, 2, world_golden)


# Data that is not the same for all, or not there for one.


def two_places(tmp_path: Path, texts: list[str | None]) -> Callable[[int], None]:
    """A directory per rank, as on nodes with local disks."""
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


def test_different_data_on_one_rank_is_refused(make_world_config: MakeConfig, root: Path, tmp_path: Path) -> None:
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
def test_bad_data_on_one_rank_ends_all(
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


def test_run_directory_that_one_rank_does_not_see_is_refused(
    make_world_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes without shared storage are detected at the start, not when the first checkpoint is incomplete."""
    monkeypatch.chdir(tmp_path)
    move = two_places(tmp_path, [None, None])

    def see_soon(rank: int) -> None:
        from llmtrain.training import ownership

        ownership.SHARED_STORAGE_SEC = 0.5
        move(rank)

    ends = harness.run_world(make_world_config(output__root_dir="runs"), 2, before=see_soon)
    for ended in ends:
        assert ended.code == 64, ended.output
        assert ended.error["error"] == "UsageError"
        assert str(Path("runs") / RUN_ID) in ended.error["what"]
    assert not (tmp_path / "place-1" / "runs").exists()

"""Sharded checkpoints: written with any split, read with any other."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_harness as harness
import numpy as np
import pytest
import rank_harness as ranks
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmtrain.checkpoint import store as checkpoint_module
from llmtrain.checkpoint.checkpoint import INDEX, Checkpoint
from llmtrain.checkpoint.shards import (
    _is_covered,
    assign_owners,
    file_name,
    merge_indexes,
    overlap,
    read_full,
    read_into,
    shard,
)
from llmtrain.checkpoint.state import model_tensors, optimizer_tensors, state_sha256
from llmtrain.checkpoint.store import CHECKSUMS, CheckpointRequest, CheckpointStore
from llmtrain.distributed.control_group import ControlGroup
from llmtrain.errors import CheckpointError
from llmtrain.runs.checksums import checksums_text
from llmtrain.runs.lock import NullLock
from llmtrain.training import run as run_module

# Boxes


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Any, Any]:
    dims = draw(st.integers(0, 3))
    sides = st.tuples(*[st.integers(0, 6)] * dims)
    return (draw(sides), draw(sides)), (draw(sides), draw(sides))


@given(boxes())
def test_overlap_matches_masks_on_a_grid(pair: tuple[Any, Any]) -> None:
    """Against masks drawn on a grid."""
    masks = []
    for offset, shape in pair:
        mask = np.zeros((12,) * len(offset), dtype=bool)
        mask[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = True
        masks.append(mask)
    common = overlap(*pair)
    drawn = np.zeros_like(masks[0])
    if common is not None:
        drawn[tuple(slice(o, o + n) for o, n in zip(*common, strict=True))] = True
        assert drawn.any()
    assert (drawn == (masks[0] & masks[1])).all()


# Who writes what


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 6))
def test_owners_are_balanced_and_deterministic(sizes: list[int], ranks_: int) -> None:
    tensors = [(f"t{number}", torch.empty(size)) for number, size in enumerate(sizes)]
    owners = assign_owners(tensors, ranks_)
    assert assign_owners(tensors[::-1], ranks_) == owners, "the order of asking does not matter"
    assert owners.keys() == {name for name, _ in tensors}
    load = [sum(t.numel() for name, t in tensors if owners[name] == rank) for rank in range(ranks_)]
    assert max(load) - min(load) <= max(sizes, default=0) + len(sizes), "no rank has more than one tensor too many"


def test_file_names() -> None:
    assert file_name("model", 0, 1) == "model.safetensors"
    assert file_name("model", 1, 4) == "model-00002-of-00004.safetensors"


def test_merged_index_has_every_piece() -> None:
    entry = {"dtype": "float32", "shape": [4, 2]}
    parts = [
        {"model": (f"f{rank}", {"w": {**entry, "piece": {"offset": [2 * rank, 0], "shape": [2, 2]}}})}
        for rank in range(2)
    ]
    assert merge_indexes(parts)["model"]["w"] == {
        **entry,
        "pieces": [
            {"file": "f0", "offset": [0, 0], "shape": [2, 2]},
            {"file": "f1", "offset": [2, 0], "shape": [2, 2]},
        ],
    }


# Any split in, any split out


@dataclass
class Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Rows:
    """Some rows of a tensor, with the interface of a DTensor."""

    def __init__(self, whole: torch.Tensor, start: int, end: int) -> None:
        self.shape, self.dtype, self._whole = whole.shape, whole.dtype, whole
        self.local = whole[start:end].clone()
        rest = (0,) * (whole.dim() - 1)
        self._chunk = Chunk((min(start, len(whole)), *rest), tuple(self.local.shape))

    def __create_chunk_list__(self) -> list[Chunk]:
        return [self._chunk]

    def to_local(self) -> torch.Tensor:
        return self.local

    def numel(self) -> int:
        return self._whole.numel()


def cuts(draw: st.DrawFn, length: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive intervals that cover the length; some may be empty."""
    inner = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    edges = [0, *inner, length]
    return list(itertools.pairwise(edges))


@st.composite
def split_tensors(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], int, int, dict[str, Any]]:
    """Tensors, writers, readers, and for each sharded tensor the intervals of the writers and of the readers."""
    writers, readers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    whole, stretches = {}, {}
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0 if number else 1, 7), max_size=3))
        kind = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        values = torch.arange(int(np.prod(shape, dtype=int)) or 1, dtype=torch.float32) + 100 * number
        whole[f"t{number}"] = values[: int(np.prod(shape, dtype=int))].reshape(shape).to(kind)
        if shape and draw(st.booleans()):
            stretches[f"t{number}"] = (cuts(draw, shape[0], writers), cuts(draw, shape[0], readers))
    return whole, writers, readers, stretches


@given(split_tensors())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_split_can_be_read_by_any_other(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    whole, writers, readers, stretches = case
    folder = tmp_path_factory.mktemp("split")
    parts, written = [], 0
    for rank in range(writers):
        held = {
            name: Rows(tensor, *stretches[name][0][rank]) if name in stretches else tensor
            for name, tensor in whole.items()
        }
        own = shard("model", held, rank, writers)  # type: ignore[arg-type]
        written += sum(tensor.numel() for tensor in own.tensors.values())
        if own.tensors:
            save_file(own.tensors, folder / file_name("model", rank, writers))
        parts.append({"model": (file_name("model", rank, writers), own.entries)})
    assert written == sum(tensor.numel() for tensor in whole.values()), "nothing is written twice or omitted"
    entries = json.loads(json.dumps(merge_indexes(parts)))["model"]

    together = read_full(folder, entries)
    for name, tensor in whole.items():
        assert together[name].dtype == tensor.dtype
        assert torch.equal(together[name], tensor), name

    for rank in range(readers):
        blank = {name: torch.full_like(tensor, 7) for name, tensor in whole.items()}
        targets = {
            name: Rows(blank[name], *stretches[name][1][rank]) if name in stretches else blank[name] for name in whole
        }
        read_into(folder, entries, targets)  # type: ignore[arg-type]
        for name, tensor in whole.items():
            if name in stretches:
                start, end = stretches[name][1][rank]
                assert torch.equal(targets[name].local, tensor[start:end]), name
            else:
                assert torch.equal(targets[name], tensor), name


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    tensors = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.tensor(1.0)}
    own = shard("model", tensors, 0, 1)
    save_file(own.tensors, tmp_path / "model.safetensors")
    return tmp_path, merge_indexes([{"model": ("model.safetensors", own.entries)}])["model"]


@pytest.mark.parametrize(
    ("targets", "kind", "words"),
    [
        ({"a": torch.zeros(3, 2)}, KeyError, "unexpected \\['b'\\]"),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(()), "c": torch.zeros(1)}, KeyError, "missing \\['c'\\]"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(())}, ValueError, "a has shape \\[3, 2\\], expected \\[2, 3\\]"),
    ],
)
def test_read_refuses_other_names_or_shapes(stored: Any, targets: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        read_into(*stored, targets)


def test_read_refuses_a_missing_or_damaged_file(stored: tuple[Path, dict[str, Any]]) -> None:
    folder, entries = stored
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_full(folder, entries)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_full(folder, entries)


# An index from an untrusted source: the hashes match, but the content is invalid.


@pytest.fixture
def forged(tmp_path: Path) -> Callable[..., Checkpoint]:
    """A checkpoint whose index was changed and whose manifest was made to fit."""
    store = CheckpointStore(tmp_path / "checkpoints")
    tensors = {group: {"a": torch.arange(6.0).reshape(3, 2)} for group in ("model", "optimizer")}
    shards = [shard(group, named, 0, 1) for group, named in tensors.items()]
    state = {"progress": {"step": 1}, "config": {}, "data_fingerprint": "x", "vocab_size": 1}
    store.save(CheckpointRequest(1, tensors, state), shards, NullLock("owner"), ControlGroup())
    checkpoint = store.at(1)
    save_file({"a": torch.full((3, 2), 666.0)}, tmp_path / "outside.safetensors")
    save_file({"a": torch.full((3, 2), 666.0)}, checkpoint.path / "unlisted.safetensors")

    def forge(change: Callable[[dict[str, Any]], None]) -> Checkpoint:
        index = json.loads((checkpoint.path / INDEX).read_text())
        change(index["model"]["a"])
        (checkpoint.path / INDEX).write_text(json.dumps(index))
        files = json.loads((checkpoint.path / CHECKSUMS).read_text())["files"]
        files[INDEX] = checkpoint_module.checksum_entry(checkpoint.path / INDEX)
        (checkpoint.path / CHECKSUMS).write_text(checksums_text(files))
        return checkpoint

    return forge


def test_forged_fixture_makes_valid_checkpoints(forged: Callable[..., Checkpoint]) -> None:
    checkpoint = forged(lambda _: None)
    checkpoint.verify()
    assert checkpoint.tensors("model")["a"].tolist() == [[0, 1], [2, 3], [4, 5]]


def verify_and_read(checkpoint: Checkpoint) -> None:
    checkpoint.verify()
    checkpoint.tensors("model")


@pytest.mark.parametrize("file", ["../../outside.safetensors", "unlisted.safetensors", "/etc/hostname"])
def test_index_may_refer_only_to_files_of_the_manifest(forged: Callable[..., Checkpoint], file: str) -> None:
    checkpoint = forged(lambda entry: entry["pieces"][0].update(file=file))
    with pytest.raises(CheckpointError):
        verify_and_read(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(pieces=[]),
        lambda entry: entry["pieces"][0].update(offset=[1, 0], shape=[2, 2]),
        lambda entry: entry["pieces"][0].update(offset=[0, 0], shape=[9, 9]),
        lambda entry: entry["pieces"][0].update(offset=[0], shape=[3]),
        lambda entry: entry.update(dtype="load"),
        lambda entry: entry.update(dtype="no_such"),
        lambda entry: entry.pop("shape"),
        lambda entry: entry.update(shape=[3, -2]),
        lambda entry: entry.update(shape=[10**9, 10**9]),
    ],
    ids=["no pieces", "a hole", "beyond", "other dimensions", "function", "unknown dtype", "no shape", "minus", "huge"],
)
def test_inconsistent_index_is_refused(forged: Callable[..., Checkpoint], change: Any) -> None:
    """Parts that no piece fills would be uninitialized memory. Refused both by verify and by reading without it."""
    checkpoint = forged(change)
    with pytest.raises(CheckpointError):
        checkpoint.verify()
    with pytest.raises(CheckpointError):
        checkpoint.tensors("model")
    with pytest.raises((CheckpointError, ValueError)):  # ValueError: another shape than the model's
        checkpoint.read_into("model", {"a": torch.zeros(3, 2)})


def pieces(*boxes: tuple[list[int], list[int]]) -> Callable[[dict[str, Any]], None]:
    """Boxes with as many elements as the full tensor, each in its own file as far as there are files."""
    files = ("model.safetensors", "optimizer.safetensors", "state.json", "index.json")
    return lambda entry: entry.update(
        pieces=[
            {"file": file, "offset": offset, "shape": shape}
            for file, (offset, shape) in zip(files, boxes, strict=False)
        ]
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["pieces"][0].update(offset=[0, 1]),
        lambda entry: entry["pieces"][0].update(offset=[3, 0]),
        lambda entry: entry["pieces"][0].update(offset=[10**30, 0]),
        pieces(([0, 0], [1, 2]), ([0, 0], [2, 2])),
        pieces(([0, 0], [2, 2]), ([1, 0], [1, 2])),
        pieces(([0, 0], [3, 1]), ([0, 0], [3, 1])),
        pieces(([0, 0], [2, 3])),
        pieces(([0, 0], [6, 1])),
        pieces(([0, 0], [1, 2]), ([2, 0], [1, 2]), ([1, 0], [1, 2])),
        lambda entry: entry.update(pieces=[{**entry["pieces"][0], "shape": [0, 2]}, *entry["pieces"]]),
        lambda entry: (entry.update(shape=[30, 2]), entry["pieces"][0].update(shape=[30, 2])),
        lambda entry: (entry.update(shape=[10**9, 10**9]), entry["pieces"][0].update(shape=[10**9, 10**9])),
        lambda entry: (entry.update(shape=[True, 2]), entry["pieces"][0].update(shape=[True, 2])),
        lambda entry: entry.update(dtype="float16"),
        lambda entry: entry.update(dtype=["float32"]),
        lambda entry: entry["pieces"][0].update(file=3),
        lambda entry: entry["pieces"][0].update(file=["model.safetensors"]),
        lambda entry: entry.update(pieces={"a": 1}),
        lambda entry: entry["pieces"].append(None),
    ],
)
def test_index_with_overlapping_pieces_is_refused(forged: Callable[..., Checkpoint], change: Any) -> None:
    checkpoint = forged(change)
    for use in (checkpoint.verify, lambda: checkpoint.tensors("model")):
        with pytest.raises(CheckpointError):
            use()
    with pytest.raises((CheckpointError, ValueError)):
        checkpoint.read_into("model", {"a": torch.zeros(3, 2)})


def test_pieces_in_any_order_are_accepted(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    boxes = [([2, 3], [2, 3]), ([0, 0], [2, 4]), ([0, 4], [2, 2]), ([2, 0], [2, 3])]
    listed = []
    for number, ((top, left), (height, width)) in enumerate(boxes):
        save_file({"a": whole[top : top + height, left : left + width].clone()}, tmp_path / f"{number}.safetensors")
        listed.append({"file": f"{number}.safetensors", "offset": [top, left], "shape": [height, width]})
    found = read_full(tmp_path, {"a": {"dtype": "float32", "shape": [4, 6], "pieces": listed}})
    assert torch.equal(found["a"], whole)


@given(split_tensors())
def test_every_split_makes_a_valid_index(case: Any) -> None:
    whole, writers, _, stretches = case
    parts = []
    for rank in range(writers):
        held = {n: Rows(t, *stretches[n][0][rank]) if n in stretches else t for n, t in whole.items()}
        parts.append({"model": (f"file-{rank}", shard("model", held, rank, writers).entries)})  # type: ignore[arg-type]
    assert all(_is_covered(entry) for entry in merge_indexes(parts)["model"].values())


def test_index_with_many_pieces_is_checked_quickly() -> None:
    """Thousands of ranks, or a denial of service: not every pair is compared."""
    count = 20_000
    rows = [{"file": str(n), "offset": [n, 0], "shape": [1, 2]} for n in range(count)]
    assert _is_covered({"dtype": "float32", "shape": [count, 2], "pieces": rows})


# Real runs: written by two ranks of fsdp, read by others.

CHANGES: dict[str, Any] = {
    "trainer__grad_accum_steps": 4,
    "trainer__eval_batches": 4,
    "trainer__schedule_steps": 8,
    "model__d_model": 64,
}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, dict[str, Any]]:
    """A run of two ranks of fsdp that ended at step 4, and its result."""
    root = tmp_path_factory.mktemp("two") / "runs"
    config = harness.tiny_config(root, cache, distributed__strategy="fsdp", trainer__max_steps=4, **CHANGES)
    return root, ranks.trained(config, 2)


def checkpoint_of(root: Path, step: int = 4) -> Checkpoint:
    return Checkpoint(root / harness.RUN_ID / "checkpoints" / f"step_{step}")


def test_each_rank_writes_only_its_slice(of_two: tuple[Path, dict[str, Any]]) -> None:
    """A rank that gathered the model would write more."""
    folder = checkpoint_of(of_two[0]).path
    checkpoint_of(of_two[0]).verify()
    for group in ("model", "optimizer"):
        held = [load_file(folder / file_name(group, rank, 2)) for rank in range(2)]
        sizes = [sum(t.numel() * t.element_size() for t in tensors.values()) for tensors in held]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
        whole = sum(t.numel() * t.element_size() for t in checkpoint_of(of_two[0]).tensors(group).values())
        assert sum(sizes) == whole
    assert not list(folder.glob("model.safetensors"))


def test_state_hash_does_not_depend_on_the_split(of_two: tuple[Path, dict[str, Any]]) -> None:
    checkpoint = checkpoint_of(of_two[0])
    found = state_sha256(checkpoint.tensors("model"), checkpoint.tensors("optimizer"))
    assert found == of_two[1]["state_sha256"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    config = harness.tiny_config(tmp_path_factory.mktemp("one") / "runs", cache, **CHANGES)
    return ranks.trained(config, 1)


_hashes: list[str] = []


def hash_after_restore() -> None:
    """In a rank: record the hash of the restored state."""
    before = run_module.restore

    def noting(resumption: Any, store: Any, module: Any, optimizer: Any, world: Any) -> Any:
        progress = before(resumption, store, module, optimizer, world)
        _hashes.append(state_sha256(model_tensors(module), optimizer_tensors(module, optimizer)))
        return progress

    run_module.restore = noting


@pytest.mark.parametrize(
    ("strategy", "count"),
    [("none", 1), ("fsdp", 4), ("ddp", 2), *(pytest.param("fsdp", n, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_any_number_of_ranks_can_resume(
    of_two: tuple[Path, dict[str, Any]],
    uninterrupted: dict[str, Any],
    tmp_path: Path,
    cache: Path,
    strategy: str,
    count: int,
) -> None:
    root = harness.copy_root(of_two[0], tmp_path / "runs")
    config = harness.tiny_config(root, cache, distributed__strategy=strategy, **CHANGES)
    ended = ranks.train_ranks(config, count, harness.RUN_ID, before=hash_after_restore, after=lambda: list(_hashes))
    assert ranks.values(ended) == [[of_two[1]["state_sha256"]]] * count, "the tensors are those that were written"
    result = harness.read_result(root)
    assert (result["steps"], result["resumed_from"], result["world_size"]) == (8, 4, count)
    assert result["final_train_loss"] == pytest.approx(uninterrupted["final_train_loss"], rel=1e-4)
    assert result["final_val_loss"] == pytest.approx(uninterrupted["final_val_loss"], rel=1e-4)
    names = {path.name for path in checkpoint_of(root, 8).path.glob("model*")}
    assert names == {file_name("model", rank, count) for rank in range(count)}


@pytest.mark.slow
def test_tensor_with_fewer_rows_than_ranks(tmp_path: Path, cache: Path) -> None:
    """A bias with 2 rows on 4 ranks: two ranks have no part of it."""
    config = harness.tiny_config(
        tmp_path / "runs", cache, distributed__strategy="fsdp", trainer__max_steps=2, model__n_layers=1, **CHANGES
    )

    def shrink() -> None:
        from llmtrain.training import components as build_module

        before = build_module.build_module

        def build(*arguments: Any) -> Any:
            module = before(*arguments)
            module.extra = torch.nn.Parameter(torch.arange(2.0))
            forward = module.forward
            module.forward = lambda *ids, **options: forward(*ids, **options) + module.extra.sum() * 0
            return module

        build_module.build_module = build

    ended = ranks.train_ranks(config, 4, before=shrink)
    result = ranks.values(ended)[0]
    checkpoint = checkpoint_of(tmp_path / "runs", 2)
    checkpoint.verify()
    model = checkpoint.tensors("model")
    assert model["extra"].shape == (2,)
    assert state_sha256(model, checkpoint.tensors("optimizer")) == result["state_sha256"]


def test_every_rank_refuses_another_model(of_two: Any, tmp_path: Path, cache: Path) -> None:
    root = harness.copy_root(of_two[0], tmp_path / "runs")
    config = harness.tiny_config(root, cache, distributed__strategy="fsdp", **{**CHANGES, "model__d_model": 32})
    ended = ranks.train_ranks(config, 2, harness.RUN_ID, allow_config_change=True)
    assert [end.code for end in ended] == [65, 65]
    for end in ended:
        assert end.error is not None
        assert end.error[0] == "CheckpointError"
        assert "has shape" in end.error[1]
    checkpoint_of(root).verify()

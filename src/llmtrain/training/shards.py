"""Tensors of a run in the files of its checkpoint: which rank writes what, and how any other number of ranks reads it.

    index.json   {"model": {"wte.weight": {"dtype": "float32", "shape": [256, 64], "pieces": [
                     {"file": "model-00001-of-00002.safetensors", "offset": [0, 0], "shape": [128, 64]}, ...]}}}

Every rank writes one file a group, holding what it owns: its slice of a sharded tensor, or its share of the tensors
that all ranks have alike. No tensor is put together for writing, nor for reading: a rank reads only what overlaps
with its own slice.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llmtrain.errors import CheckpointError
from llmtrain.training.state import Tensors

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, shape) inside the whole tensor
Index = dict[str, Any]


@dataclass(frozen=True)
class Shard:
    """What this rank writes of one group (`model` or `optimizer`)."""

    group: str
    tensors: Tensors
    """Local slices, by the name of the whole tensor."""
    entries: Index
    """For each: dtype and shape of the whole, offset and shape of the slice."""

    @property
    def byte_count(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def local_box(tensor: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """The part of a tensor this rank holds, and where it lies in the whole."""
    if not hasattr(tensor, "__create_chunk_list__"):  # what torch asks a sharded tensor for its part
        return tensor.detach(), ((0,) * tensor.dim(), tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()
    local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach(), (tuple(chunk.offsets), tuple(chunk.sizes))


def shard(group: str, tensors: Tensors, rank: int, world_size: int) -> Shard:
    mine: Tensors = {}
    entries: Index = {}
    owners = deal([(name, t) for name, t in sorted(tensors.items()) if not _is_sharded(t)], world_size)
    for name, tensor in sorted(tensors.items()):
        if owners.get(name, rank) != rank:
            continue
        local, (offset, shape) = local_box(tensor)
        if local.numel() or tensor.numel() == 0:
            mine[name] = local
            entries[name] = {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "piece": {"offset": list(offset), "shape": list(shape)},
            }
    return Shard(group, mine, entries)


def deal(tensors: list[tuple[str, torch.Tensor]], world_size: int) -> dict[str, int]:
    """Which rank writes which of the tensors that all have: the largest first, each to the rank with the least."""
    load = [0] * world_size
    owners = {}
    for name, tensor in sorted(tensors, key=lambda item: (-item[1].numel() * item[1].element_size(), item[0])):
        owner = load.index(min(load))
        owners[name] = owner
        load[owner] += tensor.numel() * tensor.element_size() + 1
    return owners


def file_name(group: str, rank: int, world_size: int) -> str:
    return f"{group}.safetensors" if world_size == 1 else f"{group}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def merge(parts: list[dict[str, tuple[str, Index]]]) -> Index:
    """One index from what every rank wrote: {group: (file, entries)} each."""
    index: Index = {}
    for part in parts:
        for group, (file, entries) in part.items():
            names = index.setdefault(group, {})
            for name, entry in entries.items():
                whole = names.setdefault(name, {"dtype": entry["dtype"], "shape": entry["shape"], "pieces": []})
                whole["pieces"].append({"file": file, **entry["piece"]})
    return index


def read_into(folder: Path, entries: Index, targets: Tensors) -> None:
    """Fill the targets, or this rank's slices of them, from the files of a checkpoint."""
    _check(folder, entries)
    if entries.keys() != targets.keys():
        missing, extra = sorted(targets.keys() - entries.keys()), sorted(entries.keys() - targets.keys())
        raise KeyError(f"missing {missing[:3]}, not expected {extra[:3]}")
    wanted: dict[str, list[tuple[str, torch.Tensor, Box, Box]]] = {}
    for name, target in targets.items():
        entry = entries[name]
        if list(target.shape) != entry["shape"]:
            raise ValueError(f"{name} has shape {entry['shape']}, not {list(target.shape)}")
        local, box = local_box(target)
        for piece in entry["pieces"]:
            stored = (tuple(piece["offset"]), tuple(piece["shape"]))
            wanted.setdefault(piece["file"], []).append((name, local, box, stored))
    for file, requests in wanted.items():
        _read_file(folder / file, requests)


def read_whole(folder: Path, entries: Index) -> Tensors:
    """Every tensor put together, on the CPU."""
    _check(folder, entries)
    targets = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for name, entry in entries.items()
    }
    read_into(folder, entries, targets)
    return targets


def _check(folder: Path, entries: Index) -> None:
    """Refuse an index that does not make sense before memory is given out for it."""
    for name, entry in entries.items():
        shape, pieces = entry.get("shape"), entry["pieces"]
        boxes = [shape, *(piece.get(key) for piece in pieces for key in ("offset", "shape"))]
        is_sized = isinstance(shape, list) and all(
            isinstance(box, list) and len(box) == len(shape) and all(isinstance(n, int) and n >= 0 for n in box)
            for box in boxes
        )
        covers = is_sized and sum(math.prod(piece["shape"]) for piece in pieces) == math.prod(shape)
        if not covers or not isinstance(getattr(torch, str(entry.get("dtype")), None), torch.dtype):
            raise CheckpointError(f"{folder / 'index.json'} is wrong about {name}.")


def _read_file(path: Path, requests: list[tuple[str, torch.Tensor, Box, Box]]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for name, target, wanted, stored in requests:
                common = overlap(wanted, stored)
                if common is None:
                    continue
                source = file.get_slice(name)[_slices(common, stored)] if stored[1] else file.get_tensor(name)
                target[_slices(common, wanted)].copy_(source)
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}.") from None


def overlap(a: Box, b: Box) -> Box | None:
    start = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    shape = tuple(e - s for s, e in zip(start, end, strict=True))
    return (start, shape) if all(n > 0 for n in shape) else None


def _slices(box: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(slice(s - o, s - o + n) for s, n, o in zip(*box, inside[0], strict=True))


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__create_chunk_list__")

"""Tensors of a run in the files of its checkpoint: which rank writes what, and how any other number of ranks reads it.

    index.json   {"model": {"wte.weight": {"dtype": "float32", "shape": [256, 64], "pieces": [
                     {"file": "model-00001-of-00002.safetensors", "offset": [0, 0], "shape": [128, 64]}, ...]}}}

Every rank writes one file a group, holding what it owns: its slice of a sharded tensor, or its share of the tensors
that all ranks have alike. No tensor is put together for writing, nor for reading: a rank reads only what overlaps
with its own slice.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llmtrain.checkpoint.state import Tensors
from llmtrain.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, shape) inside the whole tensor
Index = dict[str, Any]
# torch's names, and those that safetensors has for them
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}


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
    _check_index(folder, entries)
    _read(folder, entries, targets)


def _read(folder: Path, entries: Index, targets: Tensors) -> None:
    if entries.keys() != targets.keys():
        missing, extra = sorted(targets.keys() - entries.keys()), sorted(entries.keys() - targets.keys())
        raise KeyError(f"missing {missing[:3]}, not expected {extra[:3]}")
    wanted: dict[str, list[tuple[str, torch.Tensor, Box, Box, str]]] = {}
    for name, target in targets.items():
        entry = entries[name]
        if list(target.shape) != entry["shape"]:
            raise ValueError(f"{name} has shape {entry['shape']}, not {list(target.shape)}")
        local, box = local_box(target)
        for piece in entry["pieces"]:
            stored = (tuple(piece["offset"]), tuple(piece["shape"]))
            wanted.setdefault(piece["file"], []).append((name, local, box, stored, _DTYPES[entry["dtype"]]))
    for file, requests in wanted.items():
        _read_file(folder / file, requests)


def read_whole(folder: Path, entries: Index) -> Tensors:
    """Every tensor put together, on the CPU."""
    check(folder, entries)
    targets = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for name, entry in entries.items()
    }
    _read(folder, entries, targets)
    return targets


def check(folder: Path, entries: Index) -> None:
    """Refuse an index that does not make sense, or not with the tensors in its files."""
    wanted: dict[str, dict[str, tuple[list[int], str]]] = {}
    _check_index(folder, entries)
    for name, entry in entries.items():
        for piece in entry["pieces"]:
            wanted.setdefault(piece["file"], {})[name] = (piece["shape"], _DTYPES[entry["dtype"]])
    for file, tensors in wanted.items():
        with _opened(folder / file) as opened:
            for name, (shape, dtype) in tensors.items():
                _slice_of(opened, folder / file, name, shape, dtype)


def _check_index(folder: Path, entries: Index) -> None:
    """Before memory is given out for it: what no piece fills would be whatever was in memory."""
    for name, entry in entries.items():
        if not _is_covered(entry):
            raise CheckpointError(f"{folder / 'index.json'} is wrong about {name}.")


def _is_covered(entry: Any) -> bool:
    """Whether the pieces lie inside the whole and fill it, each place once."""
    if not isinstance(entry, dict) or str(entry.get("dtype")) not in _DTYPES or not _is_sizes(entry.get("shape")):
        return False
    shape, boxes = entry["shape"], []
    for piece in entry["pieces"]:
        offset, size = piece.get("offset"), piece.get("shape")
        if not _is_sizes(offset) or not _is_sizes(size) or not len(offset) == len(size) == len(shape):
            return False
        if any(start + count > whole for start, count, whole in zip(offset, size, shape, strict=True)):
            return False
        boxes.append((tuple(offset), tuple(size)))
    is_full = bool(boxes) and sum(math.prod(size) for _, size in boxes) == math.prod(shape)
    is_once = len({piece["file"] for piece in entry["pieces"]}) == len(boxes)  # a file has one piece of a tensor
    return is_full and is_once and not _do_overlap([box for box in boxes if math.prod(box[1])])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _do_overlap(boxes: list[Box]) -> bool:
    """Sorted along the first dimension, a box is held only against those that reach as far: slices of rows against
    none."""
    if boxes and not boxes[0][0]:
        return len(boxes) > 1  # scalars
    reaching: list[Box] = []
    for box in sorted(boxes):
        reaching = [other for other in reaching if other[0][0] + other[1][0] > box[0][0]]
        if any(overlap(box, other) for other in reaching):
            return True
        reaching.append(box)
    return False


def _read_file(path: Path, requests: list[tuple[str, torch.Tensor, Box, Box, str]]) -> None:
    with _opened(path) as file:
        for name, target, wanted, stored, dtype in requests:
            common = overlap(wanted, stored)
            if common is None:
                continue
            found = _slice_of(file, path, name, list(stored[1]), dtype)
            source = found[_slices(common, stored)] if stored[1] else file.get_tensor(name)
            target[_slices(common, wanted)].copy_(source)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}.") from None


def _slice_of(file: Any, path: Path, name: str, shape: list[int], dtype: str) -> Any:
    """A tensor of a file, of which only the header has been read yet."""
    found = file.get_slice(name)
    if (found.get_shape(), found.get_dtype()) != (shape, dtype):
        raise CheckpointError(f"{path}: {name} is not what index.json says of it.")
    return found


def overlap(a: Box, b: Box) -> Box | None:
    start = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    shape = tuple(e - s for s, e in zip(start, end, strict=True))
    return (start, shape) if all(n > 0 for n in shape) else None


def _slices(box: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(slice(s - o, s - o + n) for s, n, o in zip(*box, inside[0], strict=True))


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__create_chunk_list__")

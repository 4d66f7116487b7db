"""Tensors in the files of a checkpoint: which rank writes which, and how any other number of ranks reads them.

    index.json   {"model": {"wte.weight": {"dtype": "float32", "shape": [256, 64], "pieces": [
                     {"file": "model-00001-of-00002.safetensors", "offset": [0, 0], "shape": [128, 64]}, ...]}}}

Every rank writes one file per group with what it owns: its slices of sharded tensors, and its share of the tensors
that are replicated on all ranks. No tensor is gathered for writing or reading: a rank reads only what overlaps with
its own slice.
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

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, shape) of a slice within the full tensor
Index = dict[str, Any]
# names of dtypes in torch and in safetensors
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
    """What one rank writes of a group (`model` or `optimizer`)."""

    group: str
    tensors: Tensors
    """Local slices, by the name of the full tensor."""
    entries: Index
    """Tensor name -> dtype and shape of the full tensor, offset and shape of the slice."""

    @property
    def byte_count(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def local_box(tensor: torch.Tensor) -> tuple[torch.Tensor, Box]:
    """This rank's slice of a tensor, and its place in the full tensor."""
    if not _is_sharded(tensor):
        return tensor.detach(), ((0,) * tensor.dim(), tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach(), (tuple(chunk.offsets), tuple(chunk.sizes))


def shard(group: str, tensors: Tensors, rank: int, world_size: int) -> Shard:
    """What a rank writes of a group. safetensors refuses tensors that share memory or are not contiguous."""
    own: Tensors = {}
    storages: set[int] = set()
    entries: Index = {}
    replicated = [(name, tensor) for name, tensor in sorted(tensors.items()) if not _is_sharded(tensor)]
    owners = assign_owners(replicated, world_size)
    for name, tensor in sorted(tensors.items()):
        if owners.get(name, rank) != rank:
            continue
        local, (offset, shape) = local_box(tensor)
        if local.numel() or tensor.numel() == 0:  # a rank may have an empty slice of a tensor that is not
            storage = local.untyped_storage().data_ptr()
            own[name] = local.clone() if storage in storages else local.contiguous()
            storages.add(storage)
            entries[name] = {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "piece": {"offset": list(offset), "shape": list(shape)},
            }
    return Shard(group, own, entries)


def assign_owners(tensors: list[tuple[str, torch.Tensor]], world_size: int) -> dict[str, int]:
    """Which rank writes each replicated tensor: the largest first, to the rank with the least data so far."""
    load = [0] * world_size
    owners = {}
    for name, tensor in sorted(tensors, key=lambda item: (-item[1].numel() * item[1].element_size(), item[0])):
        owner = load.index(min(load))
        owners[name] = owner
        load[owner] += tensor.numel() * tensor.element_size() + 1
    return owners


def file_name(group: str, rank: int, world_size: int) -> str:
    if world_size == 1:
        return f"{group}.safetensors"
    return f"{group}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def merge_indexes(parts: list[dict[str, tuple[str, Index]]]) -> Index:
    """One index from those of the ranks, each {group: (file, entries)}."""
    index: Index = {}
    for part in parts:
        for group, (file, entries) in part.items():
            names = index.setdefault(group, {})
            for name, entry in entries.items():
                full = names.setdefault(name, {"dtype": entry["dtype"], "shape": entry["shape"], "pieces": []})
                full["pieces"].append({"file": file, **entry["piece"]})
    return index


def read_into(folder: Path, entries: Index, targets: Tensors) -> None:
    """Fill tensors, or this rank's slices of them, from the files of a checkpoint."""
    _check_coverage(folder, entries)
    _read(folder, entries, targets)


def _read(folder: Path, entries: Index, targets: Tensors) -> None:
    if entries.keys() != targets.keys():
        missing = sorted(targets.keys() - entries.keys())
        extra = sorted(entries.keys() - targets.keys())
        raise KeyError(f"missing {missing[:3]}, unexpected {extra[:3]}")
    by_file: dict[str, list[tuple[str, torch.Tensor, Box, Box, str]]] = {}
    for name, target in targets.items():
        entry = entries[name]
        if list(target.shape) != entry["shape"]:
            raise ValueError(f"{name} has shape {entry['shape']}, expected {list(target.shape)}")
        local, box = local_box(target)
        for piece in entry["pieces"]:
            stored = (tuple(piece["offset"]), tuple(piece["shape"]))
            by_file.setdefault(piece["file"], []).append((name, local, box, stored, _DTYPES[entry["dtype"]]))
    for file, requests in by_file.items():
        _read_file(folder / file, requests)


def read_full(folder: Path, entries: Index) -> Tensors:
    """All tensors, unsharded, on the CPU."""
    check_index(folder, entries)
    targets = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for name, entry in entries.items()
    }
    _read(folder, entries, targets)
    return targets


def check_index(folder: Path, entries: Index) -> None:
    """Raise CheckpointError if the index is inconsistent in itself or with the tensors in its files."""
    by_file: dict[str, dict[str, tuple[list[int], str]]] = {}
    _check_coverage(folder, entries)
    for name, entry in entries.items():
        for piece in entry["pieces"]:
            by_file.setdefault(piece["file"], {})[name] = (piece["shape"], _DTYPES[entry["dtype"]])
    for file, tensors in by_file.items():
        with _opened(folder / file) as opened:
            for name, (shape, dtype) in tensors.items():
                _slice_of(opened, folder / file, name, shape, dtype)


def _check_coverage(folder: Path, entries: Index) -> None:
    """Called before memory is allocated: a part that no piece fills would be uninitialized memory."""
    for name, entry in entries.items():
        if not _is_covered(entry):
            raise CheckpointError(f"{folder / 'index.json'} has an invalid entry for {name}.")


def _is_covered(entry: Any) -> bool:
    """Whether the pieces lie within the tensor and cover every element exactly once."""
    if not isinstance(entry, dict) or str(entry.get("dtype")) not in _DTYPES or not _is_sizes(entry.get("shape")):
        return False
    shape = entry["shape"]
    boxes: list[Box] = []
    for piece in entry["pieces"]:
        offset = piece.get("offset")
        size = piece.get("shape")
        if not _is_sizes(offset) or not _is_sizes(size) or not len(offset) == len(size) == len(shape):
            return False
        if any(start + count > total for start, count, total in zip(offset, size, shape, strict=True)):
            return False
        boxes.append((tuple(offset), tuple(size)))
    # Within the tensor, without overlap, and as many elements as it has: then every element is covered once.
    is_full = bool(boxes) and sum(math.prod(size) for _, size in boxes) == math.prod(shape)
    has_own_files = len({piece["file"] for piece in entry["pieces"]}) == len(boxes)  # one piece of a tensor per file
    return is_full and has_own_files and not _do_overlap([box for box in boxes if math.prod(box[1])])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _do_overlap(boxes: list[Box]) -> bool:
    """Sorted along the first dimension, so that a box is compared only with those that extend into it; slices of rows
    are compared with none."""
    if boxes and not boxes[0][0]:
        return len(boxes) > 1  # scalars
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        open_boxes = [other for other in open_boxes if other[0][0] + other[1][0] > box[0][0]]
        if any(overlap(box, other) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _read_file(path: Path, requests: list[tuple[str, torch.Tensor, Box, Box, str]]) -> None:
    with _opened(path) as file:
        for name, target, own, stored, dtype in requests:
            common = overlap(own, stored)
            if common is None:
                continue
            tensor = _slice_of(file, path, name, list(stored[1]), dtype)
            source = tensor[_slices(common, stored)] if stored[1] else file.get_tensor(name)
            target[_slices(common, own)].copy_(source)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}.") from None


def _slice_of(file: Any, path: Path, name: str, shape: list[int], dtype: str) -> Any:
    """A tensor of a file, of which only the header has been read."""
    tensor = file.get_slice(name)
    if (tensor.get_shape(), tensor.get_dtype()) != (shape, dtype):
        raise CheckpointError(f"{path}: shape or dtype of {name} does not match index.json.")
    return tensor


def overlap(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None if they do not overlap."""
    start = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    shape = tuple(e - s for s, e in zip(start, end, strict=True))
    if any(n <= 0 for n in shape):
        return None
    return start, shape


def _slices(box: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(slice(s - o, s - o + n) for s, n, o in zip(*box, inside[0], strict=True))


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; torch's own checkpointing calls this method for the local slice."""
    return hasattr(tensor, "__create_chunk_list__")

"""Muon for the matrices of the blocks, AdamW for everything else (embeddings, output layer, vectors), in one optimizer.

Muon's update is the momentum of the gradient with its singular values replaced by 1 (newton_schulz.py). It is scaled by
sqrt(max(1, rows / columns)), so that a step changes what a matrix makes of its input by the same amount whatever its
shape, and one learning rate fits all widths. The alternative, updates as large as AdamW's (torch's `match_rms_adamw`),
needs a lower learning rate the wider the model is, as AdamW does.

With several processes each matrix has an owner that orthogonalizes its update; the results are exchanged. Replicated
parameters (ddp) have their momentum on every rank. Of sharded ones (fsdp) each rank has its rows, and the owner gets
the rows of the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from llmtrain.training.newton_schulz import compute_dtype, cost, orthogonalize_

ADAMW_EPSILON = 1e-8
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13

Views = list[torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """Consecutive rows of a parameter that are orthogonalized together: all, or one of the matrices fused into it."""

    parameter: int
    """Index in the parameter group."""
    start: int
    rows: int
    columns: int
    owner: int
    """Rank that orthogonalizes it."""

    @property
    def scale(self) -> float:
        return math.sqrt(max(1.0, self.rows / self.columns))


def plan_matrices(
    shapes: Sequence[tuple[int, int]], sections: Sequence[Sequence[int]], world_size: int
) -> list[Matrix]:
    """The matrices of parameters. `sections`: per parameter the row counts of the matrices fused into it, or none. The
    most costly matrices are assigned first, to the rank with the least work so far."""
    found = []
    for parameter, ((rows, columns), heights) in enumerate(zip(shapes, sections, strict=True)):
        start = 0
        for height in heights or (rows,):
            found.append(Matrix(parameter, start, height, columns, owner=0))
            start += height
        assert start == rows, f"sections {list(heights)} of a matrix with {rows} rows"
    load = [0] * world_size
    for index in sorted(range(len(found)), key=lambda i: (-cost(found[i].rows, found[i].columns), i)):
        matrix = found[index]
        owner = load.index(min(load))
        load[owner] += cost(matrix.rows, matrix.columns)
        found[index] = Matrix(matrix.parameter, matrix.start, matrix.rows, matrix.columns, owner)
    return found


class Muon(torch.optim.Optimizer):
    """The first parameter group holds the matrices. `step` overwrites their gradients."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        sections: Sequence[Sequence[int]],
        rank: int,
        world_size: int,
        batched: bool,
        uses_kernel: bool = False,
    ) -> None:
        """`sections`: see plan_matrices. `batched` and `uses_kernel`: see orthogonalize_."""
        super().__init__(groups, {})
        matrices, *others = self.param_groups
        shapes = [cast(tuple[int, int], tuple(parameter.shape)) for parameter in matrices["params"]]
        self._plan = plan_matrices(shapes, sections, world_size)
        self._heights = [rows for rows, _ in shapes]
        self._rank = rank
        self._world_size = world_size
        self._how = {"batched": batched, "uses_kernel": uses_kernel}
        self._owned: list[list[int]] = [[] for _ in range(world_size)]  # by rank, the indexes of its matrices
        for index, matrix in enumerate(self._plan):
            self._owned[matrix.owner].append(index)
        # Created here and not by the first step: a checkpoint is loaded before.
        for parameter in matrices["params"]:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        for group in others:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        matrices, *others = self.param_groups
        self._step_matrices(matrices)
        for group in others:
            self._step_adamw(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        parameters = group["params"]
        weights = [_local(parameter) for parameter in parameters]
        momenta = [_local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        updates = []  # the gradients, which become the updates in place
        for parameter in parameters:
            has_grad = parameter.grad is not None
            updates.append(_local(parameter.grad) if has_grad else torch.zeros_like(_local(parameter)))
        lr = group["lr"]
        momentum = group["momentum"]
        torch._foreach_lerp_(momenta, updates, 1 - momentum)
        torch._foreach_lerp_(updates, momenta, momentum)  # Nesterov
        self._orthogonalize_(updates, is_sharded=hasattr(parameters[0], "to_local"))
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-lr)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=ADAMW_EPSILON,
            maximize=False,
        )

    def _orthogonalize_(self, updates: Views, is_sharded: bool) -> None:
        """Orthogonalize and scale the updates, of which each rank has its rows or all."""
        views = []
        for matrix in self._plan:
            start, end = self._rows_of(matrix, self._rank, is_sharded)
            views.append(updates[matrix.parameter][start:end])
        if is_sharded and self._world_size > 1:
            self._orthogonalize_shards_(views)
        else:
            orthogonalize_([views[i] for i in self._owned[self._rank]], **self._how)
            if self._world_size > 1:
                self._share_results_(views)
        tall = [index for index, matrix in enumerate(self._plan) if matrix.scale != 1.0]
        if tall:
            torch._foreach_mul_([views[i] for i in tall], [self._plan[i].scale for i in tall])

    def _rows_of(self, matrix: Matrix, rank: int, is_sharded: bool) -> tuple[int, int]:
        """Start and end of a matrix in what a rank has of its parameter. fsdp gives each rank ceil(rows / ranks)."""
        height = self._heights[matrix.parameter]
        first = 0
        last = height
        if is_sharded:
            chunk = -(-height // self._world_size)
            first = min(rank * chunk, height)
            last = min(first + chunk, height)
        start = min(max(matrix.start, first), last)
        end = min(max(matrix.start + matrix.rows, first), last)
        return start - first, end - first

    def _share_results_(self, views: Views) -> None:
        """Send the matrices of this rank to all others. Results of bfloat16 products lose nothing in bfloat16."""
        by_rank = []
        for owned in self._owned:
            by_rank.append([views[i] for i in owned])
        size = max(_size(part) for part in by_rank)  # all_gather needs equal sizes: smaller parts are padded
        own = torch.zeros(size, dtype=compute_dtype(views[0].device), device=views[0].device)
        _pack_(own, by_rank[self._rank])
        received = torch.empty(self._world_size * size, dtype=own.dtype, device=own.device)
        _all_gather(received, own)
        for rank, part in enumerate(torch.split(received, size)):
            if rank != self._rank:
                _unpack_(by_rank[rank], part)

    def _orthogonalize_shards_(self, views: Views) -> None:
        """Send the rows of each matrix to its owner, which orthogonalizes it and sends them back.

        views: one per matrix of the plan, (rows of this rank, columns); it may have no rows.
        """
        device = views[0].device
        dtype = compute_dtype(device)
        # What this rank sends: its rows of all matrices, sorted by their owner.
        outgoing: Views = []
        sent_sizes = []  # elements for each owner
        for owned in self._owned:
            part = [views[i] for i in owned]
            outgoing += part
            sent_sizes.append(_size(part))
        # What it receives: the rows that each rank has of its own matrices, as views of the whole ones.
        mine = [self._plan[i] for i in self._owned[self._rank]]
        wholes = [torch.empty(matrix.rows, matrix.columns, dtype=dtype, device=device) for matrix in mine]
        by_rank = self._rows_by_rank(mine, wholes)
        incoming = list(chain.from_iterable(by_rank))
        received_sizes = [_size(part) for part in by_rank]  # elements from each rank

        sent = torch.empty(sum(sent_sizes), dtype=dtype, device=device)
        received = torch.empty(sum(received_sizes), dtype=dtype, device=device)
        _pack_(sent, outgoing)
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes)
        _unpack_(incoming, received)
        orthogonalize_(wholes, **self._how)
        # The way back, in the same buffers with their roles exchanged.
        _pack_(received, incoming)
        dist.all_to_all_single(sent, received, sent_sizes, received_sizes)
        _unpack_(outgoing, sent)

    def _rows_by_rank(self, matrices: Sequence[Matrix], wholes: Views) -> list[Views]:
        """By rank, the rows that it has of each matrix: views of the whole matrices, (rows of the rank, columns)."""
        by_rank: list[Views] = []
        filled = [0] * len(matrices)  # per matrix, the rows of the ranks before
        for rank in range(self._world_size):
            views = []
            for index, matrix in enumerate(matrices):
                start, end = self._rows_of(matrix, rank, is_sharded=True)
                first = filled[index]
                filled[index] += end - start
                views.append(wholes[index][first : filled[index]])
            by_rank.append(views)
        return by_rank


def _size(views: Views) -> int:
    """Number of elements."""
    return sum(view.numel() for view in views)


def _pack_(flat: torch.Tensor, views: Views) -> None:
    if views:  # none on a rank that has no matrix
        torch._foreach_copy_(_parts(flat, views), views)


def _unpack_(views: Views, flat: torch.Tensor) -> None:
    if views:
        torch._foreach_copy_(views, _parts(flat, views))


def _parts(flat: torch.Tensor, views: Views) -> Views:
    """Consecutive parts of a flat tensor, in the shapes of the views."""
    sizes = [view.numel() for view in views]
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view_as(view) for part, view in zip(parts, views, strict=True)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

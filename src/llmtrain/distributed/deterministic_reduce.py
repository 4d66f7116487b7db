"""Sums gradients in one fixed order, whatever the number of processes.

The micro-batches of a step are the leaves of a tree: their number is halved while it is even, and the odd remainder is
summed from left to right. Each of 2**n processes owns a whole subtree and sums it locally; the subtrees are then
exchanged in pairs. `a + b` and `b + a` have the same bits, so both partners hold the same sum.
"""

import torch
import torch.distributed as dist
from torch import nn

Gradients = list[torch.Tensor]
BUCKET_ELEMENTS = 8 << 20  # 32 MB of float32 per exchange


class GradientTree:
    def __init__(self, module: nn.Module, rank: int, world_size: int, micro_batches: int) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._rank = rank
        self._world_size = world_size
        self._leaves = odd_part(micro_batches)  # summed from left to right, by autograd itself
        self._micro_batches = 0
        self._branches: list[tuple[int, Gradients]] = []  # (level, sum), from the left
        self._with_gradient: set[nn.Parameter] = set()
        self.without_gradient: list[nn.Parameter] = []
        """Parameters that no micro-batch of this rank gave a gradient in the last step. Their sum is zero."""

    def add_micro_batch(self) -> None:
        """Called after the backward pass of each micro-batch."""
        self._micro_batches += 1
        if self._micro_batches % self._leaves:
            return
        level = 0
        carried = self._detach_gradients()
        while self._branches and self._branches[-1][0] == level:
            _, left = self._branches.pop()
            torch._foreach_add_(left, carried)
            level += 1
            carried = left
        self._branches.append((level, carried))

    def finish(self) -> None:
        """Set the parameters' gradients to the sum over all micro-batches of all processes."""
        # One subtree is left: batch_split.py refuses other numbers of processes.
        ((_, total),) = self._branches
        self._branches = []
        self._micro_batches = 0
        distance = 1
        while distance < self._world_size:
            for bucket in _buckets(total):
                _add_from_partner(bucket, self._rank ^ distance)
            distance *= 2
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient
        self.without_gradient = [p for p in self._parameters if p not in self._with_gradient]
        self._with_gradient.clear()

    def _detach_gradients(self) -> Gradients:
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is None:
                gradients.append(torch.zeros_like(parameter))
            else:
                gradients.append(parameter.grad)
                self._with_gradient.add(parameter)
            parameter.grad = None
        return gradients


def odd_part(number: int) -> int:
    while number % 2 == 0:
        number //= 2
    return number


def _buckets(gradients: Gradients) -> list[Gradients]:
    buckets: list[Gradients] = [[]]
    size = 0
    for gradient in gradients:
        if buckets[-1] and size + gradient.numel() > BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.numel()
    return [bucket for bucket in buckets if bucket]


def _add_from_partner(bucket: Gradients, partner: int) -> None:
    sent = torch.cat([gradient.reshape(-1) for gradient in bucket])
    received = torch.empty_like(sent)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    ):
        work.wait()
    parts = torch.split(received, [gradient.numel() for gradient in bucket])
    torch._foreach_add_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])

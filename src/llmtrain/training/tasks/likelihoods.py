"""Log-likelihoods of given tokens. What the requests of one item have in common is computed once.

Batches are formed from all requests, whatever the number of processes, and one process computes a whole batch: results
have the same bits on any number of them. A batch has two parts: the tokens that all requests of an item begin with, one
row per item, and with the keys and values of those what follows, one row per request. Where the model has no cache, or
its weights are sharded, the second part has everything.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmtrain.errors import DataError, Interrupted
from llmtrain.models.base import evaluating
from llmtrain.models.sizes import CHUNK_ELEMENTS
from llmtrain.training.tasks.task_model import TaskModel
from llmtrain.training.text_generation import not_compiled

MIN_SHARED = 8
"""Shorter common beginnings are computed again for each request: they are not worth a forward pass of their own."""
PASS_TOKENS = 100
"""What a batch costs beyond its tokens (every weight is read again), as tokens: so many may be computed twice, or be
padding, to save one."""
CACHED_ROWS = 4
"""Rows with cached keys and values per row of the batch size: each takes the memory of a whole text."""
MAX_BATCH_TOKENS = 16_384
"""A window of a long text may fill the context of the model: several of those do not fit into memory."""
PROBE_TOKENS = 12


@dataclass(frozen=True)
class Request:
    """A continuation to score after a context of at least one token."""

    context: Sequence[int]
    continuation: Sequence[int]
    item: Hashable
    """Requests of the same item follow each other; only those share their beginning."""


@dataclass(frozen=True)
class Likelihood:
    value: float
    """Sum of the log-probabilities of the tokens of the continuation."""
    is_greedy: bool
    """Whether each of them is the most likely one."""
    is_truncated: bool
    """Whether the beginning of the context was cut off, because the model cannot read that much."""


@dataclass(frozen=True)
class _Row:
    inputs: Sequence[int]
    targets: Sequence[int]
    """The tokens that follow the last len(targets) inputs."""
    number: int
    """Of the request."""


@dataclass(frozen=True)
class _Batch:
    shared: int
    """Length of the common beginnings; 0 if there are none."""
    items: list[list[_Row]]

    @property
    def rows(self) -> list[_Row]:
        return [row for item in self.items for row in item]


_Scored = tuple[int, float, bool]
"""(number of the request, log-likelihood, whether it is greedy)"""


def is_cut(request: Request, max_length: int) -> bool:
    """Whether the beginning of its text is cut off, because the model cannot read that much."""
    return len(request.context) + len(request.continuation) - 1 > max_length


@torch.no_grad()
def log_likelihoods(model: TaskModel, requests: Sequence[Request]) -> list[Likelihood]:
    """One per request, in their order. Every rank has all of them."""
    rows = [_row(request, number, model.max_length) for number, request in enumerate(requests)]
    mine: list[_Scored] = []
    with evaluating(model.module), not_compiled(model.module), model.autocast():
        batches = _batches(rows, requests, model.batch_size, shares=_can_share(model))
        world = model.world
        done = 0
        for first in range(0, len(batches), world.world_size):
            if model.stop():
                raise Interrupted("Interrupted before the tasks were scored.", remedy="Run the same command again.")
            model.on_progress("Scoring", done, len(rows))
            number = first + world.rank
            if number < len(batches):
                mine += _score(model, batches[number])
            elif model.is_sharded:
                _score(model, batches[first])  # with the others: its weights are gathered from all ranks
            done += sum(len(batch.rows) for batch in batches[first : first + world.world_size])
    found: list[Likelihood | None] = [None] * len(rows)
    for of_rank in model.world.control.gather(mine):
        for number, value, is_greedy in of_rank:
            found[number] = Likelihood(value, is_greedy, is_cut(requests[number], model.max_length))
    return [each for each in found if each is not None]


def _row(request: Request, number: int, max_length: int) -> _Row:
    """What the model reads: the end of the text, if all of it is too long."""
    tokens = [*request.context, *request.continuation][-(max_length + 1) :]
    inputs = tokens[:-1]
    count = min(len(request.continuation), len(inputs))
    return _Row(inputs, tokens[len(tokens) - count :], number)


# Batches


def _batches(rows: Sequence[_Row], requests: Sequence[Request], batch_size: int, shares: bool) -> list[_Batch]:
    """Longest first, so that the first batch shows whether memory suffices."""
    shared: list[tuple[int, list[_Row]]] = []
    single: list[_Row] = []
    for item in _items(rows, requests):
        length = _common_length(item)
        if shares and len(item) > 1 and length >= MIN_SHARED:
            shared.append((length, item))
        else:
            single += item
    shared.sort(key=lambda each: (-each[0], -_longest(each[1]), each[1][0].number))
    single.sort(key=lambda row: (-len(row.inputs), row.number))
    batches = list(_shared_batches(shared, batch_size))
    first = 0
    while first < len(single):
        end = first + _row_limit(batch_size, len(single[first].inputs))
        batches.append(_Batch(0, [[row] for row in single[first:end]]))
        first = end
    return batches


def _row_limit(batch_size: int, length: int) -> int:
    """Rows of a batch: fewer than the batch size if the longest one is very long."""
    return max(1, min(batch_size, MAX_BATCH_TOKENS // max(1, length)))


def _items(rows: Sequence[_Row], requests: Sequence[Request]) -> Iterator[list[_Row]]:
    item: list[_Row] = []
    for row, request in zip(rows, requests, strict=True):
        if item and requests[item[0].number].item != request.item:
            yield item
            item = []
        item.append(row)
    if item:
        yield item


def _common_length(item: Sequence[_Row]) -> int:
    """How many inputs all rows begin with."""
    length = 0
    for tokens in zip(*(row.inputs for row in item), strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return length


def _longest(item: Sequence[_Row]) -> int:
    return max(len(row.inputs) for row in item)


@dataclass(frozen=True)
class _Shape:
    """Size of a batch that shares beginnings."""

    items: int
    rows: int
    shared: int
    longest: int

    @property
    def tokens(self) -> int:
        return self.items * self.shared + self.rows * (self.longest - self.shared)

    def joined(self, other: "_Shape") -> "_Shape":
        shared = min(self.shared, other.shared)
        longest = max(self.longest, other.longest)
        return _Shape(self.items + other.items, self.rows + other.rows, shared, longest)

    def fits(self, batch_size: int) -> bool:
        """Whether no forward pass has more tokens than `batch_size` whole texts."""
        limit = _row_limit(batch_size, self.longest)
        largest_pass = max(self.items * self.shared, self.rows * (self.longest - self.shared))
        return largest_pass <= limit * self.longest and self.rows <= CACHED_ROWS * limit


def _shared_batches(items: Sequence[tuple[int, list[_Row]]], batch_size: int) -> Iterator[_Batch]:
    """An item joins the batch before it unless that costs more than a batch of its own."""
    batch: list[list[_Row]] = []
    shape = _Shape(0, 0, 0, 0)
    for length, item in items:
        alone = _Shape(1, len(item), length, _longest(item))
        joined = shape.joined(alone) if batch else alone
        is_cheaper = joined.tokens <= shape.tokens + alone.tokens + PASS_TOKENS
        if batch and not (joined.fits(batch_size) and is_cheaper):
            yield _Batch(shape.shared, batch)
            batch = []
            joined = alone
        batch.append(item)
        shape = joined
    if batch:
        yield _Batch(shape.shared, batch)


# Forward passes


def _score(model: TaskModel, batch: _Batch) -> list[_Scored]:
    hidden = _target_states(model, batch)  # (N, C)
    targets = torch.tensor([token for row in batch.rows for token in row.targets], device=model.device)  # (N,)
    values, is_best = _target_log_probabilities(model, hidden, targets)
    scored = []
    start = 0
    for row in batch.rows:
        end = start + len(row.targets)
        scored.append((row.number, float(values[start:end].sum()), bool(is_best[start:end].all())))
        start = end
    return scored


def _target_states(model: TaskModel, batch: _Batch) -> torch.Tensor:
    """The hidden states that predict the targets of all rows, one after the other."""
    shared = batch.shared
    cache: Any = None
    before: torch.Tensor | None = None
    if shared:
        cache = model.adapter.new_cache(model.module, max(_longest(item) for item in batch.items))
        beginnings = torch.tensor([list(item[0].inputs[:shared]) for item in batch.items], device=model.device)
        before = model.adapter.hidden_states(model.module, beginnings, cache)  # (items, shared, C)
    following = [list(row.inputs[shared:]) for row in batch.rows]
    width = max(len(tokens) for tokens in following)
    after: torch.Tensor | None = None
    if width:
        if shared:
            item_of_row = [number for number, item in enumerate(batch.items) for _ in item]
            model.adapter.select_rows(cache, torch.tensor(item_of_row, device=model.device))
        # Nothing sees the padding: it is at the end, and attention is causal.
        padded = [tokens + [0] * (width - len(tokens)) for tokens in following]
        tokens = torch.tensor(padded, device=model.device)
        after = _states(model, tokens, cache)  # (rows, width, C)
    parts = []
    row_number = 0
    for item_number, item in enumerate(batch.items):
        for row in item:
            first = len(row.inputs) - len(row.targets)
            if before is not None and first < shared:
                parts.append(before[item_number, first:shared])
            if after is not None and len(row.inputs) > shared:
                parts.append(after[row_number, max(0, first - shared) : len(row.inputs) - shared])
            row_number += 1
    return torch.cat(parts)


def _states(model: TaskModel, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    if model.is_sharded:  # only the module's own forward pass gathers its weights
        return torch.as_tensor(model.module(tokens))
    return model.adapter.hidden_states(model.module, tokens, cache)


def _target_log_probabilities(
    model: TaskModel, hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) log-probabilities of the targets, in float64 so that their sum is exact, and whether each is the largest."""
    values = []
    is_best = []
    size = max(1, CHUNK_ELEMENTS[model.device.type] // model.adapter.vocab_size)
    for start in range(0, len(targets), size):
        chunk = hidden[start : start + size]
        logits = chunk if model.is_sharded else model.adapter.output_logits(model.module, chunk)
        logits = logits.float()  # (n, V)
        index = targets[start : start + size].unsqueeze(1)
        norm = logits.logsumexp(1, keepdim=True)
        values.append((logits.gather(1, index) - norm).squeeze(1).double())
        is_best.append(logits.argmax(1) == index.squeeze(1))
    found = torch.cat(values).cpu()
    if not found.isfinite().all():
        raise DataError(
            "The model computes values that are not finite: its weights are damaged, or its training diverged.",
            remedy="Use an earlier checkpoint.",
            reason="not_finite",
        )
    return found, torch.cat(is_best).cpu()


def _can_share(model: TaskModel) -> bool:
    """Found out once per model."""
    if not model.can_share:
        model.can_share.append(_is_cache_exact(model))
    return model.can_share[0]


def _is_cache_exact(model: TaskModel) -> bool:
    """Whether a text in two parts, the second with the cache of the first, has the logits of the whole text. Not every
    architecture of transformers has keys and values to keep."""
    if model.is_sharded or model.max_length < PROBE_TOKENS:
        return False
    tokens = torch.arange(2 * PROBE_TOKENS, device=model.device).view(2, PROBE_TOKENS) % model.adapter.vocab_size
    half = PROBE_TOKENS // 2
    try:
        cache = model.adapter.new_cache(model.module, PROBE_TOKENS)
        if cache is None:
            return False
        whole = _logits(model, tokens, None)[:, half:]
        _logits(model, tokens[:1, :half], cache)
        model.adapter.select_rows(cache, torch.zeros(2, dtype=torch.int64, device=model.device))
        following = torch.cat([tokens[:1, half:], tokens[:1, half:]])
        parts = _logits(model, following, cache)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    difference = (parts - whole[:1]).nan_to_num(posinf=0.0, neginf=0.0).abs().max()
    is_exact = whole.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    largest = whole.nan_to_num(posinf=0.0, neginf=0.0).abs().max()
    return bool(difference <= (1e-4 if is_exact else 0.05) * (1 + largest))


def _logits(model: TaskModel, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    hidden = model.adapter.hidden_states(model.module, tokens, cache)
    flat = model.adapter.output_logits(model.module, hidden.reshape(-1, hidden.shape[-1]))
    return flat.view(*tokens.shape, -1)

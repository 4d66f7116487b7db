"""Log-likelihoods: those of the whole text, whatever is shared, batched, or computed by other processes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import rank_harness as ranks
import task_models
import torch
from task_models import choice_items, gpt_model, llama_model, write_items

from llmtrain.distributed.world import World
from llmtrain.errors import DataError, Interrupted
from llmtrain.training.tasks import likelihoods
from llmtrain.training.tasks.likelihoods import Likelihood, Request, log_likelihoods
from llmtrain.training.tasks.own_tasks import read_task
from llmtrain.training.tasks.task_model import TaskModel

Make = Callable[..., TaskModel]
MODELS = ("gpt2", "modern", "llama")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    base = tmp_path_factory.mktemp("models") / "llama"

    def make(kind: str, **options: object) -> TaskModel:
        return llama_model(base, **options) if kind == "llama" else gpt_model(kind, **options)

    return make


def requests_of(model: TaskModel, count: int = 12) -> list[Request]:
    """Items that share long beginnings, short ones and none; continuations of one token and of several."""
    requests = []
    for number, item in enumerate(choice_items(count)):
        for choice in item["choices"]:
            before, tokens = model.encode_pair(item["question"], " " + choice)
            requests.append(Request(before, tokens, number))
    requests += [Request([5] * 20 + [end], [7, 8], "ends differ") for end in (1, 2, 3)]
    requests += [Request([9] * 30, [token], "one token") for token in (4, 5, 6)]
    requests += [Request([3], [4, 5], "alone")]
    return requests


@torch.no_grad()
def one_by_one(model: TaskModel, requests: list[Request]) -> list[tuple[float, bool]]:
    """What each request is, by a forward pass over its whole text."""
    expected = []
    for request in requests:
        tokens = [*request.context, *request.continuation]
        logits = model.module(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
        count = len(request.continuation)
        found = logits[-count:]
        index = torch.tensor(request.continuation)
        value = float(found.gather(1, index[:, None]).sum())
        expected.append((value, bool((found.argmax(1) == index).all())))
    return expected


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_every_request_has_the_likelihood_of_its_whole_text(make: Make, kind: str, batch_size: int) -> None:
    model = make(kind, batch_size=batch_size)
    requests = requests_of(model)
    found = log_likelihoods(model, requests)
    for each, (value, is_greedy) in zip(found, one_by_one(model, requests), strict=True):
        assert each.value == pytest.approx(value, abs=1e-5)
        assert each.is_greedy == is_greedy
        assert not each.is_truncated


@pytest.mark.parametrize("kind", MODELS)
def test_common_beginnings_are_computed_once(make: Make, kind: str) -> None:
    model = make(kind, batch_size=64)
    requests = [Request([5] * 40, [token, 3, 4], "item") for token in range(10, 30)]
    tokens = 0

    def count(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal tokens
        tokens += args[0].numel()

    embedding = next(part for part in model.module.modules() if isinstance(part, torch.nn.Embedding))
    handle = embedding.register_forward_pre_hook(count)
    log_likelihoods(model, requests)
    handle.remove()
    probe = 2 * likelihoods.PROBE_TOKENS + likelihoods.PROBE_TOKENS // 2 + 2 * likelihoods.PROBE_TOKENS // 2
    assert tokens <= probe + 40 + len(requests) * 2


def test_a_batch_holds_as_many_items_as_a_forward_pass_has_room_for(make: Make) -> None:
    """Few forward passes: each reads all weights."""
    model = make("gpt2", batch_size=8)
    requests = []
    for number in range(16):  # their common beginnings have 20 to 23 tokens
        requests += [Request([5] * (20 + number % 4) + [end], [7, 8], number) for end in (1, 2, 3, 4)]
    passes: list[int] = []
    embedding = next(part for part in model.module.modules() if isinstance(part, torch.nn.Embedding))
    log_likelihoods(model, requests[:4])  # finds out whether the cache is exact
    handle = embedding.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].numel()))
    found = log_likelihoods(model, requests)
    handle.remove()
    assert len(passes) == 4  # 16 items in batches of 8, each in two parts
    assert max(passes) <= 8 * 25
    for each, (value, _) in zip(found, one_by_one(model, requests), strict=True):
        assert each.value == pytest.approx(value, abs=1e-5)


def test_an_outlier_is_not_padded_to_the_length_of_others(make: Make) -> None:
    model = make("gpt2", batch_size=64)
    requests = [Request([5] * 300 + [end], [7, 8], "long") for end in (1, 2)]
    requests += [Request([6] * 10 + [end], [7, 8], "short") for end in (1, 2)]
    assert len(likelihoods._batches(rows_of(model, requests), requests, 64, shares=True)) == 2


def rows_of(model: TaskModel, requests: list[Request]) -> list[likelihoods._Row]:
    return [likelihoods._row(request, number, model.max_length) for number, request in enumerate(requests)]


def test_a_model_without_a_cache_is_scored_alike(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt2", batch_size=4)
    requests = requests_of(model)
    shared = log_likelihoods(model, requests)
    monkeypatch.setattr(type(model.adapter), "new_cache", lambda *_: None)
    alone = log_likelihoods(make("gpt2", batch_size=4), requests)
    assert [each.value for each in alone] == pytest.approx([each.value for each in shared], abs=1e-5)


def test_a_cache_that_does_not_hold_what_it_should_is_not_used(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an architecture whose state is not keys and values."""
    model = make("gpt2", batch_size=4)
    requests = requests_of(model)
    expected = [each.value for each in log_likelihoods(model, requests)]
    right = type(model.adapter).hidden_states
    monkeypatch.setattr(
        type(model.adapter), "hidden_states", lambda self, module, tokens, *_: right(self, module, tokens)
    )
    found = log_likelihoods(make("gpt2", batch_size=4), requests)
    assert [each.value for each in found] == pytest.approx(expected, abs=1e-5)


def test_long_texts_are_cut_at_the_beginning_and_counted(make: Make) -> None:
    model = make("gpt2")
    length = model.max_length
    long = list(range(200)) * 4
    fits, cut = log_likelihoods(
        model, [Request(long[: length - 1], [1, 2], "fits"), Request(long[: length + 50], [1, 2], "cut")]
    )
    assert (fits.is_truncated, cut.is_truncated) == (False, True)
    (same,) = log_likelihoods(model, [Request(long[: length + 50][-(length - 1) :], [1, 2], "same")])
    assert cut.value == pytest.approx(same.value, abs=1e-5)


def test_weights_that_are_not_finite_are_an_error(make: Make) -> None:
    model = make("gpt2")
    with torch.no_grad():
        next(model.module.parameters()).fill_(float("nan"))
    with pytest.raises(DataError) as error:
        log_likelihoods(model, [Request([1], [2], 0)])
    assert error.value.reason == "not_finite"


def test_it_stops_between_batches(make: Make) -> None:
    with pytest.raises(Interrupted):
        log_likelihoods(make("gpt2", stop=lambda: True), [Request([1], [2], 0)])


def scored(world: World, path: Path, kind: str, batch_size: int) -> list[Likelihood]:
    model = task_models.gpt_model(kind, world, batch_size=batch_size)
    items = read_task(path, "items", 0, None)
    requests = []
    for number, item in enumerate(items.scored):
        for choice in item.choices:
            requests.append(Request(*model.encode_pair(item.question, " " + choice), number))
    return log_likelihoods(model, requests)


@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_the_bits_do_not_depend_on_the_number_of_processes(tmp_path: Path, kind: str) -> None:
    path = write_items(tmp_path / "items.jsonl", choice_items(30))
    (alone,) = ranks.values(ranks.run_ranks(1, lambda world: scored(world, path, kind, 4)))
    for count in (2, 4):
        for found in ranks.values(ranks.run_ranks(count, lambda world: scored(world, path, kind, 4))):
            assert [each.value.hex() for each in found] == [each.value.hex() for each in alone]
            assert found == alone


def test_very_long_texts_are_scored_in_smaller_batches(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt2", batch_size=8)
    requests = requests_of(model)
    expected = [each.value for each in log_likelihoods(model, requests)]
    monkeypatch.setattr(likelihoods, "MAX_BATCH_TOKENS", 100)
    sizes: list[int] = []
    embedding = next(part for part in model.module.modules() if isinstance(part, torch.nn.Embedding))
    handle = embedding.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    found = [each.value for each in log_likelihoods(model, requests)]
    handle.remove()
    assert found == pytest.approx(expected, abs=1e-5)
    longest = max(len(request.context) + len(request.continuation) for request in requests)
    assert max(sizes) <= max(100, 5 * longest)  # the requests of one item stay together

"""The losses of preference tuning: their closed forms, and that they do not depend on how pairs become batches."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.config.objective import OBJECTIVES
from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.models import group_losses
from llmtrain.models import losses as losses_module
from llmtrain.training.components import Components, build_components, build_objective
from llmtrain.training.model_handle import ModelHandle, build_model
from llmtrain.training.objectives.preference import Answers, PreferenceObjective
from llmtrain.training.objectives.references import compute_references, identify_reference, with_references
from preference_data import make_pairs, preference_config
from tiny_llama import make_model

WORLD = World(device=torch.device("cpu"))
PAIRS = 8
LORA = {"rank": 4, "alpha": 8.0}
GPT = {"name": "gpt", "block_size": 128, "d_model": 32, "n_layers": 2, "n_heads": 2}
MODERN = {**GPT, "architecture": "modern", "mlp": "swiglu"}
Make = Callable[..., "Loaded"]
Step = tuple[float, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Loaded:
    """A model at step 0, with references if its objective needs them."""

    config: Config
    components: Components
    model: ModelHandle

    def step(self) -> Step:
        """Loss and gradients of the first step."""
        micro_batches = self.components.micro_batches
        batches = [self.components.train_batches[number] for number in range(micro_batches)]
        objective = self.components.objective
        items = sum(objective.items(batch) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = objective.sums(self.model, batch).loss / items
            loss.backward()
            total += loss.item()
        gradients = {}
        for name, parameter in self.model.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.clone()
                parameter.grad = None
        return total, gradients

    def move(self) -> None:
        """Change the weights, so that the model is no longer its reference; LoRA's then have a gradient each."""
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.model.module.parameters():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("pairs")
    make_pairs(folder / "train.jsonl", PAIRS)
    make_pairs(folder / "val.jsonl", 3, first=100)
    base = make_model(folder / "base")

    def load(
        model: dict[str, Any] | None = None,
        size: int = 1,
        count: int = 8,
        dtype: torch.dtype = torch.float32,
        **changes: Any,
    ) -> Loaded:
        """`size` samples per micro-batch, `count` micro-batches per step."""
        model = model or {"name": "hf_causal_lm", "path": str(base), "block_size": 64, "lora": LORA}
        if model["name"] != "hf_causal_lm":
            changes["data__packing"] = False
        batch = {"trainer__micro_batch_size": size, "trainer__grad_accum_steps": count}
        config = preference_config(folder, model, **{**batch, **changes})
        components = build_components(config, WORLD)
        components.recorded["base_sha256"] = None
        handle = build_model(components, config.trainer, config.distributed, WORLD)
        handle.module.to(dtype)
        if components.objective.needs_reference:
            references = compute_references(components, handle, WORLD, lambda: False)
            components = with_references(components, references)
        return Loaded(config, components, handle)

    return load


FULL = {"name": "hf_causal_lm", "block_size": 64}
UNPACKED = {"data__packing": False}
MODELS = pytest.mark.parametrize("kind", ["lora", "full", "gpt", "modern"])


def model_of(kind: str, make: Make) -> dict[str, Any] | None:
    if kind == "lora":
        return None
    if kind == "full":
        path = make().config.model.path  # type: ignore[union-attr]
        return {**FULL, "path": path}
    return GPT if kind == "gpt" else MODERN


@MODELS
def test_dpo_starts_at_ln_2(make: Make, kind: str) -> None:
    """For every packing and micro-batch size, though references and steps have other batches."""
    model = model_of(kind, make)
    for packing in (True, False) if kind in ("lora", "full") else (False,):
        for size, count in ((1, 8), (2, 4), (8, 1)):
            loss, gradients = make(model, size, count, data__packing=packing).step()
            assert loss == pytest.approx(math.log(2), abs=1e-6)
            assert max(gradient.abs().max() for gradient in gradients.values()) > 0


def test_dpo_starts_at_ln_2_in_bfloat16(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are float32, but the logits of other batches may be rounded differently: 2 % is the stated bound."""
    monkeypatch.setattr("llmtrain.models.device_precision.has_bf16", lambda _: True)
    for packing in (True, False):
        loss, _ = make(size=2, count=4, trainer__precision="bf16", data__packing=packing).step()
        assert loss == pytest.approx(math.log(2), rel=0.02)


def steps_of_all_layouts(make: Make, kind: str, objective: str, dtype: torch.dtype) -> Iterator[Step]:
    """Loss and gradients of a step with all pairs: 1 x 8, 2 x 4 and 8 x 1, packed or not."""
    model = model_of(kind, make)
    layouts: list[tuple[int, int, bool]] = [(1, 8, False), (2, 4, False), (8, 1, False)]
    if kind in ("lora", "full"):
        layouts += [(1, 8, True), (2, 4, True), (8, 1, True)]
    for size, count, packing in layouts:
        options = {"data__packing": packing, "trainer__objective": {"name": objective}}
        loaded = make(model, size, count, dtype=dtype, **options)
        loaded.move()
        yield loaded.step()


OBJECTIVE_NAMES = pytest.mark.parametrize("objective", ["dpo", "ipo", "orpo", "simpo"])


def differences(steps: Iterator[Step]) -> Iterator[tuple[float, float]]:
    """Of each other layout to the first one: the loss, and the largest difference of a gradient relative to the largest
    gradient of all weights."""
    loss, gradients = next(steps)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for other_loss, others in steps:
        largest = max(float((others[name] - gradient).abs().max()) for name, gradient in gradients.items())
        yield abs(other_loss - loss) / max(1.0, abs(loss)), largest / scale


@OBJECTIVE_NAMES
@MODELS
def test_step_does_not_depend_on_the_layout(make: Make, kind: str, objective: str) -> None:
    """What remains is the rounding of float32, 6e-8 per operation, because sums are taken in another order: on x86_64
    up to 7e-7 of the loss and 6e-7 of the gradient. The next test shows that it is nothing else."""
    for loss, gradient in differences(steps_of_all_layouts(make, kind, objective, torch.float32)):
        assert loss <= 1e-6
        assert gradient <= 1e-6


@OBJECTIVE_NAMES
@pytest.mark.parametrize("kind", ["gpt", "modern"])
def test_step_does_not_depend_on_the_layout_in_float64(
    make: Make, kind: str, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that are float32 in training are float64 here."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(group_losses, "sum_by_group", sum_in_float64)
    for loss, gradient in differences(steps_of_all_layouts(make, kind, objective, torch.float64)):
        assert loss <= 1e-14
        assert gradient <= 1e-14


def sum_in_float64(losses: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64).index_add(0, index, losses)


@pytest.mark.parametrize("kind", ["lora", "full", "gpt"])
def test_chunks_do_not_change_loss_and_gradient(make: Make, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass with a frozen output layer, two with a trained one; the reference is autograd on all logits."""
    loaded = make(model_of(kind, make), size=8, count=1)
    loaded.move()
    module = loaded.model.module
    monkeypatch.setattr(module, "has_linear_head", False, raising=False)
    expected_loss, expected = loaded.step()
    monkeypatch.setattr(module, "has_linear_head", True, raising=False)
    monkeypatch.setitem(losses_module.CHUNK_ELEMENTS, "cpu", 300 * 5)  # five positions
    loss, gradients = loaded.step()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * scale + 1e-9, msg=name)


def some_answers() -> Answers:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 20, (6, 2), generator=generator).float()
    log_probabilities = -tokens * torch.rand(6, 2, generator=generator) * 2
    references = log_probabilities + torch.randn(6, 2, generator=generator)
    return Answers(log_probabilities, references, tokens)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def closed_form(name: str, c: float, r: float, ref_c: float, ref_r: float, m: float, n: float) -> float:
    """In Python's floats. c, r: log-probabilities of the chosen and rejected answer; m, n: their tokens."""
    if name == "dpo":
        return -math.log(sigmoid(0.3 * ((c - ref_c) - (r - ref_r))))
    if name == "smoothed":
        margin = 0.3 * ((c - ref_c) - (r - ref_r))
        return -0.8 * math.log(sigmoid(margin)) - 0.2 * math.log(sigmoid(-margin))
    if name == "ipo":
        return ((c - ref_c) / m - (r - ref_r) / n - 1 / (2 * 0.3)) ** 2
    if name == "simpo":
        return -math.log(sigmoid(2.5 * (c / m - r / n) - 0.7))
    odds = [p / (1 - p) for p in (math.exp(c / m), math.exp(r / n))]
    return -c / m - 0.3 * math.log(sigmoid(math.log(odds[0] / odds[1])))


FORMS: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo", "beta": 0.3},
    "smoothed": {"name": "dpo", "beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"name": "ipo", "beta": 0.3},
    "orpo": {"name": "orpo", "beta": 0.3},
    "simpo": {"name": "simpo", "beta": 2.5, "gamma": 0.7},
}


@pytest.mark.parametrize("name", FORMS)
def test_loss_of_a_pair_has_its_closed_form(name: str) -> None:
    values = FORMS[name]
    objective = build_objective(OBJECTIVES[values["name"]](**values))
    assert isinstance(objective, PreferenceObjective)
    answers = some_answers()
    rows = zip(answers.log_probabilities.tolist(), answers.references.tolist(), answers.tokens.tolist(), strict=True)
    expected = [closed_form(name, *pair, *references, *tokens) for pair, references, tokens in rows]
    assert objective.losses(answers).tolist() == pytest.approx(expected, rel=1e-5)


def test_orpo_of_a_certain_answer_is_finite() -> None:
    objective = build_objective(OBJECTIVES["orpo"](name="orpo"))
    assert isinstance(objective, PreferenceObjective)
    certain = torch.zeros(1, 2, requires_grad=True)
    loss = objective.losses(Answers(certain, torch.zeros(1, 2), torch.ones(1, 2))).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert certain.grad is not None
    assert torch.isfinite(certain.grad).all()


def test_log_probabilities_are_those_of_transformers(make: Make) -> None:
    """Answer by answer, without padding, with the mask from the rendered prompt."""
    from transformers import AutoModelForCausalLM

    loaded = make(size=2, count=4)
    path = loaded.config.model.path  # type: ignore[union-attr]
    model = AutoModelForCausalLM.from_pretrained(path)
    batches = loaded.components.train_batches
    samples = batches.samples  # type: ignore[attr-defined]
    references: np.ndarray[Any, Any] = samples.references
    store = samples.store.answers
    for answer in range(2 * PAIRS):
        start, end = store.spans[answer, :2].tolist()
        ids = torch.tensor(store.tokens[start:end].astype(np.int64))
        is_answer = torch.tensor(store.answers[start:end] == 1)
        with torch.no_grad():
            scores = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        each = scores.gather(1, ids[1:, None]).squeeze(1)
        assert references[answer // 2, answer % 2] == pytest.approx(float(each[is_answer[1:]].sum()), rel=1e-5)


def test_key_of_the_references_covers_what_determines_them(make: Make) -> None:
    def key(loaded: Loaded, **recorded: Any) -> str:
        components = replace(loaded.components, recorded={**loaded.components.recorded, **recorded})
        return identify_reference(components, loaded.model, WORLD, threads=1).key

    loaded = make()
    first = key(loaded)
    assert key(make(trainer__objective={"name": "ipo", "beta": 0.5}, trainer__lr=1.0)) == first
    # The fingerprint of the data is one of the pairs, the tokenizer and the chat template.
    names = ("base_sha256", "data_fingerprint", "tokenizer_sha256", "numerics", "precision", "device", "architecture")
    others = [key(loaded, **{name: "another"}) for name in names]
    others += [key(make(**UNPACKED)), key(make(size=2))]
    others.append(key(make({**loaded.components.recorded["config"]["model"], "block_size": 48})))
    loaded.move()
    others.append(key(loaded))
    assert len({first, *others}) == 1 + len(others)


def test_zero_weight_micro_batch_has_loss_and_gradient_zero(make: Make) -> None:
    """Ranks with one micro-batch fewer compute one, so that all make the same collectives."""
    loaded = make(size=2, count=4)
    loaded.move()
    batch = loaded.components.train_batches[0].without_targets()
    assert loaded.components.objective.items(batch) == 0
    sums = loaded.components.objective.sums(loaded.model, batch)
    sums.loss.backward()
    assert sums.loss.item() == 0
    assert not sums.metrics.any()
    gradients = [p.grad for p in loaded.model.module.parameters() if p.requires_grad]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)

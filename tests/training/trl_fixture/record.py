"""Records losses and gradients of TRL's trainers on a tiny Llama, for test_preference_trl.py.

    python tests/training/trl_fixture/record.py     (with torch, transformers, datasets, accelerate and trl)

TRL's ORPO adds the loss of the prompt to that of the chosen answer, and divides by the tokens of the batch: its prompts
here have one token, which has no loss, and its pairs are computed one at a time.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
VOCAB_SIZE = 64
PAD = 0
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
Weights = dict[str, torch.Tensor]


def make_model(weights: Weights | None = None) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).float()
    if weights is not None:
        model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    return model


def weights_of(model: LlamaForCausalLM) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def make_pairs() -> list[dict[str, list[int]]]:
    def ids(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most, ()))
        return torch.randint(1, VOCAB_SIZE, (count,)).tolist()

    return [{"prompt_ids": ids(2, 9), "chosen_ids": ids(1, 12), "rejected_ids": ids(1, 12)} for _ in range(8)]


def gradients(model: LlamaForCausalLM, loss: torch.Tensor) -> Weights:
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def options(directory: str, **more: Any) -> dict[str, Any]:
    return {"output_dir": directory, "report_to": "none", "use_cpu": True, "bf16": False, "max_length": None, **more}


def text_dataset() -> Dataset:
    return Dataset.from_list([{"prompt": "one", "chosen": " two", "rejected": " three"}] * 2)


def record_dpo(
    loss_type: str, policy: Weights, reference: Weights, tokenizer: Any, pairs: Any
) -> tuple[float, Weights]:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    model = make_model(policy)
    with tempfile.TemporaryDirectory() as directory:
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=make_model(reference),
            args=trl.DPOConfig(**options(directory, beta=0.1, loss_type=loss_type)),
            train_dataset=text_dataset(),
            processing_class=tokenizer,
        )
        batch = DataCollatorForPreference(pad_token_id=PAD)(pairs)
        loss = trainer._compute_loss(trainer.model, batch, False)
    loss = loss[0] if isinstance(loss, tuple) else loss
    return loss.item(), gradients(model, loss)


def padded(pairs: list[dict[str, list[int]]], side: str) -> dict[str, torch.Tensor]:
    """A batch as the trainers of ORPO and CPO take it."""
    rows = [pair["prompt_ids"] + pair[f"{side}_ids"] for pair in pairs]
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for index, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
        begin = len(pair["prompt_ids"])
        labels[index, begin : len(row)] = torch.tensor(row[begin:])
    return {f"{side}_input_ids": ids, f"{side}_attention_mask": mask, f"{side}_labels": labels}


def record_without_reference(name: str, policy: Weights, tokenizer: Any, pairs: Any) -> tuple[float, Weights]:
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model = make_model(policy)
    with tempfile.TemporaryDirectory() as directory:
        if name == "orpo":
            kind, config = ORPOTrainer, ORPOConfig(**options(directory, beta=0.1))
        else:
            simpo = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}
            kind, config = CPOTrainer, CPOConfig(**options(directory, **simpo))
        trainer = kind(model=model, args=config, train_dataset=text_dataset(), processing_class=tokenizer)
        losses = []
        for pair in pairs:
            batch = {**padded([pair], "chosen"), **padded([pair], "rejected")}
            losses.append(trainer.get_batch_loss_metrics(model, batch)[0])
        loss = torch.stack(losses).mean()
    return loss.item(), gradients(model, loss)


def main() -> None:
    from tiny_llama import make_tokenizer

    torch.manual_seed(0)
    reference = weights_of(make_model())
    policy = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in reference.items()}
    pairs = make_pairs()
    short = [{**pair, "prompt_ids": pair["prompt_ids"][-1:]} for pair in pairs]
    with tempfile.TemporaryDirectory() as directory:
        make_tokenizer(Path(directory))
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.pad_token = tokenizer.eos_token
        found = {
            "dpo": record_dpo("sigmoid", policy, reference, tokenizer, pairs),
            "ipo": record_dpo("ipo", policy, reference, tokenizer, pairs),
            "orpo": record_without_reference("orpo", policy, tokenizer, short),
            "simpo": record_without_reference("simpo", policy, tokenizer, pairs),
        }
    tensors = {f"policy/{name}": weight for name, weight in policy.items()}
    tensors |= {f"reference/{name}": weight for name, weight in reference.items()}
    for name, (_, each) in found.items():
        tensors |= {f"{name}/{parameter}": gradient for parameter, gradient in each.items()}
    facts = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "shape": SHAPE,
        "pairs": pairs,
        "losses": {name: loss for name, (loss, _) in found.items()},
    }
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, HERE / "losses.safetensors", {"facts": json.dumps(facts)})
    print(json.dumps(facts["losses"]), "trl", trl.__version__)


if __name__ == "__main__":
    main()

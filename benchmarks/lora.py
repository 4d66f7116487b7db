"""LoRA in llmtrain compared with peft and the Hugging Face Trainer: same model, examples, rank and threads.

    python benchmarks/lora.py --model DIR [--rows 48 --rounds 3 --data train.jsonl]    a real model on two cores
    python benchmarks/lora.py --h200                                 Llama 1.2B on a GPU, compared with recorded results

Each side runs in its own process, trains on the same examples of ../shared/data/instruct, and measures non-padding
tokens/s after its first steps and the peak memory of the process. Prints every round and the medians.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROWS = Path(__file__).resolve().parents[2] / "shared" / "data" / "instruct" / "train.jsonl"
BLOCK, RANK, ALPHA, LR, THREADS, SEED = 512, 16, 32, 2e-4, 2, 1
PEFT_BATCH = 4  # examples: about as many tokens as two packed sequences, counting padding
LLMTRAIN_BATCH = 2
WARM_UP_STEPS = 2


def run_llmtrain(model: str, rows: str, directory: str) -> dict[str, float]:
    from llmtrain.config.load import load_config
    from llmtrain.training.run import run_training

    sets = [f"model.path={model}", f"model.block_size={BLOCK}", f"model.lora.rank={RANK}", f"model.lora.alpha={ALPHA}"]
    sets += ["model.lora.dropout=0.0", f"data.train_file={rows}", f"data.val_file={rows}"]
    sets += [f"data.cache_dir={directory}"]
    sets += [f"trainer.micro_batch_size={LLMTRAIN_BATCH}", "trainer.grad_accum_steps=1", "trainer.eval_prompts=[]"]
    sets += ["trainer.eval_batches=1", "trainer.eval_every_steps=null", "trainer.save_every_steps=null"]
    sets += [f"trainer.lr={LR}", "trainer.warmup_steps=0", f"run.threads={THREADS}", f"run.seed={SEED}"]
    sets += [f"output.root_dir={directory}", "logging.level=ERROR"]
    result = run_training(load_config("lora_instruct", sets))
    return {"tokens_per_second": result.tokens_per_second, "loss": result.final_train_loss}


def run_peft(model: str, rows: str, directory: str) -> dict[str, float]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    examples = [encode(tokenizer, json.loads(line)) for line in Path(rows).read_text().splitlines()]
    collator = DataCollatorForSeq2Seq(tokenizer, padding=True)
    step_ends: list[tuple[float, int]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            step_ends.append((time.perf_counter(), state.global_step))

    token_counts: list[int] = []

    def collate(batch: list[dict[str, list[int]]]) -> Any:
        token_counts.append(sum(len(row["input_ids"]) for row in batch))
        return collator(batch)

    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    arguments = TrainingArguments(
        output_dir=directory,
        num_train_epochs=1,
        per_device_train_batch_size=PEFT_BATCH,
        learning_rate=LR,
        weight_decay=0.0,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    trainer = Trainer(model=adapted, args=arguments, train_dataset=examples, data_collator=collate, callbacks=[Clock()])
    trainer.remove_callback(PrinterCallback)
    out = trainer.train()
    first, last = step_ends[WARM_UP_STEPS - 1], step_ends[-1]
    return {
        "tokens_per_second": sum(token_counts[WARM_UP_STEPS : last[1]]) / (last[0] - first[0]),
        "loss": out.training_loss,
    }


def encode(tokenizer: Any, row: dict[str, str]) -> dict[str, list[int]]:
    """Tokens and labels as llmtrain produces them: loss on the answer only, truncated at the same length."""
    question = f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
    return {
        "input_ids": (before + answer)[: BLOCK + 1],
        "labels": ([-100] * len(before) + answer)[: BLOCK + 1],
    }


def select_examples(model: str, data: Path, count: int, path: Path) -> None:
    """Write the first examples whose answer begins within the context, so that both sides train on all of them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    kept = []
    for line in data.read_text().splitlines():
        if any(label >= 0 for label in encode(tokenizer, json.loads(line))["labels"]):
            kept.append(line)
        if len(kept) == count:
            break
    path.write_text("\n".join(kept) + "\n")


def measure(side: str, model: str, rows: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--model", model, "--rows-file", str(rows)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(model: str, data: Path, count: int, rounds: int) -> None:
    ratios, memory = [], []
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.jsonl"
        select_examples(model, data, count, rows)
        for number in range(rounds):
            hf, own = measure("peft", model, rows), measure("llmtrain", model, rows)
            ratios.append(own["tokens_per_second"] / hf["tokens_per_second"])
            memory.append(own["memory"] / hf["memory"])
            print(
                f"round {number + 1}: peft + Trainer {hf['tokens_per_second']:,.0f} tokens/s, "
                f"{hf['memory'] / 1e9:.2f} GB; llmtrain {own['tokens_per_second']:,.0f} tokens/s, "
                f"{own['memory'] / 1e9:.2f} GB",
                flush=True,
            )
    print(f"ratio llmtrain / peft + Trainer, tokens/s: {statistics.median(ratios):.2f} (target: 1.3)")
    print(f"ratio llmtrain / peft + Trainer, memory: {statistics.median(memory):.2f} (target: at most 1)")


RECORDED_ON_H200 = {
    "transformers + peft": (47_600, 54.6),
    "transformers + peft, torch.compile": (65_700, 35.4),
    "transformers + peft, Liger kernels": (61_900, 26.1),
}


def on_h200(steps: int, packed: bool) -> None:
    """Llama 1.2B with random weights, LoRA rank 16 on all linear layers, 8 x 2048 tokens per step, bf16, on plain text
    as in the recorded results, or on generated examples packed into the same shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from llmtrain.config.load import load_config
    from llmtrain.training.run import run_training

    shape = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            LlamaForCausalLM(shape).save_pretrained(f"{directory}/llama")
        torch.set_default_dtype(torch.float32)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        sets = [f"model.path={directory}/llama", "data.tokenizer=byte", f"data.cache_dir={directory}"]
        sets += [f"output.root_dir={directory}"]
        if packed:
            rows = Path(directory) / "rows.jsonl"
            lengths = [50 + (number * 7919) % 900 for number in range(3000)]
            rows.write_text("".join(json.dumps({"instruction": "go on", "output": "a" * n}) + "\n" for n in lengths))
            sets += [f"data.train_file={rows}", f"data.val_file={rows}"]
        else:
            sets += ["data.name=python_stdlib", "data.train_file=null", "data.val_file=null"]
        sets += [f"trainer.max_steps={steps}", "trainer.max_epochs=null", "trainer.grad_accum_steps=1"]
        sets += ["trainer.eval_batches=1", "trainer.eval_every_steps=null", "trainer.save_every_steps=null"]
        sets += ["trainer.warmup_steps=1"]
        result = run_training(load_config("lora_llama_1b", sets))
    speed, memory = result.tokens_per_second, result.values["peak_memory_bytes"] / 1e9
    label = "llmtrain, packed examples" if packed else "llmtrain"
    print(f"{label}: {speed:,.0f} tokens/s, {memory:.1f} GB, {result.values['mfu']:.1%} of the GPU's peak")
    for name, (tokens, gigabytes) in RECORDED_ON_H200.items():
        print(f"  {speed / tokens:.2f} x the tokens/s and {memory / gigabytes:.2f} x the memory of {name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=os.environ.get("LLMTRAIN_SMOLLM2", "models/SmolLM2-135M-Instruct"))
    parser.add_argument("--data", type=Path, default=ROWS)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--h200", action="store_true")
    parser.add_argument("--packed", action="store_true", help="with --h200: packed examples instead of plain text")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--side", choices=("llmtrain", "peft"))
    parser.add_argument("--rows-file")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.h200:
        on_h200(arguments.steps, arguments.packed)
    elif arguments.side:
        with tempfile.TemporaryDirectory() as directory:
            run = {"llmtrain": run_llmtrain, "peft": run_peft}[arguments.side]
            result = run(arguments.model, arguments.rows_file, directory)
        result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(result))
    elif not Path(arguments.model).is_dir() or not arguments.data.is_file():
        print(f"skipped: needs the model {arguments.model} and the data {arguments.data} (../shared/data/README.md)")
    else:
        compare(arguments.model, arguments.data, arguments.rows, arguments.rounds)


if __name__ == "__main__":
    main()

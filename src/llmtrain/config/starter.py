"""Commented configs to start from: for text files, for a file of examples, or a copy of a preset."""

import json
import re
from pathlib import Path
from typing import Any

_HEAD = """\
# {about}
# Check it: llmtrain validate -c {path}    Train: llmtrain train -c {path}
# Every field: docs/config.md    With all defaults: llmtrain print-config -c {path}
schema_version: 3
run:
  name: {name}
"""
_TEXT = """\
model:
  name: gpt
  architecture: modern
  block_size: {block_size}  # context length in tokens
  d_model: 128  # width; a larger model learns more and trains slower
  n_layers: 4
  mlp: swiglu  # or relu2, which is better for larger models
data:
  name: text_files
  files: {files}
  val_fraction: 0.05  # held out for validation; or set val_files
  tokenizer: byte  # byte, char, gpt2, or a directory (see llmtrain tokenizer train)
trainer:
  max_steps: 400  # optimizer steps; or set max_epochs. Train for longer while the validation loss falls
  micro_batch_size: 16  # sequences per step; lower it if memory runs out
  optimizer: muon  # learning rate and schedule follow from it and from the size (docs/recipes.md)
  decay_fraction: 0.8
  warmup_steps: 20
  log_every_steps: 10
  eval_every_steps: 100
  eval_batches: 40  # of micro_batch_size sequences; without it the whole validation text
  save_every_steps: 100
"""
_EXAMPLES = """\
model:
  name: hf_causal_lm
  path: HuggingFaceTB/SmolLM2-135M-Instruct  # a model on the Hugging Face hub, or its directory
  block_size: 512  # longer examples are truncated
  lora:  # remove it to train all weights; then lower lr to 2e-5
    rank: 16
    alpha: 32
data:
  name: {kind}
  train_file: {file}
{fields}  val_fraction: 0.05  # held out for validation; or set val_file
trainer:
  max_epochs: 1
  micro_batch_size: 4  # lower it if memory runs out
  grad_accum_steps: 4  # micro-batches per optimizer step
  lr: 2.0e-4
  warmup_steps: 5
  weight_decay: 0.0
  log_every_steps: 5
  eval_every_steps: 50
  save_every_steps: 50
"""
_BLOCK_SIZES = (128, 64, 32, 16)


def preset_text(path: Path) -> str:
    """The file of a preset, without the comment by which editors find the schema beside it."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if "yaml-language-server" not in line)


def text_config(files: list[str], size: int, path: str) -> str | None:
    """A small GPT on text files of this many bytes in all; None if that is too little text."""
    # Each held-out share must have a few sequences.
    block_size = next((length for length in _BLOCK_SIZES if size * 0.05 > 2 * length), None)
    if block_size is None:
        return None
    about = "A small GPT, trained from scratch on your text."
    head = _HEAD.format(about=about, path=path, name=_name(path))
    return head + _TEXT.format(block_size=block_size, files=_flow(files))


def examples_config(file: str, kind: str, fields: dict[str, str], path: str) -> str:
    """LoRA fine-tuning on a file of examples. `fields`: values of the data section besides it."""
    about = "LoRA fine-tuning of a chat model on your examples."
    lines = "".join(f"  {field}: {_flow(value)}\n" for field, value in fields.items())
    head = _HEAD.format(about=about, path=path, name=_name(path))
    return head + _EXAMPLES.format(kind=kind, file=_flow(file), fields=lines)


def _flow(value: Any) -> str:
    """JSON is YAML; plain names need no quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    text = str(value)
    is_plain = re.fullmatch(r"[A-Za-z_./][A-Za-z0-9_./-]*", text) and text.lower() not in ("yes", "no", "null", "true")
    return text if is_plain else json.dumps(text)


def _name(path: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")
    return slug if re.match(r"[a-z]", slug) else "my-run"

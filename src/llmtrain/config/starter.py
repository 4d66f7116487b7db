"""Commented configs to start from: for text, examples or preference pairs, or a copy of a preset."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

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
{data}  tokenizer: byte  # byte, char, gpt2, or a directory (see llmtrain tokenizer train)
trainer:
  max_steps: {steps}  # optimizer steps; or set max_epochs. Train for longer while the validation loss falls
  micro_batch_size: 16  # sequences per step; lower it if memory runs out
  optimizer: muon  # learning rate and schedule follow from it and from the size (docs/recipes.md)
  decay_fraction: 0.8
  warmup_steps: {warmup}
  log_every_steps: 10
  eval_every_steps: {often}
  eval_batches: 40  # of micro_batch_size sequences; without it the whole validation text
  save_every_steps: {often}
"""
_TEXT_DATA = """\
  name: text_files
  files: {files}
{column}  val_fraction: 0.05  # held out for validation; or set val_files
"""
_SOURCES = """\
  name: mixture
  sources:  # {unit}; here they follow from the sizes. Change them as you like (docs/data.md)
{sources}"""
_EXAMPLES = """\
model:
  name: hf_causal_lm
  path: HuggingFaceTB/SmolLM2-135M-Instruct  # a model on the Hugging Face hub, or its directory
  block_size: {block_size}  # longer examples are truncated
  lora:  # remove it to train all weights; then lower lr to 2e-5
    rank: 16
    alpha: 32
data:
{data}trainer:
  max_epochs: {epochs}  # about {steps:,} steps
  micro_batch_size: {micro_batch_size}  # {if_memory} if memory runs out
  grad_accum_steps: {grad_accum_steps}  # micro-batches per optimizer step
  lr: 2.0e-4
  warmup_steps: {warmup}
  weight_decay: 0.0
  log_every_steps: 5
  eval_every_steps: {often}
  save_every_steps: {often}
  # eval_prompts: ["What is a symphony?"]  # answered at every evaluation: samples/ in the run, and its report
"""
_PREFERENCES = """\
model:
  name: hf_causal_lm
  path: HuggingFaceTB/SmolLM2-135M-Instruct  # a chat model on the Hugging Face hub, or its directory
  block_size: {block_size}  # of one answer with its prompt; longer pairs are dropped
  lora:  # remove it to train all weights; then lower lr to 5e-7
    rank: 16
    alpha: 32
data:
{data}trainer:
  objective:
    name: dpo  # or ipo, orpo, simpo: docs/fine-tuning.md
    beta: 0.1  # a larger one keeps the model closer to where it starts
  max_epochs: {epochs}  # about {steps:,} steps
  micro_batch_size: {micro_batch_size}  # {if_memory} if memory runs out
  grad_accum_steps: {grad_accum_steps}  # micro-batches per optimizer step
  lr: 5.0e-5
  warmup_steps: {warmup}
  weight_decay: 0.0
  log_every_steps: 5
  eval_every_steps: {often}
  save_every_steps: {often}
  # eval_prompts: ["What is a symphony?"]  # answered at every evaluation: samples/ in the run, and its report
"""
_EXAMPLE_DATA = """\
  name: {kind}
  train_file: {file}
{fields}{packing}  {validation}
"""
_PAIR_DATA = """\
  name: preference_jsonl
  train_file: {file}
{packing}  {validation}
  on_bad_example: skip  # error stops at the first pair that cannot be used
"""
_TEXT_BLOCK_SIZES = (128, 64, 32, 16)
_TEXT_STEP_TOKENS = 2048
"""Tokens per step of the model in _TEXT, by its defaults."""
_TEXT_STEPS = 400
_MIN_TEXT_STEPS = 60
_TEXT_EPOCHS = 10
_EXAMPLE_BLOCK_SIZES = (128, 256, 512, 1024, 2048)
_MICRO_BATCH_TOKENS = 2048
_STEP_TOKENS = 8192
_MIN_STEPS = 60
_MIN_EPOCH_STEPS = 20
_PACKED_SHARE = 0.9
"""About this share of the positions of packed sequences has a token."""
_LENGTH_MARGIN = 1.25
_FEW_HELD_OUT = 10


def preset_text(path: Path) -> str:
    """The file of a preset, without the comment by which editors find the schema beside it."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if "yaml-language-server" not in line)


class ExampleSizes(NamedTuple):
    """Estimates of a file of examples."""

    examples: int
    mean_tokens: float
    long_tokens: float
    """Hardly an example is longer."""


class TextSource(NamedTuple):
    """Text files that are one source."""

    files: list[str]
    """Names and globs."""
    column: str | None
    """The column of the text, if the files have records."""
    size: int
    """Bytes of text, counted to about a megabyte."""
    file_bytes: int


class ExampleSource(NamedTuple):
    """A file of examples or of preference pairs, and the data section that reads it."""

    file: str
    kind: str
    fields: dict[str, str]
    """Values of the section besides the file."""
    sizes: ExampleSizes


def text_config(sources: list[TextSource], path: str) -> str | None:
    """A small GPT on text files, or on a mixture of several sources; None if one has too little text."""
    # The share that is held out must have a few sequences.
    smallest = min(source.size for source in sources)
    size = sum(source.size for source in sources)
    fitting = [length for length in _TEXT_BLOCK_SIZES if smallest * 0.05 > 2 * length]
    if not fitting:
        return None
    # After about ten passes over a small text the model learns it by heart, and the validation loss rises.
    steps = min(_TEXT_STEPS, max(_MIN_TEXT_STEPS, _TEXT_EPOCHS * size // _TEXT_STEP_TOKENS)) // 20 * 20
    about = "A small GPT, trained from scratch on your text."
    head = _HEAD.format(about=about, path=path, name=_name(path))
    return head + _TEXT.format(
        block_size=max(fitting),
        data=_text_data(sources),
        steps=steps,
        warmup=steps // 20,
        often=steps // 4,
    )


def _text_data(sources: list[TextSource]) -> str:
    if len(sources) > 1:
        rows = []
        for source in sources:
            fields: dict[str, Any] = {"files": source.files}
            if source.column:
                fields["text_column"] = source.column
            rows.append(("text_files", fields))
        unit = "weights are shares of the tokens"
        return _SOURCES.format(unit=unit, sources=_source_lines(rows, [source.file_bytes for source in sources]))
    source = sources[0]
    column_line = ""
    if source.column:
        column_line = f"  text_column: {_flow(source.column)}  # each record is a document\n"
    return _TEXT_DATA.format(files=_flow(source.files), column=column_line)


def _source_lines(rows: list[tuple[str, dict[str, Any]]], sizes: list[float]) -> str:
    """A line per source: its kind, its fields, and a weight in proportion to its size."""
    lines = []
    for (kind, fields), size in zip(rows, sizes, strict=True):
        weight = max(0.001, round(size / sum(sizes), 3))
        parts = [f"{name}: {_flow(value)}" for name, value in {"name": kind, **fields, "weight": weight}.items()]
        lines.append(f"    - {{{', '.join(parts)}}}\n")
    return "".join(lines)


def examples_config(sources: list[ExampleSource], path: str) -> str:
    """LoRA fine-tuning on a file of examples, or on a mixture of several."""
    about = "LoRA fine-tuning of a chat model on your examples."
    head = _HEAD.format(about=about, path=path, name=_name(path))
    values = _training_values(_all_sizes(sources))
    packing = values.pop("packing")
    return head + _EXAMPLES.format(data=_example_data(sources, packing), **values)


def _all_sizes(sources: list[ExampleSource]) -> ExampleSizes:
    sizes = [source.sizes for source in sources]
    count = sum(each.examples for each in sizes)
    mean = sum(each.examples * each.mean_tokens for each in sizes) / count
    return ExampleSizes(count, mean, max(each.long_tokens for each in sizes))


def _example_data(sources: list[ExampleSource], packing: str) -> str:
    if len(sources) > 1:
        return _mixed_examples(sources, packing, "examples")
    source = sources[0]
    lines = "".join(f"  {field}: {_flow(value)}\n" for field, value in source.fields.items())
    validation = _validation(source.sizes.examples)
    return _EXAMPLE_DATA.format(
        kind=source.kind, file=_flow(source.file), fields=lines, packing=packing, validation=validation
    )


def preferences_config(sources: list[ExampleSource], path: str) -> str:
    """DPO with LoRA on a file of preference pairs, or on a mixture of several."""
    about = "Preference tuning (DPO with LoRA) of a chat model on your pairs."
    head = _HEAD.format(about=about, path=path, name=_name(path))
    values = _training_values(_all_sizes(sources), answers=2)
    packing = values.pop("packing")
    if len(sources) > 1:
        data = _mixed_examples(sources, packing, "pairs")
    else:
        validation = _validation(sources[0].sizes.examples)
        data = _PAIR_DATA.format(file=_flow(sources[0].file), packing=packing, validation=validation)
    return head + _PREFERENCES.format(data=data, **values)


def _mixed_examples(sources: list[ExampleSource], packing: str, unit: str) -> str:
    """The data section of a mixture. `unit`: what a file has."""
    rows = []
    sizes: list[float] = []
    for source in sources:
        fields: dict[str, Any] = {"train_file": source.file, **source.fields}
        tokens = source.sizes.mean_tokens
        if packing:  # packing: false, and weights are shares of the examples
            fields["packing"] = False
            tokens = 1.0
        rows.append((source.kind, fields))
        sizes.append(source.sizes.examples * tokens)
    shares = f"weights are shares of the {unit if packing else 'tokens'}"
    return _SOURCES.format(unit=shares, sources=_source_lines(rows, sizes))


def _val_fraction(examples: int) -> float:
    """A few examples are too few to validate on, so a larger share of few is held out."""
    if examples >= 200:
        return 0.05
    return 0.1 if examples >= 100 else 0.2


def _validation(examples: int) -> str:
    """The field that holds out examples for validation, with a comment."""
    fraction = _val_fraction(examples)
    held_out = max(1, round(fraction * examples))
    few = f" (only {held_out}: differences between runs mean little)" if held_out < _FEW_HELD_OUT else ""
    return f"val_fraction: {fraction}  # held out for validation{few}; or set val_file"


def _training_values(sizes: ExampleSizes, answers: int = 1) -> dict[str, Any]:
    """Length, batch and number of epochs with which this much data trains for a useful number of steps. `answers`: of
    an example, each with a context of its own."""
    fitting = [length for length in _EXAMPLE_BLOCK_SIZES if length >= _LENGTH_MARGIN * sizes.long_tokens]
    block_size = min(fitting, default=max(_EXAMPLE_BLOCK_SIZES))
    training = max(1, int(sizes.examples * (1 - _val_fraction(sizes.examples))))
    positions = answers * block_size  # of a sequence
    packed = round(training * sizes.mean_tokens / (_PACKED_SHARE * positions))
    sequences = packed
    packing = ""
    if packed < _MIN_EPOCH_STEPS:
        sequences = training
        packing = "  packing: false  # with few examples, one per sequence gives more steps\n"
    batch = 1
    while 2 * batch * positions <= _STEP_TOKENS and 2 * batch * _MIN_EPOCH_STEPS <= sequences:
        batch *= 2
    micro_batch_size = min(batch, max(1, _MICRO_BATCH_TOKENS // positions))
    epoch_steps = -(-sequences // batch)
    epochs = -(-_MIN_STEPS // epoch_steps)
    steps = epochs * epoch_steps
    return {
        "block_size": block_size,
        "packing": packing,
        "epochs": epochs,
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "if_memory": "lower it" if micro_batch_size > 1 else "the least; lower block_size",
        "grad_accum_steps": batch // micro_batch_size,
        "warmup": min(20, steps // 20),
        "often": max(5, steps // 4),
    }


def _flow(value: Any) -> str:
    """JSON is YAML; plain names need no quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, bool | float):
        return json.dumps(value)
    text = str(value)
    is_plain = re.fullmatch(r"[A-Za-z_./][A-Za-z0-9_./-]*", text) and text.lower() not in ("yes", "no", "null", "true")
    if is_plain:
        return text
    return json.dumps(text)


def _name(path: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")
    if not re.match(r"[a-z]", slug):
        return "my-run"
    return slug

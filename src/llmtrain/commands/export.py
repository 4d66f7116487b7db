"""llmtrain export: write a trained model in a format that transformers, peft or llama.cpp loads. The work is done in
inference/export.py, and what was written is checked in inference/export_check/."""

import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from llmtrain.commands.options import SOURCE, JsonOption, show, with_option_groups
from llmtrain.commands.spinner import progress
from llmtrain.core.arguments import Source, check_one_of
from llmtrain.core.terminal import format_table
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.inference.export import Format
    from llmtrain.inference.load import LoadedModel

ToOption = Annotated[
    str | None, typer.Option("--to", help="Directory to create; an existing one must be empty.", show_default=False)
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Data type of the weights: float32, bfloat16 or float16; for gguf also q8_0. Default: that of the base "
        "model; float32 for weights that the run has trained.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    str, typer.Option("--format", help="hf: for transformers, peft and vLLM; gguf: for llama.cpp and Ollama.")
]
NoCheckOption = Annotated[
    bool,
    typer.Option("--no-check", help="Do not load the export in a new process to compare it; the model card says so."),
]
ListOption = Annotated[bool, typer.Option("--list", help="Write nothing; list what the model can become.")]
BaseModelOption = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="NAME[@REVISION]",
        help="Name on the Hugging Face hub of the model that was fine-tuned, for the model card and "
        "adapter_config.json. Default: what was recorded when the model was downloaded.",
        show_default=False,
    ),
]
PushOption = Annotated[
    str | None,
    typer.Option(
        "--push-to-hub",
        help="Upload the result to this name on the Hugging Face hub: owner/name. Requires HF_TOKEN.",
        show_default=False,
    ),
]


@with_option_groups
def command(
    to: ToOption = None,
    source: Source = SOURCE,
    merge: Annotated[bool, typer.Option("--merge", help="LoRA runs: merge the adapter into the base model.")] = False,
    format_: FormatOption = "hf",
    dtype: DtypeOption = None,
    base_model: BaseModelOption = None,
    no_check: NoCheckOption = False,
    list_: ListOption = False,
    push_to_hub: PushOption = None,
    private: Annotated[
        bool, typer.Option("--private/--public", help="Visibility of a repository that --push-to-hub creates.")
    ] = True,
    json_: JsonOption = False,
) -> None:
    """Export a model to a directory that transformers loads, peft for a LoRA run without --merge, or llama.cpp, and
    check that it computes there what the model computes."""
    from llmtrain.hub.model_names import parse_hub_model
    from llmtrain.hub.upload import check_upload, upload_model
    from llmtrain.training.shutdown import StopFlag

    if list_:
        _show_list(source, json_)
        return
    if to is None and push_to_hub is None:
        raise UsageError("No destination was given.", remedy="Pass --to DIR, --push-to-hub NAME, or both.")
    if push_to_hub is not None:
        check_upload(push_to_hub)
    base = parse_hub_model(base_model, "--base-model") if base_model is not None else None
    destination = tempfile.TemporaryDirectory() if to is None else nullcontext(to)
    # An interrupted export removes what it wrote and ends the process that checks it.
    with StopFlag() as stop, progress("Loading the model") as show_progress, destination as folder:
        stop.interrupted = "Interrupted: nothing was exported."
        from llmtrain.inference.export import FORMATS, ExportOptions, export_model, parse_dtype, with_base_model
        from llmtrain.inference.export_directory import remove_unfinished
        from llmtrain.inference.load import load_model

        stop.before_leaving = remove_unfinished
        check_one_of("--format", format_, FORMATS)
        options = ExportOptions(merge, parse_dtype("--dtype", dtype, format_), cast("Format", format_), not no_check)
        loaded = with_base_model(load_model(source, "cpu"), base)
        path = Path(folder).expanduser()
        show_progress(f"Writing {'' if no_check else 'and checking '}{loaded.label}")
        written = export_model(loaded, path, options, source)
        url = None
        if push_to_hub is not None:
            stop.interrupted = "Interrupted before the upload was complete."
            show_progress(f"Uploading {push_to_hub}")
            url = upload_model(path, push_to_hub, private, f"{describe(loaded)}, exported by llmtrain")
    value = {
        "run": loaded.label,
        "step": loaded.step,
        "val_loss": loaded.val_loss,
        "to": to,
        "files": written.files,
        "base_model": str(loaded.base_model) if loaded.base_model else None,
        "format": format_,
        "check": written.check.as_dict() if written.check else None,
        "pushed_to": url,
    }
    places = []
    if to is not None:
        places.append(f"written to {to}")
    if url:
        places.append(f"uploaded to {url}")
    lines = [f"{describe(loaded)} {' and '.join(places)}: {', '.join(written.files)}"]
    if written.check:
        lines += [f"  {line}" for line in written.check.lines()]
    show(json_, value, "\n".join(lines))


def _show_list(source: Source, as_json: bool) -> None:
    with progress("Loading the model"):
        from llmtrain.inference.export_list import list_exports
        from llmtrain.inference.load import load_model

        loaded = load_model(source, "cpu")
        rows = list_exports(loaded)
    table = [["options", "loads in", "dtype", ""]]
    for row in rows:
        table.append([row.options or "-", row.loads_in, ", ".join(row.dtypes), row.problem or ""])
    show(as_json, {"run": loaded.label, "exports": [asdict(row) for row in rows]}, format_table(table))


def describe(loaded: "LoadedModel") -> str:
    """`first at step 60 (validation loss 3.0274)`"""
    text = loaded.label
    if loaded.step is not None:
        text += f" at step {loaded.step}"
        if loaded.val_loss is not None:
            text += f" (validation loss {loaded.val_loss:.4f})"
    return text

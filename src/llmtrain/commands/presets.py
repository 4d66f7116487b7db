"""llmtrain presets: the configs that ship with llmtrain, in the order in which to try them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from llmtrain import registry
from llmtrain.commands.options import JsonOption, complete_preset, show
from llmtrain.core.terminal import fit_line, stream_width

app = typer.Typer(help="List the presets that --config accepts by name, or show one.")

GROUPS = {
    "Start here": ("gpt_stdlib", "shakespeare_char", "gpt_wikitext_local", "gpt_wikitext", "example"),
    "Fine-tune": ("lora_instruct", "full_finetune_small", "continue_pretrain", "mixture_instruct", "dpo_small"),
    "GPU": ("gpt2_124m", "gpt_modern_124m", "gpt_modern_350m", "mixture_text", "lora_llama_1b"),
    "Kubernetes": (
        *(f"k8s_{kind}" for kind in registry.KINDS),
        "k8s_gpu_4x1",
        "k8s_gpu_64x8",
    ),
    "Smoke tests": ("gpt_smoke", "ddp_smoke", "fsdp_smoke", "mlflow", "ddp_mlflow"),
}
_REST = "More"


@app.callback(invoke_without_command=True)
def list_command(ctx: typer.Context, json_: JsonOption = False) -> None:
    """List the presets that --config accepts by name."""
    if ctx.invoked_subcommand is not None:
        return
    from llmtrain.config.load import DEFAULT_PRESET, list_presets

    presets = list_presets()
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, _REST: tuple(name for name in presets if name not in grouped)}
    width = max(len(name) for name in presets)
    columns = stream_width(sys.stdout)
    rows: list[dict[str, str]] = []
    lines: list[str] = []
    for group, names in groups.items():
        existing = [name for name in names if name in presets]
        if not existing:
            continue
        if lines:
            lines.append("")
        lines.append(group)
        for name in existing:
            about = _about(presets[name])
            rows.append({"name": name, "path": str(presets[name]), "about": about, "group": group})
            default = " (default)" if name == DEFAULT_PRESET else ""
            line = f"  {name:<{width}}  {about}{default}"
            lines.append(fit_line(line, columns, indent=width + 4) if columns else line)
    lines += ["", "Print one with `llmtrain presets show NAME`; copy it with `llmtrain init --preset NAME`."]
    show(json_, {"presets": rows}, "\n".join(lines))


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the preset.", autocompletion=complete_preset)],
    json_: JsonOption = False,
) -> None:
    """Print the file of a preset, with its comments."""
    from llmtrain.config.load import list_presets
    from llmtrain.config.starter import preset_text
    from llmtrain.errors import UsageError, nearest

    presets = list_presets()
    if name not in presets:
        raise UsageError(f"There is no preset '{name}'.{nearest(name, presets)}", known=presets, like=name)
    text = preset_text(presets[name])
    show(json_, {"name": name, "path": str(presets[name]), "text": text}, text.rstrip("\n"))


def _about(path: Path) -> str:
    """The first comment line of a preset."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()

"""llmtrain presets: the configs that ship with llmtrain."""

from pathlib import Path

from llmtrain.commands.options import JsonOption, show


def command(json_: JsonOption = False) -> None:
    """List the presets that --config accepts by name."""
    from llmtrain.config.load import DEFAULT_PRESET, list_presets

    presets = list_presets()
    rows = [{"name": name, "path": str(path), "about": _about(path)} for name, path in presets.items()]
    width = max(len(name) for name in presets)
    lines = [
        f"{row['name']:<{width}}  {row['about']}{' (default)' if row['name'] == DEFAULT_PRESET else ''}" for row in rows
    ]
    show(json_, {"presets": rows}, "\n".join(lines))


def _about(path: Path) -> str:
    """The first comment line of a preset."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()

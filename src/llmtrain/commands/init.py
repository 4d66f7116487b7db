"""llmtrain init: a commented config to start from."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, complete_preset, show
from llmtrain.errors import DataError, UsageError


def command(
    more_text: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Further text files for --text.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="FILE", help="Train a small GPT on text files.")
    ] = None,
    instruct: Annotated[
        str | None,
        typer.Option(
            "--instruct", metavar="FILE", help="Fine-tune a chat model on examples, one JSON object per line."
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="Copy a preset.", autocompletion=complete_preset)
    ] = None,
    to: Annotated[str, typer.Option("--to", metavar="PATH", help="File to write. It must not exist.")] = "my.yaml",
    json_: JsonOption = False,
) -> None:
    """Write a commented config for your text files, for your examples, or from a preset."""
    if [bool(text), instruct is not None, preset is not None].count(True) != 1:
        raise UsageError(
            "Pass one of --text, --instruct and --preset.", remedy="For example: llmtrain init --text corpus/*.txt"
        )
    if more_text and not text:
        raise UsageError(f"Unexpected argument '{more_text[0]}'.", remedy="Further files belong to --text.")
    target = Path(to).expanduser()
    if target.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--to must end with .yaml, got '{to}'.")
    if target.exists():
        raise UsageError(f"{to} already exists and is not replaced.", remedy="Pass another file with --to.")
    if text:
        content = _for_text([*text, *(more_text or [])], to)
    elif instruct is not None:
        content = _for_examples(instruct, to)
    else:
        content = _of_preset(preset or "")
    _write(target, content, to)
    show(json_, {"config": to}, f"{to} written. Check it with: llmtrain train -c {to} --dry-run")


def _write(target: Path, content: str, name: str) -> None:
    from llmtrain.config.document import parse_document
    from llmtrain.config.load import build_config

    build_config(parse_document(content, name))
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(content)
    except OSError as problem:
        raise UsageError(f"Cannot write {name}: {problem.strerror or problem}.") from None


def _for_text(files: list[str], to: str) -> str:
    from llmtrain.config.starter import text_config
    from llmtrain.data.text.reader import expand_files

    directory = next((file for file in files if Path(file).expanduser().is_dir()), None)
    if directory is not None:
        raise DataError(f"{directory} is a directory.", remedy=f"Pass files such as {directory.rstrip('/')}/*.txt.")
    size = sum(path.stat().st_size for path in expand_files(files, "--text"))
    content = text_config(files, size, to)
    if content is None:
        raise DataError(
            f"The text files have {size:,} bytes in all, too few to train on.", remedy="Name more or larger files."
        )
    return content


def _for_examples(file: str, to: str) -> str:
    from llmtrain.config.starter import examples_config
    from llmtrain.data.examples.formats import recognize
    from llmtrain.data.examples.json_lines import find_file, read_json_lines
    from llmtrain.data.types import BadExample

    line = next(iter(read_json_lines(find_file(file, "--instruct"), file)))
    if isinstance(line.value, BadExample):
        raise DataError(f"{file}, line {line.number}: {line.value.reason}.", remedy=line.value.remedy)
    found = recognize(line.value)
    if found is None:
        fields = ", ".join(map(repr, sorted(line.value))) or "no fields"
        raise DataError(
            f"{file}, line {line.number}: the example has {fields}; which of them is the answer is unclear.",
            remedy="Copy a preset with --preset lora_instruct, then set data.instruction_field and data.output_field.",
        )
    return examples_config(file, found.kind, found.fields, to)


def _of_preset(name: str) -> str:
    from llmtrain.config.load import list_presets
    from llmtrain.config.starter import preset_text
    from llmtrain.errors import nearest

    presets = list_presets()
    if name not in presets:
        raise UsageError(f"There is no preset '{name}'.{nearest(name, presets)}", known=presets)
    return preset_text(presets[name])

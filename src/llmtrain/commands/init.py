"""llmtrain init: a commented config to start from."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, complete_preset, show
from llmtrain.errors import DataError, UsageError


def command(
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE", help="Further files for --text, --instruct or --preferences, and directories for --text."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="PATH",
            help="Train a small GPT on text: files or directories of plain text, or a column of JSON, JSON lines, CSV, "
            "TSV and Parquet files. Several directories become a mixture of sources.",
        ),
    ] = None,
    instruct: Annotated[
        str | None,
        typer.Option(
            "--instruct",
            metavar="FILE",
            help="Fine-tune a chat model on examples: JSON (lines), CSV, TSV or Parquet. Several files become a "
            "mixture.",
        ),
    ] = None,
    preferences: Annotated[
        str | None,
        typer.Option(
            "--preferences",
            metavar="FILE",
            help="Tune a chat model on pairs of a chosen and a rejected answer: JSON (lines), CSV, TSV or Parquet. "
            "Several files become a mixture.",
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(
            "--text-column",
            metavar="NAME",
            help="Column of --text files that holds the text, if it is not found.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="Copy a preset.", autocompletion=complete_preset)
    ] = None,
    to: Annotated[str, typer.Option("--to", metavar="PATH", help="File to write. It must not exist.")] = "my.yaml",
    json_: JsonOption = False,
) -> None:
    """Write a commented config for your text files, examples or preference pairs, or from a preset."""
    if [bool(text), instruct is not None, preferences is not None, preset is not None].count(True) != 1:
        raise UsageError(
            "Pass one of --text, --instruct, --preferences and --preset.",
            remedy="For example: llmtrain init --text corpus/*.txt",
        )
    if more and preset is not None:
        raise UsageError(
            f"Unexpected argument '{more[0]}'.", remedy="Further files belong to --text, --instruct or --preferences."
        )
    if text_column is not None and not text:
        raise UsageError("--text-column belongs to --text.", remedy="Remove it.")
    target = Path(to).expanduser()
    if target.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--to must end with .yaml, got '{to}'.")
    if target.exists():
        raise UsageError(f"{to} already exists and is not replaced.", remedy="Pass another file with --to.")
    if text:
        content = _for_text([*text, *(more or [])], text_column, to)
    elif instruct is not None:
        content = _for_examples([instruct, *(more or [])], to)
    elif preferences is not None:
        content = _for_preferences([preferences, *(more or [])], to)
    else:
        content = _of_preset(preset or "")
    _write(target, content, to)
    show(json_, {"config": to}, f"{to} written. Check it with: llmtrain train -c {to} --dry-run")


def _write(target: Path, content: str, name: str) -> None:
    from llmtrain.config.document import parse_document
    from llmtrain.config.load import build_config
    from llmtrain.core.files import is_full, is_there, write_atomic

    build_config(parse_document(content, name))
    if is_there(target):  # a dangling link, or created meanwhile
        raise UsageError(f"{name} already exists and is not replaced.", remedy="Pass another file with --to.")
    try:
        write_atomic(target, content)
    except OSError as problem:
        if is_full(problem):
            raise DataError(
                f"Cannot write {name}: its disk is full. Nothing was written.",
                remedy="Free some space, or pass a file on another disk with --to.",
                reason="disk_full",
            ) from None
        raise UsageError(f"Cannot write {name}: {problem.strerror or problem}.") from None


def _for_text(names: list[str], column: str | None, to: str) -> str:
    from llmtrain.config.starter import TextSource, text_config
    from llmtrain.data.init_facts import measure_text, text_column_of
    from llmtrain.data.text.file_patterns import patterns
    from llmtrain.data.text.reader import expand_files

    sources = []
    for group in _text_groups(names):
        files = patterns(group)
        paths = expand_files(files, "--text")
        found = text_column_of(paths, column)
        file_bytes = sum(path.stat().st_size for path in paths)
        sources.append(TextSource(files, found, measure_text(paths, found), file_bytes))
    content = text_config(sources, to)
    if content is None:
        smallest = min(sources, key=lambda source: source.size)
        which = "The text files have" if len(sources) == 1 else f"The files of source {smallest.files[0]} have"
        raise DataError(
            f"{which} {smallest.size:,} bytes of text in all, too few to train on.", remedy="Name more or larger files."
        )
    return content


def _text_groups(names: list[str]) -> list[list[str]]:
    """The sources: if there are several directories, each of them and all other files together; else one."""
    directories = [name for name in names if Path(name).expanduser().is_dir()]
    if len(directories) < 2:
        return [names]
    groups = [[name] for name in directories]
    files = [name for name in names if name not in directories]
    return [*groups, files] if files else groups


def _for_examples(files: list[str], to: str) -> str:
    from llmtrain.config.starter import ExampleSource, examples_config
    from llmtrain.data.init_facts import measure_examples, recognized_examples
    from llmtrain.data.records.open_file import find_file, open_records

    sources = []
    for file in files:
        records = open_records(find_file(file, "--instruct"), file)
        found = recognized_examples(records)
        sources.append(ExampleSource(file, found.kind, found.fields, measure_examples(records, found)))
    return examples_config(sources, to)


def _for_preferences(files: list[str], to: str) -> str:
    from llmtrain.config.starter import ExampleSource, preferences_config
    from llmtrain.data.init_facts import measure_pairs
    from llmtrain.data.records.open_file import find_file, open_records

    sources = []
    for file in files:
        sizes = measure_pairs(open_records(find_file(file, "--preferences"), file))
        sources.append(ExampleSource(file, "preference_jsonl", {"on_bad_example": "skip"}, sizes))
    return preferences_config(sources, to)


def _of_preset(name: str) -> str:
    from llmtrain.config.load import list_presets
    from llmtrain.config.starter import preset_text
    from llmtrain.errors import nearest

    presets = list_presets()
    if name not in presets:
        raise UsageError(f"There is no preset '{name}'.{nearest(name, presets)}", known=presets, like=name)
    return preset_text(presets[name])

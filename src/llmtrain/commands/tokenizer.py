"""llmtrain tokenizer: train a tokenizer."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, show

app = typer.Typer(help="Train a tokenizer.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Train a tokenizer."""


@app.command("train")
def train_command(
    file: Annotated[list[str], typer.Option("--file", "-f", help="Text file or glob. Repeatable.")],
    to: Annotated[str, typer.Option("--to", help="Output directory. It must not contain a tokenizer.")],
    text_column: Annotated[
        str | None,
        typer.Option(
            "--text-column",
            metavar="NAME",
            help="Column that holds the text in JSON, JSON lines, CSV, TSV and Parquet files.",
            show_default=False,
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Number of tokens, at least 257.")] = 8192,
    json_: JsonOption = False,
) -> None:
    """Train a byte-level BPE tokenizer on text and write it as a Hugging Face tokenizer directory."""
    from llmtrain.data.records.usable import UsableRecords
    from llmtrain.data.text.documents import DocumentReader
    from llmtrain.data.text.reader import expand_files
    from llmtrain.data.tokenizers.bpe import train_bpe
    from llmtrain.errors import UsageError

    directory = Path(to).expanduser()
    if (directory / "tokenizer.json").exists():
        raise UsageError(f"{directory} already contains a tokenizer.", remedy="Choose another directory for --to.")
    files = expand_files(file, "--file")
    records = UsableRecords("skip", "--text-column", "record")
    reader = DocumentReader(text_column, records, nul_ends_text=False, field="--text-column")
    tokenizer = train_bpe((chunk.text for path in files for chunk in reader.read(path)), vocab_size, directory)
    result = {"to": str(directory), "vocab_size": tokenizer.vocab_size, "files": len(files)}
    plural = "s" if len(files) > 1 else ""
    show(
        json_,
        result,
        f"Trained a tokenizer with {tokenizer.vocab_size} tokens on {len(files)} file{plural}: {directory}",
    )

"""llmtrain tokenizer: make one of your own."""

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
    to: Annotated[str, typer.Option("--to", help="Directory to write; it must not hold a tokenizer yet.")],
    vocab_size: Annotated[int, typer.Option(min=1)] = 8192,
    json_: JsonOption = False,
) -> None:
    """Learn byte pairs (BPE) from text; the result is a Hugging Face tokenizer directory."""
    from llmtrain.data.text.reader import expand_files, read_chunks
    from llmtrain.data.tokenizers.tokenizer import train_bpe
    from llmtrain.errors import UsageError

    folder = Path(to).expanduser()
    if (folder / "tokenizer.json").exists():
        raise UsageError(f"{folder} holds a tokenizer already.", remedy="Choose another directory for --to.")
    files = expand_files(file, "--file")
    trained = train_bpe((piece.text for path in files for piece in read_chunks(path)), vocab_size, folder)
    value = {"to": str(folder), "vocab_size": trained.vocab_size, "files": len(files)}
    show(json_, value, f"A vocabulary of {trained.vocab_size} from {len(files)} files, written to {folder}.")

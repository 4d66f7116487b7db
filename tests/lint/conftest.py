"""The command of the linter."""

import pytest
import typer
from lint_examples import Lint

from llmtrain.commands.lint import command


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Lint:
    """The command as cli.py calls it: (exit code, output)."""
    app = typer.Typer(add_completion=False)
    app.command()(command)

    def call(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = app(args=[str(one) for one in arguments], standalone_mode=False)
        return int(code or 0), capsys.readouterr().out

    return call

"""Programs that run inside pods. A pod gets the text of its program in an environment variable, so its image needs
nothing but python3."""

from pathlib import Path


def script_text(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


def script_command(variable: str, file: str) -> list[str]:
    """The command that runs the program whose text is in this variable. -I -S: what is installed in the image cannot
    change how it runs."""
    return ["python3", "-I", "-S", "-c", f"import os; exec(compile(os.environ['{variable}'], '{file}', 'exec'))"]

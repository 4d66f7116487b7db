"""Scripts that run inside pods. A pod gets the source in an environment variable, so its image only needs python3."""

from pathlib import Path


def script_text(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


def script_command(variable: str, file: str) -> list[str]:
    """The command that runs the script in this variable. -I -S isolate it from packages installed in the image."""
    return ["python3", "-I", "-S", "-c", f"import os; exec(compile(os.environ['{variable}'], '{file}', 'exec'))"]

"""Run the tours of the README and of the guides, and write the real output under each command.

python tools/readme_tour.py                          rewrite them
python tools/readme_tour.py docs/fine-tuning.md      one of them; MODEL names the directory of SmolLM2-135M-Instruct
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```console(?: exit=(\d+))?\n(.*?)```", re.S)
LONGEST = 24
WIDEST = 118
PAGES = ("README.md", "docs/distributed.md")
FINE_TUNING = "docs/fine-tuning.md"  # minutes, and a model that is not here
MODEL_AT = "models/SmolLM2-135M-Instruct"


def commands(body: str) -> list[str]:
    return [line[2:] for line in body.splitlines() if line.startswith("$ ")]


def tour(text: str) -> str:
    return text[text.index("<!-- tour -->") : text.index("<!-- /tour -->")]


def run(command: str, folder: Path, expect: int) -> str:
    arguments = [sys.executable, "-m", *shlex.split(command)]
    environment = {"COLUMNS": "100", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    # With --json people read standard output only; the log lines beside it are left out.
    errors = subprocess.DEVNULL if "--json" in arguments else subprocess.STDOUT
    done = subprocess.run(arguments, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    if done.returncode != expect:
        sys.exit(f"{command}: exit {done.returncode}, expected {expect}\n{done.stdout}")
    return done.stdout.replace(str(ROOT) + "/", "")


def shorten(output: str) -> list[str]:
    lines = [line if len(line) <= WIDEST else line[: WIDEST - 4] + " ..." for line in output.rstrip().splitlines()]
    if len(lines) <= LONGEST:
        return lines
    return [*lines[: LONGEST - 9], "...", *lines[-8:]]


def main() -> None:
    for page in sys.argv[1:] or PAGES:
        rewrite(ROOT / page)


def lay_out(folder: Path) -> None:
    """What the guide to fine-tuning begins with."""
    (folder / MODEL_AT).parent.mkdir()
    (folder / MODEL_AT).symlink_to(os.environ["MODEL"])
    (folder / "data").symlink_to(ROOT.parent / "shared" / "data" / "instruct")


def rewrite(path: Path) -> None:
    text = path.read_text()
    before = tour(text)
    with tempfile.TemporaryDirectory() as name:
        if path == ROOT / FINE_TUNING:
            lay_out(Path(name))

        def fill(match: re.Match[str]) -> str:
            expect = int(match[1] or 0)
            lines = []
            for command in commands(match[2]):
                lines += [f"$ {command}", *shorten(run(command, Path(name), expect))]
            flag = f" exit={match[1]}" if match[1] else ""
            return f"```console{flag}\n" + "\n".join(lines) + "\n```"

        after = BLOCK.sub(fill, before)
    path.write_text(text.replace(before, after))


if __name__ == "__main__":
    main()

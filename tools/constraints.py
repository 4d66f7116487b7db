"""Write the exact versions of all packages to constraints.txt, and uv's copy to pyproject.toml.

python tools/constraints.py            resolve again, keeping torch at TORCH
python tools/constraints.py --check    only check that the two copies are equal
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
BEGIN, END = "constraint-dependencies = [\n", "]\n"


def resolve() -> list[str]:
    """Versions of all extras together, from uv's resolver."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write(TORCH + "\n")
        pins.flush()
        command = ["uv", "pip", "compile", "pyproject.toml", "--all-extras", "--python-version", "3.11"]
        command += [
            "--no-header",
            "--no-annotate",
            "--no-emit-index-url",
            "--no-emit-find-links",
            "--quiet",
            "-c",
            pins.name,
        ]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    # A local build (torch 2.13.0+cpu) is written as the release, so that GPU machines install a CUDA build.
    lines = [line.split("+")[0] for line in done.stdout.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "nvidia-", "cuda-", "triton"))]


def uv_copy() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"])


def read_constraints() -> list[str]:
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def write(lines: list[str]) -> None:
    head = "# Exact versions, written by `make constraints`. Install with: pip install -c constraints.txt\n"
    (ROOT / "constraints.txt").write_text(head + "\n".join(lines) + "\n")
    path = ROOT / "pyproject.toml"
    body = "".join(f'  "{line}",\n' for line in (text.replace('"', "'") for text in lines))
    text, count = re.subn(
        re.escape(BEGIN) + r".*?^" + re.escape(END), lambda _: BEGIN + body + END, path.read_text(), flags=re.S | re.M
    )
    assert count == 1, "pyproject.toml has no constraint-dependencies to replace"
    path.write_text(text)


def main() -> None:
    if "--check" not in sys.argv:
        write(resolve())
    if [line.replace('"', "'") for line in read_constraints()] != uv_copy():
        sys.exit("constraints.txt and pyproject.toml differ: run make constraints")


if __name__ == "__main__":
    main()

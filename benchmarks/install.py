"""Time from a clone to the end of the install, the first training step, evaluation and result, against another commit.

python benchmarks/install.py --before COMMIT [--train]

Clones both commits (uncommitted changes are not measured) and runs `make` in each, with empty caches: with pip, then
this commit with uv if it is on the PATH. --train also runs `make train` to its end. Without --before it does nothing,
because it downloads about a gigabyte.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "ARGS=--set trainer.log_every_steps=1 --set run.device=cpu"
MARKS = {"[TRAIN] step": "first step", "[EVAL]": "first evaluation", "[DONE]": "result"}


def clone(commit: str, directory: Path) -> Path:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(directory)], check=True)
    subprocess.run(["git", "-C", str(directory), "checkout", "-q", commit], check=True)
    return directory


def environment(home: Path) -> dict[str, str]:
    """Variables with empty caches."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS")}
    return kept | {name: str(home / name.lower()) for name in ("XDG_CACHE_HOME", "PIP_CACHE_DIR", "UV_CACHE_DIR")}


def measure(directory: Path, tool: str, is_trained: bool) -> dict[str, float]:
    """Seconds since the clone at which each stage was reached."""
    variables = environment(directory / ".caches")
    has_target = "\nsetup-train:" in (directory / "Makefile").read_text()
    make = ["make", "-s", "-C", str(directory), f"PYTHON={sys.executable}", *(["UV="] if tool == "pip" else [])]
    began = time.perf_counter()
    subprocess.run([*make, "setup-train" if has_target else "setup"], env=variables, check=True)
    stages = {"installed": time.perf_counter() - began}
    if not is_trained:
        return stages
    child = subprocess.Popen(
        [*make, "train", TRAIN], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in child.stdout or []:
        for mark, stage in MARKS.items():
            if mark in line:
                stages.setdefault(stage, time.perf_counter() - began)
    if child.wait():
        sys.exit(f"make train failed in {directory}")
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", metavar="COMMIT")
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    if not options.before:
        print("skipped: pass --before COMMIT (downloads about a gigabyte)")
        return
    variants = [("before, pip", options.before, "pip"), ("now, pip", "HEAD", "pip")]
    variants += [("now, uv", "HEAD", "uv")] if shutil.which("uv") else []
    first: dict[str, float] = {}
    for name, commit, tool in variants:
        with tempfile.TemporaryDirectory() as folder:
            stages = measure(clone(commit, Path(folder, "clone")), tool, options.train)
        first = first or stages
        for stage, seconds in stages.items():
            print(f"{name:12} {stage:17}{seconds:7.1f} s   {seconds / first[stage]:5.2f} x before", flush=True)


if __name__ == "__main__":
    main()

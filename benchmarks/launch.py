"""Seconds from `llmtrain launch` to the first training step on a cluster, against `llmtrain train --processes 2` here.

python benchmarks/launch.py KUBECONFIG IMAGE [NAMESPACE [CLAIM]]

Both train the preset ddp_smoke; the image must be on the nodes. A claim is made for each run unless one is named.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 3
STEP = re.compile(r"\[TRAIN\] step ")
EARLY = ["--config", "ddp_smoke", "--set", "trainer.log_every_steps=1"]


def seconds_to_first_step(words: list[str], folder: str) -> float:
    began = time.monotonic()
    command = [sys.executable, "-m", "llmtrain", *words]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    found = None
    lines = []
    for line in child.stdout:
        lines.append(line)
        if found is None and STEP.search(line):
            found = time.monotonic() - began
    if child.wait() or found is None:
        sys.exit(f"{' '.join(words)}:\n{''.join(lines)}")
    return found


def main() -> None:
    if len(sys.argv) < 3:
        print(f"skipped: needs a cluster.\n{__doc__}")
        return
    kubeconfig, image, *rest = sys.argv[1:]
    place = ["--kubeconfig", str(Path(kubeconfig).resolve()), "--namespace", rest[0] if rest else "default"]
    small = ["cpu=900m", "memory=1536Mi", "shm_size=64Mi"]
    settings = [word for setting in small for word in ("--set", f"launch.resources.{setting}")]
    settings += ["--set", f"launch.runs_volume.{f'claim={rest[1]}' if len(rest) > 1 else 'size=1Gi'}"]
    more = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            name = f"bench-{os.getpid()}-{number}"
            here = seconds_to_first_step(["train", *EARLY, "--processes", "2"], folder)
            there = seconds_to_first_step(
                ["launch", *EARLY, "--nodes", "2", "--name", name, "--image", image, *settings, *place], folder
            )
            delete = ["delete", name, "--data", "--yes", *place]
            subprocess.run([sys.executable, "-m", "llmtrain", *delete], check=True, capture_output=True)
            more.append(there - here)
            print(f"here {here:.1f} s, on the cluster {there:.1f} s: {there - here:.1f} s more, {there / here:.2f} x")
    print(f"median: {sorted(more)[ROUNDS // 2]:.1f} s more")


if __name__ == "__main__":
    main()

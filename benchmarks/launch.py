"""Seconds from `llmtrain launch` to the first training step on a cluster, against `llmtrain train --processes 2` here.

python benchmarks/launch.py --kubeconfig FILE --image IMAGE [--namespace NAME --claim NAME --rounds 3]

Both train the preset ddp_smoke; the image must be on the nodes. A claim is made for each run unless one is named.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP = re.compile(r"\[TRAIN\] step ")
EARLY = ["--config", "ddp_smoke", "--set", "trainer.log_every_steps=1"]


def seconds_to_first_step(arguments: list[str], folder: str) -> float:
    began = time.monotonic()
    command = [sys.executable, "-m", "llmtrain", *arguments]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    seconds = None
    lines = []
    for line in child.stdout:
        lines.append(line)
        if seconds is None and STEP.search(line):
            seconds = time.monotonic() - began
    if child.wait() or seconds is None:
        sys.exit(f"{' '.join(arguments)}:\n{''.join(lines)}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig")
    parser.add_argument("--image")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--claim")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if not given.kubeconfig or not given.image:
        print("skipped: needs a cluster (--kubeconfig and --image)")
        return
    image = given.image
    place = ["--kubeconfig", str(Path(given.kubeconfig).resolve()), "--namespace", given.namespace]
    small = ["cpu=900m", "memory=1536Mi", "shm_size=64Mi"]
    settings = [word for setting in small for word in ("--set", f"launch.resources.{setting}")]
    settings += ["--set", f"launch.runs_volume.{f'claim={given.claim}' if given.claim else 'size=1Gi'}"]
    more = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            name = f"bench-{os.getpid()}-{number}"
            here = seconds_to_first_step(["train", *EARLY, "--processes", "2"], folder)
            there = seconds_to_first_step(
                ["launch", *EARLY, "--nodes", "2", "--name", name, "--image", image, *settings, *place], folder
            )
            delete = ["delete", name, "--data", "--yes", *place]
            subprocess.run([sys.executable, "-m", "llmtrain", *delete], check=True, capture_output=True)
            more.append(there - here)
            print(f"here {here:.1f} s, on the cluster {there:.1f} s: {there - here:.1f} s more, {there / here:.2f} x")
    print(f"median: {sorted(more)[given.rounds // 2]:.1f} s more")


if __name__ == "__main__":
    main()

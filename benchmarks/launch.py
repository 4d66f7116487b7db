"""Time from `llmtrain launch` to the first training step on a cluster, compared with `llmtrain train --processes 2`.

python benchmarks/launch.py --kubeconfig FILE --image IMAGE [--namespace NAME --claim NAME --rounds 3]

Both train the preset ddp_smoke. The image must be on the nodes. Without --claim, a claim is created for each run.
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


def seconds_to_first_step(arguments: list[str], directory: str) -> float:
    began = time.monotonic()
    command = [sys.executable, "-m", "llmtrain", *arguments]
    child = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
    options = parser.parse_args()
    if not options.kubeconfig or not options.image:
        print("skipped: needs a cluster (--kubeconfig and --image)")
        return
    image = options.image
    target = ["--kubeconfig", str(Path(options.kubeconfig).resolve()), "--namespace", options.namespace]
    small = ["cpu=900m", "memory=1536Mi", "shm_size=64Mi"]
    settings = [word for setting in small for word in ("--set", f"launch.resources.{setting}")]
    settings += ["--set", f"launch.runs_volume.{f'claim={options.claim}' if options.claim else 'size=1Gi'}"]
    differences = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.rounds):
            name = f"bench-{os.getpid()}-{number}"
            local = seconds_to_first_step(["train", *EARLY, "--processes", "2"], directory)
            remote = seconds_to_first_step(
                ["launch", *EARLY, "--nodes", "2", "--name", name, "--image", image, *settings, *target], directory
            )
            delete = ["delete", name, "--data", "--yes", *target]
            subprocess.run([sys.executable, "-m", "llmtrain", *delete], check=True, capture_output=True)
            differences.append(remote - local)
            print(f"local {local:.1f} s, cluster {remote:.1f} s, ratio {remote / local:.2f}")
    print(f"median: {sorted(differences)[options.rounds // 2]:.1f} s more")


if __name__ == "__main__":
    main()

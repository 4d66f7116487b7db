"""kind, and what it makes its nodes with, as programs: no shell, and what they complain about in one line."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress

from llmtrain.errors import ClusterError, UsageError

# What kind can make nodes with, in the order in which it looks for them; the last two only if they are named.
PROVIDERS = ("docker", "nerdctl", "podman", "finch", "nerdctl.lima")
CHOICE = "KIND_EXPERIMENTAL_PROVIDER"
HOW_TO_INSTALL = "https://kind.sigs.k8s.io/docs/user/quick-start"
ANY_CLUSTER = "No cluster of your own is needed: all other commands take --kubeconfig and --context."


def list_clusters() -> list[str]:
    """Names of all kind clusters of this machine. Whatever is missing for that is told."""
    maker = provider()
    if shutil.which("kind") is None:
        raise UsageError("kind is not installed.", remedy=f"Install it: {HOW_TO_INSTALL}. {ANY_CLUSTER}")
    done = subprocess.run(["kind", "get", "clusters"], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise UsageError(
            f"{maker} does not answer kind: {_complaint(done.stderr)}",
            remedy=f"Start it, and see that `{maker} ps` works for you. {ANY_CLUSTER}",
        )
    return done.stdout.split()


def provider() -> str:
    """The program that kind makes its nodes with."""
    named = os.environ.get(CHOICE, "")
    wanted = (named,) if named in PROVIDERS else PROVIDERS[:3]
    for program in wanted:
        if shutil.which(program):
            return program
    raise UsageError(
        f"{wanted[0]} is not installed.",
        remedy=f"Install Docker (kind also works with podman and nerdctl): {HOW_TO_INSTALL}. {ANY_CLUSTER}",
    )


def mounts_of(container: str) -> list[str]:
    """Where things are mounted in a container, also when it does not run. Nowhere if there is no such
    container."""
    words = [provider(), "container", "inspect", container]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        return []
    return [mount.get("Destination", "") for mount in json.loads(done.stdout)[0].get("Mounts") or []]


def run(*words: str, input_: str = "") -> None:
    """Run a program that takes its time. What it says is shown as it comes, on standard error: the other is for our
    result."""
    said = []
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            with suppress(BrokenPipeError):  # it ended without reading
                process.stdin.write(input_)
                process.stdin.close()
            for line in process.stdout:
                said.append(line)
                print(line, end="", file=sys.stderr, flush=True)
        except BaseException:
            process.kill()  # kind has no other way to end on a signal either
            process.wait()  # whoever cleans up must not work against it
            raise
    if process.returncode:
        what = " ".join(words[:3])
        raise ClusterError(f"{what} failed: {_complaint(''.join(said))}", remedy="What it said is above.")


def _complaint(said: str) -> str:
    """The line of what a program said that tells most: what the program below it put out, else its error, else the
    last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for start in ("Command Output:", "ERROR:"):
        for line in lines:
            if line.startswith(start) and line != start:
                return line.removeprefix(start).strip()
    return lines[-1] if lines else "it said nothing"

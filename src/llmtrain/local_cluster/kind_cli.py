"""Running kind (the tool) and its container provider: without a shell, with the reason of a failure in one line."""

import json
import os
import shutil
import subprocess

from llmtrain.core.programs import run_program
from llmtrain.errors import ClusterError, UsageError

# Container providers in the order in which kind tries them; the last two only if selected.
PROVIDERS = ("docker", "nerdctl", "podman", "finch", "nerdctl.lima")
PROVIDER_VARIABLE = "KIND_EXPERIMENTAL_PROVIDER"
INSTALL_URL = "https://kind.sigs.k8s.io/docs/user/quick-start"
ANY_CLUSTER = "Or use an existing cluster: all other commands take --kubeconfig and --context."


def list_clusters() -> list[str]:
    """Names of all kind clusters on this machine. Raises if kind or its provider is missing."""
    program = provider()
    if shutil.which("kind") is None:
        raise UsageError("kind is not installed.", remedy=f"Install it: {INSTALL_URL}. {ANY_CLUSTER}")
    done = subprocess.run(["kind", "get", "clusters"], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise UsageError(
            f"kind cannot use {program}: {_error_line(done.stderr)}",
            remedy=f"Start {program} and check that `{program} ps` works. {ANY_CLUSTER}",
        )
    return done.stdout.split()


def provider() -> str:
    """The container provider that kind uses."""
    selected = os.environ.get(PROVIDER_VARIABLE, "")
    candidates = (selected,) if selected in PROVIDERS else PROVIDERS[:3]
    for program in candidates:
        if shutil.which(program):
            return program
    raise UsageError(
        f"{candidates[0]} is not installed.",
        remedy=f"Install Docker, podman or nerdctl: {INSTALL_URL}. {ANY_CLUSTER}",
    )


def mounts_of(container: str) -> list[str]:
    """Mount points of a container, running or not; empty if it does not exist."""
    words = [provider(), "container", "inspect", container]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        return []
    return [mount.get("Destination", "") for mount in json.loads(done.stdout)[0].get("Mounts") or []]


def run(*words: str, input_: str = "") -> None:
    """Run a program and copy its output to standard error as it is printed: stdout is for our own result."""
    code, output = run_program(words, input_)
    if code:
        command = " ".join(words[:3])
        raise ClusterError(f"{command} failed: {_error_line(output)}", remedy="Its full output is above.")


def _error_line(output: str) -> str:
    """The most informative line of an output: that of a nested command, else of the error, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for start in ("Command Output:", "ERROR:"):
        for line in lines:
            if line.startswith(start) and line != start:
                return line.removeprefix(start).strip()
    return lines[-1] if lines else "no output"

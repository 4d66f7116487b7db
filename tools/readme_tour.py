"""Run the tours of the README and of the guides, and write the real output under each command.

python tools/readme_tour.py                          rewrite them
python tools/readme_tour.py docs/fine-tuning.md      one of them; MODEL names the directory of SmolLM2-135M-Instruct
python tools/readme_tour.py docs/kubernetes.md       KUBE_CONFIG_FILE: a kubeconfig; the namespace of its context has a
                                                     claim `runs`; IMAGE: an image on that cluster

A block with a line ^C shows a command that is left by Ctrl-C once it has shown a training step.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```console(?: exit=(\d+))?\n(.*?)```", re.S)
LONGEST = 24
WIDEST = 118
PAGES = ("README.md", "docs/distributed.md")
FINE_TUNING = "docs/fine-tuning.md"  # minutes, and a model that is not here
MODEL_AT = "models/SmolLM2-135M-Instruct"
KUBERNETES = "docs/kubernetes.md"  # minutes, and a cluster
IMAGE_AT = "registry.example.com/llmtrain:0.1.0"  # as a reader sees them
NAMESPACE_AT = "research"
CTRL_C = "^C"


def commands(body: str) -> list[str]:
    return [line[2:] for line in body.splitlines() if line.startswith("$ ")]


def is_left(body: str) -> bool:
    return CTRL_C in body.splitlines()


def tour(text: str) -> str:
    return text[text.index("<!-- tour -->") : text.index("<!-- /tour -->")]


@dataclass(frozen=True)
class Cluster:
    """Where the commands of the guide to Kubernetes are run."""

    kubeconfig: str
    image: str
    namespace: str = ""
    """Shown as NAMESPACE_AT; empty: as it is."""


def run(command: str, folder: Path, expect: int, cluster: Cluster | None = None, is_left: bool = False) -> str:
    """What a command shows. `is_left`: by Ctrl-C, as soon as it shows a training step."""
    environment = {"COLUMNS": "100", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    if cluster:
        command = command.replace(IMAGE_AT, cluster.image)
        environment["KUBECONFIG"] = cluster.kubeconfig
    arguments = [sys.executable, "-m", *shlex.split(command)]
    # With --json people read standard output only; the log lines beside it are left out.
    errors = subprocess.DEVNULL if "--json" in arguments else subprocess.STDOUT
    process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    output = _leave(process) if is_left else process.communicate()[0]
    if process.wait() != expect:
        sys.exit(f"{command}: exit {process.returncode}, expected {expect}\n{output}")
    if cluster:
        output = output.replace(cluster.image, IMAGE_AT)
        output = output.replace(cluster.namespace, NAMESPACE_AT) if cluster.namespace else output
    return output.replace(str(ROOT) + "/", "")


def _leave(process: "subprocess.Popen[str]") -> str:
    """Its output, with the ^C that a terminal shows."""
    before = []
    for line in process.stdout or []:
        before.append(line)
        if line.startswith("[TRAIN] step"):
            process.send_signal(signal.SIGINT)
            break
    return "".join(before) + CTRL_C + process.communicate()[0]


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


def the_cluster() -> Cluster:
    """The one that the environment names."""
    import yaml

    file = os.environ["KUBE_CONFIG_FILE"]
    config = yaml.safe_load(Path(file).read_text())
    context = next(row["context"] for row in config["contexts"] if row["name"] == config["current-context"])
    return Cluster(file, os.environ["IMAGE"], context["namespace"])


def rewrite(path: Path) -> None:
    text = path.read_text()
    before = tour(text)
    cluster = the_cluster() if path == ROOT / KUBERNETES else None
    with tempfile.TemporaryDirectory() as name:
        if path == ROOT / FINE_TUNING:
            lay_out(Path(name))

        def fill(match: re.Match[str]) -> str:
            expect = int(match[1] or 0)
            lines = []
            for command in commands(match[2]):
                shown = run(command, Path(name), expect, cluster, is_left=is_left(match[2]))
                lines += [f"$ {command}", *shorten(shown)]
            flag = f" exit={match[1]}" if match[1] else ""
            return f"```console{flag}\n" + "\n".join(lines) + "\n```"

        after = BLOCK.sub(fill, before)
    path.write_text(text.replace(before, after))


if __name__ == "__main__":
    main()

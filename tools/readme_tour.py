"""Run the commands of the README and of the guides, and write their real output below each command.

python tools/readme_tour.py                          all pages that need nothing else
python tools/readme_tour.py docs/fine-tuning.md      MODEL: directory of SmolLM2-135M-Instruct
python tools/readme_tour.py docs/moving.md docs/troubleshooting.md
                                                     pages that abridge outputs with `...`: the same lines are kept
python tools/readme_tour.py docs/kubernetes.md docs/own-scripts.md
                                                     KUBE_CONFIG_FILE: a kubeconfig whose namespace has a claim `runs`;
                                                     IMAGE: an image that the cluster can pull

A block with a line ^C shows a command that is interrupted with Ctrl-C after its first training step.
"""

import difflib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```console(?: exit=(\d+))?\n(.*?)```", re.S)
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.S)
MAX_LINES = 24
MAX_WIDTH = 118
PAGES = ("README.md", "docs/tour.md", "docs/distributed.md")
FINE_TUNING = "docs/fine-tuning.md"  # takes minutes and needs a model
MODEL_AT = "models/SmolLM2-135M-Instruct"
CLUSTER_PAGES = ("docs/kubernetes.md", "docs/own-scripts.md")  # take minutes and need a cluster
# What the page shows instead of the real image and namespace.
IMAGE_AT = "registry.example.com/llmtrain:0.2.0"
NAMESPACE_AT = "research"
HOST_AT = "vm"
ABRIDGED = ("docs/moving.md", "docs/troubleshooting.md")
CTRL_C = "^C"


def write_files(text: str, directory: Path) -> None:
    """Write the files that a page shows, which its commands read."""
    for name, content in FILE.findall(text):
        (directory / name).write_text(content)


def examples(body: str) -> list[tuple[str, list[str]]]:
    """The commands of a block, each with the output shown below it."""
    parts = [part.splitlines() for part in re.split(r"^\$ ", body, flags=re.M)[1:]]
    return [(lines[0], lines[1:]) for lines in parts]


def is_interrupted(body: str) -> bool:
    return CTRL_C in body.splitlines()


def tour(text: str) -> str:
    """The part of a page whose commands are run."""
    return text[text.index("<!-- tour -->") : text.index("<!-- /tour -->")]


@dataclass(frozen=True)
class Cluster:
    """The cluster for the commands of CLUSTER_PAGES."""

    kubeconfig: str
    image: str
    namespace: str = ""
    """Shown as NAMESPACE_AT; empty: shown unchanged."""


def run(command: str, directory: Path, expect: int, cluster: Cluster | None = None, interrupt: bool = False) -> str:
    """Output of a command. `interrupt`: send SIGINT after the first training step."""
    environment = {"COLUMNS": "100", "PATH": "/usr/bin:/bin", "HOME": str(directory)}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    if cluster:
        command = command.replace(IMAGE_AT, cluster.image)
        environment["KUBECONFIG"] = cluster.kubeconfig
    arguments = [sys.executable, "-m", *shlex.split(command)]
    # With --json only standard output is read; log lines go to standard error.
    errors = subprocess.DEVNULL if "--json" in arguments else subprocess.STDOUT
    process = subprocess.Popen(
        arguments, cwd=directory, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )
    output = _interrupt(process) if interrupt else process.communicate()[0]
    if process.wait() != expect:
        sys.exit(f"{command}: exit {process.returncode}, expected {expect}\n{output}")
    if cluster:
        output = output.replace(cluster.image, IMAGE_AT)
        output = output.replace(cluster.namespace, NAMESPACE_AT) if cluster.namespace else output
    return portable(output)


def portable(output: str) -> str:
    """Output without the checkout's path and this machine's name."""
    return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w.-])", HOST_AT, output.replace(f"{ROOT}/", ""))


def mask(line: str) -> str:
    """A line without what differs between runs and machines: numbers, hashes, column widths, text of the model."""
    line = re.sub(r'(\[SAMPLE\].* ->|"sample(?:_prompt)?": ).*', r"\1", line)
    line = re.sub(r"(_IFNAME .* one of ).*", r"\1", line)  # network interfaces
    line = re.sub(r"\b[0-9a-f]{12,}\b", "0", line).replace("aarch64", "x86_64")
    line = " ".join(re.sub(r"\d[\d,.:]*(?:e[+-]?\d+)?", "0", line).split())
    line = re.sub(r"\b0 (us|ms|min|h|d)\b", "0 s", line)  # ages and durations
    return re.sub(r"\b0 [kMGT]i?B\b", "0 B", line)  # sizes and bandwidths


def is_same_line(shown: str, real: str) -> bool:
    """Whether a line of a page is a real one, with numbers masked; `shorten` cuts long lines."""
    if shown.endswith(" ..."):
        return mask(real).startswith(mask(shown.removesuffix(" ...")))
    return mask(shown) == mask(real)


def is_abridged(shown: list[str], real: list[str], same: Callable[[str, str], bool] = str.__eq__) -> bool:
    """Whether the shown lines are the real ones, where `...` stands for any number of omitted lines."""
    if not shown:
        return not real
    if shown[0] == "...":
        return any(is_abridged(shown[1:], real[start:], same) for start in range(len(real) + 1))
    return bool(real) and same(shown[0], real[0]) and is_abridged(shown[1:], real[1:], same)


def is_shown_output(command: str, shown: list[str], real: list[str]) -> bool:
    """Whether a page shows the output of a command, apart from numbers, from text that a model wrote, and from lines
    that depend on which process comes first: any rank may tokenize, and only rank 0 logs."""
    if command.startswith("llmtrain generate "):
        return bool(shown) and bool(real)
    varying = ("  |", "[DATA] tokenized ")
    constant = [[line for line in lines if not line.startswith(varying)] for lines in (shown, real)]
    return is_abridged(*constant, is_same_line)


def _interrupt(process: "subprocess.Popen[str]") -> str:
    """Output of the process, with the ^C that a terminal echoes."""
    lines = []
    for line in process.stdout or []:
        lines.append(line)
        if line.startswith("[TRAIN] step"):
            process.send_signal(signal.SIGINT)
            break
    return "".join(lines) + CTRL_C + process.communicate()[0]


def shorten(output: str) -> list[str]:
    lines = [
        line if len(line) <= MAX_WIDTH else line[: MAX_WIDTH - 4] + " ..." for line in output.rstrip().splitlines()
    ]
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[: MAX_LINES - 9], "...", *lines[-8:]]


def abridge(shown: list[str], real: list[str]) -> list[str]:
    """The real lines that correspond to the shown ones, in order, with `...` for those between them."""
    if "..." not in shown:
        return real
    kept: list[int] = []
    for line in shown:
        candidates = range(kept[-1] + 1 if kept else 0, len(real))
        if line != "..." and candidates:
            best = max(candidates, key=lambda i: (difflib.SequenceMatcher(None, line, real[i]).ratio(), -i))
            if difflib.SequenceMatcher(None, line, real[best]).ratio() > 0.5:
                kept.append(best)
    lines = []
    for before, index in zip([-1, *kept], kept, strict=False):
        lines += [*(["..."] if index > before + 1 else []), real[index]]
    return [*lines, "..."] if kept and kept[-1] < len(real) - 1 else lines


def rewrite_abridged(path: Path) -> None:
    text = path.read_text()
    with tempfile.TemporaryDirectory() as name:
        write_files(text, Path(name))

        def fill(match: re.Match[str]) -> str:
            lines = [match[0].splitlines()[0]]
            for command, shown in examples(match[2]):
                output = run(command, Path(name), int(match[1] or 0))
                lines += [f"$ {command}", *abridge(shown, output.rstrip().splitlines())]
            return "\n".join([*lines, "```"])

        path.write_text(BLOCK.sub(fill, text))


def main() -> None:
    for page in sys.argv[1:] or PAGES:
        if page in ABRIDGED:
            rewrite_abridged(ROOT / page)
        else:
            rewrite(ROOT / page)


def link_model_and_data(directory: Path) -> None:
    """The model and the data that docs/fine-tuning.md starts from."""
    (directory / MODEL_AT).parent.mkdir()
    (directory / MODEL_AT).symlink_to(os.environ["MODEL"])
    (directory / "data").symlink_to(ROOT.parent / "shared" / "data" / "instruct")


def cluster_from_env() -> Cluster:
    import yaml

    file = os.environ["KUBE_CONFIG_FILE"]
    config = yaml.safe_load(Path(file).read_text())
    context = next(row["context"] for row in config["contexts"] if row["name"] == config["current-context"])
    return Cluster(file, os.environ["IMAGE"], context["namespace"])


def rewrite(path: Path) -> None:
    text = path.read_text()
    before = tour(text)
    cluster = None
    if str(path.relative_to(ROOT)) in CLUSTER_PAGES:
        cluster = cluster_from_env()
    with tempfile.TemporaryDirectory() as name:
        write_files(text, Path(name))
        if path == ROOT / FINE_TUNING:
            link_model_and_data(Path(name))

        def fill(match: re.Match[str]) -> str:
            expect = int(match[1] or 0)
            lines = []
            for command, _ in examples(match[2]):
                output = run(command, Path(name), expect, cluster, interrupt=is_interrupted(match[2]))
                lines += [f"$ {command}", *shorten(output)]
            flag = f" exit={match[1]}" if match[1] else ""
            return f"```console{flag}\n" + "\n".join(lines) + "\n```"

        after = BLOCK.sub(fill, before)
    path.write_text(text.replace(before, after))


if __name__ == "__main__":
    main()

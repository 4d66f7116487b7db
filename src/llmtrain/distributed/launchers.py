"""Launchers, which start several processes of a command, and the parts of their command lines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmtrain.distributed.shell_command import program, without_wrappers


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Launcher:
    """Its options are written with hyphens."""

    label: str
    flags: frozenset[str]
    """Options without a value; every other option takes one."""
    pairs: frozenset[str] = frozenset()
    """Options with two values."""
    per_node: frozenset[str] = frozenset()
    """Options for the number of processes per node."""
    total: frozenset[str] = frozenset()
    """Options for the number of processes on all nodes."""
    nodes: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    """Options that name nodes."""
    is_generic: bool = False
    """Starts any program, not a Python script; with one process it is harmless, as it keeps RANK and WORLD_SIZE."""


@dataclass(frozen=True)
class LauncherCommand:
    """A command line that begins with a launcher."""

    launcher: Launcher
    options: dict[str, str]
    script: list[str]
    """The script with its arguments, or the program of a generic launcher."""

    @property
    def is_module(self) -> bool:
        return bool(self.options.keys() & {"m", "module"})

    @property
    def process(self) -> list[str]:
        """What each process runs; a script without `python`."""
        if self.is_module:
            return ["python", "-m", *self.script]
        return self.script

    @property
    def python_command(self) -> list[str]:
        """What each process runs, as a command."""
        if self.is_module or self.launcher.is_generic or "no-python" in self.options:
            return self.process or ["python", "train.py"]
        return ["python", *(self.script or ["train.py"])]

    @property
    def nodes(self) -> str | None:
        return self._option(self.launcher.nodes)

    @property
    def processes_per_node(self) -> str | None:
        per_node = self._option(self.launcher.per_node)
        if per_node:
            return per_node
        # Else all processes divided by the nodes, unless a list of hosts decides the number of nodes.
        total = self._option(self.launcher.total)
        nodes = self.nodes or "1"
        if not total or self.options.keys() & self.launcher.hosts:
            return None
        if not total.isdecimal() or not nodes.isdecimal() or int(nodes) == 0:
            return None
        count, rest = divmod(int(total), int(nodes))
        if rest:
            return None
        return str(count)

    @property
    def starts_processes(self) -> bool:
        """False for `--version` and for one process of a generic launcher."""
        is_information = self.options.keys() & {"h", "help", "V", "version"}
        is_one = self.launcher.is_generic and self._option(self.launcher.total) == "1"
        return not is_information and not is_one

    def _option(self, names: frozenset[str]) -> str | None:
        return next((value for name, value in self.options.items() if name in names and value), None)


_PYTHON = re.compile(r"python[\d.]*")
_LETTER_AND_NUMBER = re.compile(r"-([A-Za-z])(\d+)")  # -n4
_INFORMATION = _words("h help V version")
_SCRIPT_FLAGS = _words("module m no-python") | _INFORMATION
_TORCHRUN = Launcher(
    "torchrun",
    _SCRIPT_FLAGS | _words("standalone run-path use-env virtual-local-rank"),
    per_node=_words("nproc-per-node"),
    nodes=_words("nnodes"),
)
_ACCELERATE = Launcher(
    "accelerate launch",
    _SCRIPT_FLAGS | _words("multi-gpu cpu tpu use-deepspeed use-fsdp debug quiet q"),
    total=_words("num-processes"),
    nodes=_words("num-machines"),
)
_DEEPSPEED = Launcher(
    "deepspeed",
    _SCRIPT_FLAGS | _words("no-local-rank no-ssh no-ssh-check force-multi"),
    per_node=_words("num-gpus"),
    nodes=_words("num-nodes"),
    hosts=_words("H hostfile i include"),
)
_COLOSSALAI = Launcher(
    "colossalai run",
    _SCRIPT_FLAGS,
    per_node=_words("nproc-per-node"),
    nodes=_words("num-nodes"),
    hosts=_words("H host hostfile include"),
)
_COMPOSER = Launcher(
    "composer",
    _SCRIPT_FLAGS | _words("v verbose"),
    per_node=_words("n nproc"),
    total=_words("world-size"),
)
_HOROVODRUN = Launcher(
    "horovodrun",
    _INFORMATION | _words("v verbose cb check-build disable-cache autotune gloo mpi jsrun tcp"),
    total=_words("np num-proc"),
    hosts=_words("H hosts hostfile"),
    is_generic=True,
)
_SRUN = Launcher(
    "srun",
    _INFORMATION
    | _words("l label u unbuffered v vv verbose Q quiet exclusive pty O overcommit s oversubscribe overlap")
    | _words("K kill-on-bad-exit E preserve-env X disable-status k no-kill"),
    per_node=_words("ntasks-per-node"),
    total=_words("n ntasks"),
    nodes=_words("N nodes"),
    is_generic=True,
)
_MPIRUN = Launcher(
    "mpirun",
    _INFORMATION
    | _words("allow-run-as-root oversubscribe nooversubscribe tag-output timestamp-output display-map")
    | _words("display-allocation report-bindings bind-to-core bynode byslot bycore bysocket v verbose q quiet novm")
    | _words("genvall envall l prepend-rank use-hwthread-cpus continuous"),
    pairs=_words("mca gmca genv env"),
    per_node=_words("npernode N ppn perhost"),
    total=_words("n np c"),
    hosts=_words("H host hosts hostfile machinefile default-hostfile f"),
    is_generic=True,
)
_PROGRAMS = {
    ("torchrun",): _TORCHRUN,
    ("accelerate", "launch"): _ACCELERATE,
    ("deepspeed",): _DEEPSPEED,
    ("colossalai", "run"): _COLOSSALAI,
    ("composer",): _COMPOSER,
    ("horovodrun",): _HOROVODRUN,
    ("srun",): _SRUN,
    ("mpirun",): _MPIRUN,
    ("mpiexec",): replace(_MPIRUN, label="mpiexec"),
    ("orterun",): replace(_MPIRUN, label="orterun"),
}
_MODULES = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate.commands.launch": _ACCELERATE,
    "deepspeed.launcher.runner": _DEEPSPEED,
    "composer.cli.launcher": _COMPOSER,
    "horovod.runner.launch": _HOROVODRUN,
}
# `python -m MODULE SUBCOMMAND`: the program of the same name.
_PROGRAM_MODULES = {"accelerate.commands.accelerate_cli": "accelerate", "colossalai.cli": "colossalai"}
_WHICH = re.compile(r"\$\((?:which|command -v) (\w+)\)|`(?:which|command -v) (\w+)`")
_LAUNCHER_FILE = re.compile(r"(?:.*/)?torch/distributed/(?:run|launch)\.py")


def parse_launcher(command: Sequence[str]) -> LauncherCommand | None:
    """The launcher that the command begins with, behind wrappers; None for any other command. A generic launcher of
    one process counts as a wrapper."""
    found = _find(without_wrappers(command))
    if found is None:
        return None
    parsed = _split(*found)
    if parsed.starts_processes:
        return parsed
    if not parsed.script:
        return None
    return parse_launcher(parsed.script)


def _find(words: list[str]) -> tuple[Launcher, list[str]] | None:
    """The launcher, and the words after it."""
    if _PYTHON.fullmatch(program(words)):
        return _find_python(words[1:])
    for length in (1, 2):
        launcher = _PROGRAMS.get((program(words), *words[1:length]))
        if launcher:
            return launcher, words[length:]
    return None


def _find_python(rest: list[str]) -> tuple[Launcher, list[str]] | None:
    """The launcher that Python runs with these arguments."""
    while rest and rest[0].startswith("-") and not rest[0].startswith("-m"):  # options of Python itself
        has_value = rest[0] in ("-W", "-X")
        rest = rest[1 + has_value :]
    if not rest:
        return None
    first = rest[0]
    if not first.startswith("-m"):
        return _find_file(first, rest[1:])
    if first == "-m":
        module = "".join(rest[1:2])
        rest = rest[2:]
    else:  # -mtorch.distributed.run
        module = first[2:]
        rest = rest[1:]
    if module in _PROGRAM_MODULES:
        return _find([_PROGRAM_MODULES[module], *rest])
    if module in _MODULES:
        return _MODULES[module], rest
    return None


def _find_file(file: str, rest: list[str]) -> tuple[Launcher, list[str]] | None:
    """The launcher, if it is the file that Python runs: `python $(which torchrun)`."""
    if _LAUNCHER_FILE.fullmatch(file):
        return _TORCHRUN, rest
    which = _WHICH.fullmatch(file)
    if which:
        file = which[1] or which[2]
    words = [file, *rest]
    if _PYTHON.fullmatch(program(words)):  # a script of that name
        return None
    return _find(words)


def _split(launcher: Launcher, words: list[str]) -> LauncherCommand:
    """The options of the launcher by name, and the script with its arguments."""
    options: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        at += 1
        if word == "--":
            break
        if short := _LETTER_AND_NUMBER.fullmatch(word):
            options[short[1]] = short[2]
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not equals and name not in launcher.flags:
            count = 1
            if name in launcher.pairs:
                count = 2
            value = " ".join(words[at : at + count])
            at += count
        options[name] = value
    return LauncherCommand(launcher, options, words[at:])

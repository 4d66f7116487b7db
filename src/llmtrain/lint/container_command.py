"""The command of a container: words, flags and variables from command, args, shell scripts and `env`. Shell scripts are
only skimmed; what cannot be determined is ignored."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from llmtrain.distributed.shell_command import commands_in, script_position
from llmtrain.lint.yaml_nodes import LineFinder, Node

# Bounded: otherwise every unclosed `$(` would be scanned to the end of the script.
_WORD = re.compile(r"""(?:\$\([^)]{0,200}\)|[^\s"';|&()]|"[^"]*"|'[^']*')+""")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\((\w+)\)|\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_COMMENT = re.compile(r"(?m)^[^\S\n]*#.*$")
TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|\btorch/distributed/(?:run|launch)\.py")
OTHER_LAUNCHERS = re.compile(
    r"\baccelerate\s+launch\b|\bcolossalai\s+run\b|\b(?:deepspeed|mpirun|mpiexec|srun|horovodrun|composer|ray)\b"
)
LLMTRAIN = re.compile(r"\bllmtrain\s+(?:node|train)\b")
INDEX_LABELS = ("job-completion-index", "pod-index", "replica-index")
INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "POD_INDEX", "NODE_RANK", "PET_NODE_RANK", "RANK")


@dataclass(frozen=True)
class Setting:
    """A variable or a flag. `value` is `raw` with known variables expanded."""

    name: str
    value: str
    raw: str
    line: int
    node: Node
    is_literal: bool = True
    """False: the value comes from a Secret, a ConfigMap or a field of the pod."""

    @property
    def number(self) -> int | None:
        if not re.fullmatch(r"\d{1,9}", self.value):
            return None
        return int(self.value)


@dataclass(frozen=True)
class Container:
    node: Node
    is_init: bool = False

    @property
    def name(self) -> str:
        return self.node.get("name").text

    @cached_property
    def entries(self) -> list[Node]:
        """The entries of command and args, in order."""
        entries = [*self.node.get("command"), *self.node.get("args")]
        return [entry for entry in entries if entry.text]

    def entry_with(self, part: str) -> Node:
        """The first entry that contains a text; the container itself if none does."""
        for entry in self.entries:
            if part in entry.text:
                return entry
        return self.node

    @cached_property
    def script(self) -> str:
        """Command and args as one text, without comments."""
        return "\n".join(_COMMENT.sub("", entry.text) for entry in self.entries)

    @cached_property
    def command_line(self) -> str:
        """Command and args on one line, for patterns of several words."""
        return " ".join(self.script.replace("\\\n", " ").split())

    @property
    def shell_script(self) -> Node | None:
        """The script of `sh -c SCRIPT`."""
        position = script_position([entry.text for entry in self.entries])
        if position is None:
            return None
        return self.entries[position]

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command that it runs."""
        return commands_in([entry.text.strip() for entry in self.entries])

    @property
    def is_torchrun(self) -> bool:
        return bool(TORCHRUN.search(self.command_line))

    @property
    def is_launched(self) -> bool:
        """Whether a launcher starts and numbers the processes of the pod."""
        text = self.command_line
        return self.is_torchrun or bool(LLMTRAIN.search(text) or OTHER_LAUNCHERS.search(text))

    def find(self, pattern: re.Pattern[str]) -> Iterator[tuple[Node, int, str]]:
        """(entry, line, text) of every match in command and args."""
        for entry in self.entries:
            finder = LineFinder(entry)
            for match in pattern.finditer(_COMMENT.sub("", entry.text)):
                yield entry, finder.line_of(match[0]), match[0].strip()

    @cached_property
    def _words(self) -> list[tuple[str, Node]]:
        found: list[tuple[str, Node]] = []
        for entry in self.entries:
            if not re.search(r"\s", entry.text.strip()):
                found.append((entry.text.strip(), entry))
                continue
            plain = _COMMENT.sub("", entry.text).replace("\\\n", " ")
            for word in _WORD.findall(plain):
                found.append((re.sub(r"[\"']", "", word), entry))
        return found

    @cached_property
    def assignments(self) -> list[Setting]:
        """Variables of `env`, then those that a script sets."""
        raw = [*self._env(), *self._assigned_in_scripts()]
        known = {setting.name: setting.raw for setting in raw if setting.is_literal}
        return [replace(setting, value=_expand(setting.raw, known)) for setting in raw]

    @cached_property
    def variables(self) -> dict[str, Setting]:
        """Variables by name; the last assignment counts."""
        return {setting.name: setting for setting in self.assignments}

    def _env(self) -> Iterator[Setting]:
        for entry in self.node.get("env"):
            name = entry.get("name").text
            value = entry.get("value")
            source = entry.get("valueFrom")
            if source.exists:
                yield Setting(name, "", source.get("fieldRef", "fieldPath").text, source.line, source, False)
            elif name:
                yield Setting(name, value.text, value.text, value.line, value)

    def _assigned_in_scripts(self) -> Iterator[Setting]:
        # An entry that is one word, such as A=1, is an argument. One finder per script: each reads it once.
        finders = {id(entry): LineFinder(entry) for entry in self.entries if re.search(r"\s", entry.text)}
        for word, entry in self._words:
            match = _ASSIGNMENT.fullmatch(word)
            if match is None or id(entry) not in finders:
                continue
            name, value = match.groups()
            line = finders[id(entry)].line_of(f"{name}=")
            yield Setting(name, value, value, line, entry)

    @cached_property
    def flags(self) -> dict[str, Setting]:
        """`--nproc_per_node 2` and `--nproc-per-node=2`, by the name with hyphens. The first one counts: options after
        the name of a script belong to the script."""
        known = {name: setting.value for name, setting in self.variables.items() if setting.is_literal}
        found: dict[str, Setting] = {}
        finders: dict[int, LineFinder] = {}
        for (word, entry), (next_word, next_entry) in pairwise([*self._words, ("", self.node)]):
            match = re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
            if not match:
                continue
            name = match[1].replace("_", "-")
            raw = match[2]
            at = entry
            if raw is None:  # the value is the next word, perhaps in the next entry
                raw = next_word
                if next_word.startswith("--"):
                    raw = ""
                if next_entry is not self.node:  # the last flag is followed by nothing
                    at = next_entry
            line = at.line
            if at is entry:
                line = finders.setdefault(id(at), LineFinder(at)).line_of(match[0])
            found.setdefault(name, Setting(name, _expand(raw, known), raw, line, at))
        return found

    def settings(self, flags: tuple[str, ...], variables: tuple[str, ...]) -> list[Setting]:
        """The settings that exist, flags first: they take precedence over variables. A flag that only refers to one of
        the variables is omitted: the variable has the value."""
        found = [self.flags[name] for name in flags if name in self.flags]
        found += [self.variables[name] for name in variables if name in self.variables]
        names = {setting.name for setting in found}
        independent = []
        for setting in found:
            others = names - {setting.name}
            if not others & _referenced(setting.raw):
                independent.append(setting)
        return independent

    def refers_to(self, name: str) -> bool:
        """Whether a script or another variable references the variable."""
        pattern = re.compile(rf"\$\(?\{{?{name}\b")
        texts = [entry.text for entry in self.entries]
        for variable in self.node.get("env"):
            texts.append(variable.get("value").text)
        return any(pattern.search(text) for text in texts)

    @property
    def process_setting(self) -> Setting | None:
        """The setting of the number of processes that it starts."""
        flags = ("nproc-per-node", "processes-per-node")
        variables = ("PET_NPROC_PER_NODE", "NPROC_PER_NODE")
        settings = self.settings(flags, variables)
        if not settings:
            return None
        return settings[0]

    @property
    def processes(self) -> int | None:
        """Number of processes that it starts, if it can be determined."""
        setting = self.process_setting
        if setting is None:
            if OTHER_LAUNCHERS.search(self.command_line):
                return None
            return 1
        if setting.value == "gpu":
            return self.gpus
        return setting.number

    @property
    def resources(self) -> Node:
        """Requests and limits; a TrainJob has its own name for them."""
        resources = self.node.get("resources")
        of_train_job = self.node.get("resourcesPerNode")
        if of_train_job.exists and not resources.exists:
            return of_train_job
        return resources

    @property
    def gpus(self) -> int | None:
        for part in ("limits", "requests"):
            for name, amount in self.resources.get(part).items():
                if "gpu" in name and amount.number:
                    return amount.number
        return None

    @property
    def backend(self) -> str:
        found = self.settings(("rdzv-backend",), ("PET_RDZV_BACKEND",))
        if not found:
            return "static"  # the default of torchrun
        return found[0].value


def is_index(setting: Setting) -> bool:
    """Whether the value is the index of the pod."""
    if not setting.is_literal:
        return any(label in setting.raw for label in INDEX_LABELS)
    return bool(_referenced(setting.raw) & set(INDEX_VARIABLES)) or "HOSTNAME##*-" in setting.raw


def _referenced(text: str) -> set[str]:
    """Names of the variables that a text references."""
    return {match[1] or match[2] or match[4] for match in _REFERENCE.finditer(text)}


def _expand(text: str, known: dict[str, str], depth: int = 3) -> str:
    """Replace known variables by their values."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[4]
        default = match[0] if match[3] is None else match[3]
        return known.get(name, default)

    for _ in range(depth):
        expanded = _REFERENCE.sub(value, text)[:4096]  # a variable that contains itself twice grows exponentially
        if expanded == text:
            break
        text = expanded
    return text

"""The command of a container: words, flags and variables from command, args, shell scripts and `env`. Shell scripts are
only skimmed; what cannot be determined is ignored."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from llmtrain.distributed.shell_command import commands_in, script_position
from llmtrain.lint.yaml_nodes import LineFinder, Node

# Bounded: otherwise every unclosed `$(` would be scanned to the end of the script.
_WORD = re.compile(r"""(?:\$\([^)]{0,200}\)|[^\s"';|&()]|"[^"]*"|'[^']*')+""")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\((\w+)\)|\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_COMMENT = re.compile(r"(?m)^[^\S\n]*#.*$")
TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|\btorch/distributed/(?:run|launch)\.py")
OTHER_LAUNCHERS = re.compile(r"\baccelerate\s+launch\b|\bdeepspeed\b|\bmpirun\b|\bhorovodrun\b|\bcomposer\b|\bray\b")
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
        return int(self.value) if re.fullmatch(r"\d{1,9}", self.value) else None


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
        return [entry for part in ("command", "args") for entry in self.node.get(part) if entry.text]

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
        return None if position is None else self.entries[position]

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
            found += [(re.sub(r"[\"']", "", word), entry) for word in _WORD.findall(plain)]
        return found

    @cached_property
    def assignments(self) -> list[Setting]:
        """Variables of `env`, then those that a script sets."""
        raw = [*self._env(), *self._assigned()]
        known = {setting.name: setting.raw for setting in raw if setting.is_literal}
        return [replace(setting, value=_expand(setting.raw, known)) for setting in raw]

    @cached_property
    def variables(self) -> dict[str, Setting]:
        """By name; the last assignment counts."""
        return {setting.name: setting for setting in self.assignments}

    def _env(self) -> Iterator[Setting]:
        for entry in self.node.get("env"):
            name, value = entry.get("name").text, entry.get("value")
            source = entry.get("valueFrom")
            if source.exists:
                yield Setting(name, "", source.get("fieldRef", "fieldPath").text, source.line, source, False)
            elif name:
                yield Setting(name, value.text, value.text, value.line, value)

    def _assigned(self) -> Iterator[Setting]:
        finders = {id(entry): LineFinder(entry) for entry in self.entries if re.search(r"\s", entry.text)}
        for word, entry in self._words:
            if (match := _ASSIGNMENT.fullmatch(word)) and id(entry) in finders:
                line = finders[id(entry)].line_of(f"{match[1]}=")
                yield Setting(match[1], match[2], match[2], line, entry)

    @cached_property
    def flags(self) -> dict[str, Setting]:
        """`--nproc_per_node 2` and `--nproc-per-node=2`, by the name with hyphens. The first one counts: options after
        the name of a script belong to the script."""
        known = {name: setting.value for name, setting in self.variables.items() if setting.is_literal}
        found: dict[str, Setting] = {}
        words = self._words
        finders: dict[int, LineFinder] = {}
        for position, (word, entry) in enumerate(words):
            if not (match := re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)):
                continue
            name, raw, at = match[1].replace("_", "-"), match[2], entry
            if raw is None:
                after, at = words[position + 1] if position + 1 < len(words) else ("", entry)
                raw = "" if after.startswith("--") else after
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
        return [each for each in found if not names & _referenced(each.raw) - {each.name}]

    def refers_to(self, name: str) -> bool:
        """Whether a script or another variable references the variable."""
        pattern = re.compile(rf"\$\(?\{{?{name}\b")
        return any(pattern.search(entry.text) for entry in self.entries) or any(
            pattern.search(entry.get("value").text) for entry in self.node.get("env")
        )

    @property
    def process_setting(self) -> Setting | None:
        """The setting of the number of processes that it starts."""
        flags, variables = ("nproc-per-node", "processes-per-node"), ("PET_NPROC_PER_NODE", "NPROC_PER_NODE")
        return next(iter(self.settings(flags, variables)), None)

    @property
    def processes(self) -> int | None:
        """Number of processes that it starts, if it can be determined."""
        found = self.process_setting
        if found is not None:
            return self.gpus if found.value == "gpu" else found.number
        return None if OTHER_LAUNCHERS.search(self.command_line) else 1

    @property
    def resources(self) -> Node:
        """Requests and limits; a TrainJob has its own name for them."""
        own = self.node.get("resources")
        return own if own.exists or not self.node.get("resourcesPerNode").exists else self.node.get("resourcesPerNode")

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
        return found[0].value if found else "static"


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
        return known.get(name, match[3] if match[3] is not None else match[0])

    for _ in range(depth):
        text, before = _REFERENCE.sub(value, text)[:4096], text
        if text == before:
            break
    return text

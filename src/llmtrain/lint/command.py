"""What a container runs and is told: words, flags and variables, whether they stand in a list, in a shell script or in
`env`. It reads shells as a person skims them; what it cannot tell it leaves alone."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from llmtrain.distributed.shell_command import commands_in, script_position
from llmtrain.lint.yaml_nodes import Node

# Bounded: of `$(` that is never closed, each would be followed to the end of the script.
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
    """A variable or a flag, from wherever it was set. `value` has the variables put in that are known."""

    name: str
    value: str
    raw: str
    line: int
    node: Node
    is_literal: bool = True
    """False: from a Secret, a ConfigMap or a field of the pod."""

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
        """All of it as one text, comments left out."""
        return "\n".join(_COMMENT.sub("", entry.text) for entry in self.entries)

    @cached_property
    def command_line(self) -> str:
        """The same in one line, for patterns of several words."""
        return " ".join(self.script.replace("\\\n", " ").split())

    @property
    def shell_script(self) -> Node | None:
        """The script of `sh -c SCRIPT`."""
        position = script_position([entry.text for entry in self.entries])
        return None if position is None else self.entries[position]

    @property
    def commands(self) -> list[list[str]]:
        """Each command that it runs, in words."""
        return commands_in([entry.text.strip() for entry in self.entries])

    @property
    def is_torchrun(self) -> bool:
        return bool(TORCHRUN.search(self.command_line))

    @property
    def is_launched(self) -> bool:
        """By something that starts the processes of the node and numbers them."""
        text = self.command_line
        return self.is_torchrun or bool(LLMTRAIN.search(text) or OTHER_LAUNCHERS.search(text))

    def find(self, pattern: re.Pattern[str]) -> Iterator[tuple[Node, int, str]]:
        """(entry, line, what) for every match in command and args."""
        for entry in self.entries:
            text, line = _COMMENT.sub("", entry.text), 0
            for match in pattern.finditer(text):
                line = entry.line_of(match[0], line)
                yield entry, line, match[0].strip()

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
        """Every variable of `env`, then every one that a script sets."""
        raw = [*self._env(), *self._assigned()]
        known = {setting.name: setting.raw for setting in raw if setting.is_literal}
        return [replace(setting, value=_put_in(setting.raw, known)) for setting in raw]

    @cached_property
    def variables(self) -> dict[str, Setting]:
        """Of one that is set twice, the last counts."""
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
        lines = {id(entry): 0 for entry in self.entries if re.search(r"\s", entry.text)}
        for word, entry in self._words:
            if (match := _ASSIGNMENT.fullmatch(word)) and id(entry) in lines:
                line = lines[id(entry)] = entry.line_of(f"{match[1]}=", lines[id(entry)])
                yield Setting(match[1], match[2], match[2], line, entry)

    @cached_property
    def flags(self) -> dict[str, Setting]:
        """`--nproc_per_node 2` and `--nproc-per-node=2` alike, by the name with hyphens; the first one counts: what
        follows a script's name is the script's own."""
        known = {name: setting.value for name, setting in self.variables.items() if setting.is_literal}
        found: dict[str, Setting] = {}
        words = self._words
        lines: dict[int, int] = {}
        for position, (word, entry) in enumerate(words):
            if not (match := re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)):
                continue
            name, raw, at = match[1].replace("_", "-"), match[2], entry
            if raw is None:
                after, at = words[position + 1] if position + 1 < len(words) else ("", entry)
                raw = "" if after.startswith("--") else after
            line = at.line
            if at is entry:
                line = lines[id(at)] = at.line_of(match[0], lines.get(id(at), 0))
            found.setdefault(name, Setting(name, _put_in(raw, known), raw, line, at))
        return found

    def settings(self, flags: tuple[str, ...], variables: tuple[str, ...]) -> list[Setting]:
        """Those that are set, flags first: they win over variables. One that only repeats a variable of them is left
        out: what is wrong stands at the variable."""
        found = [self.flags[name] for name in flags if name in self.flags]
        found += [self.variables[name] for name in variables if name in self.variables]
        names = {setting.name for setting in found}
        return [one for one in found if not names & _referred(one.raw) - {one.name}]

    def refers_to(self, name: str) -> bool:
        """Whether a script or another variable uses the variable."""
        pattern = re.compile(rf"\$\(?\{{?{name}\b")
        return any(pattern.search(entry.text) for entry in self.entries) or any(
            pattern.search(entry.get("value").text) for entry in self.node.get("env")
        )

    @property
    def processes(self) -> int | None:
        """That it starts on its node, where that can be told."""
        found = self.settings(("nproc-per-node", "processes-per-node"), ("PET_NPROC_PER_NODE", "NPROC_PER_NODE"))
        if found:
            return self.gpus if found[0].value == "gpu" else found[0].number
        return None if OTHER_LAUNCHERS.search(self.command_line) else 1

    @property
    def gpus(self) -> int | None:
        for part in ("limits", "requests"):
            for name, amount in self.node.get("resources", part).items():
                if "gpu" in name and amount.number:
                    return amount.number
        return None

    @property
    def backend(self) -> str:
        found = self.settings(("rdzv-backend",), ("PET_RDZV_BACKEND",))
        return found[0].value if found else "static"


def is_index(setting: Setting) -> bool:
    """Whether a value is the number of the pod."""
    if not setting.is_literal:
        return any(label in setting.raw for label in INDEX_LABELS)
    return bool(_referred(setting.raw) & set(INDEX_VARIABLES)) or "HOSTNAME##*-" in setting.raw


def _referred(text: str) -> set[str]:
    """Names of the variables in a text."""
    return {match[1] or match[2] or match[4] for match in _REFERENCE.finditer(text)}


def _put_in(text: str, known: dict[str, str], depth: int = 3) -> str:
    """With the values of known variables instead of their names."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[4]
        return known.get(name, match[3] if match[3] is not None else match[0])

    for _ in range(depth):
        text, before = _REFERENCE.sub(value, text)[:4096], text
        if text == before:
            break
    return text

"""Every command as a user calls it: JSON, text, help, unknown options."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import load_command
from llmtrain.commands.table import COMMANDS

VERBS = (
    "train",
    "train --dry-run",
    "node",
    "node --smoke",
    "launch --dry-run",
    "doctor",
    "plan",
    "smoke",
    "validate",
    "print-config",
    "print-config --reference",
    "config-schema",
    "presets",
    "presets show",
    "init",
    "generate",
    "eval",
    "export",
    "runs list",
    "runs show",
    "runs compare",
    "runs prune",
    "report",
    "sweep --dry-run",
    "tokenizer train",
)

# They need a cluster, a hub or a store: tested in tests/operate, tests/launch and separate files.
IN_A_CLUSTER = {
    "status",
    "logs",
    "why",
    "recover",
    "push",
    "exec",
    "stop",
    "resume",
    "fetch",
    "delete",
    "secret",
    "guard",
}
ELSEWHERE = (
    ("status",),
    ("logs", "demo"),
    ("why", "demo"),
    ("recover", "demo"),
    ("push", "demo", "pyproject.toml"),
    ("exec", "demo", "--kill"),
    ("stop", "demo"),
    ("resume", "demo"),
    ("fetch", "demo"),
    ("delete", "demo"),
    ("secret", "hf-token", "--from-env-file", ".env"),
    ("guard", "status"),
    ("prefetch",),
    ("sync", "demo", "s3://bucket"),
)


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """(name, options) of every command below this one, except the hidden one that only the guard's pod runs."""
    if command.hidden:
        return
    if not hasattr(command, "commands"):
        yield " ".join(path), [option for parameter in command.params for option in parameter.opts]
        return
    for name, below in command.commands.items():
        yield from walk(below, (*path, name))


class TestEveryVerb:
    @pytest.mark.parametrize("name", VERBS)
    def test_json_output_is_one_object(self, cli, verb, name: str) -> None:
        done = cli(*verb(name), "--json")
        assert done.code == 0, done.err
        assert done.json

    @pytest.mark.parametrize("name", [name for name in VERBS if name != "config-schema"])  # JSON is its output
    def test_output_without_json_is_text(self, cli, verb, name: str) -> None:
        done = cli(*verb(name))
        assert done.code == 0, done.err
        assert done.out.strip()
        with pytest.raises(json.JSONDecodeError):
            json.loads(done.out)

    @pytest.mark.parametrize("name", VERBS)
    def test_unknown_option_exits_64_with_json_error(self, cli, verb, name: str) -> None:
        done = cli(*verb(name), "--json", "--no-such-option")
        assert done.code == 64
        assert done.json["exit_code"] == 64
        assert "--no-such-option" in done.json["what"] + str(done.json["remedy"])
        assert done.err.startswith("error: ")
        assert "Traceback" not in done.err

    @pytest.mark.parametrize("name", VERBS)
    def test_help(self, cli, verb, name: str) -> None:
        words = [word for word in name.split() if not word.startswith("--")]
        done = cli(*words, "--help")
        assert done.code == 0
        assert "--json" in done.out
        assert len(verb(name)) > 0

    def test_all_commands_are_covered(self, cli) -> None:
        listed = re.findall(r"^  ([a-z][a-z-]*) +[A-Z]", cli("--help").out, flags=re.M)
        # They need a person, a browser, the hub or kind (the tool), and have separate tests.
        elsewhere = {"chat", "page", "fetch-model", "fetch-data", "fetch-tasks", "data", "lint", "cluster"}
        elsewhere |= {words[0] for words in ELSEWHERE}
        assert set(listed) == {name.split()[0] for name in VERBS} | elsewhere

    def test_every_command_takes_json(self) -> None:
        """Also those of groups."""
        names = [name for rows in COMMANDS.values() for name in rows]
        found = dict(row for name in names for row in walk(load_command(name), (name,)))
        assert {"train", "logs", "guard install", "runs list"} <= set(found)
        assert [name for name, options in found.items() if "--json" not in options] == []

    @pytest.mark.parametrize(("dash", "nproc"), [("-", "nproc-per-node"), ("_", "nproc_per_node")])
    def test_node_takes_the_names_of_torchrun(self, dash: str, nproc: str) -> None:
        given = {"nnodes": "2", nproc: "4", "node_rank": "1", "master_addr": "host-a", "master_port": "29501"}
        words = [f"--{name.replace('_', dash)}={value}" for name, value in given.items()]
        options = load_command("node").make_context("node", words).params
        names = ("nodes", "processes_per_node", "node_rank", "master_addr", "master_port")
        assert [options[name] for name in names] == ["2", "4", 1, "host-a", 29501]

    @pytest.mark.parametrize("words", ELSEWHERE, ids=" ".join)
    def test_commands_with_separate_tests(self, cli, words: tuple[str, ...]) -> None:
        path = words[:2] if words[0] in ("secret", "guard") else words[:1]
        shown = cli(*path, "--help")
        assert shown.code == 0
        assert "--json" in shown.out
        done = cli(*words, "--no-such-option")
        assert done.code == 64
        assert "--no-such-option" in done.err
        assert "Traceback" not in done.err

    @pytest.mark.parametrize("words", [words for words in ELSEWHERE if words[0] in IN_A_CLUSTER], ids=" ".join)
    def test_commands_without_cluster(self, cli, words: tuple[str, ...], workdir: Path) -> None:
        (workdir / ".env").write_text("HF_TOKEN=hf_canaryOfTheCommandLine\n")
        (workdir / ".env").chmod(0o600)
        done = cli(*words, "--kubeconfig", "missing", "--json")
        assert done.code == done.json["exit_code"] == 64
        assert "kubeconfig" in done.err
        assert "Traceback" not in done.err
        assert "canary" not in done.out + done.err
        assert [path.name for path in workdir.iterdir()] == [".env"]

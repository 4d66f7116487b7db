"""What is wrong is said in one error, with exit code 64 and a suggestion."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.commands.table import COMMANDS, NOT_AVAILABLE, OTHER_NAMES


class TestUsageErrors:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["no-such-verb"],
            ["train", "surplus"],
            ["train", "--config"],
            ["generate"],
            ["generate", "--run", "one", "--max-new-tokens", "0"],
            ["generate", "--run", "one", "--max-new-tokens", "many"],
            ["generate", "--run", "one", "--temperature", "-1"],
            ["generate", "--run", "one", "--top-k", "0"],
            ["generate", "--run", "one", "--device", "tpu"],
            ["eval", "--run", "one"],
            ["eval", "--run", "one", "--file", "x", "--batch-size", "0"],
            ["export", "--run", "one"],
            ["runs", "show"],
            ["runs", "compare", "one"],
            ["runs", "nonsense"],
            ["tokenizer", "train", "--to", "x"],
            ["generate", "--run", "nowhere"],
            ["eval", "--run", "nowhere", "--file", "x"],
            ["export", "--run", "nowhere", "--to", "x"],
            ["runs", "show", "nowhere"],
            ["train", "--resume", "nowhere"],
            ["train", "--from", "nowhere"],
            ["train", "--model-local-dir", "nowhere"],
            ["train", "--config", "gpt_smoke", "--resume", "nowhere"],
        ],
        ids=" ".join,
    )
    def test_exit_64_with_and_without_json(self, cli, arguments: list[str], workdir: Path) -> None:
        plain, as_json = cli(*arguments), cli(*arguments, "--json")
        assert (plain.code, as_json.code) == (64, 64)
        assert plain.out == ""
        assert plain.err.startswith("error: ")
        assert len(plain.err.splitlines()[0]) > len("error: "), "the message is empty"
        assert "Traceback" not in plain.err + as_json.err
        assert as_json.json.keys() >= {"error", "what", "known", "remedy", "exit_code"}
        assert list(workdir.iterdir()) == []

    def test_config_error_lists_its_problems(self, cli) -> None:
        done = cli("validate", "--json", "--set", "trainer.max_steps=0", "--set", "model.nlayers=2")
        assert done.code == 64
        assert done.json["error"] == "ConfigError"
        assert len(done.json["problems"]) == 2

    def test_no_command_shows_help_without_error(self, cli) -> None:
        done = cli()
        assert done.code == 0
        assert "train" in done.out + done.err
        assert "error" not in done.err

    def test_short_help_option_works_everywhere(self, cli) -> None:
        for words in ([], ["train"], ["runs"], ["runs", "list"], ["presets", "show"], ["cluster", "up"]):
            done = cli(*words, "-h")
            assert done.code == 0, (words, done.err)
            assert "Usage" in done.out

    def test_flags_in_help_take_no_value(self, cli) -> None:
        for words in ([], ["train"], ["runs"], ["runs", "list"]):
            assert "bool" not in cli(*words, "--help").out, words

    def test_daily_commands_are_listed_first(self, cli) -> None:
        listed = re.findall(r"^  ([a-z][a-z-]*) +[A-Z]", cli("--help").out, flags=re.M)
        assert {"init", "train", "runs", "page", "generate", "eval"} <= set(listed[:9])

    def test_group_lists_whole_sentences(self, cli) -> None:
        assert "..." not in cli("runs", "--help").out.partition("Commands:")[2]

    def test_help_imports_no_markdown_parser(self) -> None:
        check = "import sys; print('markdown_it' in sys.modules)"
        code = f"import atexit; atexit.register(exec, {check!r}, {{}}); from llmtrain.cli import main; main(['--help'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.endswith("False\n")

    @pytest.mark.parametrize(
        ("typed", "meant"), [("finetune", "llmtrain train"), ("ls", "llmtrain runs list"), ("trian", "train")]
    )
    def test_unknown_command_gets_a_suggestion(self, cli, typed: str, meant: str) -> None:
        done = cli(typed)
        assert done.code == 64
        assert meant in done.err

    @pytest.mark.parametrize("name", NOT_AVAILABLE)
    def test_command_that_is_not_available_gets_an_alternative(self, cli, name: str) -> None:
        done = cli(name)
        assert done.code == 64
        assert NOT_AVAILABLE[name] in done.err

    def test_other_names_are_no_commands(self) -> None:
        commands = {name for rows in COMMANDS.values() for name in rows}
        assert commands & {*OTHER_NAMES, *NOT_AVAILABLE} == set()

    def test_second_config_is_refused(self, cli) -> None:
        done = cli("validate", "-c", "gpt_smoke", "--config", "gpt_stdlib")
        assert done.code == 64
        assert "extends" in done.err

    @pytest.mark.parametrize("option", ["--run", "--adapter", "--model"])
    @pytest.mark.parametrize("command", ["generate", "chat", "export"])
    def test_second_model_is_refused(self, cli, command: str, option: str) -> None:
        done = cli(command, option, "one", option, "other")
        assert done.code == 64
        assert f"{option} was given more than once" in done.err

    @pytest.mark.parametrize("command", ["generate", "chat", "export"])
    def test_run_given_in_both_ways_is_refused(self, cli, command: str) -> None:
        done = cli(command, "one", "--run", "other")
        assert done.code == 64
        assert "'one' and --run 'other'" in done.err

    @pytest.mark.parametrize(
        ("words", "option"),
        [(["generate", "one", "a word"], "--prompt 'a word'"), (["export", "one", "out"], "--to out")],
    )
    def test_second_argument_is_answered_with_its_option(self, cli, words: list[str], option: str) -> None:
        done = cli(*words)
        assert done.code == 64
        assert option in done.err

    def test_config_without_its_option_is_suggested(self, cli) -> None:
        done = cli("validate", "gpt_smoke")
        assert done.code == 64
        assert "--config gpt_smoke" in done.err

    @pytest.mark.parametrize("group", ["runs", "tokenizer"])
    def test_group_without_subcommand(self, cli, group: str) -> None:
        done = cli(group)
        assert done.code == 0
        assert "train" in done.out + done.err or "list" in done.out + done.err
        assert "error: \n" not in done.err


def test_missing_permission_is_one_error(cli: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated, because the tests may run as root: a user that may read a run, but not its checkpoints."""
    from llmtrain.checkpoint.store import CheckpointStore

    def refuse(store: CheckpointStore, _: str) -> None:
        raise PermissionError(13, "Permission denied", str(store.folder))

    monkeypatch.setattr(CheckpointStore, "pointed", refuse)
    done = cli("generate", "--run", "one", "--root", root, "--json")
    assert done.code == 64, done.err
    assert done.json["what"].startswith(str(root / "one" / "checkpoints"))
    assert "Traceback" not in done.err

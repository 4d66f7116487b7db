"""Completion in the shell."""

import pytest


class TestCompletion:
    """The mechanism of typer: the shell calls the program with variables."""

    @pytest.mark.parametrize(
        ("line", "word"),
        [("llmtrain tra", "train"), ("llmtrain runs co", "compare"), ("llmtrain train --proc", "--processes")],
    )
    def test_commands_and_options_are_completed(self, cli, monkeypatch, line: str, word: str) -> None:
        assert word in self.complete(cli, monkeypatch, line)

    def test_presets_are_completed(self, cli, monkeypatch) -> None:
        assert {"gpt_smoke", "gpt_stdlib"} <= set(self.complete(cli, monkeypatch, "llmtrain train --config gpt_s"))

    def complete(self, cli, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
        monkeypatch.setenv("_LLMTRAIN_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        return cli().out.split()

    def test_script_for_the_shell_is_printed(self, cli, monkeypatch) -> None:
        monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
        done = cli("--show-completion", "bash")
        assert done.code == 0, done.err
        assert "_LLMTRAIN_COMPLETE" in done.out

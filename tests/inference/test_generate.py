"""generate and chat: sampling, prompts from files, streaming in a terminal, and the progress of slow commands."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.commands import spinner as progress_module
from llmtrain.commands.chat import converse
from llmtrain.commands.generate import read_prompt
from llmtrain.commands.stream import TextStream
from llmtrain.config.load import load_config
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.errors import CheckpointError, UsageError
from llmtrain.inference.load import Source, load_model
from llmtrain.runs.directory import RunDirectory
from llmtrain.training import text_generation
from llmtrain.training.run import run_training
from llmtrain.training.text_generation import Sampling, prompt_ids, sample_text

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_training(load_config("gpt_smoke", [*tiny, f"output.root_dir={folder}", "output.run_id=one"]))
    return folder


@pytest.fixture
def generate(root: Path) -> list[Any]:
    return ["generate", "--run", "one", "--root", root, "--max-new-tokens", 8]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# Sampling.


def test_top_p_keeps_the_fewest_tokens_with_that_probability() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    for top_p, kept in (
        (1e-50, [1]),
        (0.3, [1]),
        (0.5, [1, 3]),
        (0.7, [1, 3]),
        (0.8, [1, 3, 4]),
        (0.99, [0, 1, 2, 3, 4]),
    ):
        assert text_generation._nucleus(probabilities, top_p).nonzero().flatten().tolist() == kept
    logits = probabilities.log()
    chosen = {
        text_generation._choose(
            logits, int(logits.argmax()), Sampling(1, 1.0, None, top_p=0.5), torch.Generator().manual_seed(seed)
        )
        for seed in range(50)
    }
    assert chosen == {1, 3}
    without, all_of_it = (
        text_generation._choose(
            logits, int(logits.argmax()), Sampling(1, 1.0, None, top_p=top_p), torch.Generator().manual_seed(3)
        )
        for top_p in (None, 1.0)
    )
    assert without == all_of_it


@pytest.mark.parametrize("top_p", [0, -0.5, 1.5, "nan"])
def test_top_p_outside_its_range_is_refused(cli: Cli, generate: list[Any], top_p: object) -> None:
    assert cli(*generate, "--top-p", top_p).code == 64


def test_samples_use_successive_seeds(cli: Cli, generate: list[Any]) -> None:
    done = cli(*generate, "--num-samples", 3, "--seed", 5, "--json").json
    single = [cli(*generate, "--seed", seed, "--json").json["text"] for seed in (5, 6, 7)]
    assert done["samples"] == single
    assert done["text"] == single[0]


# Prompts.


def test_prompt_file_and_standard_input(
    cli: Cli, generate: list[Any], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "the pod\nwaits é "
    (workdir / "prompt.txt").write_text(prompt)
    expected = cli(*generate, "--prompt", prompt, "--json").json
    assert cli(*generate, "--prompt-file", "prompt.txt", "--json").json == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
    assert cli(*generate, "--prompt-file", "-", "--json").json == expected


def test_bad_prompt_files(cli: Cli, generate: list[Any], workdir: Path) -> None:
    (workdir / "latin1.txt").write_bytes(b"caf\xe9")
    assert cli(*generate, "--prompt-file", "missing.txt").code == 64
    assert cli(*generate, "--prompt-file", ".").code == 64
    assert cli(*generate, "--prompt-file", "latin1.txt").code == 65
    assert cli(*generate, "--prompt-file", "latin1.txt", "--prompt", "x").code == 64


# Streaming.


class Script:
    """A model that writes given ids."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def stop_token_ids(self) -> set[int]:
        return set()

    def next_logits(self, module: object, block_size: int) -> Any:  # noqa: ARG002
        rest = iter(self._ids)
        return lambda ids: torch.nn.functional.one_hot(torch.tensor(next(rest)), 256).float()  # noqa: ARG005


@pytest.mark.parametrize(
    "written", ["Été 東京 👩‍👩‍👧!".encode(), b"caf\xc3\xa9 \xff\xfe end", b"cut \xe6\x9d", b"\xf0\x9f", b"stop\x00no"]
)
def test_streamed_text_equals_the_result(written: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """No character is printed before it is complete, and nothing is missing at the end."""
    stream, steps = TextStream("before "), []

    def show(text: str) -> None:
        steps.append(text)
        stream.show(text)

    script: Any = Script([*written])
    text = sample_text(
        script, torch.nn.Identity(), ByteTokenizer(), "x", Sampling(len(written), temperature=0), 64, on_text=show
    )
    assert text == written.partition(b"\x00")[0].decode(errors="replace")
    assert all(text.startswith(step) for step in steps)
    assert len(set(steps)) > 1 or len(text) == 1
    stream.end(text)
    assert capsys.readouterr().out == f"before {text}\n"


def test_terminal_gets_the_same_text_in_pieces(cli: Cli, generate: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cli(*generate, "--prompt", "the ", "--num-samples", 2)
    terminal = Terminal()
    pieces: list[str] = []
    monkeypatch.setattr(terminal, "write", lambda text: pieces.append(text) or len(text))
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli(*generate, "--prompt", "the ", "--num-samples", 2).code == 0
    assert "".join(pieces) == plain.out
    assert len([piece for piece in pieces if piece.strip()]) > 6


def test_json_is_not_streamed(cli: Cli, generate: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli(*generate, "--json").code == 0
    assert set(json.loads(terminal.getvalue())) == {"run", "step", "prompt", "text", "samples"}


# Chat.


def chat(lines: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}]
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    converse(lambda so_far: f"answer {len(so_far)}", messages)
    return messages


def test_reset_keeps_only_the_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = chat("one\n/help\n/foo\ntwo\n/reset\n/rest\nthree\n", monkeypatch)
    assert [message["content"] for message in messages] == ["be brief", "three", "answer 2"]


@pytest.mark.parametrize("leaving", [EOFError, KeyboardInterrupt])
def test_leaving_a_chat_ends_the_line(
    leaving: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(prompt: str) -> str:
        print(prompt, end="")
        raise leaving

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", leave)
    converse(lambda messages: "never", [])  # noqa: ARG005
    assert capsys.readouterr().out == "> \n"


# Progress and messages.


def test_progress_is_shown_only_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_module.progress("Loading") as show:
            show("Evaluating", 2, 5)
    assert pipe.getvalue() == ""
    assert "2/5" in terminal.getvalue()


def test_eval_reports_every_batch(root: Path, workdir: Path) -> None:
    from llmtrain.inference.evaluate import evaluate_files

    (workdir / "text.txt").write_text("the pod waits for the master.\n" * 20)
    calls: list[tuple[str, int, int | None]] = []
    loaded = load_model(Source(run="one", root=str(root)), "cpu")
    evaluate_files(loaded, ["text.txt"], 4, progress=lambda what, done, total: calls.append((what, done, total)))
    batches = [done for _, done, total in calls if total]
    assert batches == list(range(len(batches)))
    assert len(batches) == calls[-1][2]


@pytest.mark.parametrize(("beat", "every", "following"), [(0, 10, 10), (13, 10, 20), (28, 10, 30), (13, None, None)])
def test_missing_checkpoint_says_when_it_comes(
    workdir: Path, beat: int, every: int | None, following: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmtrain.runs.view import RunState, RunView

    run = RunDirectory(workdir / "runs" / "early")
    run.heartbeats.mkdir(parents=True)
    trainer = {"max_steps": 30, "save_every_steps": every}
    run.config.write_text(json.dumps({"schema_version": 3, "trainer": trainer}))
    (run.heartbeats / "rank-0.json").write_text(json.dumps({"rank": 0, "step": beat}))
    for is_running in (True, False):
        monkeypatch.setattr(RunView, "state", RunState.RUNNING if is_running else RunState.KILLED)
        with pytest.raises(CheckpointError) as caught:
            load_model(Source(run="early"), "cpu")
        value = caught.value.as_dict()
        assert (value["step"], value["next_checkpoint"]) == (beat, following)
        assert ("--resume early" in str(value["remedy"])) is not is_running


def test_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError):
        read_prompt("", "-")


def test_chat_says_that_a_run_only_continues_text(cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    done = cli("chat", "--run", "one", "--root", root, "--max-new-tokens", 2)
    assert done.code == 0, done.err
    assert "note: one was not trained on questions and answers" in done.err


def test_prompt_without_tokens_is_the_end_of_a_document() -> None:
    class Nothing(ByteTokenizer):
        def encode(self, text: str) -> Any:  # noqa: ARG002
            return super().encode("")

    tokenizer = Nothing()
    assert prompt_ids(tokenizer, "") == [tokenizer.end_of_text or 0]
    assert prompt_ids(ByteTokenizer(), "") == [10]


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_chat_with_a_closed_stream_ends(cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    """As services and `<&-` start a program."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(sys, stream, None)
    done = cli("chat", "--run", "one", "--root", root)
    assert done.code == 0, done.err


def test_sigterm_during_an_answer_ends_the_chat(cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the answer only."""
    sent = [signal.SIGINT, signal.SIGTERM]

    def answer(*_: Any, **__: Any) -> str:
        os.kill(os.getpid(), sent.pop(0))
        return "an answer"

    monkeypatch.setattr("llmtrain.inference.generate.generate_text", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\nthree\n"))
    done = cli("chat", "--run", "one", "--root", root)
    assert (done.code, sent) == (75, [])
    assert done.out.count("an answer") == 2

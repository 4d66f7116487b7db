"""eval, generate and chat with a fine-tuned model, and base models that were moved or are wrong."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")


from fine_tune_workspace import Cli, Workspace, sources

from tiny_llama import make_chats, make_model

pytestmark = pytest.mark.hf


def test_eval_loss_is_equal_for_run_adapter_and_model(
    workspace: Workspace, exported: dict[str, Path], cli: Cli
) -> None:
    results = {}
    for name, arguments in sources(workspace, exported).items():
        done = cli("eval", *arguments, "--file", workspace.val, "--json")
        assert done.code == 0, done.err
        results[name] = done.json
    best_val_loss = workspace.results["lora"]["best_val_loss"]
    base = cli("eval", "--model", workspace.base, "--file", workspace.val, "--json").json["loss"]
    assert base > best_val_loss + 0.1
    for name, value in results.items():
        assert value["loss"] == pytest.approx(best_val_loss, abs=1e-5), name
        assert value["tokens"] == results["run"]["tokens"] > 20
        if name == "merged":
            assert value["base"] is None
        else:
            assert value["base"]["loss"] == pytest.approx(base, abs=1e-5), name


def test_eval_prints_base_and_tuned_columns(workspace: Workspace, cli: Cli) -> None:
    done = cli("eval", *workspace.run_options(), "--file", workspace.val)
    value = cli("eval", *workspace.run_options(), "--file", workspace.val, "--json").json
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0][-2:] == ["base", "tuned"]
    assert lines[1] == ["loss", f"{value['base']['loss']:.4f}", f"{value['loss']:.4f}"]
    assert lines[2][0] == "perplexity"


def test_eval_re_enables_the_adapter(workspace: Workspace) -> None:
    from llmtrain.inference.evaluate import evaluate_files
    from llmtrain.inference.load import Source, load_model

    loaded = load_model(Source(run="lora", root=str(workspace.root)), "cpu")
    first, second = (evaluate_files(loaded, [str(workspace.val)], 4) for _ in range(2))
    assert first == second
    assert first["tuned"].loss != first["base"].loss


def test_eval_of_conversations_and_of_text(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    chats = make_chats(workdir / "chats.jsonl", 5)
    text = workdir / "text.txt"
    text.write_text("red green blue " * 60)
    for arguments in (["--model", workspace.base, "--file", chats], [*workspace.run_options("full"), "--file", text]):
        done = cli("eval", *arguments, "--json")
        assert done.code == 0, done.err
        assert 2 < done.json["loss"] < 8
        assert done.json["tokens"] > 10


def test_generate_output_is_equal_for_run_adapter_and_model(
    workspace: Workspace, exported: dict[str, Path], cli: Cli
) -> None:
    texts = {}
    for name, arguments in sources(workspace, exported).items():
        done = cli("generate", *arguments, "--prompt", "say red", "--temperature", 0, "--max-new-tokens", 8, "--json")
        assert done.code == 0, done.err
        texts[name] = done.json["text"]
    assert len(set(texts.values())) == 1, texts
    assert texts["run"].strip()
    base = cli("generate", "--model", workspace.base, "--prompt", "say red", "--temperature", 0, "--json")
    assert base.json["text"] != texts["run"]


def test_generate_raw_continues_the_prompt(workspace: Workspace, cli: Cli) -> None:
    common = ["generate", *workspace.run_options(), "--prompt", "red green", "--temperature", 0, "--max-new-tokens", 8]
    chat, raw = cli(*common, "--json"), cli(*common, "--json", "--raw")
    assert chat.json["text"] != raw.json["text"]
    assert cli(*common, "--raw").out.startswith("red green")
    assert not cli(*common).out.startswith("red green")


def test_generate_requires_exactly_one_model(workspace: Workspace, cli: Cli) -> None:
    assert cli("generate").code == 64
    two = cli("generate", *workspace.run_options(), "--adapter", workspace.run("lora") / "adapter")
    assert two.code == 64
    assert "--adapter" in two.err


def set_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize("name", ["run", "adapter", "merged"])
def test_chat(
    workspace: Workspace, exported: dict[str, Path], cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    arguments = ["chat", *sources(workspace, exported)[name], "--temperature", 0, "--max-new-tokens", 6]
    set_stdin(monkeypatch, "say red\nsay blue\n\nsay nothing\n")
    done = cli(*arguments, "--system", "be brief", "--json")
    assert done.code == 0, done.err
    messages = done.json["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages[1::2]] == ["say red", "say blue"]
    set_stdin(monkeypatch, "say red\nsay blue\n")  # ends at EOF
    plain = cli(*arguments, "--system", "be brief")
    answers = [messages[2]["content"], messages[4]["content"]]
    assert "note:" not in plain.err
    assert plain.out.split() == f"> say red {answers[0]} > say blue {answers[1]}".split()
    # Each answer depends on the whole conversation.
    set_stdin(monkeypatch, "say blue\n")
    assert cli(*arguments, "--json").json["messages"][0] == {"role": "user", "content": "say blue"}


@pytest.mark.slow
def test_chat_in_another_process(workspace: Workspace) -> None:
    command = [sys.executable, "-m", "llmtrain", "chat", *workspace.run_options(), "--temperature", "0"]
    done = subprocess.run(
        [*command, "--max-new-tokens", "6", "--json"],
        input="say red\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    samples = json.loads(
        (workspace.run("lora") / "samples" / f"step_{workspace.results['lora']['best_step']}.json").read_text()
    )
    assert value["messages"][1]["content"] == samples[0]["answer"].strip()


# Moved and wrong base models.


@pytest.fixture
def moved_base(workspace: Workspace, workdir: Path) -> Iterator[Path]:
    """The base model, moved to another directory."""
    workspace.base.rename(workdir / "moved")
    yield workdir / "moved"
    (workdir / "moved").rename(workspace.base)


def test_model_option_locates_a_moved_base(workspace: Workspace, moved_base: Path, cli: Cli) -> None:
    adapter = ["--adapter", str(workspace.run("lora") / "adapter")]
    for arguments in (workspace.run_options(), adapter):
        missing = cli("eval", *arguments, "--file", workspace.val)
        assert missing.code == 64
        assert str(workspace.base) in missing.err
        done = cli("eval", *arguments, "--model", moved_base, "--file", workspace.val, "--json")
        assert done.code == 0, done.err
        assert done.json["loss"] == pytest.approx(workspace.results["lora"]["best_val_loss"], abs=1e-5)


def test_full_run_does_not_need_base_weights(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    """All weights are in the checkpoint; only config.json of the base is needed."""
    (workdir / "shape").mkdir()
    shutil.copy(workspace.base / "config.json", workdir / "shape")
    done = cli("eval", *workspace.run_options("full"), "--model", workdir / "shape", "--file", workspace.val, "--json")
    assert done.code == 0, done.err
    assert done.json["loss"] == pytest.approx(workspace.results["full"]["best_val_loss"], abs=1e-5)


@pytest.mark.parametrize("verb", ["generate", "eval", "export", "chat"])
def test_wrong_base_model_is_refused(workspace: Workspace, cli: Cli, workdir: Path, verb: str) -> None:
    """With the same shapes: only its hash differs."""
    other = make_model(workdir / "other", seed=1)
    more = {"eval": ["--file", workspace.val], "export": ["--to", workdir / "out", "--merge"]}.get(verb, [])
    done = cli(verb, *workspace.run_options(), "--model", other, *more)
    assert done.code == 65
    assert str(other) in done.err
    assert "Traceback" not in done.err
    assert not (workdir / "out").exists()


def test_base_model_of_another_shape_is_refused(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    wide = make_model(workdir / "wide", hidden_size=64)
    for arguments in (["--adapter", workspace.run("lora") / "adapter"], workspace.run_options()):
        done = cli("generate", *arguments, "--model", wide, "--prompt", "x")
        assert done.code == 65
        assert "base model" in done.err
        assert "Traceback" not in done.err
        assert len(done.err) < 1500


def test_directory_without_adapter_is_refused(workspace: Workspace, cli: Cli) -> None:
    for directory in (workspace.base, workspace.directory / "nowhere"):
        done = cli("generate", "--adapter", directory, "--prompt", "x")
        assert done.code == 64
        assert "adapter_config.json" in done.err


def test_adapter_with_other_trained_modules_is_refused(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    shutil.copytree(workspace.run("lora") / "adapter", workdir / "adapter")
    path = workdir / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules_to_save": ["lm_head"]}))
    done = cli("generate", "--adapter", workdir / "adapter", "--prompt", "x")
    assert done.code == 65
    assert "modules_to_save ['lm_head'], which llmtrain does not support" in done.err

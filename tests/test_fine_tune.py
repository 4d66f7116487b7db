"""Fine-tuning end to end: a tiny model directory, examples, `train`, and everything done with the result.

The module trains one LoRA run and one full fine-tuning run; peft and transformers load their output in a process that
never imports llmtrain.
"""

import contextlib
import importlib.util
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")

sys.path.insert(0, str(Path(__file__).parent))

from hub_server import FakeHub, Repo, serve
from llmtrain.hub.token import TOKEN_VARIABLES
from tiny_llama import make_chats, make_examples, make_model, make_tokenizer

pytestmark = pytest.mark.hf

TOKENS = torch.arange(5, 65).view(2, 30)
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 0]}
Cli = Callable[..., Any]


@dataclass(frozen=True)
class Workspace:
    """A directory with a base model, examples and runs."""

    directory: Path
    results: dict[str, dict[str, Any]]

    @property
    def base(self) -> Path:
        return self.directory / "base"

    @property
    def root(self) -> Path:
        return self.directory / "runs"

    @property
    def val(self) -> Path:
        return self.directory / "val.jsonl"

    def run(self, run_id: str) -> Path:
        return self.root / run_id

    def run_options(self, run_id: str = "lora") -> list[str]:
        return ["--run", run_id, "--root", str(self.root)]

    def steps(self, run_id: str) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.run(run_id) / "checkpoints").glob("step_*"))

    def train(self, *overrides: str, more: tuple[str, ...] = ()) -> list[str]:
        sets = [part for text in overrides for part in ("--set", text)]
        return ["train", "--config", str(self.directory / "config.yaml"), "--json", *sets, *more]


def write_config(directory: Path) -> None:
    document = {
        "schema_version": 3,
        "run": {"name": "tiny", "device": "cpu", "threads": 1},
        "model": {"name": "hf_causal_lm", "path": str(directory / "base"), "lora": {"rank": 4, "alpha": 8.0}},
        "data": {
            "name": "instruct_jsonl",
            "train_file": str(directory / "train.jsonl"),
            "val_file": str(directory / "val.jsonl"),
            "cache_dir": str(directory / "cache"),
        },
        "trainer": {
            "max_epochs": 2,
            "micro_batch_size": 2,
            "lr": 2e-2,
            "schedule": "constant",
            "eval_prompts": ["say red", "say blue"],
            "eval_prompt_tokens": 6,
            "log_every_steps": 1,
        },
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(document))


def train_in(directory: Path, arguments: list[str]) -> dict[str, Any]:
    """`llmtrain train --json` in this process, with `directory` as working directory."""
    from llmtrain.cli import main

    previous, out = Path.cwd(), io.StringIO()
    os.chdir(directory)
    try:
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
            main(arguments)
    finally:
        os.chdir(previous)
    assert ended.value.code == 0, out.getvalue()
    return dict(json.loads(out.getvalue()))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    directory = tmp_path_factory.mktemp("fine-tune")
    make_model(directory / "base")
    (directory / "base" / "generation_config.json").write_text(json.dumps(GENERATION))
    make_examples(directory / "train.jsonl", 60)
    make_examples(directory / "val.jsonl", 6, first=100)
    write_config(directory)
    created = Workspace(directory, {})
    kinds = {"lora": [], "full": ["model.lora=null", "trainer.lr=1e-3"]}
    for run_id, overrides in kinds.items():
        created.results[run_id] = train_in(directory, created.train(*overrides, f"output.run_id={run_id}"))
    return created


def llmtrain_logits(workspace: Workspace, **source: str) -> torch.Tensor:
    from llmtrain.inference.load import Source, load_model

    loaded = load_model(Source(root=str(workspace.root), **source), "cpu")
    with torch.no_grad():
        logits: torch.Tensor = loaded.module(TOKENS)
    return logits


# Files of a run.


def test_training_reduces_the_loss(workspace: Workspace) -> None:
    for result in workspace.results.values():
        assert result["status"] == "finished"
        assert result["epochs"] == 2
        assert result["final_val_loss"] < result["first_train_loss"] - 0.2
    assert workspace.results["lora"]["steps"] == workspace.results["full"]["steps"] > 4


def test_result_has_parameter_counts(workspace: Workspace) -> None:
    lora, full = workspace.results["lora"], workspace.results["full"]
    assert full["trainable_parameters"] == full["parameters"]
    assert lora["parameters"] == full["parameters"] + lora["trainable_parameters"]
    shapes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    assert lora["trainable_parameters"] == 2 * sum(4 * (i + o) for i, o in shapes)


def adapter_dirs(workspace: Workspace) -> dict[str, Path]:
    run = workspace.run("lora")
    return {
        "run": run / "adapter",
        **{f"step_{step}": run / "checkpoints" / f"step_{step}" / "adapter" for step in workspace.steps("lora")},
    }


def test_adapter_in_the_run_and_in_every_checkpoint(workspace: Workspace) -> None:
    directories = adapter_dirs(workspace)
    assert len(directories) == 3
    for directory in directories.values():
        assert {path.name for path in directory.iterdir()} == {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "llmtrain.json",
        }
        adapter_config = json.loads((directory / "adapter_config.json").read_text())
        assert adapter_config["base_model_name_or_path"] == str(workspace.base)
        assert (adapter_config["r"], adapter_config["lora_alpha"], adapter_config["peft_type"]) == (4, 8.0, "LORA")
        assert adapter_config["inference_mode"] is True
    best = workspace.results["lora"]["best_step"]
    run_adapter, best_adapter = (
        (directories[name] / "adapter_model.safetensors").read_bytes() for name in ("run", f"step_{best}")
    )
    assert run_adapter == best_adapter
    other = min(workspace.steps("lora"), key=lambda step: step == best)
    assert (directories[f"step_{other}"] / "adapter_model.safetensors").read_bytes() != best_adapter


def test_lora_checkpoints_contain_adapters_only(workspace: Workspace) -> None:
    newest = workspace.run("lora") / "checkpoints" / f"step_{workspace.steps('lora')[-1]}"
    with safe_open(newest / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert len(names) == 2 * 7 * 2
    assert all("lora_A" in name or "lora_B" in name for name in names)


def test_tied_embeddings_are_stored_once(workspace: Workspace) -> None:
    newest = workspace.run("full") / "checkpoints" / f"step_{workspace.steps('full')[-1]}"
    stored = load_file(newest / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == workspace.results["full"]["parameters"]
    embeddings = [name for name, tensor in stored.items() if tensor.dim() == 2 and len(tensor) > 100]
    assert len(embeddings) == 1
    assert not (newest / "adapter").exists()


def test_base_model_is_recorded_by_its_hash(workspace: Workspace) -> None:
    from llmtrain.content_hash import files_sha256

    files = [workspace.base / "config.json", workspace.base / "model.safetensors"]
    base_sha256 = files_sha256(files, workspace.directory / "another-cache")
    for run_id, result in workspace.results.items():
        assert result["base_sha256"] == base_sha256
        for step in workspace.steps(run_id):
            state = json.loads((workspace.run(run_id) / "checkpoints" / f"step_{step}" / "state.json").read_text())
            assert state["base_sha256"] == base_sha256


def test_samples_answer_the_eval_prompts(workspace: Workspace) -> None:
    files = sorted((workspace.run("lora") / "samples").iterdir())
    assert [path.name for path in files] == [f"step_{step}.json" for step in workspace.steps("lora")]
    for path in files:
        answers = json.loads(path.read_text())
        assert [answer["prompt"] for answer in answers] == ["say red", "say blue"]
        assert all(isinstance(answer["answer"], str) for answer in answers)


def test_sample_equals_generate_output(workspace: Workspace, cli: Cli) -> None:
    (step,) = [step for step in workspace.steps("lora") if step == workspace.results["lora"]["best_step"]]
    sample = json.loads((workspace.run("lora") / "samples" / f"step_{step}.json").read_text())[0]
    done = cli(
        "generate", *workspace.run_options(), "--prompt", "say red", "--temperature", 0, "--max-new-tokens", 6, "--json"
    )
    assert done.json["text"] == sample["answer"]
    assert sample["answer"].strip()


def test_model_card(workspace: Workspace) -> None:
    result = workspace.results["lora"]
    card = (workspace.run("lora") / "adapter" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == str(workspace.base)
    assert head["library_name"] == "peft"
    assert f"| best validation loss | {result['best_val_loss']:.4f} |" in card
    assert f"| training loss, first logged | {result['first_train_loss']:.4f} |" in card
    assert f"| steps | {result['best_step']} |" in card
    assert result["base_sha256"] in card
    assert str(workspace.directory / "train.jsonl") in card


def test_adapter_of_a_relative_base_path_loads_from_another_directory(
    workspace: Workspace, cli: Cli, workdir: Path
) -> None:
    """`models/tiny` in adapter_config.json would be a name on the hub."""
    shutil.copytree(workspace.base, workdir / "models" / "tiny")
    done = cli(*workspace.train("model.path=models/tiny", "trainer.max_epochs=null", "trainer.max_steps=1"))
    assert done.code == 0, done.err
    adapter = Path(done.json["run_dir"], "adapter").resolve()
    (workdir / "elsewhere").mkdir()
    os.chdir(workdir / "elsewhere")  # the fixture restores it
    done = cli("generate", "--adapter", adapter, "--prompt", "say red", "--max-new-tokens", 2)
    assert done.code == 0, done.err


# peft and transformers.

LOAD_SCRIPT = """
import json, sys
import torch
from safetensors.torch import save_file
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
request = json.loads(sys.argv[1])
tokens = torch.tensor(request["tokens"])
logits = {}
with torch.no_grad():
    for name, directory in request["adapters"].items():
        base = AutoModelForCausalLM.from_pretrained(request["base"])
        model = PeftModel.from_pretrained(base, directory).eval()
        logits[name] = model(input_ids=tokens).logits.clone()
    facts = {}
    for name, directory in request["models"].items():
        model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        logits[name] = model.eval()(input_ids=tokens).logits.clone()
        tokenizer = AutoTokenizer.from_pretrained(directory)
        chat = [{"role": "user", "content": "say red"}]
        facts[name] = {
            "problems": sorted(map(str, [*report["missing_keys"], *report["unexpected_keys"]])),
            "prompt": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
            "ids": tokenizer("red green blue")["input_ids"],
            "eos": tokenizer.eos_token,
            "use_cache": model.config.use_cache,
            "dtype": str(model.dtype),
        }
assert "llmtrain" not in sys.modules
save_file(logits, request["to"])
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def exported(workspace: Workspace) -> dict[str, Path]:
    from llmtrain.cli import main

    directories = {name: workspace.directory / "exported" / name for name in ("merged", "adapter", "full")}
    calls = {
        "merged": [*workspace.run_options(), "--merge"],
        "adapter": [*workspace.run_options()],
        "full": [*workspace.run_options("full")],
    }
    for name, arguments in calls.items():
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
            main(["export", *arguments, "--to", str(directories[name])])
        assert ended.value.code == 0
        assert str(directories[name]) in out.getvalue()
    return directories


def load_in_another_process(
    workspace: Workspace, exported: dict[str, Path]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Logits of all adapters and exported models, computed by peft and transformers, and facts about the models."""
    to = workspace.directory / "logits.safetensors"
    adapters = {**adapter_dirs(workspace), "exported": exported["adapter"]}
    models = {"merged": exported["merged"], "full": exported["full"], "base": workspace.base}
    request = {
        "tokens": TOKENS.tolist(),
        "base": str(workspace.base),
        "to": str(to),
        "adapters": {name: str(path) for name, path in adapters.items()},
        "models": {name: str(path) for name, path in models.items()},
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD_SCRIPT, json.dumps(request)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return load_file(to), json.loads(done.stdout)


def test_peft_and_transformers_compute_the_same_logits(workspace: Workspace, exported: dict[str, Path]) -> None:
    """One test for all, because it starts a process."""
    logits, facts = load_in_another_process(workspace, exported)
    expected = {
        "base": llmtrain_logits(workspace, model=str(workspace.base)),
        "merged": llmtrain_logits(workspace, run="lora"),
        "full": llmtrain_logits(workspace, run="full"),
        "run": llmtrain_logits(workspace, adapter=str(workspace.run("lora") / "adapter")),
        "exported": llmtrain_logits(workspace, adapter=str(exported["adapter"])),
        **{
            f"step_{step}": llmtrain_logits(workspace, run="lora", checkpoint=f"step_{step}")
            for step in workspace.steps("lora")
        },
    }
    assert expected.keys() == logits.keys()
    for name, value in expected.items():
        assert (value - logits[name]).abs().max() < 1e-5, name
        assert name == "base" or (value - logits["base"]).abs().max() > 1e-2, f"{name} has no effect"
    first, last = workspace.steps("lora")
    assert (expected[f"step_{first}"] - expected[f"step_{last}"]).abs().max() > 1e-3
    for name in ("merged", "full"):
        assert (llmtrain_logits(workspace, model=str(exported[name])) - expected[name]).abs().max() < 1e-5
        assert facts[name] == facts["base"]
    assert facts["base"]["prompt"] == "<|im_start|>user\nsay red<|im_end|>\n<|im_start|>assistant\n"
    assert facts["base"]["problems"] == []


@pytest.mark.parametrize("name", ["merged", "full"])
def test_exported_model_keeps_generation_config(exported: dict[str, Path], name: str) -> None:
    """Chat models name their end-of-turn token in generation_config.json."""
    generation_config = json.loads((exported[name] / "generation_config.json").read_text())
    assert {key: generation_config.get(key) for key in GENERATION} == GENERATION


def test_exported_adapter_is_a_peft_directory(workspace: Workspace, exported: dict[str, Path]) -> None:
    names = {path.name for path in exported["adapter"].iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"}
    assert "model.safetensors" not in names
    run_adapter = workspace.run("lora") / "adapter" / "adapter_model.safetensors"
    assert (exported["adapter"] / "adapter_model.safetensors").read_bytes() == run_adapter.read_bytes()
    for name, library in (("adapter", "peft"), ("merged", "transformers"), ("full", "transformers")):
        head = yaml.safe_load((exported[name] / "README.md").read_text().split("---\n")[1])
        assert head["library_name"] == library
        assert head["base_model"] == str(workspace.base)


def test_export_of_an_adapter_directory(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    adapter = workspace.run("lora") / "adapter"
    done = cli("export", "--adapter", adapter, "--merge", "--to", workdir / "merged", "--json")
    assert done.code == 0, done.err
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(done.json["files"])
    merged, expected = llmtrain_logits(workspace, model=str(workdir / "merged")), llmtrain_logits(workspace, run="lora")
    assert (merged - expected).abs().max() < 1e-5


def test_export_of_another_checkpoint(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    first = workspace.steps("lora")[0]
    done = cli(
        "export", *workspace.run_options(), "--checkpoint", f"step_{first}", "--merge", "--to", workdir / "m", "--json"
    )
    assert done.json["step"] == first
    expected = llmtrain_logits(workspace, run="lora", checkpoint=f"step_{first}")
    assert (llmtrain_logits(workspace, model=str(workdir / "m")) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("merge", [("--merge",), ()], ids=["merged", "adapter"])
@pytest.mark.parametrize("exists", [True, False], ids=["empty-directory", "new-directory"])
def test_export_to_a_full_disk(
    workspace: Workspace, cli: Cli, workdir: Path, merge: tuple[str, ...], exists: bool
) -> None:
    to = workdir / "out" if exists else workdir / "new" / "out"
    if exists:
        to.mkdir()
    with max_file_size(8_000):
        done = cli("export", *workspace.run_options(), *merge, "--to", to)
    assert done.code == 64, done.err
    assert str(to) in done.err
    assert "Traceback" not in done.err
    assert to.exists() == exists
    assert list(workdir.rglob("*.*")) == []


@contextlib.contextmanager
def max_file_size(size: int) -> Iterator[None]:
    """Limit the size of files: a write beyond it fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
@pytest.mark.needs_root
def test_export_to_a_full_tmpfs(workspace: Workspace, workdir: Path) -> None:
    """In its own process: a library that maps a file it cannot fill is killed by a signal."""
    disk = workdir / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small tmpfs")
    try:
        command = [
            sys.executable,
            "-m",
            "llmtrain",
            "export",
            *workspace.run_options(),
            "--merge",
            "--to",
            str(disk / "out"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 65, done.stderr
        assert str(disk / "out") in done.stderr
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_export_refuses_a_non_empty_directory(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    (workdir / "out").mkdir()
    (workdir / "out" / "precious").write_text("mine")
    done = cli("export", *workspace.run_options(), "--merge", "--to", workdir / "out")
    assert done.code == 64
    assert [path.name for path in (workdir / "out").iterdir()] == ["precious"]


# eval, generate and chat.


def sources(workspace: Workspace, exported: dict[str, Path]) -> dict[str, list[str]]:
    return {
        "run": workspace.run_options(),
        "adapter": ["--adapter", str(workspace.run("lora") / "adapter")],
        "exported-adapter": ["--adapter", str(exported["adapter"])],
        "merged": ["--model", str(exported["merged"])],
    }


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
    assert plain.out.split() == " ".join(answers).split()
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
        timeout=120,
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


# Resuming.

SHORT = ["trainer.max_epochs=null", "trainer.max_steps=4", "trainer.save_every_steps=2", "trainer.eval_every_steps=2"]


@pytest.mark.parametrize(
    "kind", [["model.lora.dropout=0.3"], ["model.lora=null"], ["model.lora.dora=true"]], ids=["lora", "full", "dora"]
)
def test_resumed_run_is_bit_identical(workspace: Workspace, cli: Cli, kind: list[str]) -> None:
    whole = cli(*workspace.train(*SHORT, *kind, "output.run_id=whole"))
    assert whole.code == 0, whole.err
    first = cli(*workspace.train(*SHORT, *kind, "output.run_id=halves", "trainer.max_steps=2"))
    assert first.json["state_sha256"] != whole.json["state_sha256"]
    second = cli(*workspace.train(*SHORT, *kind, more=("--resume", "halves")))
    assert second.code == 0, second.err
    assert second.json["resumed_from"] == 2
    assert second.json["state_sha256"] == whole.json["state_sha256"]
    assert second.json["final_val_loss"] == whole.json["final_val_loss"]


def test_run_from_before_attention_auto_keeps_its_attention(workspace: Workspace, cli: Cli) -> None:
    """Earlier versions recorded sdpa, their default. On a CPU auto is sdpa, so the bits can be compared."""
    plain = ["model.lora.dropout=0.0"]  # layers with a common input are computed together
    whole = cli(*workspace.train(*SHORT, *plain, "output.run_id=whole"))
    earlier = "output.run_id=halves", "trainer.max_steps=2", "model.attention=sdpa"
    assert cli(*workspace.train(*SHORT, *plain, *earlier)).code == 0
    resumed = cli(*workspace.train(*SHORT, *plain, more=("--resume", "halves")))
    assert resumed.code == 0, resumed.err
    assert resumed.json["state_sha256"] == whole.json["state_sha256"]
    changed = cli(*workspace.train(*SHORT, *plain, "model.attention=eager", more=("--resume", "halves")))
    assert changed.code == 64


def test_resume_refuses_changed_base_model(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    model = workdir / "model"
    shutil.copytree(workspace.base, model)
    overrides = (*SHORT, f"model.path={model}")
    assert cli(*workspace.train(*overrides, "trainer.max_steps=2", "output.run_id=run")).code == 0
    # Another directory with the same content is accepted.
    model.rename(workdir / "moved")
    done = cli(
        *workspace.train(*SHORT, f"model.path={workdir / 'moved'}", "trainer.max_steps=3", more=("--resume", "run"))
    )
    assert done.code == 0, done.err
    assert done.json["resumed_from"] == 2
    # The same directory with other content is refused.
    tensors = load_file(workdir / "moved" / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, workdir / "moved" / "model.safetensors", {"format": "pt"})
    again = workspace.train(*SHORT, f"model.path={workdir / 'moved'}", more=("--resume", "run"))
    refused = cli(*again)
    assert refused.code == 64, refused.err
    assert "base_sha256" in refused.err
    assert "--allow-config-change" in refused.err
    assert cli(*again, "--allow-config-change").code == 0


def test_resume_refuses_changed_lora_rank(workspace: Workspace, cli: Cli) -> None:
    assert cli(*workspace.train(*SHORT, "trainer.max_steps=2", "output.run_id=run")).code == 0
    done = cli(*workspace.train(*SHORT, "model.lora.rank=8", more=("--resume", "run")))
    assert done.code == 64
    assert "model.lora" in done.err


# Other settings.


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.packing=false"],
        ["data.train_on_prompt=true", "trainer.precision=bf16"],
        ["model.lora.target_modules=[q_proj, v_proj]", "model.lora.rslora=true", "trainer.grad_accum_steps=2"],
        ["model.gradient_checkpointing=true", "model.attention=eager"],
        ["model.dtype=bfloat16", "trainer.precision=bf16"],
        ["trainer.async_save=true"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_settings_train(workspace: Workspace, cli: Cli, overrides: list[str]) -> None:
    done = cli(*workspace.train(*SHORT, *overrides))
    assert done.code == 0, done.err
    assert list(Path(done.json["run_dir"], "adapter").iterdir())
    evaluated = cli("eval", "--run", done.json["run_id"], "--file", workspace.val, "--json")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json["loss"] < evaluated.json["base"]["loss"] - 1e-4
    assert evaluated.json["loss"] == pytest.approx(done.json["best_val_loss"], abs=2e-3)


def test_chat_data_trains(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    chats = make_chats(workdir / "chats.jsonl", 20)
    done = cli(*workspace.train(*SHORT, "data.name=chat_jsonl", f"data.train_file={chats}", f"data.val_file={chats}"))
    assert done.code == 0, done.err
    assert done.json["final_val_loss"] < done.json["first_train_loss"]
    evaluated = cli("eval", "--run", done.json["run_id"], "--file", chats, "--json")
    assert evaluated.json["loss"] == pytest.approx(done.json["best_val_loss"], abs=1e-5)


def test_text_data_trains(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    """Continued pretraining."""
    (workdir / "text.txt").write_text("red green blue one two three " * 100)
    sets = ["data.name=text_files", "data.files=text.txt"]
    done = cli(*workspace.train(*SHORT, *sets, "model.block_size=32"))
    assert done.code == 0, done.err
    assert done.json["final_val_loss"] < done.json["first_train_loss"]


def test_dry_run(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    done = cli(*workspace.train(more=("--dry-run",)))
    assert done.code == 0, done.err
    assert done.json["trainable_parameters"] == workspace.results["lora"]["trainable_parameters"]
    assert done.json["parameters"] == workspace.results["lora"]["parameters"]
    assert done.json["steps"] == workspace.results["lora"]["steps"]
    assert done.json["loss"] == pytest.approx(workspace.results["lora"]["first_train_loss"], abs=1e-5)
    assert not (workdir / "runs").exists()


# Invalid input.


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def unknown_architecture(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "frobnicator", "vocab_size": 300}))


def corrupt_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def not_a_language_model(directory: Path) -> None:
    from transformers import ViTConfig

    ViTConfig(hidden_size=32).save_pretrained(directory)


def truncate_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def corrupt_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense nonsense")


def remove_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name},
        directory / "model.safetensors",
        {"format": "pt"},
    )


def fewer_tokens(directory: Path) -> None:
    make_model(directory, vocab_size=280)


def corrupt_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


MODELS: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "missing directory": (shutil.rmtree, 64, "model.path"),
    "no config.json": (without("config.json"), 65, "config.json"),
    "no weights": (without("model.safetensors"), 65, "model.safetensors"),
    "only a pickle": (pickle_only, 65, "pytorch_model.bin"),
    "unknown architecture": (unknown_architecture, 65, "frobnicator"),
    "corrupt config.json": (corrupt_config, 65, "config.json"),
    "not a language model": (not_a_language_model, 65, "model"),
    "truncated weights": (truncate_weights, 65, "SafetensorError"),
    "corrupt weights": (corrupt_weights, 65, "SafetensorError"),
    "missing tensor": (remove_tensor, 65, "model.layers.1.mlp.up_proj.weight"),
    "fewer tokens than the tokenizer": (fewer_tokens, 65, "280"),
    "no tokenizer": (without("tokenizer.json"), 65, "model.tokenizer_path"),
    "corrupt tokenizer": (corrupt_tokenizer, 65, "tokenizer"),
}


@pytest.mark.parametrize("case", MODELS)
def test_bad_model_directory_is_refused(workspace: Workspace, cli: Cli, workdir: Path, case: str) -> None:
    damage, code, message = MODELS[case]
    shutil.copytree(workspace.base, workdir / "model")
    damage(workdir / "model")
    done = cli(*workspace.train(f"model.path={workdir / 'model'}"))
    assert_refused(done, code, message, workdir)
    assert str(workdir / "model") in done.err or case == "fewer tokens than the tokenizer"


def assert_refused(done: Any, code: int, message: str, workdir: Path) -> None:
    assert done.code == code, done.err
    assert message in done.err
    assert "Traceback" not in done.err
    assert "\nerror: " in f"\n{done.err}"
    assert done.json["exit_code"] == code
    assert not (workdir / "runs").exists()


CONFIGS: dict[str, tuple[list[str], int, str]] = {
    "block_size beyond the positions": (["model.block_size=129"], 64, "model.block_size must be at most 128"),
    "remote code without a commit": (
        ["model.path=somebody/model", "model.trust_remote_code=true"],
        64,
        "model.revision",
    ),
    "4 bits without a GPU": (["model.lora.quantize=true"], 64, "model.lora.quantize"),
    "no path": (["model.path=null"], 64, "model.path"),
    "empty path": (["model.path="], 64, "model.path"),
    "lora of a gpt": (["model.name=gpt", "model.lora.rank=4"], 64, "model.lora"),
    "packing of a gpt": (
        ["model.name=gpt", "data.tokenizer={base}"],
        64,
        "data.packing",
    ),
    "unknown layer": (["model.lora.target_modules=[q_proj, nonsense]"], 64, "nonsense"),
    "name that is not in the cache": (["model.path=somebody/model"], 64, "somebody/model"),
    "warm-up longer than the run": (["trainer.warmup_steps=1000", "trainer.schedule=cosine"], 64, "warmup_steps 1000"),
    "missing file": (["data.train_file=nowhere.jsonl"], 65, "nowhere.jsonl"),
    "examples too long to be used": (["model.block_size=8"], 65, "model.block_size 8"),
    "examples too long, as an error": (["model.block_size=30", "data.truncation=error"], 65, "line"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_config_is_refused(workspace: Workspace, cli: Cli, workdir: Path, case: str) -> None:
    overrides, code, message = CONFIGS[case]
    done = cli(*workspace.train(*(text.replace("{base}", str(workspace.base)) for text in overrides)))
    assert_refused(done, code, message, workdir)


GOOD = json.dumps({"instruction": "say red", "output": "red"})
BAD_FILES: dict[str, tuple[str, str]] = {
    "no answer": (f'{GOOD}\n{GOOD}\n{{"instruction": "say red"}}\n', "line 3: "),
    "empty answer": (f'{GOOD}\n{{"instruction": "say red", "output": ""}}\n', "line 2: "),
    "invalid JSON": (f'{GOOD}\n{GOOD}\n{GOOD}\n{{"instruction": \n', "line 4: "),
    "not an object": (f"{GOOD}\n[1, 2]\n", "line 2: "),
    "empty": ("", "is empty"),
    "blank lines": ("\n\n", "is empty"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_examples_are_refused(workspace: Workspace, cli: Cli, workdir: Path, case: str) -> None:
    text, message = BAD_FILES[case]
    (workdir / "examples.jsonl").write_text(text)
    done = cli(*workspace.train("data.train_file=examples.jsonl"))
    assert_refused(done, 65, message, workdir)
    assert "examples.jsonl" in done.err


@pytest.mark.parametrize("missing", ["peft", "transformers"])
def test_missing_hf_extra_is_refused(
    workspace: Workspace, cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else find(name, *more))
    done = cli(*workspace.train())
    assert_refused(done, 64, missing, workdir)
    assert "llmtrain[hf]" in done.err


# Local files and the network.


def saved_config(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    return dict(yaml.safe_load(Path(done.json["run_dir"], "config.yaml").read_text()))


ONE_STEP = ["trainer.max_epochs=null", "trainer.max_steps=1"]


def test_short_options_set_model_fields(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    shutil.copytree(workspace.base, workdir / "model", ignore=shutil.ignore_patterns("tokenizer*", "chat*"))
    make_tokenizer(workdir / "tokenizer")
    paths = ("--model-local-dir", str(workdir / "model"), "--tokenizer-local-dir", str(workdir / "tokenizer"))
    model = saved_config(cli(*workspace.train(*ONE_STEP, "model.path=somebody/model", more=paths)))["model"]
    assert model["path"] == str(workdir / "model")
    assert model["tokenizer_path"] == str(workdir / "tokenizer")
    assert model["local_files_only"] is True


@pytest.mark.parametrize("options", [(), ("--local-files-only",)])
def test_local_files_only(workspace: Workspace, cli: Cli, options: tuple[str, ...]) -> None:
    model = saved_config(cli(*workspace.train(*ONE_STEP, more=options)))["model"]
    assert model["path"] == str(workspace.base)
    assert model["tokenizer_path"] is None
    assert model["local_files_only"] is bool(options)


OFFLINE = """
import json, os, socket, sys
attempts = []
def refuse(name, real):
    def replacement(*args, **kwargs):
        family = getattr(args[0], "family", None)
        if family in (socket.AF_INET, socket.AF_INET6, None):
            attempts.append(f"{name} {args[1:] if family else args}")
            raise OSError("no network here")
        return real(*args, **kwargs)
    return replacement
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse(name, getattr(socket.socket, name)))
for name in ("getaddrinfo", "create_connection"):
    setattr(socket, name, refuse(name, getattr(socket, name)))
from llmtrain.cli import main
codes = []
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as ended:
        codes.append([ended.code, len(attempts)])
print(json.dumps(codes), file=open(sys.argv[2], "w"))
"""


def without_variables(*names: str) -> dict[str, str]:
    dropped = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", *TOKEN_VARIABLES, *names}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def test_model_directory_does_not_use_the_network(workspace: Workspace, tmp_path: Path) -> None:
    """No connection attempts; the last call is the control, which must make one."""
    calls = [
        workspace.train(*ONE_STEP, "output.run_id=offline"),
        ["generate", "--run", "offline", "--prompt", "say red", "--max-new-tokens", "2"],
        ["eval", "--adapter", "runs/offline/adapter", "--file", str(workspace.val)],
        ["export", "--run", "offline", "--merge", "--to", "merged"],
        workspace.train(*ONE_STEP, "model.path=somebody/model"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, json.dumps(calls), "codes.json"],
        cwd=tmp_path,
        env={**without_variables(), "HF_HOME": str(tmp_path / "hf-home"), "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes[:4] == [[0, 0]] * 4, done.stderr
    assert codes[4][0] == 64
    assert codes[4][1] > 0
    assert "fetch-model" in done.stderr


# Secrets.


def repo_of(directory: Path, token: str, gated: bool = False) -> Repo:
    return Repo({path.name: path.read_bytes() for path in directory.iterdir()}, token=token, gated=gated)


@pytest.fixture
def hub(workspace: Workspace) -> Iterator[FakeHub]:
    with serve() as server:
        server.repos["somebody/gated"] = repo_of(workspace.base, "hf_CanaryUnused", gated=True)
        yield server


def files_with(directory: Path, canary: str) -> list[Path]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 20
    return [path for path in files if canary.encode() in path.read_bytes() or canary in path.name]


FROM_HUB = """
import json, os, sys
from llmtrain.cli import main
calls, codes = json.load(sys.stdin), []  # not argv, which meta.json records
for variable, token, arguments in calls:
    os.environ[variable] = token
    try:
        main(arguments)
    except SystemExit as ended:
        codes.append(ended.code)
    del os.environ[variable]
sys.exit(0 if codes == [0] * len(calls) else f"exit codes {codes}")
"""


def run_script(
    hub: FakeHub, directory: Path, script: str, *arguments: str, stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        input=stdin,
        cwd=directory,
        env={**without_variables("http_proxy", "HTTP_PROXY"), **hub.environment(directory / "hf-home")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_tokens_are_used_and_never_written(workspace: Workspace, hub: FakeHub, tmp_path: Path) -> None:
    """Each variable gives access to a repository that only its token opens."""
    calls = []
    tokens = {name: f"hf_CanaryNumber{number}Xq7" for number, name in enumerate(TOKEN_VARIABLES)}
    for name, token in tokens.items():
        repo = f"somebody/{name.lower()}"
        hub.repos[repo] = repo_of(workspace.base, token)
        cache = f"data.cache_dir={tmp_path / 'cache'}"
        calls.append((name, token, workspace.train(*ONE_STEP, f"model.path={repo}", cache)))
    ended = run_script(hub, tmp_path, FROM_HUB, stdin=json.dumps(calls))
    assert ended.returncode == 0, ended.stderr
    assert hub.tokens >= set(tokens.values())
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    for token in tokens.values():
        assert token not in ended.stdout + ended.stderr
        assert files_with(tmp_path, token) == []
    names = [
        json.loads((run / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] for run in runs
    ]
    assert sorted(names) == sorted(f"somebody/{name.lower()}" for name in tokens)


def test_gated_model_without_token_is_refused(workspace: Workspace, hub: FakeHub, tmp_path: Path) -> None:
    script = "from llmtrain.cli import main; main()"
    ended = run_script(hub, tmp_path, script, *workspace.train(*ONE_STEP, "model.path=somebody/gated"))
    assert ended.returncode == 64, ended.stderr
    error = json.loads(ended.stdout)
    assert error["exit_code"] == 64
    assert "somebody/gated" in error["what"]
    assert "gated" in error["what"]
    assert "HF_TOKEN" in error["remedy"]
    assert "license" in error["remedy"]
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_secret_in_the_notes_is_redacted(
    workspace: Workspace, cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People upload README.md with the adapter."""
    monkeypatch.setenv("HF_TOKEN", "hf_CanaryInTheNotes5")
    done = cli(*workspace.train(*ONE_STEP, "run.notes=pasted hf_CanaryInTheNotes5 here"))
    assert done.code == 0, done.err
    exported = cli("export", "--run", done.json["run_id"], "--to", workdir / "out", "--merge")
    assert exported.code == 0, exported.err
    assert "CanaryInTheNotes5" not in done.out + done.err + exported.out
    assert files_with(workdir, "CanaryInTheNotes5") == []

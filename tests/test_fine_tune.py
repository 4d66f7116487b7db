"""Fine-tuning as a user does it: a tiny model directory, rows, `train`, and everything that is done with the result.

One LoRA run and one of all weights are trained for the whole file; other programs (peft, transformers) look at what
they left in a process that never imports llmtrain."""

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
from tiny_llama import make_chats, make_model, make_rows, make_tokenizer

pytestmark = pytest.mark.hf

TOKENS = torch.arange(5, 65).view(2, 30)
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 0]}
Cli = Callable[..., Any]


@dataclass(frozen=True)
class Place:
    """A directory with a base model, rows and runs."""

    folder: Path
    results: dict[str, dict[str, Any]]

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def root(self) -> Path:
        return self.folder / "runs"

    @property
    def val(self) -> Path:
        return self.folder / "val.jsonl"

    def run(self, run_id: str) -> Path:
        return self.root / run_id

    def of_run(self, run_id: str = "lora") -> list[str]:
        return ["--run", run_id, "--root", str(self.root)]

    def steps(self, run_id: str) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.run(run_id) / "checkpoints").glob("step_*"))

    def train(self, *overrides: str, more: tuple[str, ...] = ()) -> list[str]:
        sets = [part for text in overrides for part in ("--set", text)]
        return ["train", "--config", str(self.folder / "config.yaml"), "--json", *sets, *more]


def write_config(folder: Path) -> None:
    document = {
        "schema_version": 2,
        "run": {"name": "tiny", "device": "cpu", "threads": 1},
        "model": {"name": "hf_causal_lm", "path": str(folder / "base"), "lora": {"rank": 4, "alpha": 8.0}},
        "data": {
            "name": "instruct_jsonl",
            "train_file": str(folder / "train.jsonl"),
            "val_file": str(folder / "val.jsonl"),
            "cache_dir": str(folder / "cache"),
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
    (folder / "config.yaml").write_text(yaml.safe_dump(document))


def trained_in(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """`llmtrain train --json` in this process, its runs in `folder`/runs."""
    from llmtrain.cli import main

    before, out = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
            main(arguments)
    finally:
        os.chdir(before)
    assert ended.value.code == 0, out.getvalue()
    return dict(json.loads(out.getvalue()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("fine-tune")
    make_model(folder / "base")
    (folder / "base" / "generation_config.json").write_text(json.dumps(GENERATION))
    make_rows(folder / "train.jsonl", 60)
    make_rows(folder / "val.jsonl", 6, first=100)
    write_config(folder)
    found = Place(folder, {})
    kinds = {"lora": [], "full": ["model.lora=null", "trainer.lr=1e-3"]}
    for run_id, overrides in kinds.items():
        found.results[run_id] = trained_in(folder, found.train(*overrides, f"output.run_id={run_id}"))
    return found


def our_logits(place: Place, **source: str) -> torch.Tensor:
    from llmtrain.inference.load import Source, load_model

    loaded = load_model(Source(root=str(place.root), **source), "cpu")
    with torch.no_grad():
        logits: torch.Tensor = loaded.module(TOKENS)
    return logits


# What a run leaves.


def test_the_run_learned(place: Place) -> None:
    for result in place.results.values():
        assert result["status"] == "finished"
        assert result["epochs"] == 2
        assert result["final_val_loss"] < result["first_train_loss"] - 0.2
    assert place.results["lora"]["steps"] == place.results["full"]["steps"] > 4


def test_the_result_counts_parameters(place: Place) -> None:
    lora, full = place.results["lora"], place.results["full"]
    assert full["trainable_parameters"] == full["parameters"]
    assert lora["parameters"] == full["parameters"] + lora["trainable_parameters"]
    shapes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    assert lora["trainable_parameters"] == 2 * sum(4 * (i + o) for i, o in shapes)


def adapter_folders(place: Place) -> dict[str, Path]:
    run = place.run("lora")
    return {
        "run": run / "adapter",
        **{f"step_{step}": run / "checkpoints" / f"step_{step}" / "adapter" for step in place.steps("lora")},
    }


def test_an_adapter_at_every_kept_checkpoint_and_in_the_run(place: Place) -> None:
    folders = adapter_folders(place)
    assert len(folders) == 3
    for folder in folders.values():
        assert {path.name for path in folder.iterdir()} == {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "llmtrain.json",
        }
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(place.base)
        assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8.0, "LORA")
        assert settings["inference_mode"] is True
    best = place.results["lora"]["best_step"]
    of_run, of_best = ((folders[name] / "adapter_model.safetensors").read_bytes() for name in ("run", f"step_{best}"))
    assert of_run == of_best
    other = min(place.steps("lora"), key=lambda step: step == best)
    assert (folders[f"step_{other}"] / "adapter_model.safetensors").read_bytes() != of_best


def test_checkpoints_of_a_lora_run_hold_adapters_only(place: Place) -> None:
    newest = place.run("lora") / "checkpoints" / f"step_{place.steps('lora')[-1]}"
    with safe_open(newest / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert len(names) == 2 * 7 * 2
    assert all("lora_A" in name or "lora_B" in name for name in names)


def test_a_tied_matrix_is_stored_once(place: Place) -> None:
    newest = place.run("full") / "checkpoints" / f"step_{place.steps('full')[-1]}"
    stored = load_file(newest / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == place.results["full"]["parameters"]
    of_vocabulary = [name for name, tensor in stored.items() if tensor.dim() == 2 and len(tensor) > 100]
    assert len(of_vocabulary) == 1
    assert not (newest / "adapter").exists()


def test_the_base_model_is_recorded_by_its_content(place: Place) -> None:
    from llmtrain.content_hash import files_sha256

    files = [place.base / "config.json", place.base / "model.safetensors"]
    wanted = files_sha256(files, place.folder / "another-cache")
    for run_id, result in place.results.items():
        assert result["base_sha256"] == wanted
        for step in place.steps(run_id):
            state = json.loads((place.run(run_id) / "checkpoints" / f"step_{step}" / "state.json").read_text())
            assert state["base_sha256"] == wanted


def test_answers_to_the_prompts(place: Place) -> None:
    files = sorted((place.run("lora") / "samples").iterdir())
    assert [path.name for path in files] == [f"step_{step}.json" for step in place.steps("lora")]
    for path in files:
        answers = json.loads(path.read_text())
        assert [answer["prompt"] for answer in answers] == ["say red", "say blue"]
        assert all(isinstance(answer["answer"], str) for answer in answers)


def test_an_answer_is_what_generate_says(place: Place, cli: Cli) -> None:
    (step,) = [step for step in place.steps("lora") if step == place.results["lora"]["best_step"]]
    kept = json.loads((place.run("lora") / "samples" / f"step_{step}.json").read_text())[0]
    done = cli("generate", *place.of_run(), "--prompt", "say red", "--temperature", 0, "--max-new-tokens", 6, "--json")
    assert done.json["text"] == kept["answer"]
    assert kept["answer"].strip()


def test_the_model_card(place: Place) -> None:
    result = place.results["lora"]
    card = (place.run("lora") / "adapter" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == str(place.base)
    assert head["library_name"] == "peft"
    assert f"| best validation loss | {result['best_val_loss']:.4f} |" in card
    assert f"| training loss, first step | {result['first_train_loss']:.4f} |" in card
    assert f"| steps | {result['best_step']} |" in card
    assert result["base_sha256"] in card
    assert str(place.folder / "train.jsonl") in card


def test_a_relative_path_of_the_base_is_found_from_elsewhere(place: Place, cli: Cli, workdir: Path) -> None:
    """`models/tiny` in an adapter_config.json would be taken for a name on the hub."""
    shutil.copytree(place.base, workdir / "models" / "tiny")
    done = cli(*place.train("model.path=models/tiny", "trainer.max_epochs=null", "trainer.max_steps=1"))
    assert done.code == 0, done.err
    adapter = Path(done.json["run_dir"], "adapter").resolve()
    (workdir / "elsewhere").mkdir()
    os.chdir(workdir / "elsewhere")  # the fixture goes back
    done = cli("generate", "--adapter", adapter, "--prompt", "say red", "--max-new-tokens", 2)
    assert done.code == 0, done.err


# Other programs.

ELSEWHERE = """
import json, sys
import torch
from safetensors.torch import save_file
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
asked = json.loads(sys.argv[1])
tokens = torch.tensor(asked["tokens"])
logits = {}
with torch.no_grad():
    for name, folder in asked["adapters"].items():
        base = AutoModelForCausalLM.from_pretrained(asked["base"])
        model = PeftModel.from_pretrained(base, folder).eval()
        logits[name] = model(input_ids=tokens).logits.clone()
    said = {}
    for name, folder in asked["models"].items():
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        logits[name] = model.eval()(input_ids=tokens).logits.clone()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        chat = [{"role": "user", "content": "say red"}]
        said[name] = {
            "problems": sorted(map(str, [*report["missing_keys"], *report["unexpected_keys"]])),
            "prompt": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
            "ids": tokenizer("red green blue")["input_ids"],
            "eos": tokenizer.eos_token,
            "use_cache": model.config.use_cache,
            "dtype": str(model.dtype),
        }
assert "llmtrain" not in sys.modules
save_file(logits, asked["to"])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def exported(place: Place) -> dict[str, Path]:
    from llmtrain.cli import main

    folders = {name: place.folder / "exported" / name for name in ("merged", "adapter", "full")}
    calls = {
        "merged": [*place.of_run(), "--merge"],
        "adapter": [*place.of_run()],
        "full": [*place.of_run("full")],
    }
    for name, arguments in calls.items():
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
            main(["export", *arguments, "--to", str(folders[name])])
        assert ended.value.code == 0
        assert str(folders[name]) in out.getvalue()
    return folders


def loaded_elsewhere(place: Place, exported: dict[str, Path]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Logits of all that the runs left and of all that was exported, by other programs; and what they say of models."""
    to = place.folder / "elsewhere.safetensors"
    adapters = {**adapter_folders(place), "exported": exported["adapter"]}
    models = {"merged": exported["merged"], "full": exported["full"], "base": place.base}
    asked = {
        "tokens": TOKENS.tolist(),
        "base": str(place.base),
        "to": str(to),
        "adapters": {name: str(path) for name, path in adapters.items()},
        "models": {name: str(path) for name, path in models.items()},
    }
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(asked)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return load_file(to), json.loads(done.stdout)


def test_peft_and_transformers_compute_what_we_do(place: Place, exported: dict[str, Path]) -> None:
    """One test, for it takes a process of its own."""
    logits, said = loaded_elsewhere(place, exported)
    ours = {
        "base": our_logits(place, model=str(place.base)),
        "merged": our_logits(place, run="lora"),
        "full": our_logits(place, run="full"),
        "run": our_logits(place, adapter=str(place.run("lora") / "adapter")),
        "exported": our_logits(place, adapter=str(exported["adapter"])),
        **{f"step_{step}": our_logits(place, run="lora", checkpoint=f"step_{step}") for step in place.steps("lora")},
    }
    assert ours.keys() == logits.keys()
    for name, mine in ours.items():
        assert (mine - logits[name]).abs().max() < 1e-5, name
        assert name == "base" or (mine - logits["base"]).abs().max() > 1e-2, f"{name} does nothing, so proves nothing"
    first, last = place.steps("lora")
    assert (ours[f"step_{first}"] - ours[f"step_{last}"]).abs().max() > 1e-3
    for name in ("merged", "full"):
        assert (our_logits(place, model=str(exported[name])) - ours[name]).abs().max() < 1e-5
        assert said[name] == said["base"]
    assert said["base"]["prompt"] == "<|im_start|>user\nsay red<|im_end|>\n<|im_start|>assistant\n"
    assert said["base"]["problems"] == []


@pytest.mark.parametrize("name", ["merged", "full"])
def test_an_exported_model_generates_as_its_base_does(exported: dict[str, Path], name: str) -> None:
    """When it stops, above all: chat models name their end-of-turn token in generation_config.json."""
    found = json.loads((exported[name] / "generation_config.json").read_text())
    assert {key: found.get(key) for key in GENERATION} == GENERATION


def test_an_exported_adapter_is_a_directory_for_peft(place: Place, exported: dict[str, Path]) -> None:
    names = {path.name for path in exported["adapter"].iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"}
    assert "model.safetensors" not in names
    of_run = place.run("lora") / "adapter" / "adapter_model.safetensors"
    assert (exported["adapter"] / "adapter_model.safetensors").read_bytes() == of_run.read_bytes()
    for name, library in (("adapter", "peft"), ("merged", "transformers"), ("full", "transformers")):
        head = yaml.safe_load((exported[name] / "README.md").read_text().split("---\n")[1])
        assert head["library_name"] == library
        assert head["base_model"] == str(place.base)


def test_export_of_an_adapter_directory(place: Place, cli: Cli, workdir: Path) -> None:
    adapter = place.run("lora") / "adapter"
    done = cli("export", "--adapter", adapter, "--merge", "--to", workdir / "merged", "--json")
    assert done.code == 0, done.err
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(done.json["files"])
    merged, wanted = our_logits(place, model=str(workdir / "merged")), our_logits(place, run="lora")
    assert (merged - wanted).abs().max() < 1e-5


def test_export_of_another_checkpoint(place: Place, cli: Cli, workdir: Path) -> None:
    first = place.steps("lora")[0]
    done = cli("export", *place.of_run(), "--checkpoint", f"step_{first}", "--merge", "--to", workdir / "m", "--json")
    assert done.json["step"] == first
    ours = our_logits(place, run="lora", checkpoint=f"step_{first}")
    assert (our_logits(place, model=str(workdir / "m")) - ours).abs().max() < 1e-5


@pytest.mark.parametrize("merge", [("--merge",), ()], ids=["merged", "adapter"])
@pytest.mark.parametrize("is_there", [True, False], ids=["into-an-empty-directory", "into-a-new-one"])
def test_export_to_a_full_disk(place: Place, cli: Cli, workdir: Path, merge: tuple[str, ...], is_there: bool) -> None:
    to = workdir / "out" if is_there else workdir / "new" / "out"
    if is_there:
        to.mkdir()
    with largest_file(8_000):
        done = cli("export", *place.of_run(), *merge, "--to", to)
    assert done.code == 64, done.err
    assert done.err.startswith(f"error: Cannot write to {to}: ")
    assert "Traceback" not in done.err
    assert to.exists() == is_there
    assert list(workdir.rglob("*.*")) == []


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may become larger: a write beyond fails as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.needs_root
def test_export_to_a_really_full_disk(place: Place, workdir: Path) -> None:
    """Of its own process: a library that maps files it cannot fill would be killed by a signal."""
    disk = workdir / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small tmpfs")
    try:
        command = [sys.executable, "-m", "llmtrain", "export", *place.of_run(), "--merge", "--to", str(disk / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 64, done.stderr
        assert "Cannot write to" in done.stderr
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_export_does_not_overwrite(place: Place, cli: Cli, workdir: Path) -> None:
    (workdir / "out").mkdir()
    (workdir / "out" / "precious").write_text("mine")
    done = cli("export", *place.of_run(), "--merge", "--to", workdir / "out")
    assert done.code == 64
    assert [path.name for path in (workdir / "out").iterdir()] == ["precious"]


# eval, generate and chat.


def sources(place: Place, exported: dict[str, Path]) -> dict[str, list[str]]:
    return {
        "run": place.of_run(),
        "adapter": ["--adapter", str(place.run("lora") / "adapter")],
        "exported-adapter": ["--adapter", str(exported["adapter"])],
        "merged": ["--model", str(exported["merged"])],
    }


def test_eval_gives_one_loss_for_run_adapter_and_model(place: Place, exported: dict[str, Path], cli: Cli) -> None:
    found = {}
    for name, arguments in sources(place, exported).items():
        done = cli("eval", *arguments, "--file", place.val, "--json")
        assert done.code == 0, done.err
        found[name] = done.json
    wanted = place.results["lora"]["best_val_loss"]
    base = cli("eval", "--model", place.base, "--file", place.val, "--json").json["loss"]
    assert base > wanted + 0.1
    for name, value in found.items():
        assert value["loss"] == pytest.approx(wanted, abs=1e-5), name
        assert value["tokens"] == found["run"]["tokens"] > 20
        if name == "merged":
            assert value["base"] is None
        else:
            assert value["base"]["loss"] == pytest.approx(base, abs=1e-5), name


def test_eval_shows_base_and_tuned_side_by_side(place: Place, cli: Cli) -> None:
    done = cli("eval", *place.of_run(), "--file", place.val)
    value = cli("eval", *place.of_run(), "--file", place.val, "--json").json
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0][-2:] == ["base", "tuned"]
    assert lines[1] == ["loss", f"{value['base']['loss']:.4f}", f"{value['loss']:.4f}"]
    assert lines[2][0] == "perplexity"


def test_eval_leaves_the_adapter_on(place: Place) -> None:
    from llmtrain.inference.evaluate import evaluate_files
    from llmtrain.inference.load import Source, load_model

    loaded = load_model(Source(run="lora", root=str(place.root)), "cpu")
    first, second = (evaluate_files(loaded, [str(place.val)], 4) for _ in range(2))
    assert first == second
    assert first["tuned"].loss != first["base"].loss


def test_eval_of_conversations_and_of_text(place: Place, cli: Cli, workdir: Path) -> None:
    chats = make_chats(workdir / "chats.jsonl", 5)
    text = workdir / "text.txt"
    text.write_text("red green blue " * 60)
    for arguments in (["--model", place.base, "--file", chats], [*place.of_run("full"), "--file", text]):
        done = cli("eval", *arguments, "--json")
        assert done.code == 0, done.err
        assert 2 < done.json["loss"] < 8
        assert done.json["tokens"] > 10


def test_generate_says_the_same_from_run_adapter_and_model(place: Place, exported: dict[str, Path], cli: Cli) -> None:
    said = {}
    for name, arguments in sources(place, exported).items():
        done = cli("generate", *arguments, "--prompt", "say red", "--temperature", 0, "--max-new-tokens", 8, "--json")
        assert done.code == 0, done.err
        said[name] = done.json["text"]
    assert len(set(said.values())) == 1, said
    assert said["run"].strip()
    base = cli("generate", "--model", place.base, "--prompt", "say red", "--temperature", 0, "--json")
    assert base.json["text"] != said["run"]


def test_generate_raw_goes_on_from_the_prompt(place: Place, cli: Cli) -> None:
    common = ["generate", *place.of_run(), "--prompt", "red green", "--temperature", 0, "--max-new-tokens", 8]
    asked, raw = cli(*common, "--json"), cli(*common, "--json", "--raw")
    assert asked.json["text"] != raw.json["text"]
    assert cli(*common, "--raw").out.startswith("red green")
    assert not cli(*common).out.startswith("red green")


def test_generate_without_a_model_and_with_two(place: Place, cli: Cli) -> None:
    assert cli("generate").code == 64
    two = cli("generate", *place.of_run(), "--adapter", place.run("lora") / "adapter")
    assert two.code == 64
    assert "--adapter" in two.err


def piped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize("name", ["run", "adapter", "merged"])
def test_chat(place: Place, exported: dict[str, Path], cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    arguments = ["chat", *sources(place, exported)[name], "--temperature", 0, "--max-new-tokens", 6]
    piped(monkeypatch, "say red\nsay blue\n\nsay nothing\n")
    done = cli(*arguments, "--system", "be brief", "--json")
    assert done.code == 0, done.err
    messages = done.json["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages[1::2]] == ["say red", "say blue"]
    piped(monkeypatch, "say red\nsay blue\n")  # ends with the input
    plain = cli(*arguments, "--system", "be brief")
    answers = [messages[2]["content"], messages[4]["content"]]
    assert plain.out.split() == " ".join(answers).split()
    # An answer is given to the whole conversation.
    piped(monkeypatch, "say blue\n")
    assert cli(*arguments, "--json").json["messages"][0] == {"role": "user", "content": "say blue"}


def test_chat_in_a_process_of_its_own(place: Place) -> None:
    command = [sys.executable, "-m", "llmtrain", "chat", *place.of_run(), "--temperature", "0"]
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
    kept = json.loads((place.run("lora") / "samples" / f"step_{place.results['lora']['best_step']}.json").read_text())
    assert value["messages"][1]["content"] == kept[0]["answer"].strip()


# Where the base model is now.


@pytest.fixture
def moved(place: Place, workdir: Path) -> Iterator[Path]:
    """The base model at another place, and no longer where it was."""
    place.base.rename(workdir / "moved")
    yield workdir / "moved"
    (workdir / "moved").rename(place.base)


def test_a_moved_base_is_named_with_model(place: Place, moved: Path, cli: Cli) -> None:
    adapter = ["--adapter", str(place.run("lora") / "adapter")]
    for arguments in (place.of_run(), adapter):
        lost = cli("eval", *arguments, "--file", place.val)
        assert lost.code == 64
        assert str(place.base) in lost.err
        found = cli("eval", *arguments, "--model", moved, "--file", place.val, "--json")
        assert found.code == 0, found.err
        assert found.json["loss"] == pytest.approx(place.results["lora"]["best_val_loss"], abs=1e-5)


def test_a_full_run_needs_no_base_weights(place: Place, cli: Cli, workdir: Path) -> None:
    """All its weights are in the checkpoint; of the base only the shape is asked for."""
    (workdir / "shape").mkdir()
    shutil.copy(place.base / "config.json", workdir / "shape")
    done = cli("eval", *place.of_run("full"), "--model", workdir / "shape", "--file", place.val, "--json")
    assert done.code == 0, done.err
    assert done.json["loss"] == pytest.approx(place.results["full"]["best_val_loss"], abs=1e-5)


@pytest.mark.parametrize("verb", ["generate", "eval", "export", "chat"])
def test_another_base_is_refused(place: Place, cli: Cli, workdir: Path, verb: str) -> None:
    """Of the same shapes: nothing but its content tells."""
    other = make_model(workdir / "other", seed=1)
    more = {"eval": ["--file", place.val], "export": ["--to", workdir / "out", "--merge"]}.get(verb, [])
    done = cli(verb, *place.of_run(), "--model", other, *more)
    assert done.code == 65
    assert f"{other} is not the base model of this adapter" in done.err
    assert "Traceback" not in done.err
    assert not (workdir / "out").exists()


def test_an_adapter_on_a_base_of_other_shapes(place: Place, cli: Cli, workdir: Path) -> None:
    wide = make_model(workdir / "wide", hidden_size=64)
    for arguments in (["--adapter", place.run("lora") / "adapter"], place.of_run()):
        done = cli("generate", *arguments, "--model", wide, "--prompt", "x")
        assert done.code == 65
        assert "base model" in done.err
        assert "Traceback" not in done.err
        assert len(done.err) < 1500


def test_a_directory_that_is_no_adapter(place: Place, cli: Cli) -> None:
    for folder in (place.base, place.folder / "nowhere"):
        done = cli("generate", "--adapter", folder, "--prompt", "x")
        assert done.code == 64
        assert "adapter_config.json" in done.err


# Going on.

SHORT = ["trainer.max_epochs=null", "trainer.max_steps=4", "trainer.save_every_steps=2", "trainer.eval_every_steps=2"]


@pytest.mark.parametrize(
    "kind", [["model.lora.dropout=0.3"], ["model.lora=null"], ["model.lora.dora=true"]], ids=["lora", "full", "dora"]
)
def test_a_resumed_run_is_the_same_run(place: Place, cli: Cli, kind: list[str]) -> None:
    whole = cli(*place.train(*SHORT, *kind, "output.run_id=whole"))
    assert whole.code == 0, whole.err
    first = cli(*place.train(*SHORT, *kind, "output.run_id=halves", "trainer.max_steps=2"))
    assert first.json["state_sha256"] != whole.json["state_sha256"]
    second = cli(*place.train(*SHORT, *kind, more=("--resume", "halves")))
    assert second.code == 0, second.err
    assert second.json["resumed_from"] == 2
    assert second.json["state_sha256"] == whole.json["state_sha256"]
    assert second.json["final_val_loss"] == whole.json["final_val_loss"]


def test_resuming_on_a_base_that_changed(place: Place, cli: Cli, workdir: Path) -> None:
    model = workdir / "model"
    shutil.copytree(place.base, model)
    given = (*SHORT, f"model.path={model}")
    assert cli(*place.train(*given, "trainer.max_steps=2", "output.run_id=run")).code == 0
    # Elsewhere, with the same content: fine.
    model.rename(workdir / "moved")
    done = cli(*place.train(*SHORT, f"model.path={workdir / 'moved'}", "trainer.max_steps=3", more=("--resume", "run")))
    assert done.code == 0, done.err
    assert done.json["resumed_from"] == 2
    # The same place, with another content: refused.
    tensors = load_file(workdir / "moved" / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, workdir / "moved" / "model.safetensors", {"format": "pt"})
    again = place.train(*SHORT, f"model.path={workdir / 'moved'}", more=("--resume", "run"))
    refused = cli(*again)
    assert refused.code == 64, refused.err
    assert "base_sha256" in refused.err
    assert "--allow-config-change" in refused.err
    assert cli(*again, "--allow-config-change").code == 0


def test_resuming_with_another_rank_is_refused(place: Place, cli: Cli) -> None:
    assert cli(*place.train(*SHORT, "trainer.max_steps=2", "output.run_id=run")).code == 0
    done = cli(*place.train(*SHORT, "model.lora.rank=8", more=("--resume", "run")))
    assert done.code == 64
    assert "model.lora" in done.err


# Other kinds of runs.


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
def test_other_settings_train_too(place: Place, cli: Cli, overrides: list[str]) -> None:
    done = cli(*place.train(*SHORT, *overrides))
    assert done.code == 0, done.err
    assert list(Path(done.json["run_dir"], "adapter").iterdir())
    evaluated = cli("eval", "--run", done.json["run_id"], "--file", place.val, "--json")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json["loss"] < evaluated.json["base"]["loss"] - 1e-4  # Adafactor is slow on zeros
    assert evaluated.json["loss"] == pytest.approx(done.json["best_val_loss"], abs=2e-3)


def test_conversations(place: Place, cli: Cli, workdir: Path) -> None:
    chats = make_chats(workdir / "chats.jsonl", 20)
    done = cli(*place.train(*SHORT, "data.name=chat_jsonl", f"data.train_file={chats}", f"data.val_file={chats}"))
    assert done.code == 0, done.err
    assert done.json["final_val_loss"] < done.json["first_train_loss"]
    evaluated = cli("eval", "--run", done.json["run_id"], "--file", chats, "--json")
    assert evaluated.json["loss"] == pytest.approx(done.json["best_val_loss"], abs=1e-5)


def test_plain_text(place: Place, cli: Cli, workdir: Path) -> None:
    """A model can be trained further on text, too."""
    (workdir / "text.txt").write_text("red green blue one two three " * 100)
    sets = ["data.name=text_files", "data.files=text.txt", "data.train_file=null", "data.val_file=null"]
    done = cli(*place.train(*SHORT, *sets, "model.block_size=32"))
    assert done.code == 0, done.err
    assert done.json["final_val_loss"] < done.json["first_train_loss"]


def test_dry_run(place: Place, cli: Cli, workdir: Path) -> None:
    done = cli(*place.train(more=("--dry-run",)))
    assert done.code == 0, done.err
    assert done.json["trainable_parameters"] == place.results["lora"]["trainable_parameters"]
    assert done.json["parameters"] == place.results["lora"]["parameters"]
    assert done.json["steps"] == place.results["lora"]["steps"]
    assert done.json["loss"] == pytest.approx(place.results["lora"]["first_train_loss"], abs=1e-5)
    assert not (workdir / "runs").exists()


# Wrong input.


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "frobnicator", "vocab_size": 300}))


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def not_a_language_model(folder: Path) -> None:
    from transformers import ViTConfig

    ViTConfig(hidden_size=32).save_pretrained(folder)


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def nonsense_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense nonsense")


def lacking_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def fewer_tokens(folder: Path) -> None:
    make_model(folder, vocab_size=280)


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


MODELS: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "no directory": (shutil.rmtree, 64, "does not exist"),
    "no config.json": (without("config.json"), 65, "it has no config.json"),
    "no weights": (without("model.safetensors"), 65, "has no weights"),
    "only a pickle": (only_a_pickle, 65, "pytorch_model.bin, a pickle"),
    "unknown architecture": (unknown_architecture, 65, "frobnicator"),
    "broken config.json": (broken_config, 65, "config.json cannot be used"),
    "no language model": (not_a_language_model, 65, "model"),
    "cut weights": (cut_weights, 65, "cannot be loaded"),
    "nonsense as weights": (nonsense_weights, 65, "cannot be loaded"),
    "a tensor lacks": (lacking_weights, 65, "lacks weights: model.layers.1.mlp.up_proj.weight"),
    "fewer tokens than the tokenizer": (fewer_tokens, 65, "The tokenizer does not fit the model"),
    "no tokenizer": (without("tokenizer.json"), 65, "has no tokenizer"),
    "broken tokenizer": (broken_tokenizer, 65, "tokenizer"),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_directory_that_cannot_be_used(place: Place, cli: Cli, workdir: Path, what: str) -> None:
    damage, code, message = MODELS[what]
    shutil.copytree(place.base, workdir / "model")
    damage(workdir / "model")
    done = cli(*place.train(f"model.path={workdir / 'model'}"))
    refused(done, code, message, workdir)
    assert str(workdir / "model") in done.err or what == "fewer tokens than the tokenizer"


def refused(done: Any, code: int, message: str, workdir: Path) -> None:
    assert done.code == code, done.err
    assert message in done.err
    assert "Traceback" not in done.err
    assert "\nerror: " in f"\n{done.err}"
    assert done.json["exit_code"] == code
    assert not (workdir / "runs").exists()


CONFIGS: dict[str, tuple[list[str], int, str]] = {
    "block_size beyond the positions": (["model.block_size=129"], 64, "129 is beyond the 128 positions"),
    "code of the hub without a commit": (
        ["model.path=somebody/model", "model.trust_remote_code=true"],
        64,
        "needs a commit as model.revision",
    ),
    "4 bits without a GPU": (["model.lora.quantize=true"], 64, "model.lora.quantize needs a GPU"),
    "no path": (["model.path=null"], 64, "model.path is empty"),
    "empty path": (["model.path="], 64, "model.path"),
    "lora of a gpt": (["model.name=gpt", "model.path=null"], 64, "model.lora is for model.name hf_causal_lm"),
    "packing of a gpt": (
        ["model.name=gpt", "model.path=null", "model.lora=null", "data.tokenizer={base}"],
        64,
        "data.packing is true",
    ),
    "unknown layer": (["model.lora.target_modules=[q_proj, nonsense]"], 64, "is called nonsense"),
    "a name that is not in the cache": (["model.path=somebody/model"], 64, "not in the local cache"),
    "warm-up longer than the run": (["trainer.warmup_steps=1000", "trainer.schedule=cosine"], 64, "warmup_steps 1000"),
    "no such file": (["data.train_file=nowhere.jsonl"], 65, "no file nowhere.jsonl"),
    "rows too long to be used": (["model.block_size=8"], 65, "rows can be used at model.block_size 8"),
    "rows too long, said to be an error": (["model.block_size=30", "data.long_rows=error"], 65, "line"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_cannot_be_used(place: Place, cli: Cli, workdir: Path, what: str) -> None:
    overrides, code, message = CONFIGS[what]
    done = cli(*place.train(*(text.replace("{base}", str(place.base)) for text in overrides)))
    refused(done, code, message, workdir)


GOOD = json.dumps({"instruction": "say red", "output": "red"})
ROWS: dict[str, tuple[str, str]] = {
    "no answer": (f'{GOOD}\n{GOOD}\n{{"instruction": "say red"}}\n', "line 3: "),
    "an empty answer": (f'{GOOD}\n{{"instruction": "say red", "output": ""}}\n', "line 2: "),
    "no JSON": (f'{GOOD}\n{GOOD}\n{GOOD}\n{{"instruction": \n', "line 4: not valid JSON"),
    "no object": (f"{GOOD}\n[1, 2]\n", "line 2: not a JSON object"),
    "empty": ("", "is empty"),
    "blank lines": ("\n\n", "is empty"),
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_cannot_be_used(place: Place, cli: Cli, workdir: Path, what: str) -> None:
    text, message = ROWS[what]
    (workdir / "rows.jsonl").write_text(text)
    done = cli(*place.train("data.train_file=rows.jsonl"))
    refused(done, 65, message, workdir)
    assert "rows.jsonl" in done.err


@pytest.mark.parametrize("missing", ["peft", "transformers"])
def test_without_the_hf_extra(
    place: Place, cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else find(name, *more))
    done = cli(*place.train())
    refused(done, 64, f"model.name hf_causal_lm needs {missing}.", workdir)
    assert "llmtrain[hf]" in done.err


# Where things come from.


def kept_config(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    return dict(yaml.safe_load(Path(done.json["run_dir"], "config.yaml").read_text()))


ONE_STEP = ["trainer.max_epochs=null", "trainer.max_steps=1"]


def test_short_options_stand_for_fields(place: Place, cli: Cli, workdir: Path) -> None:
    shutil.copytree(place.base, workdir / "model", ignore=shutil.ignore_patterns("tokenizer*", "chat*"))
    make_tokenizer(workdir / "tokenizer")
    paths = ("--model-local-dir", str(workdir / "model"), "--tokenizer-local-dir", str(workdir / "tokenizer"))
    model = kept_config(cli(*place.train(*ONE_STEP, "model.path=somebody/model", more=paths)))["model"]
    assert model["path"] == str(workdir / "model")
    assert model["tokenizer_path"] == str(workdir / "tokenizer")
    assert model["local_files_only"] is True


@pytest.mark.parametrize("given", [(), ("--local-files-only",)])
def test_local_files_only(place: Place, cli: Cli, given: tuple[str, ...]) -> None:
    model = kept_config(cli(*place.train(*ONE_STEP, more=given)))["model"]
    assert model["path"] == str(place.base)
    assert model["tokenizer_path"] is None
    assert model["local_files_only"] is bool(given)


OFFLINE = """
import json, os, socket, sys
attempts = []
def refuse(name, real):
    def instead(*given, **more):
        family = getattr(given[0], "family", None)
        if family in (socket.AF_INET, socket.AF_INET6, None):
            attempts.append(f"{name} {given[1:] if family else given}")
            raise OSError("no network here")
        return real(*given, **more)
    return instead
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


def test_a_directory_needs_no_network(place: Place, tmp_path: Path) -> None:
    """Nothing is even tried; the last call is the control, which must try."""
    calls = [
        place.train(*ONE_STEP, "output.run_id=offline"),
        ["generate", "--run", "offline", "--prompt", "say red", "--max-new-tokens", "2"],
        ["eval", "--adapter", "runs/offline/adapter", "--file", str(place.val)],
        ["export", "--run", "offline", "--merge", "--to", "merged"],
        place.train(*ONE_STEP, "model.path=somebody/model"),
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


def repo_of(folder: Path, token: str, gated: bool = False) -> Repo:
    return Repo({path.name: path.read_bytes() for path in folder.iterdir()}, token=token, gated=gated)


@pytest.fixture
def hub(place: Place) -> Iterator[FakeHub]:
    with serve() as server:
        server.repos["somebody/gated"] = repo_of(place.base, "hf_CanaryOfNobody", gated=True)
        yield server


def hits(folder: Path, canary: str) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    return [path for path in files if canary.encode() in path.read_bytes() or canary in path.name]


FROM_HUB = """
import json, os, sys
from llmtrain.cli import main
calls, codes = json.load(sys.stdin), []  # a command line is kept in meta.json
for variable, token, arguments in calls:
    os.environ[variable] = token
    try:
        main(arguments)
    except SystemExit as ended:
        codes.append(ended.code)
    del os.environ[variable]
sys.exit(0 if codes == [0] * len(calls) else f"exit codes {codes}")
"""


def in_process_of_its_own(
    hub: FakeHub, folder: Path, script: str, *arguments: str, given: str = ""
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        input=given,
        cwd=folder,
        env={**without_variables("http_proxy", "HTTP_PROXY"), **hub.environment(folder / "hf-home")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_tokens_are_used_and_never_written(place: Place, hub: FakeHub, tmp_path: Path) -> None:
    """Each variable opens a repository that only its token opens."""
    calls = []
    tokens = {name: f"hf_CanaryNumber{number}Xq7" for number, name in enumerate(TOKEN_VARIABLES)}
    for name, token in tokens.items():
        repo = f"somebody/{name.lower()}"
        hub.repos[repo] = repo_of(place.base, token)
        cache = f"data.cache_dir={tmp_path / 'cache'}"
        calls.append((name, token, place.train(*ONE_STEP, f"model.path={repo}", cache)))
    ended = in_process_of_its_own(hub, tmp_path, FROM_HUB, given=json.dumps(calls))
    assert ended.returncode == 0, ended.stderr
    assert hub.tokens >= set(tokens.values())
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    for token in tokens.values():
        assert token not in ended.stdout + ended.stderr
        assert hits(tmp_path, token) == []
    names = [
        json.loads((run / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] for run in runs
    ]
    assert sorted(names) == sorted(f"somebody/{name.lower()}" for name in tokens)


def test_a_gated_model_without_a_token(place: Place, hub: FakeHub, tmp_path: Path) -> None:
    script = "from llmtrain.cli import main; main()"
    ended = in_process_of_its_own(hub, tmp_path, script, *place.train(*ONE_STEP, "model.path=somebody/gated"))
    assert ended.returncode == 64, ended.stderr
    error = json.loads(ended.stdout)
    assert error["exit_code"] == 64
    assert "somebody/gated" in error["what"]
    assert "gated" in error["what"]
    assert "HF_TOKEN" in error["remedy"]
    assert "licence" in error["remedy"]
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_a_secret_in_the_notes_is_in_no_file(
    place: Place, cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """README.md is what people upload with the adapter."""
    monkeypatch.setenv("HF_TOKEN", "hf_CanaryInTheNotes5")
    done = cli(*place.train(*ONE_STEP, "run.notes=pasted hf_CanaryInTheNotes5 here"))
    assert done.code == 0, done.err
    exported = cli("export", "--run", done.json["run_id"], "--to", workdir / "out", "--merge")
    assert exported.code == 0, exported.err
    assert "CanaryInTheNotes5" not in done.out + done.err + exported.out
    assert hits(workdir, "CanaryInTheNotes5") == []

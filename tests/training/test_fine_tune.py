"""Fine-tuning: the files of a run, resuming, and settings."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")


from fine_tune_workspace import Cli, Workspace, adapter_dirs

from tiny_llama import make_chats

pytestmark = pytest.mark.hf


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
        assert adapter_config["base_model_name_or_path"] is None  # a path is of no use to others
        assert adapter_config["revision"] is None
        assert (adapter_config["r"], adapter_config["lora_alpha"], adapter_config["peft_type"]) == (4, 8.0, "LORA")
        assert adapter_config["inference_mode"] is True
        assert adapter_config["target_modules"] == sorted(adapter_config["target_modules"])
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
    from llmtrain.data.content_hash import files_sha256

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
    assert "base_model" not in head
    assert str(workspace.base) not in card
    assert head["library_name"] == "peft"
    assert f"| best validation loss | {result['best_val_loss']:.4f} |" in card
    assert card.count("validation loss") == 1, "these weights are the best"
    assert yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])["model"]["lora"]["target_modules"] == "all-linear"
    assert f"| training loss, first logged | {result['first_train_loss']:.4f} |" in card
    assert f"| steps | {result['best_step']} |" in card
    assert result["base_sha256"] in card
    assert str(workspace.directory / "train.jsonl") in card


def test_adapter_of_a_relative_base_path_loads_from_another_directory(
    workspace: Workspace, cli: Cli, workdir: Path
) -> None:
    """Its path is in llmtrain.json."""
    shutil.copytree(workspace.base, workdir / "models" / "tiny")
    done = cli(*workspace.train("model.path=models/tiny", "trainer.max_epochs=null", "trainer.max_steps=1"))
    assert done.code == 0, done.err
    adapter = Path(done.json["run_dir"], "adapter").resolve()
    (workdir / "elsewhere").mkdir()
    os.chdir(workdir / "elsewhere")  # the fixture restores it
    done = cli("generate", "--adapter", adapter, "--prompt", "say red", "--max-new-tokens", 2)
    assert done.code == 0, done.err


# Resuming.

SHORT = ["trainer.max_epochs=null", "trainer.max_steps=4", "trainer.save_every_steps=2", "trainer.eval_every_steps=2"]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(["model.lora.dropout=0.3"], id="lora"),
        pytest.param(["model.lora=null"], id="full"),
        pytest.param(["model.lora.dora=true"], id="dora", marks=pytest.mark.slow),
    ],
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


@pytest.mark.parametrize("name", ["byte", pytest.param("char", marks=pytest.mark.slow), "gpt2"])
def test_model_directory_named_like_a_built_in_tokenizer(
    workspace: Workspace, cli: Cli, workdir: Path, name: str
) -> None:
    shutil.copytree(workspace.base, workdir / name)
    done = cli(*workspace.train(f"model.path={name}", more=("--dry-run",)))
    assert done.code == 0, done.err
    assert done.json["loss"] == pytest.approx(workspace.results["lora"]["first_train_loss"], abs=1e-5)


def test_run_of_a_model_directory_named_byte_has_its_tokenizer(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    shutil.copytree(workspace.base, workdir / "byte")
    done = cli(*workspace.train(*SHORT, "model.path=./byte", "output.run_id=run", "trainer.max_steps=2"))
    assert done.code == 0, done.err
    assert done.json["tokenizer_sha256"] == workspace.results["lora"]["tokenizer_sha256"]
    assert json.loads((workdir / "runs" / "run" / "tokenizer" / "llmtrain_tokenizer.json").read_text())["kind"] == "hf"
    # Neither the name of the directory nor its place is part of what a resume compares.
    (workdir / "byte").rename(workdir / "moved")
    resumed = cli(*workspace.train(*SHORT, "model.path=moved", more=("--resume", "run")))
    assert resumed.code == 0, resumed.err
    assert resumed.json["resumed_from"] == 2


def test_data_tokenizer_byte_is_built_in_despite_a_directory_of_that_name(
    workspace: Workspace, cli: Cli, workdir: Path
) -> None:
    shutil.copytree(workspace.base, workdir / "byte")
    sets = ["data.tokenizer=byte", "data.prompt_format=plain", "model.block_size=128"]
    done = cli(*workspace.train(*SHORT, *sets, "output.run_id=run", "trainer.max_steps=1"))
    assert done.code == 0, done.err
    assert done.json["tokenizer_sha256"] != workspace.results["lora"]["tokenizer_sha256"]


# Invalid input.

"""GGUF files: loaded by transformers and llama.cpp with the same tokens and logits; refused where they would not be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load_config
from llmtrain.inference.gguf.shapes import shape_problem
from llmtrain.inference.gguf.vocabulary import PRE_TOKENIZERS, read_vocabulary, vocabulary_problem
from llmtrain.training.run import run_training
from slow_cases import some
from tiny_llama import make_model

Cli = Callable[..., Any]
pytest.importorskip("gguf", reason="needs the gguf extra")
pytestmark = pytest.mark.hf

TEXT = "the pod waits for the master, the node resumes. Été 12:30 😀\n" * 60
MODERN = ("model.architecture=modern", "model.n_kv_heads=1")
SWIGLU = (*MODERN, "model.mlp=swiglu", "model.d_model=64")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    """Runs of each shape, with the tokenizers byte and char and one trained for the text."""
    from llmtrain.data.tokenizers.bpe import train_bpe

    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    train_bpe([TEXT], 300, folder / "bpe")
    for run_id, tokenizer, *changes in (
        ("gpt2", "byte", "model.d_ff=48"),
        ("qwen3", str(folder / "bpe"), *SWIGLU),
        ("untied", "byte", *SWIGLU, "model.tie_embeddings=false"),
        ("relu2", "byte", *MODERN, "model.mlp=relu2"),
        ("char", "char"),
    ):
        sets = [*tiny, "model.name=gpt", "model.n_layers=1", "model.n_heads=2", f"output.root_dir={folder}"]
        sets += ["data.name=text_files", f"data.files=[{folder / 'text.txt'}]", f"data.tokenizer={tokenizer}"]
        run_training(load_config("gpt_smoke", [*sets, *changes, f"output.run_id={run_id}"]))
    return folder


@pytest.fixture
def make_gguf(root: Path, cli: Cli, workdir: Path) -> Callable[..., Any]:
    def run(run_id: str, *options: object) -> Any:
        done = cli("export", run_id, "--root", root, "--format", "gguf", "--to", "out", *options, "--json")
        assert "Traceback" not in done.err
        assert sorted(path.name for path in workdir.glob("out*/*")) == (done.json["files"] if done.code == 0 else [])
        return done

    return run


@pytest.mark.parametrize("run_id", some(["gpt2", "qwen3"], "qwen3"))
def test_transformers_and_llama_cpp_compute_the_same(make_gguf: Callable[..., Any], run_id: str) -> None:
    """The export itself asks them."""
    done = make_gguf(run_id)
    assert done.code == 0, done.err
    assert done.json["files"] == ["README.md", "export-check.json", "model.gguf"]
    check = done.json["check"]
    assert check["logits_error"] < 1e-5
    assert check["equal_tokens"] == check["continuation_tokens"]
    if "xllamacpp" in check["loaded_with"]:
        assert check["llama_cpp_equal_tokens"] == check["continuation_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_data_types(make_gguf: Callable[..., Any], dtype: str) -> None:
    from gguf import GGUFReader

    done = make_gguf("untied", "--dtype", dtype)
    assert done.code == 0, done.err
    types = {tensor.tensor_type.name for tensor in GGUFReader("out/model.gguf").tensors}
    assert types == {"F32", dtype.upper()}
    assert done.json["check"]["logits_error"] < 1e-5 < 1e-4 < done.json["check"]["rounding_error"] < 4e-2


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "num_key_value_heads": 4}])
def test_llama(cli: Cli, workdir: Path, changes: dict[str, Any]) -> None:
    """The rows of q and k have another order in llama.cpp, and grouped heads have fewer of them."""
    model = make_model(workdir / "base", **changes)
    for dtype in ("f32", "f16", "q8_0"):
        done = cli("export", "--model", model, "--format", "gguf", "--dtype", dtype, "--to", dtype, "--json")
        assert done.code == 0, done.err
        assert done.json["check"]["logits_error"] < 1e-5
        assert done.json["check"]["chat_template"] is True


@pytest.mark.parametrize("dtype", some(["f32", "f16", "q8_0"], "q8_0"))
def test_wrong_order_of_rows_is_found(cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Dequantized tensors would be equal to what was written. Attention hardly matters in this model: rounding to
    q8_0 changes more."""
    import torch
    from transformers import AutoModelForCausalLM

    from llmtrain.inference.gguf import shapes

    monkeypatch.setitem(vars(shapes.SHAPES["llama"]), "convert", shapes._as_is)
    model = make_model(workdir / "base")
    small = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for layer in small.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
    small.save_pretrained(model)
    done = cli("export", "--model", model, "--format", "gguf", "--dtype", dtype, "--to", "out", "--json")
    assert (done.code, done.json["reason"]) == (65, "export_differs")
    assert "logits differ" in done.json["differences"][0]
    assert not (workdir / "out").exists()


@pytest.mark.parametrize(("run_id", "why"), [("relu2", "nanochat"), ("char", "byte-level BPE")])
def test_what_llama_cpp_cannot_compute_is_refused(make_gguf: Callable[..., Any], run_id: str, why: str) -> None:
    done = make_gguf(run_id)
    assert (done.code, done.json["error"]) == (64, "UsageError")
    assert why in done.json["what"]
    assert "qwen3" in done.json["remedy"]


def test_missing_package_and_unknown_names_are_refused(
    cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmtrain.inference.gguf import write

    model = make_model(workdir / "base")
    find = write.importlib.util.find_spec
    monkeypatch.setattr(write.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    done = cli("export", "--model", model, "--format", "gguf", "--to", "out", "--json")
    assert (done.code, done.json["error"]) == (64, "UsageError")
    assert "gguf" in done.json["what"]
    for options in (["--format", "onnx"], ["--dtype", "q8_0"], ["--format", "gguf", "--dtype", "int8"]):
        assert cli("export", "--model", model, "--to", "out", *options).code == 64
    assert not (workdir / "out").exists()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type"),
        ({"model_type": "gemma3_text"}, "gemma3_text"),
    ],
)
def test_settings_that_llama_cpp_would_ignore_are_refused(changes: dict[str, Any], word: str) -> None:
    config = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    assert shape_problem(config) is None
    assert word in str(shape_problem({**config, **changes}))
    assert shape_problem(None) is not None


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def layout(pre_tokenizer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "ignore_merges": False}
    return {"model": model, "pre_tokenizer": pre_tokenizer, "normalizer": None, "added_tokens": [], **changes}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {**BYTE_LEVEL, "use_regex": False}


def split_at(expression: str) -> dict[str, Any]:
    return sequence({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}, BYTES)


WORDS = {name: str(splits[0][1]) for splits, (name, _) in PRE_TOKENIZERS.items() if splits[0][0] == "Split"}


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (layout(BYTE_LEVEL), "gpt-2"),
        (layout(sequence(DIGITS, BYTE_LEVEL)), "smollm"),
        (layout(split_at(WORDS["qwen2"]), normalizer={"type": "NFC"}), "qwen2"),
        (layout({**BYTE_LEVEL, "add_prefix_space": True}), None),
        (layout(BYTE_LEVEL, normalizer={"type": "Lowercase"}), None),
        (layout(sequence({**DIGITS, "individual_digits": False}, BYTE_LEVEL)), None),
        (layout(split_at(r"\w+")), None),
        (layout(split_at(WORDS["llama-bpe"])), None),  # without ignore_merges it is another tokenizer
        (layout({"type": "Metaspace"}), None),
    ],
)
def test_pre_tokenizer_is_named_by_what_it_does(tmp_path: Path, found: dict[str, Any], name: str | None) -> None:
    assert (vocabulary_problem(found) is None) == (name is not None)
    if name is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(found))
        assert read_vocabulary(tmp_path, 4, adds_bos=False).pre == name


def test_vocabulary_has_a_token_for_every_row(tmp_path: Path) -> None:
    added = {"lstrip": False, "rstrip": False, "single_word": False}
    tokens = [{"id": 3, "content": "<|end|>", "special": True, **added}]
    tokens.append({"id": 4, "content": "<think>", "special": False, **added})
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout(BYTE_LEVEL, added_tokens=tokens)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    vocabulary = read_vocabulary(tmp_path, 6, adds_bos=True)
    assert vocabulary.tokens == ["a", "b", "ab", "<|end|>", "<think>", "[PAD5]"]
    assert vocabulary.types == [1, 1, 1, 3, 4, 5]
    assert (vocabulary.merges, vocabulary.special, vocabulary.adds_bos) == (["a b"], {"eos": 3}, True)
    tokens[0]["lstrip"] = True
    assert "<|end|>" in str(vocabulary_problem(layout(BYTE_LEVEL, added_tokens=tokens)))

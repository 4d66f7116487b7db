"""Shared fixtures: GPT-2's tokenizer, a tiny chat tokenizer trained on the spot, and JSON lines files."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from llmtrain.data.tokenizers.bpe import train_bpe
from llmtrain.data.tokenizers.gpt2 import GPT2Tokenizer

TEXT = "What is a pod? A pod is a group of containers. system user assistant tool\n" * 20
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
MakeTokenizer = Callable[..., Path]


@pytest.fixture
def gpt2(shared_data: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> GPT2Tokenizer:
    directory = tmp_path_factory.mktemp("tiktoken")
    for name in ("vocab.bpe", "encoder.json"):
        key = hashlib.sha1((GPT2_URL + name).encode()).hexdigest()
        shutil.copy(shared_data / "gpt2-bpe" / name, directory / key)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(directory))
    return GPT2Tokenizer()


@pytest.fixture(scope="session")
def bare_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE tokenizer with the special tokens of ChatML, without a chat template."""
    directory = tmp_path_factory.mktemp("bare")
    train_bpe([TEXT], 320, directory)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


@pytest.fixture
def make_tokenizer(bare_tokenizer: Path, tmp_path: Path) -> MakeTokenizer:
    """Makes a tokenizer directory with a chat template in tokenizer_config.json or in its own file."""

    def make(template: str | None = CHATML, name: str = "tokenizer", as_file: bool = False) -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "tokenizer.json").write_bytes((bare_tokenizer / "tokenizer.json").read_bytes())
        tokenizer_config = json.loads((bare_tokenizer / "tokenizer_config.json").read_text())
        if as_file:
            (directory / "chat_template.jinja").write_text(str(template))
        elif template is not None:
            tokenizer_config["chat_template"] = template
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        return directory

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes a file of JSON lines; strings are written unchanged."""

    def write(*lines: Any, name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return str(path)

    return write

"""What the tests of data share: GPT-2's tokenizer, a tiny chat tokenizer made on the spot, and files of rows."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from llmtrain.data.tokenizers.tokenizer import GPT2Tokenizer, train_bpe

TEXT = "What is a pod? A pod is a group of containers. system user assistant tool\n" * 20
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
MakeTokenizer = Callable[..., Path]


@pytest.fixture
def gpt2(shared_data: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> GPT2Tokenizer:
    folder = tmp_path_factory.mktemp("tiktoken")
    for name in ("vocab.bpe", "encoder.json"):
        key = hashlib.sha1((GPT2_URL + name).encode()).hexdigest()
        shutil.copy(shared_data / "gpt2-bpe" / name, folder / key)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    return GPT2Tokenizer()


@pytest.fixture(scope="session")
def bare_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte pairs with the special tokens of ChatML, without a template."""
    folder = tmp_path_factory.mktemp("bare")
    train_bpe([TEXT], 320, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def make_tokenizer(bare_tokenizer: Path, tmp_path: Path) -> MakeTokenizer:
    """A tokenizer directory of the test's own, with a template in its settings or as a file."""

    def make(template: str | None = CHATML, name: str = "tokenizer", as_file: bool = False) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_bytes((bare_tokenizer / "tokenizer.json").read_bytes())
        settings = json.loads((bare_tokenizer / "tokenizer_config.json").read_text())
        if as_file:
            (folder / "chat_template.jinja").write_text(str(template))
        elif template is not None:
            settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """A file of JSON lines; text is written as it is."""

    def write(*rows: Any, name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write

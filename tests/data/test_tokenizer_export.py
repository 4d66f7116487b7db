"""Exported tokenizers, loaded by transformers: the same ids as our own encoding, for every kind of tokenizer."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import models, normalizers, pre_tokenizers, processors

from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.bpe import train_bpe
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.data.tokenizers.byte_level import as_characters, merges_of
from llmtrain.data.tokenizers.char import CharTokenizer
from llmtrain.data.tokenizers.gpt2 import GPT2Tokenizer
from llmtrain.data.tokenizers.hf import HFTokenizer

pytestmark = pytest.mark.hf
TRAINING_TEXT = "the pod waits for the master, it's 12:30. Été, 東京, 😀!\n\n  the node resumes  the loss\r\n" * 30
SPACES = " \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u2003\u2028\u200b\u3000\ufeff"
EMOJI = ["👩‍👩‍👧", "🏽", "🇩🇪", "e\u0301"]
PIECES = [*EMOJI, "Ā", "Ġ", "\x00", "'s", "n't", "'LL", "<unk>", "<0x41>", " the", "  ", "\r\n", " 123"]


def random_texts(seed: int = 0, count: int = 1000) -> list[str]:
    """Texts of all scripts, with every kind of white space, control characters, emoji and combining characters."""
    generator = random.Random(seed)

    def piece() -> str:
        kind = generator.randrange(6)
        if kind == 0:
            return generator.choice(SPACES)
        if kind == 1:
            return generator.choice(PIECES)
        start, end = [(0, 32), (32, 127), (0x80, 0xD800), (0xE000, 0x110000)][kind - 2]
        return chr(generator.randrange(start, end))

    return ["", *("".join(piece() for _ in range(generator.randrange(30))) for _ in range(count - 1))]


TEXTS = random_texts()


class TinyGPT2(GPT2Tokenizer):
    """GPT-2's tokenizer with fewer merges: the real one needs a download."""

    def __init__(self, merges: list[tuple[str, str]]) -> None:
        characters = {as_characters(bytes([byte])): bytes([byte]) for byte in range(256)}
        tokens = list(characters.values())
        for left, right in merges:
            tokens.append(b"".join(characters[character] for character in left + right))
        self.ranks = {token: rank for rank, token in enumerate(tokens)}
        self.end_of_text = len(tokens)
        self.vocab_size = len(tokens) + 1
        self._encoding = tiktoken.Encoding(
            "tiny", pat_str=r50k_pat_str, mergeable_ranks=self.ranks, special_tokens={"<|endoftext|>": len(tokens)}
        )


def bpe_merges(tokenizer: HFTokenizer) -> list[tuple[str, str]]:
    layout = json.loads(tokenizer._tokenizer.to_str())
    return [(left, right) for left, right in layout["model"]["merges"]]


def foreign(directory: Path) -> HFTokenizer:
    """Of another model: a normalizer, digits split one by one, BOS added, and a class that would rebuild it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=340, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return HFTokenizer(directory)


def load(tokenizer: Tokenizer, directory: Path) -> Any:
    """As beside an exported GPT: config.json would make AutoTokenizer choose GPT-2's class."""
    from transformers import AutoTokenizer

    tokenizer.export(directory, 1000)
    size = tokenizer.vocab_size
    special = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": size, **special}))
    return AutoTokenizer.from_pretrained(directory)


def check(tokenizer: Tokenizer, directory: Path, texts: list[str]) -> Any:
    loaded = load(tokenizer, directory)
    assert len(loaded) == tokenizer.vocab_size
    assert loaded.eos_token_id == loaded.bos_token_id == tokenizer.end_of_text
    expected = [tokenizer.encode(text).tolist() for text in texts]
    assert loaded(texts)["input_ids"] == expected
    assert loaded.batch_decode(expected) == [tokenizer.decode(ids) for ids in expected]
    return loaded


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return train_bpe([TRAINING_TEXT], 320, tmp_path_factory.mktemp("bpe"))


def test_byte_ids_equal_ours(tmp_path: Path) -> None:
    loaded = check(ByteTokenizer(), tmp_path, TEXTS)
    generator = random.Random(1)
    for _ in range(500):  # a model may generate invalid UTF-8
        ids = [generator.choice([generator.randrange(256), generator.randrange(128, 256)]) for _ in range(12)]
        assert loaded.decode(ids) == ByteTokenizer().decode(ids)


def test_char_ids_equal_ours(tmp_path: Path) -> None:
    check(CharTokenizer.from_texts(TEXTS), tmp_path, TEXTS)


def test_char_refuses_unknown_characters_in_transformers_too(tmp_path: Path) -> None:
    loaded = load(CharTokenizer("abc"), tmp_path)
    assert loaded("cab")["input_ids"] == [2, 0, 1]
    with pytest.raises(Exception, match="UNK"):
        loaded("abz")


def test_gpt2_ids_equal_ours(bpe: HFTokenizer, tmp_path: Path) -> None:
    check(TinyGPT2(bpe_merges(bpe)), tmp_path, TEXTS)


def test_merges_are_recovered_from_ranks(bpe: HFTokenizer) -> None:
    merges = bpe_merges(bpe)
    assert merges_of(TinyGPT2(merges).ranks) == merges


@pytest.mark.shared
def test_real_gpt2_ids_equal_ours(gpt2: GPT2Tokenizer, shared_data: Path, tmp_path: Path) -> None:
    check(gpt2, tmp_path, TEXTS)
    lines = (shared_data / "gpt2-bpe" / "vocab.bpe").read_text().splitlines()[1:]
    layout = json.loads((tmp_path / "tokenizer.json").read_text())
    assert [" ".join(merge) for merge in layout["model"]["merges"]] == lines


def test_trained_bpe_ids_equal_ours(bpe: HFTokenizer, tmp_path: Path) -> None:
    check(bpe, tmp_path, TEXTS)


def test_hf_tokenizer_ids_equal_ours(tmp_path: Path) -> None:
    """Trained on without BOS, so it is not added either."""
    tokenizer = foreign(tmp_path / "foreign")
    loaded = load(tokenizer, tmp_path / "exported")
    assert [loaded(text)["input_ids"] for text in TEXTS] == [tokenizer.encode(text).tolist() for text in TEXTS]
    assert loaded.eos_token_id == tokenizer.end_of_text


def test_vocab_and_merges_files_are_exported_as_tokenizer_json(bpe: HFTokenizer, tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    bpe._tokenizer.model.save(str(tmp_path / "gpt2"))
    check(HFTokenizer(tmp_path / "gpt2"), tmp_path / "exported", TEXTS[:100])


def test_export_is_a_tokenizer_directory_for_the_next_run(tmp_path: Path) -> None:
    """data.tokenizer may name the export; the ids stay the same."""
    for kind, tokenizer in (("byte", ByteTokenizer()), ("char", CharTokenizer.from_texts(TEXTS))):
        tokenizer.export(tmp_path / kind, 64)
        again = HFTokenizer(tmp_path / kind)
        assert (again.vocab_size, again.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
        assert [again.encode(text).tolist() for text in TEXTS] == [tokenizer.encode(text).tolist() for text in TEXTS]
        assert [ids.tolist() for ids in again.encode_many(TEXTS, 1)] == [tokenizer.encode(t).tolist() for t in TEXTS]
        shutil.rmtree(tmp_path / kind)


def test_class_that_would_rebuild_the_tokenizer_is_replaced(tmp_path: Path) -> None:
    """As of SmolLM: numbers are split into digits, and GPT2Tokenizer of transformers does not read that."""
    from transformers import AutoTokenizer

    from llmtrain.data.tokenizers.keep_ids import keep_ids

    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(["12:30 2026 1234 the cat"] * 50, vocab_size=290, special_tokens=["<|end|>"])
    layout = json.loads(bpe.to_str())
    digits = {"type": "Digits", "individual_digits": True}
    layout["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, layout["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    values = {"eos_token": "<|end|>", "chat_template": "{{ messages }}"}
    for name, is_replaced in (("PreTrainedTokenizerFast", False), ("GPT2Tokenizer", True)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**values, "tokenizer_class": name}))
        ours = HFTokenizer(tmp_path)
        keep_ids(ours, tmp_path)
        written = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert (written == {**values, "tokenizer_class": name}) == (not is_replaced)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert loaded("in 2026 at 12:30")["input_ids"] == ours.encode("in 2026 at 12:30").tolist()
        assert loaded.eos_token == "<|end|>"
        assert loaded.chat_template == values["chat_template"]

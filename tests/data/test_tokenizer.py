import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.registry
from hypothesis import given
from hypothesis import strategies as st

from limits import limit
from llmtrain.data.text.reader import read_chunks
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.bpe import train_bpe
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.data.tokenizers.char import CharTokenizer
from llmtrain.data.tokenizers.gpt2 import GPT2Tokenizer
from llmtrain.data.tokenizers.hf import HFTokenizer
from llmtrain.data.tokenizers.load import (
    BUILT_IN,
    load_saved_tokenizer,
    load_tokenizer,
    saved_sha256,
    tokenizer_identity,
)
from llmtrain.errors import DataError, UsageError

TEXT = "the pod waits for the master, the node resumes the loss. Été, 東京, 😀!\n" * 30
any_text = st.text(st.characters(codec="utf-8"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return train_bpe([TEXT], 300, tmp_path_factory.mktemp("bpe"))


def save_and_load(tokenizer: Tokenizer, directory: Path) -> Tokenizer:
    tokenizer.save(directory)
    return load_saved_tokenizer(directory)


class TestByte:
    @given(text=any_text)
    def test_ids_are_utf8_bytes(self, text: str) -> None:
        tokenizer = ByteTokenizer()
        assert tokenizer.encode(text).tolist() == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text

    def test_invalid_utf8_decodes_to_replacement_characters(self) -> None:
        assert ByteTokenizer().decode([0xFF, 65]) == "\ufffdA"

    def test_save_and_load(self, tmp_path: Path) -> None:
        assert isinstance(save_and_load(ByteTokenizer(), tmp_path / "x"), ByteTokenizer)


class TestTokenBytes:
    @given(text=any_text)
    def test_lengths_add_up_to_the_text(self, bpe: HFTokenizer, text: str) -> None:
        char = CharTokenizer.from_texts([text]) if text else ByteTokenizer()
        for tokenizer in (ByteTokenizer(), char, bpe):
            text = text.replace("\0", "")  # end of text of the byte tokenizer
            lengths = tokenizer.token_bytes()
            assert lengths is not None
            assert lengths.shape == (tokenizer.vocab_size,)
            assert lengths[tokenizer.encode(text)].sum() == len(text.encode())

    def test_special_token_has_no_text(self, bpe: HFTokenizer) -> None:
        lengths = bpe.token_bytes()
        assert lengths is not None
        assert lengths[bpe.end_of_text] == 0
        assert (lengths == 0).sum() == 1

    def test_unknown_after_normalization(self, bpe: HFTokenizer, tmp_path: Path) -> None:
        bpe.save(tmp_path)
        layout = json.loads((tmp_path / "tokenizer.json").read_text())
        layout["normalizer"] = {"type": "Lowercase"}
        (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
        assert HFTokenizer(tmp_path).token_bytes() is None


class TestChar:
    @given(text=st.text(st.characters(codec="utf-8"), min_size=1))
    def test_round_trip(self, text: str) -> None:
        tokenizer = CharTokenizer.from_texts([text])
        ids = tokenizer.encode(text)
        assert tokenizer.vocab_size == len(set(text))
        assert int(ids.max()) < tokenizer.vocab_size
        assert tokenizer.decode(ids.tolist()) == text

    def test_ids_are_sorted_by_character(self) -> None:
        assert CharTokenizer.from_texts(["cab", "d"]).encode("abcd").tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("unknown", ["z", "\x00", "😀", "é"])
    def test_unknown_character_is_refused(self, unknown: str) -> None:
        with pytest.raises(DataError) as caught:
            CharTokenizer.from_texts(["abc"]).encode(f"ab{unknown}c")
        assert repr(unknown) in caught.value.what
        assert "'abc'" in str(caught.value.remedy)

    def test_empty_text_has_no_vocabulary(self) -> None:
        with pytest.raises(DataError):
            CharTokenizer.from_texts(["", ""])

    def test_empty_text_has_no_ids(self) -> None:
        assert len(CharTokenizer.from_texts(["abc"]).encode("")) == 0

    def test_save_and_load(self, tmp_path: Path) -> None:
        tokenizer = CharTokenizer.from_texts([TEXT])
        again = save_and_load(tokenizer, tmp_path)
        assert again.vocab_size == tokenizer.vocab_size
        assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


class TestBpe:
    @given(text=any_text)
    def test_round_trip_of_any_text(self, bpe: HFTokenizer, text: str) -> None:
        ids = bpe.encode(text)
        assert (ids < bpe.vocab_size).all()
        assert bpe.decode(ids.tolist()) == text

    def test_training_reaches_vocab_size_and_compresses(self, bpe: HFTokenizer) -> None:
        assert bpe.vocab_size == 300
        assert len(bpe.encode(TEXT)) < 0.75 * len(TEXT.encode())

    def test_encode_many_equals_encode(self, bpe: HFTokenizer) -> None:
        texts = [*TEXT.splitlines(keepends=True), ""]
        assert [ids.tolist() for ids in bpe.encode_many(texts, 2)] == [bpe.encode(text).tolist() for text in texts]

    def test_end_of_text_token(self, bpe: HFTokenizer) -> None:
        assert bpe.end_of_text is not None
        assert bpe.decode([bpe.end_of_text]) == "<|endoftext|>"

    def test_save_and_load(self, bpe: HFTokenizer, tmp_path: Path) -> None:
        again = save_and_load(bpe, tmp_path)
        assert again.encode(TEXT).tolist() == bpe.encode(TEXT).tolist()
        assert again.end_of_text == bpe.end_of_text

    def test_vocab_size_below_minimum_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="257"):
            train_bpe([TEXT], 256, tmp_path / "x")
        assert not (tmp_path / "x").exists()

    def test_training_is_deterministic(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            train_bpe([TEXT], 280, tmp_path / name)
        assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()

    @pytest.mark.hf
    def test_transformers_loads_it_with_the_same_ids(self, bpe: HFTokenizer, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        bpe.save(tmp_path)
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert loaded(TEXT)["input_ids"] == bpe.encode(TEXT).tolist()
        assert loaded.eos_token_id == bpe.end_of_text


class TestDirectories:
    def test_load_from_vocab_and_merges(self, bpe: HFTokenizer, tmp_path: Path) -> None:
        bpe._tokenizer.model.save(str(tmp_path))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["merges.txt", "vocab.json"]
        assert load_tokenizer(str(tmp_path)).encode(TEXT).tolist() == bpe.encode(TEXT).tolist()

    def test_unknown_spec_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as caught:
            load_tokenizer(str(tmp_path / "nowhere"))
        assert str(tmp_path / "nowhere") in caught.value.what
        assert caught.value.known == sorted(BUILT_IN)

    def test_directory_without_tokenizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no tokenizer\.json"):
            load_tokenizer(str(tmp_path))

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
    def test_damaged_tokenizer_json_is_refused(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=re.escape(str(tmp_path))):
            load_tokenizer(str(tmp_path))

    @pytest.mark.parametrize("content", [None, "", "[]"])
    def test_missing_description_is_refused(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            (tmp_path / "llmtrain_tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=r"llmtrain_tokenizer\.json"):
            load_saved_tokenizer(tmp_path)

    def test_identity_depends_on_content_only(self, bpe: HFTokenizer, tmp_path: Path) -> None:
        for name in ("a", "b"):
            bpe.save(tmp_path / name)
        first, second = (tokenizer_identity(str(tmp_path / name)) for name in ("a", "b"))
        assert first == second
        train_bpe([TEXT], 290, tmp_path / "c")
        assert tokenizer_identity(str(tmp_path / "c")) != first
        assert [tokenizer_identity(name) for name in BUILT_IN] == list(BUILT_IN)


@pytest.fixture
def fresh_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken caches encodings per process; each test loads its own, from TIKTOKEN_CACHE_DIR."""
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    # Nothing listens on this port: a download fails at once, also on machines with network access.
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("fresh_tiktoken")
class TestGpt2:
    def test_missing_files_are_refused_with_remedy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        started = time.monotonic()
        with pytest.raises(DataError, match="gpt2") as caught:
            load_tokenizer("gpt2")
        assert "TIKTOKEN_CACHE_DIR" in (caught.value.remedy or "")
        assert caught.value.exit_code == 65
        assert time.monotonic() - started < limit(60)

    @pytest.mark.shared
    def test_known_ids(self, gpt2: GPT2Tokenizer) -> None:
        assert gpt2.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
        assert gpt2.decode([15496, 11, 995, 0]) == "Hello, world!"
        assert int(gpt2.encode("<|endoftext|>").max()) < gpt2.end_of_text  # special tokens in text are not interpreted

    @pytest.mark.shared
    def test_chunks_of_a_file_encode_like_the_whole_file(self, gpt2: GPT2Tokenizer, shared_data: Path) -> None:
        path = shared_data / "wikitext-2" / "test.txt"
        chunks = [chunk.text for chunk in read_chunks(path)]
        ids = np.concatenate(list(gpt2.encode_many(chunks, 2)))
        whole = gpt2._encoding.encode_ordinary(path.read_bytes().decode())
        assert len(whole) == 295_877
        assert np.array_equal(ids, whole)

    @pytest.mark.shared
    def test_save_and_load(self, gpt2: GPT2Tokenizer, tmp_path: Path) -> None:
        assert isinstance(save_and_load(gpt2, tmp_path / "saved"), GPT2Tokenizer)

    @pytest.mark.shared
    def test_same_ids_as_hf_tokenizer_of_the_same_files(
        self, gpt2: GPT2Tokenizer, shared_data: Path, tmp_path: Path
    ) -> None:
        directory = tmp_path / "hf"
        directory.mkdir()
        shutil.copy(shared_data / "gpt2-bpe" / "encoder.json", directory / "vocab.json")
        shutil.copy(shared_data / "gpt2-bpe" / "vocab.bpe", directory / "merges.txt")
        hf = load_tokenizer(str(directory))
        assert hf.encode(TEXT).tolist() == gpt2.encode(TEXT).tolist()
        assert (hf.vocab_size, hf.end_of_text) == (gpt2.vocab_size, gpt2.end_of_text)


def test_sha256_identifies_the_vocabulary(bpe: HFTokenizer, tmp_path: Path) -> None:
    other = train_bpe([TEXT.upper()], 300, tmp_path / "other")
    tokenizers = [ByteTokenizer(), CharTokenizer("abc"), CharTokenizer("ABC"), CharTokenizer("abcd"), bpe, other]
    assert len({tokenizer.sha256() for tokenizer in tokenizers}) == len(tokenizers)
    for number, tokenizer in enumerate(tokenizers):
        directory = tmp_path / str(number)
        assert save_and_load(tokenizer, directory).sha256() == tokenizer.sha256() == saved_sha256(directory)


def test_sha256_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(CharTokenizer, "_vocabulary", lambda _: calls.append(None) or {})
    tokenizer = CharTokenizer("abc")
    assert tokenizer.sha256() == tokenizer.sha256() == CharTokenizer("abc").sha256()
    assert len(calls) == 2, "once per tokenizer"


def test_modified_saved_tokenizer_is_refused(tmp_path: Path) -> None:
    CharTokenizer("abc").save(tmp_path)
    description = tmp_path / "llmtrain_tokenizer.json"
    description.write_text(description.read_text().replace("abc", "ABC"))
    assert saved_sha256(tmp_path) is None
    with pytest.raises(DataError):
        load_saved_tokenizer(tmp_path)


def test_tokenizer_saved_without_hash_loads(tmp_path: Path) -> None:
    (tmp_path / "llmtrain_tokenizer.json").write_text('{"kind": "char", "characters": "abc"}')
    assert saved_sha256(tmp_path) == CharTokenizer("abc").sha256()

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.registry
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.data.text.reader import read_chunks
from llmtrain.data.tokenizers.tokenizer import (
    BUILT_IN,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    HFTokenizer,
    Tokenizer,
    load_saved_tokenizer,
    load_tokenizer,
    saved_sha256,
    tokenizer_identity,
    train_bpe,
)
from llmtrain.errors import DataError, UsageError

TEXT = "the pod waits for the master, the node resumes the loss. Été, 東京, 😀!\n" * 30
any_text = st.text(st.characters(codec="utf-8"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return train_bpe([TEXT], 300, tmp_path_factory.mktemp("bpe"))


def saved_and_loaded(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    tokenizer.save(folder)
    return load_saved_tokenizer(folder)


class TestByte:
    @given(text=any_text)
    def test_ids_are_bytes_and_come_back(self, text: str) -> None:
        tokenizer = ByteTokenizer()
        assert tokenizer.encode(text).tolist() == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text

    def test_bytes_that_are_no_text_are_shown_somehow(self) -> None:
        assert ByteTokenizer().decode([0xFF, 65]) == "\ufffdA"

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        assert isinstance(saved_and_loaded(ByteTokenizer(), tmp_path / "x"), ByteTokenizer)


class TestChar:
    @given(text=st.text(st.characters(codec="utf-8"), min_size=1))
    def test_its_own_text_comes_back(self, text: str) -> None:
        tokenizer = CharTokenizer.from_texts([text])
        ids = tokenizer.encode(text)
        assert tokenizer.vocab_size == len(set(text))
        assert int(ids.max()) < tokenizer.vocab_size
        assert tokenizer.decode(ids.tolist()) == text

    def test_ids_do_not_depend_on_the_order_of_the_text(self) -> None:
        assert CharTokenizer.from_texts(["cab", "d"]).encode("abcd").tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("odd", ["z", "\x00", "😀", "é"])
    def test_an_unseen_character_is_named(self, odd: str) -> None:
        with pytest.raises(DataError, match="never saw in training") as caught:
            CharTokenizer.from_texts(["abc"]).encode(f"ab{odd}c")
        assert repr(odd) in caught.value.what

    def test_no_text_no_vocabulary(self) -> None:
        with pytest.raises(DataError, match="empty"):
            CharTokenizer.from_texts(["", ""])

    def test_empty_text_has_no_ids(self) -> None:
        assert len(CharTokenizer.from_texts(["abc"]).encode("")) == 0

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        tokenizer = CharTokenizer.from_texts([TEXT])
        again = saved_and_loaded(tokenizer, tmp_path)
        assert again.vocab_size == tokenizer.vocab_size
        assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


class TestBpe:
    @given(text=any_text)
    def test_any_text_comes_back(self, bpe: HFTokenizer, text: str) -> None:
        ids = bpe.encode(text)
        assert (ids < bpe.vocab_size).all()
        assert bpe.decode(ids.tolist()) == text

    def test_it_learned_something(self, bpe: HFTokenizer) -> None:
        assert bpe.vocab_size == 300
        assert len(bpe.encode(TEXT)) < 0.75 * len(TEXT.encode())

    def test_many_at_once_are_the_same(self, bpe: HFTokenizer) -> None:
        texts = [*TEXT.splitlines(keepends=True), ""]
        assert [ids.tolist() for ids in bpe.encode_many(texts, 2)] == [bpe.encode(text).tolist() for text in texts]

    def test_documents_end_with_its_own_token(self, bpe: HFTokenizer) -> None:
        assert bpe.end_of_text is not None
        assert bpe.decode([bpe.end_of_text]) == "<|endoftext|>"

    def test_saved_and_loaded(self, bpe: HFTokenizer, tmp_path: Path) -> None:
        again = saved_and_loaded(bpe, tmp_path)
        assert again.encode(TEXT).tolist() == bpe.encode(TEXT).tolist()
        assert again.end_of_text == bpe.end_of_text

    def test_too_small_a_vocabulary(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="257"):
            train_bpe([TEXT], 256, tmp_path / "x")
        assert not (tmp_path / "x").exists()

    def test_training_is_repeatable(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            train_bpe([TEXT], 280, tmp_path / name)
        assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()

    @pytest.mark.hf
    def test_transformers_gives_the_same_ids(self, bpe: HFTokenizer, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        bpe.save(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs(TEXT)["input_ids"] == bpe.encode(TEXT).tolist()
        assert theirs.eos_token_id == bpe.end_of_text


class TestDirectories:
    def test_vocab_and_merges(self, bpe: HFTokenizer, tmp_path: Path) -> None:
        bpe._tokenizer.model.save(str(tmp_path))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["merges.txt", "vocab.json"]
        assert load_tokenizer(str(tmp_path)).encode(TEXT).tolist() == bpe.encode(TEXT).tolist()

    def test_neither_built_in_nor_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="neither built in nor a directory") as caught:
            load_tokenizer(str(tmp_path / "nowhere"))
        assert caught.value.known == sorted(BUILT_IN)

    def test_a_directory_without_one(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no tokenizer\.json"):
            load_tokenizer(str(tmp_path))

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
    def test_a_damaged_one(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match="cannot be read"):
            load_tokenizer(str(tmp_path))

    @pytest.mark.parametrize("content", [None, "", "[]"])
    def test_nothing_saved_there(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            (tmp_path / "llmtrain_tokenizer.json").write_text(content)
        with pytest.raises(DataError, match="holds no saved tokenizer"):
            load_saved_tokenizer(tmp_path)

    def test_identity_changes_with_the_content_only(self, bpe: HFTokenizer, tmp_path: Path) -> None:
        for name in ("a", "b"):
            bpe.save(tmp_path / name)
        first, second = (tokenizer_identity(str(tmp_path / name)) for name in ("a", "b"))
        assert first == second
        train_bpe([TEXT], 290, tmp_path / "c")
        assert tokenizer_identity(str(tmp_path / "c")) != first
        assert [tokenizer_identity(name) for name in BUILT_IN] == list(BUILT_IN)


@pytest.fixture
def fresh_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken keeps what it has loaded; here each test loads anew, from the directory it names."""
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    # Nothing listens there: a download fails at once on machines with a network, too.
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("fresh_tiktoken")
class TestGpt2:
    def test_missing_files_are_explained(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        started = time.monotonic()
        with pytest.raises(DataError, match="gpt2 tokenizer are not here") as caught:
            load_tokenizer("gpt2")
        assert "TIKTOKEN_CACHE_DIR" in (caught.value.remedy or "")
        assert caught.value.exit_code == 65
        assert time.monotonic() - started < 60

    @pytest.mark.shared
    def test_known_ids(self, gpt2: GPT2Tokenizer) -> None:
        assert gpt2.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
        assert gpt2.decode([15496, 11, 995, 0]) == "Hello, world!"
        assert int(gpt2.encode("<|endoftext|>").max()) < gpt2.end_of_text  # text is never a command

    @pytest.mark.shared
    def test_pieces_of_a_file_give_the_ids_of_the_whole(self, gpt2: GPT2Tokenizer, shared_data: Path) -> None:
        path = shared_data / "wikitext-2" / "test.txt"
        chunks = [piece.text for piece in read_chunks(path)]
        ids = np.concatenate(list(gpt2.encode_many(chunks, 2)))
        whole = gpt2._encoding.encode_ordinary(path.read_bytes().decode())
        assert len(whole) == 295_877
        assert np.array_equal(ids, whole)

    @pytest.mark.shared
    def test_saved_and_loaded(self, gpt2: GPT2Tokenizer, tmp_path: Path) -> None:
        assert isinstance(saved_and_loaded(gpt2, tmp_path / "saved"), GPT2Tokenizer)

    @pytest.mark.shared
    def test_the_same_files_as_a_hugging_face_directory(
        self, gpt2: GPT2Tokenizer, shared_data: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "hf"
        folder.mkdir()
        shutil.copy(shared_data / "gpt2-bpe" / "encoder.json", folder / "vocab.json")
        shutil.copy(shared_data / "gpt2-bpe" / "vocab.bpe", folder / "merges.txt")
        hf = load_tokenizer(str(folder))
        assert hf.encode(TEXT).tolist() == gpt2.encode(TEXT).tolist()
        assert (hf.vocab_size, hf.end_of_text) == (gpt2.vocab_size, gpt2.end_of_text)


def test_the_hash_of_a_tokenizer_is_of_what_its_ids_mean(bpe: HFTokenizer, tmp_path: Path) -> None:
    other = train_bpe([TEXT.upper()], 300, tmp_path / "other")
    tokenizers = [ByteTokenizer(), CharTokenizer("abc"), CharTokenizer("ABC"), CharTokenizer("abcd"), bpe, other]
    assert len({tokenizer.sha256() for tokenizer in tokenizers}) == len(tokenizers)
    for number, tokenizer in enumerate(tokenizers):
        folder = tmp_path / str(number)
        assert saved_and_loaded(tokenizer, folder).sha256() == tokenizer.sha256() == saved_sha256(folder)


def test_a_saved_tokenizer_that_was_changed_is_refused(tmp_path: Path) -> None:
    CharTokenizer("abc").save(tmp_path)
    description = tmp_path / "llmtrain_tokenizer.json"
    description.write_text(description.read_text().replace("abc", "ABC"))
    assert saved_sha256(tmp_path) is None
    with pytest.raises(DataError):
        load_saved_tokenizer(tmp_path)


def test_a_tokenizer_that_an_earlier_version_saved_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "llmtrain_tokenizer.json").write_text('{"kind": "char", "characters": "abc"}')
    assert saved_sha256(tmp_path) == CharTokenizer("abc").sha256()

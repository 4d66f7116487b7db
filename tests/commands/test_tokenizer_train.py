"""llmtrain tokenizer train."""

import json
from pathlib import Path

import pytest

from record_files import write_rows


class TestTokenizerTrain:
    def test_run_can_use_trained_tokenizer(self, cli, verb, train, workdir: Path) -> None:
        made = cli(*verb("tokenizer train"), "--json").json
        assert 257 < made["vocab_size"] <= 300
        done = train(f"data.tokenizer={workdir / 'tok'}", "output.run_id=mine", more=["--json"])
        assert done.code == 0, done.err
        assert cli("generate", "--run", "mine", "--prompt", "the pod", "--max-new-tokens", "3").code == 0

    def test_column_of_records_is_the_text(self, cli, workdir: Path) -> None:
        documents = [f"document {number}, some words" for number in range(50)]
        for number, document in enumerate(documents):
            (workdir / f"{number:02}.txt").write_text(document)
        write_rows(workdir / "a.jsonl", [{"body": document} for document in documents])
        vocabularies = []
        for to, words in (("plain", ["--file", "*.txt"]), ("column", ["--file", "a.jsonl", "--text-column", "body"])):
            done = cli("tokenizer", "train", *words, "--to", to, "--vocab-size", "280")
            assert done.code == 0, done.err
            tokenizer = json.loads((workdir / to / "tokenizer.json").read_text())
            vocabularies.append(tokenizer["model"]["vocab"])
        assert vocabularies[0] == vocabularies[1]
        done = cli("tokenizer", "train", "--file", "a.jsonl", "--to", "tok", "--text-column", "text", "--json")
        assert (done.code, "--text-column" in done.json["remedy"]) == (65, True)

    def test_existing_files_are_not_overwritten(self, cli, verb, workdir: Path) -> None:
        assert cli(*verb("tokenizer train")).code == 0
        before = (workdir / "tok/tokenizer.json").read_bytes()
        done = cli(*verb("tokenizer train"))
        assert done.code == 64
        assert "already" in done.err
        assert (workdir / "tok/tokenizer.json").read_bytes() == before

    @pytest.mark.parametrize(
        ("options", "code", "word"),
        [
            (["--vocab-size", "10"], 64, "257"),
            (["--vocab-size", "0"], 64, "vocab-size"),
            (["--file", "nowhere*.txt"], 65, "nowhere*.txt"),
            (["--file", "bad.txt"], 65, "not valid UTF-8"),
            (["--to", "text.txt/below"], 64, "text.txt"),
            (["--to", "text.txt"], 64, "text.txt"),
        ],
    )
    def test_bad_input(self, cli, text: Path, workdir: Path, options: list[str], code: int, word: str) -> None:
        (workdir / "bad.txt").write_bytes(b"ok\n\xff\n")
        done = cli("tokenizer", "train", "--file", text, "--to", "tok", *options)
        assert "Traceback" not in done.err
        assert done.code == code
        assert word in done.err
        assert sorted(path.name for path in workdir.iterdir()) == ["bad.txt", "text.txt"]

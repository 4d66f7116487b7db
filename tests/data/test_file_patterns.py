"""What `llmtrain init --text` writes for directories, and for the names that a shell made of a glob."""

from pathlib import Path

import pytest

from llmtrain.data.text.file_patterns import patterns
from llmtrain.data.text.reader import expand_files
from llmtrain.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text("text")
    return folder


def test_directory_becomes_a_glob(corpus: Path) -> None:
    assert patterns(["corpus"]) == patterns(["corpus/"]) == ["corpus/*.txt"]
    (corpus / "deep" / "er").mkdir(parents=True)
    (corpus / "deep" / "er" / "7.txt").write_text("text")
    (corpus / "8.jsonl").write_text('{"text": "a"}')
    (corpus / "picture.png").write_text("")
    (corpus / ".git").mkdir()
    (corpus / ".git" / "description.txt").write_text("text")
    found = patterns(["corpus"])
    assert found == ["corpus/*.jsonl", "corpus/**/*.txt"]
    names = {path.name for path in expand_files(found, "files")}
    assert names == {*(f"{number}.txt" for number in range(8) if number != 6), "8.jsonl"}


@pytest.mark.usefixtures("corpus")
def test_names_made_by_the_shell_become_the_glob_again() -> None:
    names = [f"corpus/{number}.txt" for number in range(6)]
    assert patterns(names) == ["corpus/*.txt"]
    assert patterns(["/elsewhere/a.txt", *names]) == ["/elsewhere/a.txt", "corpus/*.txt"]


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize("left_out", [1, 4])
def test_names_that_no_glob_matches_stay(left_out: int) -> None:
    names = [f"corpus/{number}.txt" for number in range(6 - left_out)]
    assert patterns(names) == names


def test_directory_with_characters_of_globs(corpus: Path) -> None:
    odd = corpus.rename(corpus.with_name("corpus [v1]"))
    for found in (patterns([odd.name]), patterns([f"{odd.name}/{number}.txt" for number in range(6)])):
        assert len(found) == 1
        assert len(expand_files(found, "files")) == 6


def test_directory_without_text_names_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("")
    with pytest.raises(DataError) as caught:
        patterns([str(tmp_path)])
    assert caught.value.known == ["1 with .png"]

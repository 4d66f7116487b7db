"""llmtrain init."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load_config
from preference_data import make_pairs
from record_files import write_rows
from tiny_llama import make_examples, make_model


class TestInit:
    @pytest.fixture
    def examples(self, workdir: Path) -> Callable[..., str]:
        def write(**fields: Any) -> str:
            (workdir / "examples.jsonl").write_text(f"{json.dumps(fields)}\n" * 40)
            return "examples.jsonl"

        return write

    def test_text_config_trains(self, cli, text: Path, cache: Path, workdir: Path) -> None:
        (workdir / "more.txt").write_text("more text\n" * 200)
        done = cli("init", "--text", text.name, "more.txt", "--to", "mine.yaml", "--json")
        assert (done.code, done.json) == (0, {"config": "mine.yaml"}), done.err
        content = (workdir / "mine.yaml").read_text()
        assert len(content.splitlines()) <= 30
        assert "  # " in content, "comments"
        config = load_config("mine.yaml")
        assert config.data.files == ["text.txt", "more.txt"]
        assert (config.model.architecture, config.trainer.optimizer) == ("modern", "muon")
        small = ["trainer.max_steps=2", "trainer.warmup_steps=0", "model.n_layers=1", "model.d_model=16"]
        small += [f"data.cache_dir={cache}", "run.threads=1", "trainer.micro_batch_size=2"]
        done = cli("train", "-c", "mine.yaml", *(part for each in small for part in ("--set", each)))
        assert done.code == 0, done.err

    @pytest.mark.parametrize(
        ("fields", "kind", "mapped"),
        [
            ({"instruction": "a", "output": "b"}, "instruct_jsonl", ("instruction", "output")),
            ({"prompt": "a", "completion": "b"}, "instruct_jsonl", ("instruction", "output")),
            ({"question": "a", "answer": "b"}, "instruct_jsonl", ("question", "answer")),
            ({"messages": [{"role": "user", "content": "a"}]}, "chat_jsonl", None),
            ({"conversations": [{"from": "human", "value": "a"}]}, "chat_jsonl", None),
        ],
    )
    def test_format_of_examples_is_recognized(
        self, cli, examples, fields: dict[str, Any], kind: str, mapped: tuple[str, str] | None
    ) -> None:
        done = cli("init", "--instruct", examples(**fields))
        assert done.code == 0, done.err
        data = load_config("my.yaml").data
        assert data.name == kind
        assert mapped is None or (data.instruction_field, data.output_field) == mapped

    DOCUMENTS = tuple({"id": str(number), "text": f"A document, number {number}.\n" * 20} for number in range(40))

    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"])
    def test_records_are_recognized_as_documents(self, cli, workdir: Path, name: str) -> None:
        write_rows(workdir / name, list(self.DOCUMENTS))
        assert cli("init", "--text", name).code == 0
        assert load_config("my.yaml").data.text_column == "text"

    def test_documents_are_trained_on_without_their_syntax(self, cli, workdir: Path, cache: Path) -> None:
        write_rows(workdir / "a.jsonl", list(self.DOCUMENTS))
        assert cli("init", "--text", "a.jsonl").code == 0
        small = ["model.n_layers=1", "model.d_model=16", f"data.cache_dir={cache}", "run.threads=1"]
        done = cli(
            "train", "-c", "my.yaml", *(part for each in small for part in ("--set", each)), "--dry-run", "--json"
        )
        assert done.code == 0, done.err
        # The texts and an end-of-text token for each, and one where the document on the border was split.
        tokens = done.json["train_tokens"] + done.json["val_tokens"]
        assert tokens - sum(len(row["text"]) + 1 for row in self.DOCUMENTS) in (0, 1)

    @pytest.mark.parametrize(
        ("rows", "words", "column"),
        [
            ([{"content": "x" * 2000, "url": "u"}], [], "content"),
            ([{"id": 1, "story": "x" * 2000}], [], "story"),
            ([{"title": "t"}, {"title": "t", "text": "x" * 2000}], [], "text"),
            ([{"a": "x" * 2000, "b": "y"}], ["--text-column", "a"], "a"),
        ],
    )
    def test_column_of_the_text_is_found(
        self, cli, workdir: Path, rows: list[dict[str, Any]], words: list[str], column: str
    ) -> None:
        write_rows(workdir / "a.jsonl", rows)
        done = cli("init", "--text", "a.jsonl", *words)
        assert done.code == 0, done.err
        assert load_config("my.yaml").data.text_column == column

    @pytest.mark.parametrize(
        ("name", "rows", "words", "remedy"),
        [
            ("a.csv", [{"a": "x", "b": "y"}], [], "--text-column"),
            ("a.parquet", [{"a": "x", "b": "y"}], ["--text-column", "text"], "--text-column"),
            ("a.jsonl", [{"a": 1, "b": 2}], [], "--text-column"),
            ("a.jsonl", [{"instruction": "x", "output": "y"}], [], "--instruct"),
        ],
    )
    def test_unclear_column_is_refused_with_known_columns(
        self, cli, workdir: Path, name: str, rows: list[dict[str, Any]], words: list[str], remedy: str
    ) -> None:
        write_rows(workdir / name, rows)
        done = cli("init", "--text", name, *words, "--json")
        assert (done.code, done.json["known"]) == (65, sorted(rows[0]))
        assert remedy in done.json["remedy"]
        assert not (workdir / "my.yaml").exists()

    @pytest.mark.parametrize("name", ["a.json", "a.csv", "a.tsv", "a.parquet"])
    def test_examples_of_every_format(self, cli, workdir: Path, name: str) -> None:
        write_rows(workdir / name, [{"question": f"q{number}", "answer": "a"} for number in range(30)])
        done = cli("init", "--instruct", name)
        assert done.code == 0, done.err
        data = load_config("my.yaml").data
        assert (data.train_file, data.instruction_field, data.output_field) == (name, "question", "answer")

    def test_preference_pairs_are_refused_with_what_to_do(self, cli, examples, workdir: Path) -> None:
        for chosen in ("a", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]):
            done = cli("init", "--instruct", examples(prompt="q", chosen=chosen, rejected=chosen), "--json")
            assert (done.code, done.json["error"]) == (65, "DataError")
            assert "To train on the chosen answers" in done.json["remedy"]
        assert not (workdir / "my.yaml").exists()

    def test_preference_pairs_get_a_config_sized_to_them(self, cli, workdir: Path) -> None:
        make_pairs(workdir / "pairs.jsonl", 200)
        done = cli("init", "--preferences", "pairs.jsonl")
        assert done.code == 0, done.err
        config = load_config("my.yaml")
        assert (config.data.name, config.data.train_file) == ("preference_jsonl", "pairs.jsonl")
        assert config.trainer.objective.name == "dpo"
        assert config.model.block_size == 128
        assert config.data.val_fraction == 0.05

    def test_a_larger_share_of_few_pairs_is_held_out(self, cli, workdir: Path) -> None:
        make_pairs(workdir / "pairs.jsonl", 30)
        assert cli("init", "--preferences", "pairs.jsonl").code == 0
        assert load_config("my.yaml").data.val_fraction == 0.2
        assert "only 6:" in (workdir / "my.yaml").read_text()

    @pytest.mark.parametrize(("counts", "is_packed"), [((30, 10), False), ((3000, 1000), True)])
    def test_files_of_pairs_become_a_mixture(
        self, cli, workdir: Path, counts: tuple[int, int], is_packed: bool
    ) -> None:
        for name, count in zip("ab", counts, strict=True):
            make_pairs(workdir / f"{name}.jsonl", count)
        done = cli("init", "--preferences", "a.jsonl", "b.jsonl")
        assert done.code == 0, done.err
        config = load_config("my.yaml")
        assert config.trainer.objective.name == "dpo"
        sections = config.data.sections()
        assert [section.train_file for section in sections] == ["a.jsonl", "b.jsonl"]
        assert {section.name for section in sections} == {"preference_jsonl"}
        assert {section.on_bad_example for section in sections} == {"skip"}
        assert {section.packing for section in sections} == {is_packed}
        assert [source.weight for source in config.data.sources] == pytest.approx([0.75, 0.25], abs=0.01)

    @pytest.mark.parametrize(
        ("rows", "remedy"),
        [
            ([{"instruction": "x", "output": "y"}], "--instruct"),
            ([{"a": "x", "b": "y"}], "chosen"),
            ([{"prompt": "x", "chosen": "a", "rejected": "b"}], "more pairs"),
            ([{"prompt": "x", "chosen": "a", "rejected": "a"}] * 3, None),
        ],
    )
    def test_file_without_pairs_is_refused(
        self, cli, workdir: Path, rows: list[dict[str, str]], remedy: str | None
    ) -> None:
        write_rows(workdir / "pairs.jsonl", rows)
        done = cli("init", "--preferences", "pairs.jsonl", "--json")
        assert (done.code, done.json["error"]) == (65, "DataError"), done.err
        assert remedy is None or remedy in done.json["remedy"]
        assert not (workdir / "my.yaml").exists()

    @pytest.mark.hf
    def test_config_for_50_examples_learns(self, cli, workdir: Path, cache: Path) -> None:
        make_examples(workdir / "a.jsonl", 50)
        make_model(workdir / "model", max_position_embeddings=512)
        assert cli("init", "--instruct", "a.jsonl").code == 0
        tiny = ["model.path=model", "model.lora=null", "trainer.lr=5e-3", f"data.cache_dir={cache}", "run.threads=1"]
        done = cli("train", "-c", "my.yaml", *(part for each in tiny for part in ("--set", each)), "--json")
        assert done.code == 0, done.err
        assert "warning" not in done.err
        assert done.json["steps"] >= 40
        assert done.json["final_train_loss"] < 0.7 * done.json["first_train_loss"]
        assert done.json["final_val_loss"] < 0.9 * done.json["first_train_loss"]

    @pytest.mark.parametrize(("size", "steps"), [(2_000, 60), (20_000, 80), (200_000, 400), (10_000_000, 400)])
    def test_number_of_steps_follows_from_the_text(self, cli, workdir: Path, size: int, steps: int) -> None:
        (workdir / "a.txt").write_text("word " * (size // 5))
        assert cli("init", "--text", "a.txt").code == 0
        trainer = load_config("my.yaml").trainer
        assert trainer.max_steps == steps
        assert trainer.warmup_steps * 10 <= steps

    def test_directories_of_text_become_a_mixture(self, cli, workdir: Path, cache: Path) -> None:
        for name, count in (("web", 300), ("books", 100)):
            (workdir / name).mkdir()
            (workdir / name / "a.txt").write_text("words in a line\n" * count)
        write_rows(workdir / "books" / "b.jsonl", list(self.DOCUMENTS))
        (workdir / "notes.txt").write_text("a note\n" * 300)
        done = cli("init", "--text", "web/", "books", "notes.txt")
        assert done.code == 0, done.err
        config = load_config("my.yaml")
        assert config.data.labels() == ["web", "books", "notes"]
        assert [section.text_column for section in config.data.sections()] == [None, "text", None]
        assert sum(source.weight for source in config.data.sources) == pytest.approx(1, abs=0.002)
        small = ["model.n_layers=1", "model.d_model=16", f"data.cache_dir={cache}", "run.threads=1"]
        small += ["trainer.max_steps=2", "trainer.warmup_steps=0", "data.sources.0.weight=0.5"]
        done = cli("train", "-c", "my.yaml", *(part for each in small for part in ("--set", each)))
        assert done.code == 0, done.err

    @pytest.mark.parametrize(("counts", "weights"), [((30, 10), [0.75, 0.25]), ((3000, 1000), [0.75, 0.25])])
    def test_files_of_examples_become_a_mixture(
        self, cli, workdir: Path, counts: tuple[int, int], weights: list[float]
    ) -> None:
        write_rows(
            workdir / "a.jsonl", [{"instruction": f"q{number:04}", "output": "a"} for number in range(counts[0])]
        )
        chat = {"messages": [{"role": "user", "content": "q0000"}, {"role": "assistant", "content": "a"}]}
        write_rows(workdir / "b.jsonl", [chat] * counts[1])
        done = cli("init", "--instruct", "a.jsonl", "b.jsonl")
        assert done.code == 0, done.err
        data = load_config("my.yaml").data
        assert [section.name for section in data.sections()] == ["instruct_jsonl", "chat_jsonl"]
        assert [source.weight for source in data.sources] == pytest.approx(weights, abs=0.01)
        assert {section.packing for section in data.sections()} == {counts[0] > 1000}

    def test_preset_is_copied(self, cli) -> None:
        assert cli("init", "--preset", "lora_instruct", "--to", "mine.yaml").code == 0
        assert load_config("mine.yaml") == load_config("lora_instruct")

    def test_existing_file_is_not_replaced(self, cli, text: Path, workdir: Path) -> None:
        (workdir / "my.yaml").write_text("mine")
        assert cli("init", "--text", text).code == 64
        assert (workdir / "my.yaml").read_text() == "mine"

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            ([], 64),
            (["--text", "text.txt", "--preset", "gpt_smoke"], 64),
            (["--preset", "nothing"], 64),
            (["--preset", "gpt_smoke", "surplus"], 64),
            (["--preset", "gpt_smoke", "--to", "my.txt"], 64),
            (["--preset", "gpt_smoke", "--to", "no/where.yaml"], 64),
            (["--text", "nowhere.txt"], 65),
            (["--text", "tiny.txt"], 65),
            (["--instruct", "nowhere.jsonl"], 65),
            (["--instruct", "text.txt"], 65),
            (["--instruct", "odd.jsonl"], 65),
            (["--instruct", "one.jsonl"], 65),
            (["--instruct", "empty.jsonl"], 65),
            (["--text", "object.json"], 65),
            (["--text", "text.txt", "--text-column", "a"], 64),
            (["--preset", "gpt_smoke", "--text-column", "a"], 64),
        ],
    )
    @pytest.mark.usefixtures("text")
    def test_invalid_request_writes_nothing(self, cli, workdir: Path, words: list[str], code: int) -> None:
        (workdir / "tiny.txt").write_text("x")
        (workdir / "odd.jsonl").write_text('{"a": 1}\n')
        (workdir / "one.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
        (workdir / "empty.jsonl").write_text("")
        (workdir / "object.json").write_text('{\n  "a": "text"\n}\n')
        before = set(workdir.iterdir())
        done = cli("init", *words, "--json")
        assert done.code == done.json["exit_code"] == code, done.err
        assert set(workdir.iterdir()) == before

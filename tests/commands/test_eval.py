"""llmtrain eval."""

from pathlib import Path

import pytest

from llmtrain.config.schema import Config
from record_files import write_rows


class TestEval:
    def test_documents_are_read_as_in_training(self, cli, train, workdir: Path) -> None:
        """A run trained on a column of records evaluates that column of other files, in any format."""
        rows = [{"text": f"document {number}, some words", "id": str(number)} for number in range(40)]
        files = ("a.jsonl", "a.csv", "a.parquet")
        for name in files:
            write_rows(workdir / name, rows)
        data = ["data.name=text_files", "data.files=a.jsonl", "data.text_column=text", "data.val_fraction=0.3"]
        assert train(*data, "output.run_id=docs").code == 0
        results = [
            cli("eval", "--run", "docs", "--file", f"a.{kind}", "--json") for kind in ("jsonl", "csv", "parquet")
        ]
        assert [done.code for done in results] == [0, 0, 0], results[0].err
        assert len({done.json["loss"] for done in results}) == 1
        tokens = sum(len(row["text"]) + 1 for row in rows)
        assert tokens - 16 <= results[0].json["tokens"] <= tokens

    def test_training_text_has_lower_loss(self, cli, root: Path, workdir: Path) -> None:
        losses = {}
        for name, content in (("like", "the pod waits for the master.\n"), ("unlike", "ÄÖÜ 0123456789 ßß\n")):
            (workdir / name).write_text(content * 40)
            done = cli("eval", "--run", "one", "--root", root, "--file", name, "--json")
            assert done.json["perplexity"] == pytest.approx(2.718281828459045 ** done.json["loss"])
            losses[name] = done.json["loss"]
        assert losses["like"] < losses["unlike"]

    def test_batch_size_does_not_change_the_loss(self, cli, verb) -> None:
        results = [cli(*verb("eval"), "--batch-size", size, "--json").json for size in (1, 7, 100)]
        assert len({result["tokens"] for result in results}) == 1
        assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-5)
        assert results[0]["loss"] == pytest.approx(results[2]["loss"], rel=1e-5)

    def test_loss_matches_the_training_run(self, cli, root: Path, workdir: Path) -> None:
        """The complete validation text of the run, evaluated by `eval`."""
        from llmtrain.data.text.dummy_text import DummyText

        text = "\n".join(chunk.text for chunk in DummyText(Config().data, 1).chunks("val"))
        (workdir / "val.txt").write_text(text)
        done = cli("eval", "--run", "one", "--root", root, "--file", "val.txt", "--checkpoint", "step_4", "--json")
        summary = cli("runs", "show", "one", "--root", root, "--json").json
        assert done.json["loss"] == pytest.approx(summary["val_loss"], abs=0.1)

    def test_several_runs_side_by_side(self, cli, root: Path, text: Path) -> None:
        call = ["eval", "--root", root, "--file", text]
        one, other = (cli(*call, "--run", name, "--json").json for name in ("one", "other"))
        both = cli(*call, "--run", "one", "--run", root / "other", "--json")
        assert both.code == 0, both.err
        assert both.json == {"evaluations": [one, other]}
        assert one["loss"] != other["loss"]
        assert cli(*call, "one", root / "other", "--json").json == both.json
        assert cli(*call, "one", "--run", root / "other", "--json").json == both.json
        head, *rows = [line.split() for line in cli(*call, "--run", "one", "--run", "other").out.splitlines()]
        assert head == ["run_id", "step", "loss", "perplexity", "tokens"]
        assert [row[:3] for row in rows] == [[each["run"], "4", f"{each['loss']:.4f}"] for each in (one, other)]
        missing = cli(*call, "--run", "one", "--run", "nowhere")
        assert (missing.code, missing.out) == (64, "")

    @pytest.mark.parametrize("options", [[], ["--block-size", 16]])
    def test_short_text_is_evaluated_as_it_is(self, cli, root: Path, workdir: Path, options: list[object]) -> None:
        (workdir / "short.txt").write_text("the pod")
        done = cli("eval", "one", "--root", root, "--file", "short.txt", "--json", *options)
        assert done.code == 0, done.err
        assert done.json["tokens"] == len("the pod")  # the last one predicts the end of the text

    def test_tokens_that_differ_are_noted(self, cli, root: Path, text: Path, train) -> None:
        train("output.run_id=wider", "model.block_size=32")
        done = cli("eval", "--run", "wider", "--run", root / "one", "--file", text)
        assert done.code == 0, done.err
        assert "may not be comparable" in done.out

    @pytest.mark.parametrize(("content", "word"), [("", "empty"), (None, "x.txt")])
    def test_bad_files(self, cli, root: Path, workdir: Path, content: str | None, word: str) -> None:
        if content is not None:
            (workdir / "x.txt").write_text(content)
        done = cli("eval", "--run", "one", "--root", root, "--file", "x.txt")
        assert done.code == 65
        assert word in done.err

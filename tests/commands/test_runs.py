"""llmtrain runs."""

import re
from pathlib import Path

import pytest


class TestRuns:
    def test_list(self, cli, root: Path) -> None:
        rows = cli("runs", "list", "--root", root, "--json").json["runs"]
        assert [row["run_id"] for row in rows] == ["one", "twin", "other"]
        assert {row["status"] for row in rows} == {"finished"}
        assert {row["step"] for row in rows} == {4}
        table = cli("runs", "list", "--root", root).out.splitlines()
        assert len(table) == 4
        assert table[0].startswith("run_id")

    def test_no_runs(self, cli) -> None:
        done = cli("runs", "list", "--json")
        assert (done.code, done.json["runs"]) == (0, [])
        assert "No runs" in cli("runs", "list").out

    def test_show(self, cli, root: Path) -> None:
        value = cli("runs", "show", "one", "--root", root, "--json").json
        assert value["checkpoints"] == ["step_2", "step_4"]
        assert (value["latest"], value["best"]) == ("step_4", "step_4")
        assert value["result"]["state_sha256"] == value["state_sha256"]
        assert value["config"]["model"]["name"] == "gpt"
        assert value["meta"]["run_id"] == "one"

    def test_compare(self, cli, root: Path) -> None:
        twins = cli("runs", "compare", "one", "twin", "--root", root, "--json").json
        assert (twins["same_state"], twins["first_different_step"], twins["compared_steps"]) == (True, None, 4)
        assert twins["config_differences"] == []
        others = cli("runs", "compare", "one", "other", "--root", root, "--json").json
        assert (others["same_state"], others["first_different_step"]) == (False, 1)
        assert others["config_differences"] == [{"field": "run.seed", "first": 1, "second": 2}]

    def test_compare_text(self, cli, root: Path) -> None:
        assert "identical" in cli("runs", "compare", "one", "twin", "--root", root).out
        assert re.search(r"^run.seed +1 +2$", cli("runs", "compare", "one", "other", "--root", root).out, re.M)

    def test_compare_names_equal_states(self, cli, root: Path) -> None:
        done = cli("runs", "compare", "one", "twin", "other", "--root", root)
        assert done.code == 0, done.err
        assert "The final states of one and twin are identical, the others are different." in done.out

    def test_seeds_of_one_setting_do_not_compete(self, cli, root: Path) -> None:
        value = cli("runs", "compare", "one", "twin", "other", "--root", root, "--json").json
        assert value["config_differences"] == [{"field": "run.seed", "values": [1, 1, 2]}]
        assert value["best"] is None
        (group,) = value["groups"]
        losses = {row["run_id"]: row["best_val_loss"] for row in value["runs"]}
        assert group["run_ids"] == ["one", "twin", "other"]
        assert group["n"] == 2, "a twin is the same sample again"
        assert group["best_val_loss"]["mean"] == pytest.approx((losses["one"] + losses["other"]) / 2)
        text = cli("runs", "compare", "one", "twin", "other", "--root", root)
        assert text.code == 0, text.err
        assert "Best:" not in text.out

    def test_compare_by_group(self, cli, root: Path) -> None:
        call = ["runs", "compare", "one", "twin", "other", "--root", root, "--group-by", "run.seed"]
        groups = cli(*call, "--json").json["groups"]
        assert [group["values"] for group in groups] == [{"run.seed": 1}, {"run.seed": 2}]
        text = cli(*call)
        assert text.code == 0, text.err
        assert re.search(r"^ *1 .* one, twin$", text.out, re.M)
        unknown = cli(*call[:-1], "trainer.lrr")
        assert unknown.code == 64
        assert "'trainer.lr'" in unknown.err

    def test_list_sorts_limits_and_filters(self, cli, root: Path) -> None:
        def ids(*options: str) -> list[str]:
            done = cli("runs", "list", "--root", root, *options, "--json")
            assert done.code == 0, done.err
            return [row["run_id"] for row in done.json["runs"]]

        oldest_first = ids()
        assert ids("--sort", "age") == oldest_first[::-1]
        assert ids("--limit", "1") == oldest_first[-1:]
        assert ids("--sort", "run_id", "--limit", "2") == sorted(oldest_first)[:2]
        assert ids("--filter", "TWI") == ["twin"]
        assert ids("--filter", "no such text") == []
        losses = [row["val_loss"] for row in cli("runs", "list", "--root", root, "--json").json["runs"]]
        rows = cli("runs", "list", "--root", root, "--sort", "val_loss", "--json").json["runs"]
        assert [row["val_loss"] for row in rows] == sorted(losses)
        assert rows[0].keys() >= {"started_at", "dataset", "lr", "parameters"}
        assert cli("runs", "list", "--root", root, "--sort", "loss").code == 64

    def test_show_is_short(self, cli, root: Path) -> None:
        done = cli("runs", "show", "one", "--root", root)
        assert done.code == 0, done.err
        lines = done.out.splitlines()
        assert len(lines) <= 17
        assert max(map(len, lines[:-2])) <= 80, "all but the directory and the command"
        facts = {line[:12].strip(): line[14:] for line in lines}
        row = cli("runs", "show", "one", "--root", root, "--json").json
        assert facts["status"] == row["status"]
        assert f"{row['val_loss']:.4f}" in facts["loss"]
        assert "tokens/s on average" in facts["speed"]
        (start,) = row["generations"]
        seconds = start["start_seconds"]
        longest = max(seconds, key=seconds.__getitem__)
        total, part = sum(seconds.values()), seconds[longest]
        assert facts["start-up"] == f"{total:.1f} s, {part:.1f} s of it: {longest}"
        assert "first step" in seconds
        assert "runs show" in facts["more"]
        assert cli("runs", "show", "one", "--root", root, "--all", "--plot").code == 64

    def test_list_marks_the_best_run(self, cli, root: Path) -> None:
        rows = cli("runs", "list", "--root", root, "--json").json["runs"]
        lowest = min(row["best_val_loss"] for row in rows)
        best = {row["run_id"] for row in rows if row["best_val_loss"] == lowest}
        marked = {line.split()[0] for line in cli("runs", "list", "--root", root).out.splitlines() if "*" in line}
        assert marked == best

    def test_tables_fit_the_terminal(self, cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        commands = [["list"], ["show", "one", "--all"], ["compare", "one", "other"]]
        wide = [cli("runs", *words, "--root", root).out for words in commands]
        monkeypatch.setattr("llmtrain.core.terminal.stream_width", lambda _: 60)
        monkeypatch.setattr("llmtrain.commands.run_tables.stream_width", lambda _: 60)
        narrow = [cli("runs", *words, "--root", root).out for words in commands]
        assert "dataset" in wide[0].splitlines()[0]
        assert narrow[0].split()[:4] == ["run_id", "status", "step", "val_loss"]
        assert max(map(len, narrow[0].splitlines())) <= 60
        assert "  - architecture: " in narrow[1]
        assert max(map(len, narrow[2].splitlines()[:4])) <= 60

    def test_show_is_readable(self, cli, root: Path) -> None:
        out = cli("runs", "show", "one", "--root", root, "--all").out
        assert "{'" not in out, "a Python dict"
        assert "None" not in out
        top = [line for line in out.splitlines() if not line.startswith(" ")]
        assert all(re.match(r"[a-z_][^:]*:", line) for line in top), "text of several lines is indented"
        assert "    name: gpt\n    architecture: gpt2\n" in out, "they decide which other fields there are"

    def test_damaged_run_does_not_hide_others(self, cli, train, workdir: Path) -> None:
        for run_id in ("whole", "broken"):
            train(f"output.run_id={run_id}")
        broken = workdir / "runs" / "broken"
        (broken / "meta.json").write_text("{")
        (broken / "config.yaml").write_text("a: b: c")
        (broken / "metrics.jsonl").write_text('{"train/loss": 1.0}\n{"step"')
        (broken / "checkpoints" / "step_odd").mkdir()
        done = cli("runs", "list", "--json")
        assert done.code == 0, done.err
        assert {row["run_id"] for row in done.json["runs"]} == {"whole", "broken"}
        assert cli("runs", "show", "broken").code == 0

"""llmtrain train."""

import json
import re
import shutil
from pathlib import Path

import pytest

from llmtrain.commands.train import _longer
from llmtrain.config.load import load_config

TRAIN_KEYS = {
    "run_id",
    "run_dir",
    "steps",
    "first_train_loss",
    "final_train_loss",
    "final_val_loss",
    "best_val_loss",
    "tokens_per_second",
    "state_sha256",
}


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "steps", "epochs", "options"),
    [
        (6, None, 6, 0, "--set trainer.max_steps=12"),
        (None, 2, 8, 2, "--set trainer.max_epochs=4"),
        (6, 4, 6, 1, "--set trainer.max_steps=12"),
        (90, 2, 8, 2, "--set trainer.max_epochs=4"),
        (8, 2, 8, 2, "--set trainer.max_steps=16 --set trainer.max_epochs=4"),
        (90, 9, 8, 2, "--set trainer.max_epochs=18"),  # stopped early
    ],
)
def test_hint_raises_the_limit_that_ended_the_run(
    max_steps: int | None, max_epochs: int | None, steps: int, epochs: int, options: str
) -> None:
    wanted = {"max_steps": max_steps, "max_epochs": max_epochs}
    assert _longer({"wanted": wanted, "steps": steps, "epochs": epochs}) == options


class TestTrain:
    def test_result_fields(self, train, workdir: Path) -> None:
        done = train("output.run_id=mine", more=["--json"])
        assert done.code == 0, done.err
        result = done.json
        assert result.keys() >= TRAIN_KEYS
        assert (result["run_id"], result["steps"]) == ("mine", 4)
        assert Path(result["run_dir"]).resolve() == workdir / "runs" / "mine"
        assert result["final_train_loss"] < result["first_train_loss"]
        assert result["best_val_loss"] <= result["final_val_loss"]
        assert result["tokens_per_second"] > 0
        assert re.fullmatch(r"[0-9a-f]{64}", result["state_sha256"])
        assert json.loads((workdir / "runs/mine/finished.json").read_text()) == result

    def test_start_is_profiled(self, train) -> None:
        done = train("output.run_id=mine", more=["--profile-start", "--json"])
        assert done.code == 0, done.err
        lines = done.err.splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith("phase of the start"))
        rows = {line[:18].strip(): float(line[18:].split()[0]) for line in lines[first + 1 :]}
        total = rows.pop("in all")
        assert {"reading data", "first step"} < rows.keys()
        assert sum(rows.values()) == pytest.approx(total, abs=0.01 * len(rows))
        assert rows.keys() == done.json["timing"]["start"].keys()
        refused = train("output.run_id=mine", more=["--profile-start", "--dry-run"])
        assert (refused.code, "--profile-start" in refused.err) == (64, True)

    def test_run_directory_files(self, train, workdir: Path) -> None:
        assert train("output.run_id=mine", "run.notes=remember").code == 0
        run = workdir / "runs" / "mine"
        names = {path.name for path in run.iterdir() if not path.name.startswith(".")}
        assert names >= {"config.yaml", "meta.json", "metrics.jsonl", "logs", "checkpoints"}
        assert "lock" not in names
        config = load_config(run / "config.yaml")
        assert (config.run.notes, config.output.run_id, config.trainer.max_steps) == ("remember", "mine", 4)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
        assert [row["step"] for row in rows if "val/loss" in row] == [2, 4]
        assert "[DONE]" in (run / "logs" / "train.log").read_text()
        meta = json.loads((run / "meta.json").read_text())
        assert meta.keys() >= {"git", "argv", "versions", "machine", "environment"}

    def test_disabled_files_are_not_written(self, train, workdir: Path) -> None:
        off = ["output.save_config_copy=false", "output.save_meta_json=false", "logging.log_to_file=false"]
        assert train("output.run_id=mine", *off).code == 0
        run = workdir / "runs" / "mine"
        assert [name for name in ("config.yaml", "meta.json", "logs") if (run / name).exists()] == []

    def test_log_lines_have_tags_and_go_to_standard_error(self, train) -> None:
        done = train("output.run_id=mine")
        tags = set(re.findall(r"^\[([A-Z]+)\] ", done.err, re.MULTILINE))
        assert tags >= {"SETUP", "TRAIN", "EVAL", "SAVE", "DONE"}
        assert "DDP" not in tags, "only in distributed runs"
        assert not re.search(r"^\[[A-Z]+\] ", done.out, re.MULTILINE)

    def test_log_lines_as_json(self, train) -> None:
        done = train("logging.json_output=true")
        lines = [json.loads(line) for line in done.err.splitlines() if not line.startswith("note: ")]  # of the config
        assert {line["tag"] for line in lines} >= {"TRAIN", "EVAL", "DONE"}
        assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4]

    def test_text_output_has_losses_sample_and_path(self, train) -> None:
        done = train("output.run_id=mine")
        for word in ("A sample the model wrote", "train loss", "val loss", "runs/mine"):
            assert word in done.out

    def test_dry_run_creates_no_run(self, train, workdir: Path) -> None:
        done = train("trainer.grad_accum_steps=3", more=["--dry-run", "--json"])
        assert done.code == 0, done.err
        report = done.json
        assert report["tokens_per_step"] == 2 * 3 * 16
        assert report["parameters"] == 256 * 16 + 16 * 256 + 256
        assert report["peak_memory_bytes"] > 1_000_000
        assert 5 < report["loss"] < 7
        assert list(workdir.iterdir()) == []

    @pytest.mark.parametrize("rank", [0, 1])
    def test_dry_run_of_several_processes_is_reported_by_rank_0(self, train, monkeypatch, rank: int) -> None:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29500}
        for name, value in {**names, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        sets = ["distributed.strategy=ddp", "trainer.scale_batch=true", "trainer.grad_accum_steps=3"]
        done = train(*sets, more=["--dry-run", "--json"])
        assert done.code == 0, done.err
        if rank:
            assert done.out == ""
        else:
            assert (done.json["world_size"], done.json["tokens_per_step"]) == (2, 2 * 2 * 3 * 16)

    def test_same_config_gives_same_state(self, train) -> None:
        hashes = [train(f"run.seed={seed}", more=["--json"]).json["state_sha256"] for seed in (1, 1, 2)]
        assert hashes[0] == hashes[1] != hashes[2]

    @pytest.mark.parametrize("how", ["copied", "renamed", "moved", "linked", "linked by path"])
    def test_resume_of_moved_run(self, train, cli, workdir: Path, how: str) -> None:
        """config.yaml has the original id and root, which are not passed this time."""
        assert train("output.run_id=mine").code == 0
        old, words = workdir / "runs" / "mine", ["other"]
        match how:
            case "copied":
                shutil.copytree(old, workdir / "runs" / "other")
            case "renamed":
                old.rename(workdir / "runs" / "other")
            case "moved":
                old.rename((workdir / "disk").absolute())
                words = [str(workdir / "disk")]
            case _:
                old.rename(workdir / "disk")
                (workdir / "runs" / "other").symlink_to(workdir / "disk")
                words = ["other"] if how == "linked" else ["runs/other"]
        done = cli("train", "--resume", *words, "--set", "trainer.max_steps=6", "--json")
        assert done.code == 0, done.err
        assert (done.json["steps"], done.json["resumed_from"]) == (6, 4)
        assert Path(done.json["run_dir"]).name == Path(words[0]).name

    def test_resume_under_another_name_is_refused(self, train, cli) -> None:
        assert train("output.run_id=mine").code == 0
        assert cli("train", "--resume", "mine", "--set", "output.run_id=other").code == 64

    def test_resume_by_id_needs_no_config(self, train, cli) -> None:
        assert train("output.run_id=mine").code == 0
        longer = cli("train", "--resume", "mine", "--set", "trainer.max_steps=6", "--json")
        assert longer.code == 0, longer.err
        assert (longer.json["steps"], longer.json["resumed_from"]) == (6, 4)

    def test_finished_run_is_not_changed(self, train, cli) -> None:
        first = train("output.run_id=mine", more=["--json"]).json
        assert cli("train", "--resume", "mine", "--json").json == first
        assert re.search(r"^speed .* tokens/s on average, 4 steps$", cli("train", "--resume", "mine").out, re.M)
        longer = cli("train", "--resume", "mine", "--set", "trainer.max_steps=6")
        assert re.search(r"^speed .* tokens/s on average since step 4, 6 steps$", longer.out, re.M)

    def test_sample_keeps_its_margin_in_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from llmtrain.commands.train import _sample_lines

        result = {"sample": "word " * 40, "sample_prompt": ""}
        assert len(_sample_lines(result)) == 5
        monkeypatch.setattr("llmtrain.commands.train.stream_width", lambda _: 60)
        parts = [line for line in _sample_lines(result) if "word" in line]
        assert len(parts) > 3
        assert all(line.startswith("  | ") and len(line) <= 60 for line in parts)

    def test_long_step_shows_its_micro_batches(self, train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llmtrain.tracking.console.MICRO_BATCH_LINE_SEC", 0.0)
        done = train("trainer.grad_accum_steps=3", "trainer.micro_batch_size=1", "output.run_id=long")
        assert done.code == 0, done.err
        shown = re.findall(r"^\[TRAIN\] step 1: micro-batch (\d) of 3, ", done.err, re.M)
        assert shown == ["2", "3"]

    def test_large_seed(self, train) -> None:
        """Refused at the start, or usable until the end."""
        done = train(f"run.seed={2**64}", more=["--json"])
        assert "Traceback" not in done.err
        assert done.code in (0, 64)

    @pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
    def test_optimizers_resume(self, train, cli, optimizer: str) -> None:
        assert train("output.run_id=mine", f"trainer.optimizer={optimizer}").code == 0
        done = cli("train", "--resume", "mine", "--set", "trainer.max_steps=6", "--json")
        assert done.code == 0, done.err
        whole = train(
            f"trainer.optimizer={optimizer}", "trainer.max_steps=6", "trainer.schedule=constant", more=["--json"]
        )
        assert whole.code == 0

    def test_tensorboard_and_bf16(self, train, workdir: Path) -> None:
        done = train("output.run_id=mine", "tracking.tensorboard.enabled=true", "trainer.precision=bf16")
        assert done.code == 0, done.err
        assert "switched off" not in done.err
        assert list((workdir / "runs/mine/tensorboard").iterdir())

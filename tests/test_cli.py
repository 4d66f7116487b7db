"""Every command as a user calls it, on runs that are trained once."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import COMMANDS, load_command
from llmtrain.commands.presets import GROUPS as PRESET_GROUPS
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config

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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    """A directory of runs: `one`, its twin, and `other` with another seed, all of a small real GPT."""
    from llmtrain.training.run import run_training

    folder = tmp_path_factory.mktemp("runs")
    sets = [*tiny, "model.name=gpt", "model.n_layers=1", "model.n_heads=2", f"output.root_dir={folder}"]
    for run_id, seed in (("one", 1), ("twin", 1), ("other", 2)):
        run_training(load_config("gpt_smoke", [*sets, f"run.seed={seed}", f"output.run_id={run_id}"]))
    return folder


@pytest.fixture
def text(workdir: Path) -> Path:
    path = workdir / "text.txt"
    path.write_text("the pod waits for the master.\n" * 40)
    return path


@pytest.fixture
def verb(root: Path, text: Path, workdir: Path, tiny: list[str]) -> Callable[[str], list[str]]:
    """The arguments of a typical call of a command."""
    sets = ["--config", "gpt_smoke", *(part for field in tiny for part in ("--set", field))]
    of_run = ["--run", "one", "--root", str(root)]
    calls = {
        "train": ["train", *sets],
        "train --dry-run": ["train", "--dry-run", *sets],
        "node": ["node", *sets],
        "node --smoke": ["node", "--smoke", "--set", "run.device=cpu"],
        "launch --dry-run": ["launch", "--dry-run", *sets, "--name", "demo"],
        "doctor": ["doctor", *sets],
        "smoke": ["smoke", "--set", "run.device=cpu", "--samples", "512", "--batch", "64"],
        "validate": ["validate", "--config", "gpt_smoke"],
        "print-config": ["print-config", "--config", "gpt_smoke"],
        "print-config --reference": ["print-config", "--reference"],
        "config-schema": ["config-schema"],
        "presets": ["presets"],
        "presets show": ["presets", "show", "gpt_smoke"],
        "init": ["init", "--text", str(text), "--to", "made.yaml"],
        "generate": ["generate", *of_run, "--prompt", "the ", "--max-new-tokens", "20"],
        "eval": ["eval", *of_run, "--file", str(text)],
        "export": ["export", *of_run, "--to", str(workdir / "exported")],
        "runs list": ["runs", "list", "--root", str(root)],
        "runs show": ["runs", "show", "one", "--root", str(root)],
        "runs compare": ["runs", "compare", "one", "other", "--root", str(root)],
        "runs prune": ["runs", "prune", "one", "--root", str(root)],
        "report": ["report", "one", "--root", str(root)],
        "tokenizer train": [
            "tokenizer",
            "train",
            "--file",
            str(text),
            "--to",
            str(workdir / "tok"),
            "--vocab-size",
            "300",
        ],
    }
    return lambda name: calls[name]


VERBS = (
    "train",
    "train --dry-run",
    "node",
    "node --smoke",
    "launch --dry-run",
    "doctor",
    "smoke",
    "validate",
    "print-config",
    "print-config --reference",
    "config-schema",
    "presets",
    "presets show",
    "init",
    "generate",
    "eval",
    "export",
    "runs list",
    "runs show",
    "runs compare",
    "runs prune",
    "report",
    "tokenizer train",
)

# They need a cluster, a hub or a store: tested in tests/operate, tests/launch and separate files.
IN_A_CLUSTER = {
    "status",
    "logs",
    "why",
    "recover",
    "push",
    "exec",
    "stop",
    "resume",
    "fetch",
    "delete",
    "secret",
    "guard",
}
ELSEWHERE = (
    ("status",),
    ("logs", "demo"),
    ("why", "demo"),
    ("recover", "demo"),
    ("push", "demo", "pyproject.toml"),
    ("exec", "demo", "--kill"),
    ("stop", "demo"),
    ("resume", "demo"),
    ("fetch", "demo"),
    ("delete", "demo"),
    ("secret", "hf-token", "--from-env-file", ".env"),
    ("guard", "status"),
    ("prefetch",),
    ("sync", "demo", "s3://bucket"),
)


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """(name, options) of every command below this one, except the hidden one that only the guard's pod runs."""
    if command.hidden:
        return
    if not hasattr(command, "commands"):
        yield " ".join(path), [option for parameter in command.params for option in parameter.opts]
        return
    for name, below in command.commands.items():
        yield from walk(below, (*path, name))


class TestEveryVerb:
    @pytest.mark.parametrize("name", VERBS)
    def test_json_output_is_one_object(self, cli, verb, name: str) -> None:
        done = cli(*verb(name), "--json")
        assert done.code == 0, done.err
        assert done.json

    @pytest.mark.parametrize("name", [name for name in VERBS if name != "config-schema"])  # JSON is its output
    def test_output_without_json_is_text(self, cli, verb, name: str) -> None:
        done = cli(*verb(name))
        assert done.code == 0, done.err
        assert done.out.strip()
        with pytest.raises(json.JSONDecodeError):
            json.loads(done.out)

    @pytest.mark.parametrize("name", VERBS)
    def test_unknown_option_exits_64_with_json_error(self, cli, verb, name: str) -> None:
        done = cli(*verb(name), "--json", "--no-such-option")
        assert done.code == 64
        assert done.json["exit_code"] == 64
        assert "--no-such-option" in done.json["what"] + str(done.json["remedy"])
        assert done.err.startswith("error: ")
        assert "Traceback" not in done.err

    @pytest.mark.parametrize("name", VERBS)
    def test_help(self, cli, verb, name: str) -> None:
        words = [word for word in name.split() if not word.startswith("--")]
        done = cli(*words, "--help")
        assert done.code == 0
        assert "--json" in done.out
        assert len(verb(name)) > 0

    def test_all_commands_are_covered(self, cli) -> None:
        listed = re.findall(r"│ ([a-z][a-z-]*) +[A-Z]", cli("--help").out)
        # They need a person, a browser, the hub or kind (the tool), and have separate tests.
        elsewhere = {"chat", "page", "fetch-model", "fetch-data", "lint", "cluster"}
        elsewhere |= {words[0] for words in ELSEWHERE}
        assert set(listed) == {name.split()[0] for name in VERBS} | elsewhere

    def test_every_command_takes_json(self) -> None:
        """Also those of groups. The page serves until it is stopped: it has no result."""
        names = [name for rows in COMMANDS.values() for name in rows]
        found = dict(row for name in names for row in walk(load_command(name), (name,)))
        assert {"train", "logs", "guard install", "runs list"} <= set(found)
        assert [name for name, options in found.items() if "--json" not in options] == ["page"]

    @pytest.mark.parametrize("words", ELSEWHERE, ids=" ".join)
    def test_commands_with_separate_tests(self, cli, words: tuple[str, ...]) -> None:
        path = words[:2] if words[0] in ("secret", "guard") else words[:1]
        shown = cli(*path, "--help")
        assert shown.code == 0
        assert "--json" in shown.out
        done = cli(*words, "--no-such-option")
        assert done.code == 64
        assert "--no-such-option" in done.err
        assert "Traceback" not in done.err

    @pytest.mark.parametrize("words", [words for words in ELSEWHERE if words[0] in IN_A_CLUSTER], ids=" ".join)
    def test_commands_without_cluster(self, cli, words: tuple[str, ...], workdir: Path) -> None:
        (workdir / ".env").write_text("HF_TOKEN=hf_canaryOfTheCommandLine\n")
        (workdir / ".env").chmod(0o600)
        done = cli(*words, "--kubeconfig", "missing", "--json")
        assert done.code == done.json["exit_code"] == 64
        assert "kubeconfig" in done.err
        assert "Traceback" not in done.err
        assert "canary" not in done.out + done.err
        assert [path.name for path in workdir.iterdir()] == [".env"]


class TestUsageErrors:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["no-such-verb"],
            ["train", "surplus"],
            ["train", "--config"],
            ["generate"],
            ["generate", "--run", "one", "--max-new-tokens", "0"],
            ["generate", "--run", "one", "--max-new-tokens", "many"],
            ["generate", "--run", "one", "--temperature", "-1"],
            ["generate", "--run", "one", "--top-k", "0"],
            ["generate", "--run", "one", "--device", "tpu"],
            ["eval", "--run", "one"],
            ["eval", "--run", "one", "--file", "x", "--batch-size", "0"],
            ["export", "--run", "one"],
            ["runs", "show"],
            ["runs", "compare", "one"],
            ["runs", "nonsense"],
            ["tokenizer", "train", "--to", "x"],
            ["generate", "--run", "nowhere"],
            ["eval", "--run", "nowhere", "--file", "x"],
            ["export", "--run", "nowhere", "--to", "x"],
            ["runs", "show", "nowhere"],
            ["train", "--resume", "nowhere"],
            ["train", "--from", "nowhere"],
            ["train", "--model-local-dir", "nowhere"],
            ["train", "--config", "gpt_smoke", "--resume", "nowhere"],
        ],
        ids=" ".join,
    )
    def test_exit_64_with_and_without_json(self, cli, arguments: list[str], workdir: Path) -> None:
        plain, as_json = cli(*arguments), cli(*arguments, "--json")
        assert (plain.code, as_json.code) == (64, 64)
        assert plain.out == ""
        assert plain.err.startswith("error: ")
        assert len(plain.err.splitlines()[0]) > len("error: "), "the message is empty"
        assert "Traceback" not in plain.err + as_json.err
        assert as_json.json.keys() >= {"error", "what", "known", "remedy", "exit_code"}
        assert list(workdir.iterdir()) == []

    def test_config_error_lists_its_problems(self, cli) -> None:
        done = cli("validate", "--json", "--set", "trainer.max_steps=0", "--set", "model.nlayers=2")
        assert done.code == 64
        assert done.json["error"] == "ConfigError"
        assert len(done.json["problems"]) == 2

    def test_no_command_shows_help_without_error(self, cli) -> None:
        done = cli()
        assert done.code == 0
        assert "train" in done.out + done.err
        assert "error" not in done.err

    def test_short_help_option_works_everywhere(self, cli) -> None:
        for words in ([], ["train"], ["runs"], ["runs", "list"], ["presets", "show"], ["cluster", "up"]):
            done = cli(*words, "-h")
            assert done.code == 0, (words, done.err)
            assert "Usage" in done.out

    def test_flags_in_help_take_no_value(self, cli) -> None:
        for words in ([], ["train"], ["runs"], ["runs", "list"]):
            assert "bool" not in cli(*words, "--help").out, words

    def test_second_config_is_refused(self, cli) -> None:
        done = cli("validate", "-c", "gpt_smoke", "--config", "gpt_stdlib")
        assert done.code == 64
        assert "extends" in done.err

    def test_config_without_its_option_is_suggested(self, cli) -> None:
        done = cli("validate", "gpt_smoke")
        assert done.code == 64
        assert "--config gpt_smoke" in done.err

    @pytest.mark.parametrize("group", ["runs", "tokenizer"])
    def test_group_without_subcommand(self, cli, group: str) -> None:
        done = cli(group)
        assert done.code == 0
        assert "train" in done.out + done.err or "list" in done.out + done.err
        assert "error: \n" not in done.err


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
        assert re.search(r"^speed .* tokens/s, 4 steps$", cli("train", "--resume", "mine").out, re.M)
        longer = cli("train", "--resume", "mine", "--set", "trainer.max_steps=6")
        assert re.search(r"^speed .* tokens/s since step 4, 6 steps$", longer.out, re.M)

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


class TestConfigVerbs:
    def test_validate_names_the_file(self, cli) -> None:
        done = cli("validate", "--config", "gpt_smoke", "--json")
        assert done.json["valid"] is True
        assert done.json["config"].endswith("gpt_smoke.yaml")

    def test_print_config_is_a_valid_config(self, cli, workdir: Path) -> None:
        printed = cli("print-config", "--config", "example", "--set", "trainer.lr=1e-3").out
        (workdir / "mine.yaml").write_text(printed)
        expected = load_config("example", ["trainer.lr=1e-3"])
        assert load_config("mine.yaml") == expected
        assert cli("print-config", "--config", "mine.yaml", "--json").json == expected.as_dict()

    def test_config_reference_matches_docs(self, cli, repo: Path) -> None:
        assert cli("print-config", "--reference").out == (repo / "docs" / "config.md").read_text()

    def test_presets_match_the_files(self, cli, repo: Path) -> None:
        rows = cli("presets", "--json").json["presets"]
        assert {row["name"] for row in rows} == {path.stem for path in (repo / "configs/presets").glob("*.yaml")}
        assert all(row["about"] for row in rows)
        assert rows[0]["name"] == "gpt_stdlib", "the one to start with"

    def test_every_preset_has_a_group_and_a_description_of_its_own(self, cli) -> None:
        rows = cli("presets", "--json").json["presets"]
        assert {row["name"] for row in rows if row["group"] not in PRESET_GROUPS} == set()
        for row in rows:
            assert not any(other["name"] in row["about"].split() for other in rows if other is not row), row

    def test_presets_show_prints_a_config(self, cli, workdir: Path) -> None:
        text = cli("presets", "show", "gpt_smoke").out
        (workdir / "mine.yaml").write_text(text)
        assert text.startswith("# ")
        assert load_config("mine.yaml") == load_config("gpt_smoke")
        assert cli("presets", "show", "gpt_smok").code == 64


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
        ],
    )
    @pytest.mark.usefixtures("text")
    def test_invalid_request_writes_nothing(self, cli, workdir: Path, words: list[str], code: int) -> None:
        (workdir / "tiny.txt").write_text("x")
        (workdir / "odd.jsonl").write_text('{"a": 1}\n')
        before = set(workdir.iterdir())
        done = cli("init", *words, "--json")
        assert done.code == done.json["exit_code"] == code, done.err
        assert set(workdir.iterdir()) == before


class TestCompletion:
    """The mechanism of typer: the shell calls the program with variables."""

    @pytest.mark.parametrize(
        ("line", "word"),
        [("llmtrain tra", "train"), ("llmtrain runs co", "compare"), ("llmtrain train --proc", "--processes")],
    )
    def test_commands_and_options_are_completed(self, cli, monkeypatch, line: str, word: str) -> None:
        assert word in self.complete(cli, monkeypatch, line)

    def test_presets_are_completed(self, cli, monkeypatch) -> None:
        assert {"gpt_smoke", "gpt_stdlib"} <= set(self.complete(cli, monkeypatch, "llmtrain train --config gpt_s"))

    def complete(self, cli, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
        monkeypatch.setenv("_LLMTRAIN_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        return cli().out.split()

    def test_script_for_the_shell_is_printed(self, cli, monkeypatch) -> None:
        monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
        done = cli("--show-completion", "bash")
        assert done.code == 0, done.err
        assert "_LLMTRAIN_COMPLETE" in done.out


class TestGenerate:
    def test_seed_decides_the_text(self, cli, verb) -> None:
        texts = [cli(*verb("generate"), "--seed", seed, "--json").json["text"] for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    def test_temperature_zero_needs_no_seed(self, cli, verb) -> None:
        call = [*verb("generate"), "--temperature", "0", "--json"]
        assert cli(*call, "--seed", "1").json == cli(*call, "--seed", "2").json

    def test_prompt_is_printed_before_the_text(self, cli, verb) -> None:
        assert cli(*verb("generate")).out.startswith("the ")

    def test_empty_prompt_starts_a_document(self, cli, root: Path) -> None:
        assert cli("generate", "--run", "one", "--root", root, "--max-new-tokens", 5).code == 0

    @pytest.mark.parametrize(
        ("checkpoint", "step"), [("best", 4), ("latest", 4), ("step_2", 2), ("step_4", 4), ("step_2.pt", 2)]
    )
    def test_checkpoints_by_name(self, cli, verb, checkpoint: str, step: int) -> None:
        assert cli(*verb("generate"), "--checkpoint", checkpoint, "--json").json["step"] == step

    @pytest.mark.parametrize("checkpoint", ["step_99", "nonsense", "", "..", "../.."])
    def test_unknown_checkpoint_lists_known_ones(self, cli, verb, checkpoint: str) -> None:
        done = cli(*verb("generate"), "--checkpoint", checkpoint, "--json")
        assert done.code == 65
        assert {"best", "latest", "step_2", "step_4"} <= set(done.json["known"])

    @pytest.mark.parametrize(
        "options",
        [
            ["--temperature", "nan"],
            ["--temperature", "1e-40"],
            ["--temperature", "inf"],
            ["--temperature", "1e39"],
            ["--top-p", "1e-50"],
            ["--seed", 2**64],
            ["--top-k", 10**6],
            ["--prompt", "\udcff"],  # a byte that is not UTF-8, as Python receives it from a shell
            ["--prompt", "é" * 200],
        ],
        ids=lambda options: " ".join(map(str, options))[:30].encode("ascii", "replace").decode(),
    )
    def test_unusual_numbers_and_prompts(self, cli, verb, options: list[object]) -> None:
        done = cli(*verb("generate"), *options)
        assert "Traceback" not in done.err
        assert done.code in (0, 64, 65)

    def test_run_by_path(self, cli, root: Path) -> None:
        assert cli("generate", "--run", root / "one", "--max-new-tokens", 3, "--json").json["run"] == "one"


class TestEval:
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

    @pytest.mark.parametrize(("content", "word"), [("", "empty"), ("short", "model.block_size"), (None, "x.txt")])
    def test_bad_files(self, cli, root: Path, workdir: Path, content: str | None, word: str) -> None:
        if content is not None:
            (workdir / "x.txt").write_text(content)
        done = cli("eval", "--run", "one", "--root", root, "--file", "x.txt")
        assert done.code == 65
        assert word in done.err


class TestExport:
    def test_export_has_files_for_transformers(self, cli, verb, workdir: Path) -> None:
        done = cli(*verb("export"), "--json")
        assert {"config.json", "model.safetensors"} <= set(done.json["files"])
        assert set(done.json["files"]) == {path.name for path in (workdir / "exported").iterdir()}
        assert json.loads((workdir / "exported/config.json").read_text())["model_type"] == "gpt2"

    def test_existing_files_are_not_overwritten(self, cli, verb, workdir: Path) -> None:
        (workdir / "exported").mkdir()
        (workdir / "exported/mine.txt").write_text("x")
        assert cli(*verb("export")).code == 64
        assert [path.name for path in (workdir / "exported").iterdir()] == ["mine.txt"]

    def test_unwritable_target_is_refused(self, cli, root: Path, text: Path) -> None:
        done = cli("export", "--run", "one", "--root", root, "--to", text / "below")
        assert done.code == 64
        assert "Cannot write" in done.err

    def test_export_keeps_other_files(self, cli, verb, workdir: Path) -> None:
        for name in (".old-exported", ".new-exported"):
            (workdir / name).mkdir()
            (workdir / name / "mine.txt").write_text("x")
        assert cli(*verb("export")).code == 0
        assert sorted(path.name for path in workdir.glob(".*")) == [".new-exported", ".old-exported"]
        assert all((workdir / name / "mine.txt").is_file() for name in (".old-exported", ".new-exported"))

    @pytest.mark.parametrize("kind", ["here", "link", "link to nothing", "empty"])
    def test_export_into_existing_directory(
        self, cli, verb, workdir: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        """The directory itself is kept: it may be a mount, or the working directory of a process."""
        arguments = verb("export")[:-2]
        disk, link = workdir / "disk", workdir / "link"
        if kind != "link to nothing":
            disk.mkdir()
        if kind.startswith("link"):
            link.symlink_to(disk)
        before = disk.stat().st_ino if disk.exists() else None
        if kind == "here":
            monkeypatch.chdir(disk)
        done = cli(*arguments, "--to", {"here": ".", "empty": disk}.get(kind, link), "--json")
        assert done.code == 0, done.err
        assert before in (None, disk.stat().st_ino)
        assert set(done.json["files"]) == {path.name for path in disk.iterdir()} >= {"config.json", "README.md"}
        assert link.is_symlink() == kind.startswith("link")
        again = cli(*arguments, "--to", disk)
        assert again.code == 64
        assert "Traceback" not in again.err

    @pytest.mark.parametrize("kind", ["loop", "file", "link to a file", "below a file", "too long"])
    def test_export_to_unwritable_directory(self, cli, verb, workdir: Path, kind: str) -> None:
        (workdir / "file").write_text("mine")
        (workdir / "loop").symlink_to("loop")
        (workdir / "link").symlink_to("file")
        to = {"link to a file": "link", "below a file": "file/below", "too long": "x" * 300}.get(kind, kind)
        done = cli(*verb("export")[:-2], "--to", workdir / to)
        assert done.code == 64, done.err
        assert "Traceback" not in done.err
        assert (workdir / "file").read_text() == "mine"
        assert not list(workdir.glob(".llmtrain-*"))

    def test_export_can_be_trained(self, cli, verb, train, workdir: Path) -> None:
        assert cli(*verb("export")).code == 0
        gpt = ["model.name=gpt", "model.n_layers=1", "model.n_heads=2", f"model.init={workdir / 'exported'}"]
        done = train(*gpt, more=["--json"])
        assert done.code == 0, done.err
        assert done.json["first_train_loss"] < 5.4

    def test_model_without_export_format(self, cli, train) -> None:
        train("output.run_id=dummy")
        done = cli("export", "--run", "dummy", "--to", "there")
        assert done.code == 64
        assert "dummy_gpt" in done.err
        assert not Path("there").exists()


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

    def test_compare_of_three_names_the_best(self, cli, root: Path) -> None:
        value = cli("runs", "compare", "one", "twin", "other", "--root", root, "--json").json
        assert value["config_differences"] == [{"field": "run.seed", "values": [1, 1, 2]}]
        losses = {row["run_id"]: row["best_val_loss"] for row in value["runs"]}
        assert losses[value["best"]["run_id"]] == min(losses.values()) == value["best"]["best_val_loss"]
        assert value["best"]["margin"] == sorted(losses.values())[1] - min(losses.values())
        text = cli("runs", "compare", "one", "twin", "other", "--root", root)
        assert text.code == 0, text.err
        assert value["best"]["run_id"] in text.out

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

    def test_show_is_readable(self, cli, root: Path) -> None:
        out = cli("runs", "show", "one", "--root", root).out
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


class TestTokenizerTrain:
    def test_run_can_use_trained_tokenizer(self, cli, verb, train, workdir: Path) -> None:
        made = cli(*verb("tokenizer train"), "--json").json
        assert 257 < made["vocab_size"] <= 300
        done = train(f"data.tokenizer={workdir / 'tok'}", "output.run_id=mine", more=["--json"])
        assert done.code == 0, done.err
        assert cli("generate", "--run", "mine", "--prompt", "the pod", "--max-new-tokens", "3").code == 0

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

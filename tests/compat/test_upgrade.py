"""Documents of schema versions 1 and 2 load as version 3 with the meaning they had; version 3 as version 2."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import yaml
from fault_harness import RUN_ID

from llmtrain.compat.downgrade import downgrade, lost_in_v2
from llmtrain.compat.upgrade import upgraded_values
from llmtrain.config.data import ChatJsonlSection
from llmtrain.config.document import Document, parse_document
from llmtrain.config.load import build_config
from llmtrain.config.model import GptSection
from llmtrain.config.schema import SECTIONS_BY_NAME, Config
from llmtrain.errors import ConfigError

# Every field name of version 1, with a value that is not its default where possible.
VERSION_1: dict[str, Any] = {
    "schema_version": 1,
    "run": {"name": "old", "seed": 7, "device": "cpu", "deterministic": True, "notes": "from before"},
    "model": {
        "name": "gpt",
        "init": "random",
        "block_size": 32,
        "d_model": 48,
        "n_layers": 3,
        "n_heads": 6,
        "d_ff": 100,
        "dropout": 0.1,
        "tie_embeddings": False,
        "vocab_size": 50300,
    },
    "data": {
        "name": "hf_text",
        "cache_dir": "somewhere",
        "num_workers": 1,
        "train_split": "train[:50%]",
        "val_split": "test",
        "dataset_name": "wikitext",
        "dataset_config": "wikitext-2-raw-v1",
        "text_column": "content",
    },
    "trainer": {
        "max_steps": 20,
        "micro_batch_size": 3,
        "grad_accum_steps": 2,
        "lr": 0.01,
        "weight_decay": 0.2,
        "warmup_steps": 4,
        "max_grad_norm": 0.5,
        "log_every_steps": 1,
        "eval_every_steps": 5,
        "save_every_steps": 6,
    },
    "ddp": {
        "enabled": True,
        "backend": "gloo",
        "init_method": "env://",
        "timeout_sec": 60,
        "find_unused_parameters": True,
        "rank": 1,
        "world_size": 2,
        "local_rank": 1,
        "master_addr": "localhost",
        "master_port": 29500,
    },
    "mlflow": {
        "enabled": True,
        "tracking_uri": "sqlite:///x.db",
        "experiment": "e",
        "run_name": "r",
        "log_models": True,
    },
    "logging": {"level": "DEBUG", "json_output": True, "log_to_file": False, "file_name": "a.log"},
    "output": {"root_dir": "out", "run_id": "old-run", "save_config_copy": False, "save_meta_json": False},
}


HF_TEXT = "schema_version: 1\nmodel: {vocab_size: 50257}\ndata: {name: hf_text, dataset_name: wikitext}\n"


def load(text: str, *overrides: str) -> Config:
    return build_config(parse_document(text, "test"), overrides)


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return caught.value.problems


def notes_of(text: str, *overrides: str, for_launch: bool = False) -> str:
    notes: list[str] = []
    build_config(parse_document(text, "test"), overrides, notes, for_launch=for_launch)
    return "; ".join(notes)


class TestVersion1:
    def test_note_says_that_launch_starts_one_pod(self) -> None:
        text = "schema_version: 1\ntrainer: {max_steps: 4}"
        assert "launch.nodes is 1" in notes_of(text, for_launch=True)
        assert "launch.nodes" not in notes_of(text, "launch.nodes=2", for_launch=True)
        assert "launch.nodes" not in notes_of(f"{text}\nlaunch: {{nodes: 2}}", for_launch=True)
        assert "launch.nodes" not in notes_of(text)

    def test_every_field_name_is_upgraded(self) -> None:
        loaded = load(yaml.safe_dump(VERSION_1)).as_dict()
        expected = {key: value for key, value in VERSION_1.items() if key not in ("ddp", "mlflow")}
        expected["schema_version"] = 3
        expected["distributed"] = {k: v for k, v in VERSION_1["ddp"].items() if k != "enabled"} | {"strategy": "ddp"}
        for section, value in expected.items():
            actual = {key: loaded[section][key] for key in value} if isinstance(value, dict) else loaded[section]
            assert actual == value
        assert loaded["tracking"]["mlflow"] == VERSION_1["mlflow"]

    def test_enabled_decides_the_strategy(self) -> None:
        assert load("schema_version: 1\nddp: {enabled: false}").distributed.strategy == "none"
        assert load("schema_version: 1").distributed.strategy == "ddp"

    def test_set_accepts_old_and_new_names(self) -> None:
        document = "schema_version: 1\nddp: {backend: gloo}"
        config = load(
            document, "ddp.enabled=true", "trainer.lr=1e-3", "distributed.timeout_sec=5", "mlflow.enabled=true"
        )
        assert (config.distributed.strategy, config.distributed.backend) == ("ddp", "gloo")
        assert (config.trainer.lr, config.distributed.timeout_sec) == (1e-3, 5)
        assert config.tracking.mlflow.enabled

    def test_ddp_is_refused_in_later_documents(self) -> None:
        for version in (2, 3):
            assert "distributed" in problems(f"schema_version: {version}\nddp: {{enabled: true}}")[0]
            assert "ddp" in problems(f"schema_version: {version}", "ddp.enabled=true")[0]

    def test_enabled_must_be_a_boolean(self) -> None:
        (problem,) = problems("schema_version: 1\nddp: {enabled: sometimes}")
        assert "strategy" in problem

    def test_problem_in_ddp_has_its_line(self) -> None:
        (problem,) = problems("schema_version: 1\nddp:\n  enabled: true\n  backend: mpi")
        assert problem.startswith("line 4: ")

    def test_two_names_for_one_section_are_refused(self) -> None:
        assert problems("schema_version: 1\nddp: {timeout_sec: 5}\ndistributed: {backend: gloo}")


class TestVersion2:
    def test_renamed_fields(self) -> None:
        config = load(
            "schema_version: 2\nmlflow: {enabled: true, experiment: e}\nlogging: {tensorboard: true, level: DEBUG}\n"
            "trainer: {early_stopping: 2}\n"
            "data: {name: chat_jsonl, train_file: x, packing: false, long_rows: truncate, bad_rows: skip}"
        )
        assert (config.tracking.mlflow.enabled, config.tracking.mlflow.experiment) == (True, "e")
        assert (config.tracking.tensorboard.enabled, config.logging.level) == (True, "DEBUG")
        assert config.trainer.early_stopping_patience == 2
        assert isinstance(config.data, ChatJsonlSection)
        assert (config.data.truncation, config.data.on_bad_example) == ("right", "skip")

    @pytest.mark.parametrize("value", ["skip", "error"])
    def test_other_values_of_long_rows_stay(self, value: str) -> None:
        config = load(
            f"schema_version: 2\ndata: {{name: chat_jsonl, train_file: x, packing: false, long_rows: {value}}}"
        )
        assert getattr(config.data, "truncation", None) == value

    def test_fields_of_other_kinds_are_dropped_and_named(self) -> None:
        text = (
            "schema_version: 2\nmodel: {name: hf_causal_lm, path: x, d_model: 64, n_layers: 4}\n"
            "data: {name: dummy_text, files: [a.txt], text_column: text}"
        )
        config = load(text)
        assert "d_model" not in config.as_dict()["model"]
        notes = notes_of(text)
        assert "model.d_model" in notes
        assert "data.files" in notes
        assert "n_layers" not in notes, "a default says nothing"
        assert "text_column" not in notes

    def test_overridden_name_decides_which_fields_are_dropped(self) -> None:
        text = "schema_version: 2\nmodel: {name: hf_causal_lm, path: x, d_model: 64}"
        config = load(text, "model.name=gpt")
        assert isinstance(config.model, GptSection)
        assert config.model.d_model == 64

    def test_unknown_field_is_refused(self) -> None:
        (problem,) = problems("schema_version: 2\nmodel:\n  d_modle: 64")
        assert problem.startswith("line 3: model.d_modle")

    def test_problem_in_a_renamed_field_has_its_line(self) -> None:
        (problem,) = problems("schema_version: 2\nmlflow:\n  enabled: 5")
        assert problem.startswith("line 3: tracking.mlflow.enabled")

    def test_two_names_for_one_field_are_refused(self) -> None:
        assert problems("schema_version: 2\nmlflow: {experiment: a}\ntracking: {mlflow: {experiment: b}}")

    @pytest.mark.parametrize("section", ["mlflow", "launch", "data", "tracking"])
    def test_empty_section(self, section: str) -> None:
        assert load(f"schema_version: 2\n{section}:\n") == Config()

    def test_set_accepts_old_and_new_names(self) -> None:
        config = load("schema_version: 2", "mlflow.enabled=true", "trainer.early_stopping=3", "run.seed=5")
        assert config.tracking.mlflow.enabled
        assert (config.trainer.early_stopping_patience, config.run.seed) == (3, 5)
        assert load("schema_version: 2", "tracking.mlflow.enabled=true").tracking.mlflow.enabled


PODS = (
    "schema_version: 2\noutput: {root_dir: here}\nmlflow: {tracking_uri: http://localhost}\n"
    "distributed: {master_port: 4000}\n"
    "launch: {name: demo, tracking_uri: http://mlflow, master_port: 5000, runs_volume: {mount_path: /mnt}}\n"
)


class TestFieldsThatVersion2HadForPods:
    def test_they_decide_a_launch(self) -> None:
        config = build_config(parse_document(PODS, "test"), for_launch=True)
        assert (config.output.run_id, config.output.root_dir) == ("demo", "/mnt")
        assert config.tracking.mlflow.tracking_uri == "http://mlflow"
        assert config.distributed.master_port == 5000

    def test_they_decide_nothing_else(self) -> None:
        config = load(PODS)
        assert (config.output.run_id, config.output.root_dir) == (None, "here")
        assert config.tracking.mlflow.tracking_uri == "http://localhost"
        assert config.distributed.master_port == 4000

    @pytest.mark.parametrize("for_launch", [True, False])
    def test_the_note_names_them(self, for_launch: bool) -> None:
        notes = notes_of(PODS, for_launch=for_launch)
        for name in ("output.run_id", "output.root_dir", "tracking.mlflow.tracking_uri", "distributed.master_port"):
            assert name in notes

    def test_defaults_of_a_launch(self) -> None:
        text = "schema_version: 2\noutput: {root_dir: /srv/runs}\ndistributed: {master_port: 4000}"
        config = build_config(parse_document(text, "test"), for_launch=True)
        assert (config.output.root_dir, config.distributed.master_port) == ("/out", 29500)
        assert notes_of(text, for_launch=True).count(";") == 0

    def test_two_names_of_a_job_are_refused(self) -> None:
        document = parse_document("schema_version: 2\noutput: {run_id: one}\nlaunch: {name: two}", "test")
        with pytest.raises(ConfigError, match=r"launch\.name"):
            build_config(document, for_launch=True)

    def test_set_accepts_old_names(self) -> None:
        document = parse_document("schema_version: 2", "test")
        config = build_config(document, ["launch.name=demo", "launch.runs_volume.mount_path=/mnt"], for_launch=True)
        assert (config.output.run_id, config.output.mount_path) == ("demo", "/mnt")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("column", ["text", "body"])
def test_text_files_stay_plain_text(version: int, column: str) -> None:
    """Earlier versions recorded data.text_column for every kind of data, and only hf_text used it."""
    data = {"name": "text_files", "files": ["a.jsonl"], "text_column": column}
    values = {"schema_version": version, "data": data}
    assert upgraded_values(values)["data"]["text_column"] is None
    hf_text = {**values, "data": {**data, "name": "hf_text"}}
    assert upgraded_values(hf_text)["data"]["text_column"] == column
    assert build_config(Document("test", values)).data.text_column is None


class TestDowngrade:
    """For `launch.image_schema: 2`."""

    def test_column_of_text_files_is_lost(self) -> None:
        """An image of version 2 would train on the syntax of the records."""
        sets = ["data.name=text_files", "data.files=a.jsonl"]
        plain, documents = (
            load("output: {run_id: demo}", *sets, *more).as_dict() for more in ([], ["data.text_column=text"])
        )
        assert lost_in_v2(plain) == []
        assert lost_in_v2(documents) == ["data.text_column"]
        assert "text_column" not in downgrade(documents)["data"]

    def config(self) -> Config:
        text = (
            "tracking: {mlflow: {enabled: true, tracking_uri: http://mlflow}}\noutput: {run_id: demo, root_dir: /mnt}"
        )
        data = ["data.name=chat_jsonl", "data.train_file=x", "data.packing=false", "data.truncation=right"]
        return load(text, *data, "launch.image=me/train:1", "trainer.early_stopping_patience=2")

    def test_upgrade_gives_the_same_config(self) -> None:
        config = self.config()
        back = build_config(Document("test", downgrade(config.as_dict())), for_launch=True)
        assert back.with_values("distributed", master_port=None) == config

    def test_mixture_is_lost(self) -> None:
        mixture = "data: {name: mixture, sources: [{name: dummy_text, weight: 1}]}\noutput: {run_id: demo}"
        assert lost_in_v2(load(mixture).as_dict()) == ["data.name"]

    @pytest.mark.parametrize("field", ["max_documents=3", "deduplicate=true", "split_by=hash", "add_bos=true"])
    def test_choice_of_documents_is_lost(self, field: str) -> None:
        sets = ["data.name=text_files", "data.files=a.txt", f"data.{field}"]
        values = load("output: {run_id: demo}", *sets).as_dict()
        assert lost_in_v2(values) == [f"data.{field.partition('=')[0]}"]
        assert field.partition("=")[0] not in downgrade(values)["data"]

    @pytest.mark.parametrize(
        "kind", [*SECTIONS_BY_NAME["model"], *sorted(SECTIONS_BY_NAME["data"].keys() - {"mixture"})]
    )
    def test_has_only_names_of_version_2(self, kind: str, repo: Path) -> None:
        """The recorded run has all of them."""
        recorded = yaml.safe_load((repo / "tests/first_version/runs/lora/config.yaml").read_text())
        needed = {"hf_causal_lm": ["model.path=x"], "text_files": ["data.files=x"], "hf_text": ["data.files=x"]}
        section = "model" if kind in SECTIONS_BY_NAME["model"] else "data"
        sets = [f"{section}.name={kind}", *needed.get(kind, [])]
        sets += ["data.train_file=x", "data.packing=false"] if "jsonl" in kind else []
        sets += ["trainer.objective.name=dpo"] if kind == "preference_jsonl" else []
        old = downgrade(load("output: {run_id: demo}", *sets).as_dict())
        assert old["schema_version"] == 2
        assert names_of(old) <= names_of(recorded)

    def test_values_of_version_2(self) -> None:
        old = downgrade(self.config().as_dict())
        assert (old["data"]["long_rows"], old["trainer"]["early_stopping"]) == ("truncate", 2)
        assert (old["launch"]["name"], old["launch"]["runs_volume"]["mount_path"]) == ("demo", "/mnt")
        assert (old["launch"]["tracking_uri"], old["launch"]["master_port"]) == ("http://mlflow", 29500)


def names_of(values: dict[str, Any], path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths of all fields, without those inside `launch.env` and the like."""
    found = set()
    for name, value in values.items():
        found.add((*path, name))
        if isinstance(value, dict) and len(path) < 2 and value:
            found |= names_of(value, (*path, name))
    return found


class TestImpliedByVersion1:
    def test_hf_text_has_the_tokenizer_gpt2(self) -> None:
        assert load(HF_TEXT).data.tokenizer == "gpt2"
        assert load(HF_TEXT, "data.tokenizer=byte").data.tokenizer == "byte"
        assert load(HF_TEXT.replace("wikitext}", "wikitext, tokenizer: byte}")).data.tokenizer == "byte"

    def test_overridden_data_name_decides_the_tokenizer(self) -> None:
        assert load(HF_TEXT, "data.name=dummy_text").data.tokenizer is None
        assert load("schema_version: 1", "data.name=hf_text", "data.dataset_name=wikitext").data.tokenizer == "gpt2"

    @pytest.mark.parametrize("text", ["schema_version: 1", "schema_version: 1\ntrainer:\nlogging:\n"])
    def test_implied_values_are_filled_in(self, text: str) -> None:
        config = load(text)
        assert config.trainer.scale_batch is True
        assert config.trainer.keep_checkpoints == "all"
        assert config.logging.all_ranks is True

    def test_value_of_the_document_stays(self) -> None:
        text = "schema_version: 1\ntrainer: {keep_checkpoints: 5, scale_batch: false}\nlogging: {all_ranks: false}"
        config = load(text)
        assert (config.trainer.keep_checkpoints, config.trainer.scale_batch) == (5, False)
        assert config.logging.all_ranks is False

    def test_version_2_has_the_defaults_of_today(self) -> None:
        config = load(HF_TEXT.replace("schema_version: 1", "schema_version: 2"))
        assert config.data.tokenizer is None
        assert (config.trainer.scale_batch, config.trainer.keep_checkpoints) == (False, 3)
        assert config.logging.all_ranks is False


def test_print_config_prints_the_upgraded_config_and_one_note(cli: Callable[..., Any], workdir: Path) -> None:
    (workdir / "old.yaml").write_text(HF_TEXT)
    done = cli("print-config", "--config", "old.yaml", "--json")
    assert done.json["data"]["tokenizer"] == "gpt2"
    (note,) = [line for line in done.err.splitlines() if line.startswith("note: ")]
    for field in ("data.tokenizer", "trainer.scale_batch", "trainer.keep_checkpoints", "logging.all_ranks"):
        assert field in note
    assert "note:" not in cli("print-config", "--config", "gpt_smoke").err


def version_1(root: Path, cache: Path, **trainer: Any) -> Config:
    """The harness's tiny run, as a version-1 document has it."""
    values = harness.tiny_config(root, cache).as_dict()
    old = {
        "schema_version": 1,
        "run": {"name": "tiny", "seed": 7, "device": "cpu"},
        "model": {name: values["model"][name] for name in ("name", "block_size", "d_model", "n_layers", "n_heads")},
        "data": {name: values["data"][name] for name in ("name", "cache_dir")},
        "trainer": {"max_steps": 8, "micro_batch_size": 2, "warmup_steps": 2, "save_every_steps": 2, **trainer},
        "ddp": {"enabled": True, "backend": "gloo"},
        "output": {"root_dir": str(root), "run_id": RUN_ID},
    }
    return load(json.dumps(old), "run.threads=1", "trainer.log_every_steps=1", "trainer.eval_batches=2")


def test_grad_accum_steps_count_per_process(tmp_path: Path, cache: Path) -> None:
    tokens = []
    for count in (1, 2):
        config = version_1(tmp_path / str(count) / "runs", cache, grad_accum_steps=1)
        ends = harness.run_world(config, count)
        assert ends[0].result, ends[0].output
        tokens.append(ends[0].result["tokens"])
    assert tokens[1] == 2 * tokens[0]


def test_every_checkpoint_is_kept_and_every_rank_logs(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "runs"
    ends = harness.run_world(version_1(root, cache, grad_accum_steps=1), 2)
    assert [ended.code for ended in ends] == [0, 0], ends[0].output
    assert harness.steps_saved(root) == [2, 4, 6, 8]
    for ended in ends:
        assert ended.output.count("[TRAIN] ") >= 8
    checkpoint = str(root / RUN_ID / "checkpoints" / "step_2.pt")
    refused = harness.run(version_1(root, cache, grad_accum_steps=1), checkpoint)
    assert refused.code == 64, "the number of processes decides the batch"
    assert "was trained with 2 processes" in refused.output
    assert "--set trainer.scale_batch=false --set trainer.grad_accum_steps=2" in refused.output
    assert "another config" not in refused.output
    assert harness.run(version_1(root, cache, grad_accum_steps=3), checkpoint).code == 64
    resumed = harness.run(version_1(root, cache, grad_accum_steps=2, scale_batch=False), checkpoint)
    assert resumed.code == 0, resumed.output
    assert resumed.result["tokens"] == ends[0].result["tokens"]


class TestGradientCheckpointing:
    """model.gradient_checkpointing of earlier documents is trainer.activation_checkpointing."""

    @pytest.mark.parametrize("version", [2, 3])
    @pytest.mark.parametrize(("value", "expected"), [("true", "blocks"), ("false", "none")])
    def test_field_is_moved_with_a_note(self, version: int, value: str, expected: str) -> None:
        notes: list[str] = []
        text = f"schema_version: {version}\nmodel: {{name: hf_causal_lm, path: x, gradient_checkpointing: {value}}}"
        config = build_config(parse_document(text, "test"), notes=notes)
        assert config.trainer.activation_checkpointing == expected
        assert any("activation_checkpointing" in note for note in notes) == (expected == "blocks")

    def test_override_is_moved_and_the_new_name_wins(self) -> None:
        old = "model.gradient_checkpointing=true"
        base = ["model.name=hf_causal_lm", "model.path=x"]
        assert load("", *base, old).trainer.activation_checkpointing == "blocks"
        new = "trainer.activation_checkpointing=selective"
        assert load("", *base, old, new).trainer.activation_checkpointing == "selective"

    def test_other_values_are_refused(self) -> None:
        with pytest.raises(ConfigError):
            load("", "model.name=hf_causal_lm", "model.path=x", "model.gradient_checkpointing=maybe")

    def test_recorded_config_has_the_new_name(self) -> None:
        model: dict[str, Any] = {"name": "hf_causal_lm", "path": "x", "gradient_checkpointing": True}
        recorded = {"schema_version": 3, "model": model, "trainer": {}}
        upgraded = upgraded_values(recorded)
        assert upgraded["trainer"]["activation_checkpointing"] == "blocks"
        assert "gradient_checkpointing" not in upgraded["model"]
        assert model["gradient_checkpointing"] is True, "the argument is not changed"

    @pytest.mark.parametrize(
        ("model", "value", "is_lost"),
        [
            ("hf_causal_lm", "none", False),
            ("hf_causal_lm", "blocks", False),
            ("hf_causal_lm", "selective", True),
            ("gpt", "none", False),
            ("gpt", "blocks", True),
        ],
    )
    def test_downgrade(self, model: str, value: str, is_lost: bool) -> None:
        path = ["model.path=x"] if model == "hf_causal_lm" else []
        config = load("", f"model.name={model}", *path, f"trainer.activation_checkpointing={value}").as_dict()
        assert ("trainer.activation_checkpointing" in lost_in_v2(config)) == is_lost
        old = downgrade(config)
        assert "activation_checkpointing" not in old["trainer"]
        assert old["model"].get("gradient_checkpointing", False) == (model == "hf_causal_lm" and value == "blocks")


@pytest.mark.parametrize("size", [[1], {"a": 1}, [], 7])
def test_a_size_that_is_not_a_name_is_left_out(size: object) -> None:
    """Version 2 had no sizes of a GPT-2."""
    values = {"schema_version": 2, "run": {"name": "old"}, "model": {"name": "gpt", "size": size}}
    notes: list[str] = []
    config = build_config(Document("test", {**values, "data": {"name": "dummy_text"}}), notes=notes)
    assert not hasattr(config.model, "size")
    assert "model.size is left out" in " ".join(notes)

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from llmtrain.config.document import parse_document
from llmtrain.config.load import build_config, dump_config, find_config, list_presets, load_config
from llmtrain.config.schema import Config, differences, may_change
from llmtrain.errors import ConfigError, UsageError

# Exactly the names of the first schema, each with a value that is not its default where that is possible.
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


def load(text: str, *overrides: str) -> Config:
    return build_config(parse_document(text, "test.yaml"), overrides)


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    assert caught.value.exit_code == 64
    assert caught.value.source == "test.yaml"
    return caught.value.problems


def only_problem(text: str, *overrides: str) -> str:
    found = problems(text, *overrides)
    assert len(found) == 1, found
    return found[0]


class TestVersion1:
    def test_every_name_is_upgraded(self) -> None:
        config = load(yaml.safe_dump(VERSION_1))
        expected = {key: value for key, value in VERSION_1.items() if key != "ddp"}
        expected["schema_version"] = 2
        expected["distributed"] = {k: v for k, v in VERSION_1["ddp"].items() if k != "enabled"} | {"strategy": "ddp"}
        loaded = config.as_dict()
        for section, value in expected.items():
            given = {key: loaded[section][key] for key in value} if isinstance(value, dict) else loaded[section]
            assert given == value

    def test_enabled_decides_the_strategy(self) -> None:
        assert load("schema_version: 1\nddp: {enabled: false}").distributed.strategy == "none"
        assert load("schema_version: 1").distributed.strategy == "ddp"

    def test_set_takes_old_and_new_names(self) -> None:
        document = "schema_version: 1\nddp: {backend: gloo}"
        config = load(document, "ddp.enabled=true", "trainer.lr=1e-3", "distributed.timeout_sec=5")
        assert (config.distributed.strategy, config.distributed.backend) == ("ddp", "gloo")
        assert (config.trainer.lr, config.distributed.timeout_sec) == (1e-3, 5)

    def test_old_names_belong_to_old_documents(self) -> None:
        assert "distributed" in only_problem("schema_version: 2\nddp: {enabled: true}")
        assert "ddp" in only_problem("schema_version: 2", "ddp.enabled=true")

    def test_enabled_must_be_a_boolean(self) -> None:
        assert "strategy" in only_problem("schema_version: 1\nddp: {enabled: sometimes}")

    def test_a_problem_in_ddp_has_its_line(self) -> None:
        text = only_problem("schema_version: 1\nddp:\n  enabled: true\n  backend: mpi")
        assert text.startswith("line 4: ")

    def test_no_setting_is_dropped_in_silence(self) -> None:
        """Both names of one section in one document: one of the two would be lost."""
        assert problems("schema_version: 1\nddp: {timeout_sec: 5}\ndistributed: {backend: gloo}")

    def test_presets_are_version_2(self) -> None:
        for path in list_presets().values():
            assert "\nschema_version: 2\n" in path.read_text()


@pytest.mark.parametrize("version", ["0", "3", "'2'", "two", "[1]", "null", "true", "1.5"])
def test_unknown_schema_version(version: str) -> None:
    assert "schema_version" in only_problem(f"schema_version: {version}")


def test_no_schema_version_is_the_current_one() -> None:
    assert load("trainer: {max_steps: 5}").schema_version == 2


@pytest.mark.parametrize("preset", sorted(list_presets()))
def test_presets_load_and_come_back_from_a_dump(preset: str) -> None:
    config = load_config(preset)
    assert load(dump_config(config)) == config


class TestStrictness:
    @pytest.mark.parametrize(
        ("text", "path"),
        [
            ("trainer: {max_steps: '5'}", "trainer.max_steps"),
            ("trainer: {max_steps: 5.0}", "trainer.max_steps"),
            ("trainer: {max_steps: true}", "trainer.max_steps"),
            ("trainer: {micro_batch_size: null}", "trainer.micro_batch_size"),
            ("trainer: {lr: '0.1'}", "trainer.lr"),
            ("trainer: {lr: .nan}", "trainer.lr"),
            ("trainer: {lr: .inf}", "trainer.lr"),
            ("trainer: {betas: [0.9]}", "trainer.betas"),
            ("trainer: {betas: [0.9, 1.5]}", "trainer.betas"),
            ("trainer: {betas: [0.9, '0.95']}", "trainer.betas"),
            ("trainer: {schedule: cosin}", "trainer.schedule"),
            ("trainer: {keep_checkpoints: 1}", "trainer.keep_checkpoints"),
            ("model: {dropout: 1.0}", "model.dropout"),
            ("model: {dropout: .nan}", "model.dropout"),
            ("model: {tie_embeddings: 1}", "model.tie_embeddings"),
            ("data: {val_fraction: 0}", "data.val_fraction"),
            ("data: {val_fraction: .nan}", "data.val_fraction"),
            ("data: {files: a.txt}", "data.files"),
            ("data: {files: [1]}", "data.files"),
            ("run: {name: 5}", "run.name"),
            ("run: {name: ''}", "run.name"),
            ("run: {seed: -1}", "run.seed"),
            ("run: {device: gpu}", "run.device"),
            ("run: {threads: 0}", "run.threads"),
            ("distributed: {master_port: 70000}", "distributed.master_port"),
            ("distributed: {rank: 2, world_size: 2}", "distributed.rank"),
            ("logging: {level: info}", "logging.level"),
            ("logging: {file_name: ../x}", "logging.file_name"),
            ("output: {run_id: ../x}", "output.run_id"),
            ("output: {run_id: Upper}", "output.run_id"),
            ("mlflow: {enabled: 'yes'}", "mlflow.enabled"),
        ],
    )
    def test_a_wrong_value_is_named(self, text: str, path: str) -> None:
        assert path in only_problem(text)

    @pytest.mark.parametrize(
        "text",
        [
            "trainer: {lr: 1}",
            "trainer: {lr: 1e-3}",
            "trainer: {max_grad_norm: null}",
            "trainer: {eval_every_steps: null}",
            "model: {d_ff: null}",
            "run:",
            "",
            "# only a comment",
        ],
    )
    def test_what_looks_odd_but_is_right(self, text: str) -> None:
        load(text)

    @pytest.mark.parametrize(
        ("text", "near"),
        [
            ("trainer: {max_step: 5}", "'max_steps'"),
            ("model: {n_layer: 5}", "'n_layers'"),
            ("output: {root: x}", "'root_dir'"),
            ("trainr: {lr: 0.1}", "'trainer'"),
            ("model: {name: gtp}", "'gpt'"),
            ("data: {name: text_file}", "'text_files'"),
        ],
    )
    def test_an_unknown_name_brings_the_nearest(self, text: str, near: str) -> None:
        found = only_problem(text)
        assert f"Did you mean {near}?" in found
        assert "Known: " in found

    def test_nothing_near_means_no_guess(self) -> None:
        found = only_problem("trainer: {zzzzzzz: 5}")
        assert "Did you mean" not in found
        assert "max_steps" in found

    @pytest.mark.parametrize("text", ["[1, 2]", "5", "trainer", "1: {a: b}"])
    def test_a_document_is_a_mapping(self, text: str) -> None:
        with pytest.raises(ConfigError, match="mapping"):
            load(text)

    @pytest.mark.parametrize("text", ["trainer: 5", "trainer: [1]", "trainer: text"])
    def test_a_section_is_a_mapping(self, text: str) -> None:
        assert "trainer must be a section" in only_problem(text)

    def test_a_field_name_is_text(self) -> None:
        with pytest.raises(ConfigError, match="text"):
            load("trainer: {1: 2}")

    @pytest.mark.parametrize(
        "text", ["trainer: {lr: [", "a: b: c", "\tx: 1", "x: *nowhere", "x: !!python/name:os.system a"]
    )
    def test_not_yaml(self, text: str) -> None:
        with pytest.raises(ConfigError, match="not valid YAML"):
            load(text)

    def test_a_value_inside_itself(self) -> None:
        with pytest.raises(ConfigError):
            load("run: &a\n  name: *a")

    def test_a_key_given_twice(self) -> None:
        with pytest.raises(ConfigError, match="'lr' is given twice, again at line 3"):
            load("trainer:\n  lr: 0.1\n  lr: 0.2")
        with pytest.raises(ConfigError, match="'trainer' is given twice"):
            load("trainer: {lr: 0.1}\ntrainer: {max_steps: 2}")


class TestAllAtOnce:
    DOCUMENT = (
        "schema_version: 2\n"
        "run:\n"
        "  seed: x\n"
        "model:\n"
        "  d_model: 30\n"
        "  n_heads: 4\n"
        "  dropuot: 0.1\n"
        "trainer:\n"
        "  max_steps: 0\n"
        "  lr: -1.0\n"
        "trainers: {}\n"
    )

    def test_every_problem_with_path_and_line(self) -> None:
        found = problems(self.DOCUMENT)
        assert len(found) == 6
        for start in (
            "line 3: run.seed",
            "line 7: model.dropuot",
            "line 9: trainer.max_steps",
            "line 10: trainer.lr",
            "line 11: section 'trainers'",
        ):
            assert any(text.startswith(start) for text in found), (start, found)
        assert any("d_model 30 is not divisible by model.n_heads 4" in text for text in found)

    def test_overrides_are_in_the_same_list(self) -> None:
        found = problems(self.DOCUMENT, "trainer.micro_batch_size=0", "nonsense")
        assert len(found) == 8
        assert any(text.startswith("--set trainer.micro_batch_size") for text in found)
        assert any("nonsense" in text for text in found)

    def test_the_message_holds_them_all(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load(self.DOCUMENT)
        assert "test.yaml: 6 problems" in str(caught.value)
        assert all(problem in str(caught.value) for problem in caught.value.problems)

    def test_a_check_of_two_fields_waits_for_both(self) -> None:
        """d_model is wrong by itself: whether n_heads divides it is not yet a question."""
        assert "model.d_model" in only_problem("model: {d_model: x, n_heads: 3}")


class TestOverrides:
    def test_they_win(self) -> None:
        assert load("trainer: {lr: 0.5}", "trainer.lr=0.1", "trainer.lr=0.2").trainer.lr == 0.2

    @pytest.mark.parametrize(
        ("override", "value"),
        [
            ("trainer.lr=1e-3", 1e-3),
            ("trainer.lr=1E3", 1000.0),
            ("trainer.lr=.5", 0.5),
            ("trainer.lr=1_0.5", 10.5),
            ("trainer.max_grad_norm=null", None),
            ("trainer.max_grad_norm=", None),
            ("trainer.compile=true", True),
            ("run.notes=a=b", "a=b"),
            ("run.notes='1e-3'", "1e-3"),
            ("data.files=[a.txt, b.txt]", ["a.txt", "b.txt"]),
            ("data.files=a.txt", ["a.txt"]),
            ("trainer.betas=[0.8, 0.9]", (0.8, 0.9)),
        ],
    )
    def test_they_have_the_type_of_yaml(self, override: str, value: object) -> None:
        section, field = override.split("=")[0].split(".")
        loaded = getattr(getattr(load("data: {name: text_files, files: [x.txt]}", override), section), field)
        assert loaded == value
        assert type(loaded) is type(value)

    @pytest.mark.parametrize(
        ("override", "word"),
        [
            ("trainer.lr=fast", "trainer.lr"),
            ("trainer.max_steps=1e3", "trainer.max_steps"),
            ("trainer.learning_rate=1", "trainer.learning_rate"),
            ("trainer.lrr=1", "'lr'"),
            ("trainr.lr=1", "'trainer'"),
            ("lr=1", "section.field=value"),
            ("trainer.lr", "section.field=value"),
            ("trainer.lr.x=1", "trainer.lr is not a section"),
            ("model.lora.x.y=1", "section.field=value"),
            ("model.lora.rnk=1", "Did you mean 'rank'"),
            ("trainer.lr=[", "not a YAML value"),
            ("schema_version.x=1", "schema_version"),
        ],
    )
    def test_they_are_checked_the_same(self, override: str, word: str) -> None:
        found = only_problem("schema_version: 2", override)
        assert word in found

    def test_one_can_mend_the_document(self) -> None:
        assert load("trainer: {max_steps: 0}", "trainer.max_steps=3").trainer.max_steps == 3


class TestDumping:
    @pytest.mark.parametrize("name", ["1e-3", "1e3", "no", "null", "5", "~", "a: b", "# x", " x ", "é ü", "2024-01-01"])
    def test_text_that_looks_like_something_else(self, name: str) -> None:
        config = Config().with_values("run", name=name)
        assert load(dump_config(config)) == config

    @given(
        notes=st.none() | st.text(st.characters(codec="utf-8"), max_size=60),
        lr=st.floats(1e-300, 1e300),
        steps=st.integers(100, 2**31 - 1),
        betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    )
    def test_a_dump_loads_as_the_same_config(
        self, notes: str | None, lr: float, steps: int, betas: tuple[float, float]
    ) -> None:
        config = Config().with_values("run", notes=notes).with_values("trainer", lr=lr, max_steps=steps, betas=betas)
        assert load(dump_config(config)) == config

    def test_sections_keep_their_order(self) -> None:
        assert list(yaml.safe_load(dump_config(Config()))) == list(Config.model_fields)


class TestFrozen:
    def test_fields_cannot_be_set(self) -> None:
        config = load("trainer: {lr: 0.5}")
        with pytest.raises(ValidationError):
            config.trainer.lr = 0.1  # type: ignore[misc]
        with pytest.raises(ValidationError):
            config.trainer = Config().trainer  # type: ignore[misc]

    def test_loading_leaves_the_document_alone(self) -> None:
        document = parse_document("schema_version: 1\nddp: {enabled: true}\ntrainer: {lr: 0.5}", "x")
        before = repr(document.values)
        build_config(document, ["trainer.lr=0.1", "ddp.enabled=false"])
        assert repr(document.values) == before


class TestFinding:
    def test_a_preset_by_name_a_file_by_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert find_config("gpt_smoke").name == "gpt_smoke.yaml"
        Path("mine.yaml").write_text("run: {name: mine}")
        assert load_config("mine.yaml").run.name == "mine"
        Path("gpt_smoke").write_text("run: {name: here}")
        assert load_config("gpt_smoke").run.name == "here"

    def test_the_default(self) -> None:
        assert load_config().run.name == "gpt-stdlib"

    def test_an_unknown_preset_brings_the_nearest(self) -> None:
        with pytest.raises(UsageError, match="Did you mean 'gpt_smoke'") as caught:
            load_config("gpt_smok")
        assert caught.value.known == sorted(list_presets())

    @pytest.mark.parametrize("name", ["nowhere.yaml", "no/where", ".", ""])
    def test_no_such_file(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError):
            load_config(name)

    def test_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_bytes(b"run: {name: \xff}")
        with pytest.raises(UsageError, match="cannot be read"):
            load_config(tmp_path / "x.yaml")


def test_differences_name_the_fields() -> None:
    old, new = Config(), Config().with_values("trainer", lr=0.5, max_steps=7)
    assert differences(old.as_dict(), new.as_dict()) == [("trainer.lr", 3e-4, 0.5), ("trainer.max_steps", None, 7)]
    assert [may_change(path) for path in ("trainer.lr", "trainer.max_steps", "logging.level")] == [False, True, True]


def test_a_range_is_no_time_of_day() -> None:
    """YAML 1.1 reads 2:4 as 124."""
    assert load("launch: {nodes: 2:4}").launch.nodes == "2:4"
    assert load("schema_version: 2", "launch.nodes=2:4").launch.nodes == "2:4"


@pytest.mark.parametrize(
    "sets",
    [
        ("backend=etcd-v2",),
        ("endpoint=etcd:2379",),
        ("backend=etcd-v3", "endpoint=etcd:2379"),
        *(("backend=etcd-v2", f"endpoint={value}") for value in ("etcd", "etcd:0", "etcd:70000", "http://etcd:2379")),
        *(("backend=etcd-v2", f"endpoint={value}") for value in ("':2379'", "'a b:2379'", "2379", "::1")),
    ],
)
def test_a_rendezvous_that_cannot_be(sets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        load_config("ddp_smoke", [f"distributed.rendezvous.{text}" for text in sets])


@pytest.mark.parametrize("endpoint", ["etcd.kube:2379", "10.0.0.1:2379", "'[::1]:2379'"])
def test_a_rendezvous_at_etcd(endpoint: str) -> None:
    sets = ["distributed.rendezvous.backend=etcd-v2", f"distributed.rendezvous.endpoint={endpoint}"]
    assert load_config("ddp_smoke", sets).distributed.rendezvous.endpoint == endpoint.strip("'")


@pytest.mark.parametrize(
    ("tokenizer", "size", "valid"), [(None, 255, False), (None, 256, True), ("gpt2", 50256, False), ("char", 10, True)]
)
def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tokenizer: str | None, size: int, valid: bool) -> None:
    overrides = [f"model.vocab_size={size}", *([f"data.tokenizer={tokenizer}"] if tokenizer else [])]
    if valid:
        assert load_config("gpt_smoke", overrides).model.vocab_size == size
        return
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        load_config("gpt_smoke", overrides)

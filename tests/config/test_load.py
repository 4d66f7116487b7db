import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from llmtrain import registry
from llmtrain.config.aliases import alias_of, all_targets
from llmtrain.config.document import parse_document
from llmtrain.config.load import build_config, dump_config, find_config, flat_overrides, list_presets, load_config
from llmtrain.config.model import LoraSection
from llmtrain.config.problems import setting_of_option
from llmtrain.config.schema import SECTIONS, SECTIONS_BY_NAME, Config, classes_of, differences, may_change
from llmtrain.config.trainer import OPTIMIZER_DEFAULTS
from llmtrain.errors import ConfigError, UsageError


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


@pytest.mark.parametrize("version", ["0", "4", "'3'", "three", "[1]", "null", "true", "1.5"])
def test_unknown_schema_version_is_refused(version: str) -> None:
    assert "schema_version" in only_problem(f"schema_version: {version}")


def test_no_schema_version_means_the_current_one() -> None:
    assert load("trainer: {max_steps: 5}").schema_version == 3


def test_presets_have_the_current_version() -> None:
    for path in list_presets().values():
        assert "\nschema_version: 3\n" in path.read_text()


def test_muon_has_defaults_of_its_own() -> None:
    muon = load("trainer: {optimizer: muon}").trainer
    assert (muon.lr, muon.schedule, muon.decay_fraction) == (0.01, "wsd", 0.5)
    assert (muon.momentum, muon.momentum_warmup_steps) == (0.95, 250)
    chosen = load("trainer: {optimizer: muon, lr: 0.02, schedule: cosine, momentum: 0.9}").trainer
    assert (chosen.lr, chosen.schedule, chosen.momentum, chosen.decay_fraction) == (0.02, "cosine", 0.9, 0.5)
    adamw = load("").trainer
    assert (adamw.lr, adamw.schedule, adamw.decay_fraction, adamw.momentum) == (3e-4, "cosine", 0.2, None)


def test_defaults_of_an_optimizer_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version with other defaults loads the same config."""
    config = load("trainer: {optimizer: muon}")
    monkeypatch.setitem(OPTIMIZER_DEFAULTS, "muon", {"lr": 1.0, "momentum": 0.5})
    assert load(dump_config(config)) == config


@pytest.mark.parametrize("preset", sorted(list_presets()))
def test_presets_round_trip(preset: str) -> None:
    config = load_config(preset)
    assert load(dump_config(config)) == config


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--lr", "--set trainer.lr=8"),
        ("--learning-rate", "--set trainer.lr=8"),
        ("--max-steps", "--set trainer.max_steps=8"),
        ("--batch-size", "--set trainer.micro_batch_size=8"),
        ("--trainer.lr", "--set trainer.lr=8"),
        ("--lora-r", "--set model.lora.rank=8"),
    ],
)
def test_setting_of_an_option_that_does_not_exist(option: str, setting: str) -> None:
    assert setting in (setting_of_option(option, "8") or "")


def test_no_setting_for_an_option_that_names_no_field() -> None:
    assert setting_of_option("--nonsense", "8") is None


def test_sections_in_overrides_become_dotted_keys() -> None:
    labels = {"team": "ml"}
    nested = {"trainer": {"lr": 1e-3}, "model": {"lora": {"rank": 8}}, "launch.labels": labels, "run.seed": 1}
    expected = [("trainer.lr", 1e-3), ("model.lora.rank", 8), ("launch.labels", labels), ("run.seed", 1)]
    assert flat_overrides(nested) == expected


class TestStrictness:
    @pytest.mark.parametrize(
        ("text", "path"),
        [
            ("trainer: {max_steps: '5'}", "trainer.max_steps"),
            ("trainer: {max_steps: 5.0}", "trainer.max_steps"),
            ("trainer: {max_steps: true}", "trainer.max_steps"),
            ("trainer: {lr: '0.1'}", "trainer.lr"),
            ("trainer: {lr: .nan}", "trainer.lr"),
            ("trainer: {lr: .inf}", "trainer.lr"),
            ("trainer: {betas: [0.9]}", "trainer.betas"),
            ("trainer: {betas: [0.9, 1.5]}", "trainer.betas"),
            ("trainer: {betas: [0.9, '0.95']}", "trainer.betas"),
            ("trainer: {schedule: cosin}", "trainer.schedule"),
            ("trainer: {optimizer: [muon]}", "trainer.optimizer"),
            ("trainer: {optimizer: muon, momentum: 1.0}", "trainer.momentum"),
            ("trainer: {optimizer: muon, momentum: -0.1}", "trainer.momentum"),
            ("trainer: {optimizer: muon, momentum_warmup_steps: -1}", "trainer.momentum_warmup_steps"),
            ("trainer: {keep_checkpoints: 1}", "trainer.keep_checkpoints"),
            ("model: {dropout: 1.0}", "model.dropout"),
            ("model: {dropout: .nan}", "model.dropout"),
            ("model: {tie_embeddings: 1}", "model.tie_embeddings"),
            ("data: {val_fraction: 0}", "data.val_fraction"),
            ("data: {val_fraction: .nan}", "data.val_fraction"),
            ("data: {name: text_files, files: 5}", "data.files"),
            ("data: {name: text_files, files: [1]}", "data.files"),
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
            ("tracking: {mlflow: {enabled: 'yes'}}", "tracking.mlflow.enabled"),
        ],
    )
    def test_invalid_value_is_named(self, text: str, path: str) -> None:
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
    def test_unusual_but_valid_documents_load(self, text: str) -> None:
        load(text)

    @pytest.mark.parametrize(
        ("text", "near"),
        [
            ("trainer: {max_step: 5}", "'max_steps'"),
            ("model: {n_layrs: 5}", "'n_layers'"),
            ("output: {root: x}", "'root_dir'"),
            ("trainr: {lr: 0.1}", "'trainer'"),
            ("model: {name: gtp}", "'gpt'"),
            ("data: {name: text_file}", "'text_files'"),
        ],
    )
    def test_unknown_name_suggests_the_nearest(self, text: str, near: str) -> None:
        found = only_problem(text)
        assert f"Did you mean {near}?" in found
        assert "Known: " not in found or ".name" in found, "all names only where none is suggested"

    def test_unknown_name_without_a_near_one_has_no_suggestion(self) -> None:
        found = only_problem("trainer: {zzzzzzz: 5}")
        assert "Did you mean" not in found
        assert " and " in found
        assert "docs/config.md" in found

    @pytest.mark.parametrize("text", ["[1, 2]", "5", "trainer", "1: {a: b}"])
    def test_document_must_be_a_mapping(self, text: str) -> None:
        with pytest.raises(ConfigError, match="mapping"):
            load(text)

    @pytest.mark.parametrize("text", ["trainer: 5", "trainer: [1]", "trainer: text"])
    def test_section_must_be_a_mapping(self, text: str) -> None:
        assert "trainer must be a section" in only_problem(text)

    def test_field_name_must_be_text(self) -> None:
        with pytest.raises(ConfigError, match="text"):
            load("trainer: {1: 2}")

    @pytest.mark.parametrize(
        "text", ["trainer: {lr: [", "a: b: c", "\tx: 1", "x: *nowhere", "x: !!python/name:os.system a", "? [a, b]\n: 3"]
    )
    def test_invalid_yaml_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="not valid YAML"):
            load(text)

    def test_large_document_is_not_read_to_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llmtrain.config.yaml_values.MAX_VALUES", 100)
        assert "more than 100 values" in only_problem("model:\n" + "  a: 1\n" * 60 + "  ][ not YAML\n")
        assert "not YAML" in only_problem("model:\n" + "".join(f"  a{i}: 1\n" for i in range(40)) + "  ][ not YAML\n")

    def test_recursive_alias_is_refused(self) -> None:
        with pytest.raises(ConfigError):
            load("run: &a\n  name: *a")

    def test_duplicate_key_is_refused_with_its_line(self) -> None:
        with pytest.raises(ConfigError, match="duplicate key 'lr' at line 3"):
            load("trainer:\n  lr: 0.1\n  lr: 0.2")
        with pytest.raises(ConfigError, match="duplicate key 'trainer'"):
            load("trainer: {lr: 0.1}\ntrainer: {max_steps: 2}")


class TestAllProblemsAtOnce:
    DOCUMENT = (
        "schema_version: 3\n"
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
        starts = (
            "line 3: run.seed",
            "line 6: model.d_model 30 is not divisible by model.n_heads 4",
            "line 7: model.dropuot",
            "line 9: trainer.max_steps",
            "line 10: trainer.lr",
            "line 11: section 'trainers'",
        )
        assert len(found) == len(starts)
        for text, start in zip(found, starts, strict=True):
            assert text.startswith(start), found

    def test_problems_of_overrides_are_in_the_same_list(self) -> None:
        found = problems(self.DOCUMENT, "trainer.micro_batch_size=0", "nonsense")
        assert len(found) == 8
        assert any(text.startswith("--set trainer.micro_batch_size") for text in found)
        assert any("nonsense" in text for text in found)

    def test_message_lists_all(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load(self.DOCUMENT)
        assert "test.yaml: 6 problems" in str(caught.value)
        assert all(problem in str(caught.value) for problem in caught.value.problems)

    def test_check_of_two_fields_is_skipped_if_one_is_invalid(self) -> None:
        assert "model.d_model" in only_problem("model: {d_model: x, n_heads: 3}")


class TestWording:
    @pytest.mark.parametrize(
        ("text", "start"),
        [
            ("trainer: {betas: 0.9}", "line 1: trainer.betas must be two numbers such as [0.9, 0.95], got 0.9."),
            ("trainer: {betas: [0.9]}", "line 1: trainer.betas must be two numbers such as [0.9, 0.95], got [0.9]."),
            ("trainer: {betas: [0.9, 2.5]}", "line 1: trainer.betas: item 2 must be below 1"),
            ("trainer: {max_steps: -3}", "line 1: trainer.max_steps must be above 0, got -3."),
            ("trainer: {max_steps: many}", "line 1: trainer.max_steps must be an integer, got 'many'."),
            ("trainer: {compile: maybe}", "line 1: trainer.compile must be true or false"),
            ("logging: {level: Info}", "line 1: logging.level must be 'DEBUG', 'INFO'"),
            ("data: {name: text_files, files: [1]}", "line 1: data.files: item 1 must be text"),
            ("model: {name: hf_causal_lm, path: x, lora: 5}", "line 1: model.lora must be a section"),
        ],
    )
    def test_invalid_value_names_what_is_accepted(self, text: str, start: str) -> None:
        found = only_problem(text)
        assert found.startswith(start)
        assert "nput should" not in found

    def test_run_id_is_suggested(self) -> None:
        assert "Try 'my-run'" in only_problem("output: {run_id: My_Run}")
        assert "Try" not in only_problem("output: {run_id: '5'}")

    def test_override_with_invalid_yaml_quotes_the_character(self) -> None:
        found = only_problem("run:", "trainer.eval_prompts=[What is it?]")
        assert "'?'" in found
        assert "unicode string" not in found

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("trainer:\n  lr: 1\n    max_steps: 3\n", 3),
            ("run:\n  name: a: b\n", 2),
            ("run:\n\tname: a\n", 2),
            ("trainer:\n  betas: [0.9,\n", 2),
            ("run:\n  name: x\n  name: y\n", 3),
            ("run: *nowhere\n", 1),
            ("run:\n  name: x\n seed: 3\n", 3),
        ],
    )
    def test_invalid_yaml_is_reported_with_file_and_line(self, text: str, line: int) -> None:
        with pytest.raises(ConfigError) as caught:
            load(text)
        assert str(caught.value).startswith(f"test.yaml:{line}: not valid YAML")
        assert "unicode string" not in str(caught.value)
        assert len(caught.value.problems) == 1


class TestAliases:
    """Names from other trainers are refused, with the field to write."""

    @pytest.mark.parametrize(
        ("text", "field"),
        [
            ("trainer: {learning_rate: 1}", "trainer.lr."),
            ("model: {n_embd: 1}", "model.d_model."),
            ("model: {n_layer: 1}", "model.n_layers."),
            ("trainer: {max_iters: 1}", "trainer.max_steps."),
            ("trainer: {batch_size: 1}", "trainer.micro_batch_size."),
            ("trainer: {num_train_epochs: 1}", "trainer.max_epochs."),
            ("trainer: {warmup_ratio: 0.1}", "trainer.warmup_steps. It counts steps"),
            ("trainer: {gradient_accumulation_steps: 4}", "trainer.grad_accum_steps. It counts"),
            ("trainer: {fp16: true}", "trainer.precision."),
            ("trainer: {seed: 1}", "run.seed."),
            ("model: {lora_r: 8}", "model.lora.rank."),
            ("model: {name: hf_causal_lm, path: x, lora: {r: 8}}", "model.lora.rank."),
            ("base_model: x", "model.path."),
            ("sequence_len: 128", "model.block_size."),
            ("micro_batch_size: 2", "trainer.micro_batch_size."),
            ("training: {steps: 5}", "trainer."),
        ],
    )
    def test_name_of_another_trainer_is_refused_with_the_field(self, text: str, field: str) -> None:
        found = only_problem(text)
        assert f"is unknown; here it is {field}" in found
        assert "Known:" not in found

    def test_aliases_lead_to_existing_fields(self) -> None:
        existing = {
            f"{section}.{field}" for section in SECTIONS for kind in classes_of(section) for field in kind.model_fields
        }
        existing |= {f"model.lora.{field}" for field in LoraSection.model_fields}
        assert all_targets() <= existing

    def test_no_alias_is_a_name_of_its_own_field(self) -> None:
        for target in all_targets():
            alias = alias_of(target.rpartition(".")[2], is_section=False)
            assert alias is None or alias[0] != target


class TestExtends:
    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("below").mkdir()
        Path("below/base.yaml").write_text(
            "run: {name: base, seed: 5}\nmodel: {name: gpt, n_layers: 2}\ntrainer:\n  lr: 0.5\n  betas: [0.1, 0.2]\n"
        )

    def write(self, text: str, name: str = "below/mine.yaml") -> str:
        Path(name).write_text(text)
        return name

    def test_fields_are_merged_over_a_file_beside_the_document(self) -> None:
        config = load_config(self.write("extends: base.yaml\nrun: {name: mine}\ntrainer: {betas: [0.3, 0.4]}"))
        assert (config.run.name, config.run.seed) == ("mine", 5)
        assert (config.trainer.lr, config.trainer.betas) == (0.5, (0.3, 0.4))
        assert "extends" not in dump_config(config)

    def test_preset_and_chain(self) -> None:
        self.write("extends: gpt_smoke\ntrainer: {lr: 0.25}")
        config = load_config(self.write("extends: below/mine.yaml\nrun: {name: top}", "top.yaml"))
        smoke = load_config("gpt_smoke")
        assert config == smoke.with_values("run", name="top").with_values("trainer", lr=0.25)

    def test_another_kind_drops_the_fields_of_the_base(self) -> None:
        config = load_config(self.write("extends: base.yaml\nmodel: {name: dummy_gpt}"))
        assert config.model.name == "dummy_gpt"

    def test_null_replaces_a_value_but_not_a_section(self) -> None:
        self.write("model: {name: hf_causal_lm, path: x, lora: {rank: 4}}", "below/base.yaml")
        config = load_config(self.write("extends: base.yaml\nrun:\nmodel: {lora: null}"))
        assert config.model.lora is None  # type: ignore[union-attr]

    def test_older_base_is_upgraded(self) -> None:
        self.write("schema_version: 2\ntrainer: {early_stopping: 3}", "below/base.yaml")
        assert load_config(self.write("extends: base.yaml")).trainer.early_stopping_patience == 3

    def test_problem_in_the_base_names_its_line(self) -> None:
        self.write("run:\n  name: base\n  sed: 5\n", "below/base.yaml")
        with pytest.raises(ConfigError) as caught:
            load_config(self.write("extends: base.yaml\ntrainer: {lr: -1}"))
        assert caught.value.problems[0].startswith("line 2: trainer.lr")
        assert re.search(r"base\.yaml:3: run\.sed", caught.value.problems[1])

    @pytest.mark.parametrize(
        "text",
        [
            "extends: mine.yaml",
            "extends: nowhere.yaml",
            "extends: no_such_preset",
            "extends: 5",
            "extends: [base.yaml]",
            "extends:",
            "schema_version: 2\nextends: base.yaml",
        ],
    )
    def test_invalid_base_is_refused(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            load_config(self.write(text))
        assert caught.value.exit_code == 64

    @pytest.mark.parametrize("base", ["nowhere.yaml", "no_such_preset", "."])
    def test_missing_base_is_a_problem_of_the_line_that_extends_it(self, base: str) -> None:
        path = self.write(f"run: {{name: mine}}\nextends: {base}")
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert caught.value.source == str(path)
        assert caught.value.problems[0].startswith("line 2:")

    def test_circle_is_refused(self) -> None:
        self.write("extends: base.yaml")
        self.write("extends: mine.yaml", "below/base.yaml")
        with pytest.raises(ConfigError, match=r"mine\.yaml -> base\.yaml -> mine\.yaml"):
            load_config("below/mine.yaml")

    def test_override_applies_to_the_merged_config(self) -> None:
        assert load_config(self.write("extends: base.yaml"), ["trainer.lr=0.1"]).trainer.lr == 0.1


class TestOverrides:
    def test_last_override_wins(self) -> None:
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
    def test_override_is_parsed_as_yaml(self, override: str, value: object) -> None:
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
            ("model.lora.rnk=1", "model.lora only applies to model.name hf_causal_lm"),
            ("trainer.lr=[", "not valid YAML"),
            ("schema_version.x=1", "schema_version"),
        ],
    )
    def test_override_is_validated(self, override: str, word: str) -> None:
        found = only_problem("schema_version: 3", override)
        assert word in found

    def test_options_of_a_built_in_kind_name_classes_of_your_own(self) -> None:
        text = only_problem("model: {name: gpt}", "model.options.x=3")
        assert text.startswith("--set")
        assert "data.options" not in text
        assert "package.module:Class" in text

    def test_unknown_tracker_names_the_known_ones(self) -> None:
        text = only_problem("{}", "tracking.comet.enabled=true")
        assert all(word in text for word in ("mlflow", "tensorboard", "custom", "docs/extending.md"))

    def test_override_replaces_an_invalid_value(self) -> None:
        assert load("trainer: {max_steps: 0}", "trainer.max_steps=3").trainer.max_steps == 3


class TestDumping:
    @pytest.mark.parametrize("name", ["1e-3", "1e3", "no", "null", "5", "~", "a: b", "# x", " x ", "é ü", "2024-01-01"])
    def test_text_that_looks_like_another_type_round_trips(self, name: str) -> None:
        config = Config().with_values("run", name=name)
        assert load(dump_config(config)) == config

    @given(
        notes=st.none() | st.text(st.characters(codec="utf-8"), max_size=60),
        lr=st.floats(1e-300, 1e300),
        steps=st.integers(100, 2**31 - 1),
        betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    )
    def test_dump_loads_as_the_same_config(
        self, notes: str | None, lr: float, steps: int, betas: tuple[float, float]
    ) -> None:
        config = Config().with_values("run", notes=notes).with_values("trainer", lr=lr, max_steps=steps, betas=betas)
        assert load(dump_config(config)) == config

    def test_dump_keeps_the_order_of_sections(self) -> None:
        assert list(yaml.safe_load(dump_config(Config()))) == list(Config.model_fields)


class TestFrozen:
    def test_fields_cannot_be_set(self) -> None:
        config = load("trainer: {lr: 0.5}")
        with pytest.raises(ValidationError):
            config.trainer.lr = 0.1  # type: ignore[misc]
        with pytest.raises(ValidationError):
            config.trainer = Config().trainer  # type: ignore[misc]

    def test_loading_does_not_change_the_document(self) -> None:
        document = parse_document("schema_version: 1\nddp: {enabled: true}\ntrainer: {lr: 0.5}", "x")
        before = repr(document.values)
        build_config(document, ["trainer.lr=0.1", "ddp.enabled=false"])
        assert repr(document.values) == before


class TestFindConfig:
    def test_preset_by_name_and_file_by_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert find_config("gpt_smoke").name == "gpt_smoke.yaml"
        Path("mine.yaml").write_text("run: {name: mine}")
        assert load_config("mine.yaml").run.name == "mine"
        Path("gpt_smoke").write_text("run: {name: here}")
        assert load_config("gpt_smoke").run.name == "here"

    def test_default_preset(self) -> None:
        assert load_config().run.name == "gpt-stdlib"

    def test_unknown_preset_suggests_the_nearest(self) -> None:
        with pytest.raises(UsageError, match="Did you mean 'gpt_smoke'") as caught:
            load_config("gpt_smok")
        assert caught.value.known == sorted(list_presets())

    @pytest.mark.parametrize("name", ["nowhere.yaml", "no/where", ".", ""])
    def test_missing_file_is_refused(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError):
            load_config(name)

    def test_file_that_is_not_utf8_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_bytes(b"run: {name: \xff}")
        with pytest.raises(UsageError, match="cannot be read"):
            load_config(tmp_path / "x.yaml")


def test_differences_names_the_fields() -> None:
    old, new = Config(), Config().with_values("trainer", lr=0.5, max_steps=7)
    assert differences(old.as_dict(), new.as_dict()) == [("trainer.lr", 3e-4, 0.5), ("trainer.max_steps", None, 7)]
    assert [may_change(path) for path in ("trainer.lr", "trainer.max_steps", "logging.level")] == [False, True, True]


def test_node_range_is_not_parsed_as_a_sexagesimal_number() -> None:
    """YAML 1.1 reads 2:4 as 124."""
    assert load("launch: {nodes: 2:4}").launch.nodes == "2:4"
    assert load("schema_version: 3", "launch.nodes=2:4").launch.nodes == "2:4"


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
def test_invalid_rendezvous_is_refused(sets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        load_config("ddp_smoke", [f"distributed.rendezvous.{text}" for text in sets])


@pytest.mark.parametrize("endpoint", ["etcd.kube:2379", "10.0.0.1:2379", "'[::1]:2379'"])
def test_etcd_rendezvous_loads(endpoint: str) -> None:
    sets = ["distributed.rendezvous.backend=etcd-v2", f"distributed.rendezvous.endpoint={endpoint}"]
    assert load_config("ddp_smoke", sets).distributed.rendezvous.endpoint == endpoint.strip("'")


@pytest.mark.parametrize(
    ("tokenizer", "size", "valid"), [(None, 255, False), (None, 256, True), ("gpt2", 50256, False), ("char", 10, True)]
)
def test_vocabulary_smaller_than_the_tokenizers_is_refused(tokenizer: str | None, size: int, valid: bool) -> None:
    overrides = [f"model.vocab_size={size}", *([f"data.tokenizer={tokenizer}"] if tokenizer else [])]
    if valid:
        assert load_config("gpt_smoke", overrides).model.vocab_size == size
        return
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        load_config("gpt_smoke", overrides)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("model: {name: gpt}", ["data.packing=true"]),
        ("model: {name: dummy_gpt}", []),
        ("model: {name: gpt, architecture: modern}", []),
        ("model: {name: hf_causal_lm, path: x, lora: {}}", ["trainer.optimizer=adafactor"]),
        ("model: {name: hf_causal_lm, path: x, lora: {quantize: true}}", ["distributed.strategy=fsdp"]),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(text: str, overrides: list[str]) -> None:
    examples = "data: {name: instruct_jsonl, train_file: x.jsonl}"
    assert only_problem(f"{text}\n{examples}", *overrides)


@pytest.mark.parametrize("name", sorted(SECTIONS_BY_NAME["model"]))
def test_packing_is_accepted_for_models_that_pack(name: str) -> None:
    can_pack = registry.resolve("model.name", name, registry.MODELS).can_pack
    path = ["model.path=x"] if name == "hf_causal_lm" else []
    examples = ["data.name=instruct_jsonl", "data.train_file=x.jsonl"]
    for packing in (True, False):
        try:
            load("", f"model.name={name}", *path, *examples, f"data.packing={str(packing).lower()}")
            is_accepted = True
        except ConfigError:
            is_accepted = False
        assert is_accepted == (can_pack or not packing)


class TestKinds:
    """Sections whose fields depend on `name`."""

    def test_config_has_only_the_fields_of_its_kind(self) -> None:
        config = load("model: {name: hf_causal_lm, path: x}\ndata: {name: dummy_text}").as_dict()
        assert "d_model" not in config["model"]
        assert config["model"]["path"] == "x"
        assert "files" not in config["data"]

    def test_field_of_another_kind_is_refused_and_its_kinds_named(self) -> None:
        text = only_problem("model:\n  name: hf_causal_lm\n  path: x\n  d_model: 64\n")
        assert text.startswith("line 4: model.d_model")
        assert "gpt and dummy_gpt" in text

    def test_required_field_is_named(self) -> None:
        assert "model.path is required" in only_problem("model: {name: hf_causal_lm}")

    @pytest.mark.parametrize("name", ["5", "null", "[gpt]", "nothing"])
    @pytest.mark.parametrize("section", ["model", "data"])
    def test_unknown_kind_is_refused(self, section: str, name: str) -> None:
        assert f"{section}.name" in only_problem(f"{section}: {{name: {name}}}")

    def test_subsection_of_a_kind_is_checked(self) -> None:
        assert "Did you mean 'rank'" in only_problem("model: {name: hf_causal_lm, path: x}", "model.lora.rnk=1")

    def test_override_of_the_name_drops_the_fields_of_the_old_kind(self) -> None:
        notes: list[str] = []
        document = parse_document("model: {name: gpt, d_model: 64, n_layers: 2}", "test.yaml")
        config = build_config(document, ["model.name=dummy_gpt"], notes)
        assert config.model == load("model: {name: dummy_gpt, d_model: 64}").model
        assert len(notes) == 1
        assert "model.n_layers" in notes[0]

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("mlflow: {enabled: true}", "tracking.mlflow"),
            ("trainer: {early_stopping: 2}", "trainer.early_stopping_patience"),
            ("data: {name: chat_jsonl, train_file: x, long_rows: skip}", "data.truncation"),
            ("data: {name: chat_jsonl, train_file: x, bad_rows: skip}", "data.on_bad_example"),
            ("logging: {tensorboard: true}", "tracking.tensorboard.enabled"),
            ("launch: {name: demo}", "output.run_id"),
            ("launch: {master_port: 5000}", "distributed.master_port"),
            ("launch: {runs_volume: {mount_path: /x}}", "output.root_dir"),
            ("launch: {tracking_uri: http://x}", "tracking.mlflow.tracking_uri"),
            ("ddp: {backend: gloo}", "distributed"),
        ],
    )
    def test_old_name_in_a_current_document_names_the_new_one(self, old: str, new: str) -> None:
        assert new in only_problem(old)

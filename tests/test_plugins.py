"""Classes of a user's own: how they are found, what is refused, and what a resume notices."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load_config
from llmtrain.errors import ConfigError, UsageError
from llmtrain.plugins import load_plugin, source_sha256
from llmtrain.registry import PLUGINS

Cli = Callable[..., Any]
# No module of a user's imports torch here unless it must: these tests are about names and options.
TRACKER = """
from pydantic import BaseModel
from llmtrain.tracking.base import Tracker


class Plain(Tracker):
    pass


class Csv(Tracker):
    class Options(BaseModel):
        file: str
        every: int = 1

    def __init__(self, run, options):
        raise RuntimeError("no such server")


class Odd(Tracker):
    Options = dict


def function():
    pass
"""
DATA = """
from llmtrain.data.base import TextChunk, TextData


class Unfinished(TextData):
    def identity(self):
        return {}


class Words(Unfinished):
    def chunks(self, split):
        yield TextChunk("one two three four " * 200, True)
"""
MODEL = """
from torch import nn

from llmtrain.models.base import ModelAdapter


class Net(nn.Sequential):
    pass


class Adapter(ModelAdapter):
    def build(self):
        return Net(nn.Embedding(self.vocab_size, 8), nn.Dropout(0.5), nn.Linear(8, self.vocab_size))
"""


@pytest.fixture
def modules(workdir: Path) -> Path:
    """A current directory with the modules plugin_trackers, plugin_data and plugin_model."""
    for name, text in (("trackers", TRACKER), ("data", DATA), ("model", MODEL)):
        (workdir / f"plugin_{name}.py").write_text(text)
    return workdir


@pytest.fixture
def train_plugin(cli: Cli, tiny: list[str]) -> Cli:
    """`llmtrain train` of the model plugin_model:Adapter, with the tiny overrides and then yours."""

    def run(*overrides: str, config: str = "gpt_smoke") -> Any:
        shared = [text for text in tiny if not text.startswith(("model.name", "model.d_model"))]
        sets = [*shared, "model.name=plugin_model:Adapter", *overrides]
        done = cli("train", "--config", config, *(part for text in sets for part in ("--set", text)), "--json")
        assert done.code == 0, done.err
        return done

    return run


def track(*names: str, options: str = "{}") -> str:
    return f"tracking.custom=[{', '.join(f'{{name: {name}, options: {options}}}' for name in names)}]"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config("gpt_smoke", overrides)
    return error.value.problems


@pytest.mark.parametrize(
    "name",
    [
        "plugin_nothing:Csv",
        "plugin_trackers:Cvs",
        "plugin_trackers:function",
        "plugin_trackers:BaseModel",
        "plugin trackers:Csv",
        "csv",
    ],
)
def test_name_that_is_no_tracker_is_refused(name: str, modules: Path) -> None:  # noqa: ARG001
    assert len(problems(track(name))) == 1


def test_every_class_is_reported_at_once(modules: Path) -> None:  # noqa: ARG001
    found = problems(track("plugin_trackers:Nope", "plugin_nothing:Csv"), "data.name=plugin_data:Unfinished")
    assert len(found) == 3
    assert "chunks" in found[0]


@pytest.mark.parametrize(
    ("source", "line", "shown"),
    [
        ("import os\n\nraise ValueError('no GPU')\n", 3, "ValueError: no GPU"),
        ("x = 1\nimport plugin_missing\n", 2, "plugin_missing"),
        ("class :\n", 1, "SyntaxError"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
        ("def f():\n    return {}['key']\n\nf()\n", 2, "KeyError: 'key'"),
        ("import json\njson.loads('{')\n", 2, "JSONDecodeError"),
    ],
)
def test_import_error_shows_the_users_line(workdir: Path, cli: Cli, source: str, line: int, shown: str) -> None:
    (workdir / "plugin_broken.py").write_text(source)
    done = cli("validate", "--set", track("plugin_broken:Csv"), "--json")
    assert done.code == 64
    assert "Traceback" not in done.err
    (problem,) = done.json["problems"]
    assert f"{workdir / 'plugin_broken.py'}:{line}" in problem
    assert shown in problem


@pytest.mark.parametrize(
    ("name", "options", "accepted"),
    [
        ("Csv", "{file: a, evry: 2}", "every, file"),
        ("Csv", "{file: a, every: often}", "every, file"),
        ("Csv", "{}", "every, file"),
        ("Plain", "{file: a}", "none"),
        ("Odd", "{}", "BaseModel"),
    ],
)
def test_options_are_validated_by_the_class(modules: Path, name: str, options: str, accepted: str) -> None:  # noqa: ARG001
    (problem,) = problems(track(f"plugin_trackers:{name}", options=options))
    assert accepted in problem


def test_option_problem_names_its_line(modules: Path) -> None:
    text = "schema_version: 3\ndata:\n  name: plugin_data:Words\n  options:\n    size: 3\n"
    (modules / "words.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config("words.yaml")
    assert error.value.problems[0].startswith("line 5: data.options.size")


@pytest.mark.parametrize("override", ["model.name=gptt", "data.name=dummy_txt", "data.name=[1]"])
def test_misspelled_builtin_name_is_refused(override: str) -> None:
    assert len(problems(override)) == 1


def test_fields_of_another_kind_belong_into_options(modules: Path) -> None:  # noqa: ARG001
    (problem,) = problems("data.name=plugin_data:Words", "data.files=a.txt")
    assert "data.options" in problem


def test_set_changes_one_option_and_drops_fields_of_the_old_kind(modules: Path) -> None:
    (modules / "plugin_sized.py").write_text(
        "from pydantic import BaseModel\nfrom plugin_data import Words\n\n\n"
        "class Sized(Words):\n    class Options(BaseModel):\n        size: int = 1\n"
    )
    sets = ["data.name=plugin_sized:Sized", "data.options.size=5"]
    config = load_config("gpt_stdlib", sets)  # python_stdlib has val_fraction
    assert config.as_dict()["data"]["options"] == {"size": 5}
    assert "val_fraction" not in config.as_dict()["data"]


def test_module_beside_the_config_is_found(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (modules / "words.yaml").write_text("schema_version: 3\ndata: {name: 'plugin_data:Words'}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(modules / "words.yaml").data.name == "plugin_data:Words"


def test_installed_package_is_not_hidden_by_a_file(workdir: Path) -> None:
    (workdir / "json.py").write_text("raise RuntimeError\n")
    with pytest.raises(UsageError):
        load_plugin(PLUGINS["data.name"], "json:Words")
    load_config("gpt_smoke")


def test_source_hash_covers_the_whole_package(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = workdir / "plugin_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text(DATA)
    (package / "helper.py").write_text("")
    monkeypatch.syspath_prepend(workdir)
    kind = load_plugin(PLUGINS["data.name"], "plugin_package.data:Words")
    before = source_sha256(kind)
    (package / "helper.py").write_text("x = 1\n")
    assert before != source_sha256(kind)


def test_failing_tracker_does_not_end_the_run(train: Cli, modules: Path) -> None:
    done = train(track("plugin_trackers:Csv", options="{file: a}"), "output.run_id=tracked", more=["--json"])
    assert done.code == 0, done.err
    assert "no such server" in done.err
    assert json.loads((modules / "runs/tracked/finished.json").read_text())["steps"] == 4


def test_resume_of_a_class_with_dropout_is_exact(train_plugin: Cli, cli: Cli, modules: Path) -> None:
    whole = train_plugin("data.name=plugin_data:Words", "output.run_id=whole", "trainer.schedule_steps=4")
    train_plugin("data.name=plugin_data:Words", "output.run_id=part", "trainer.schedule_steps=4", "trainer.max_steps=2")
    rest = cli("train", "--resume", "part", "--set", "trainer.max_steps=4", "--json")
    assert rest.code == 0, rest.err
    assert "has changed since" not in rest.err
    assert rest.json["state_sha256"] == whole.json["state_sha256"]

    (modules / "plugin_model.py").write_text(f"{MODEL}\n# A comment.\n")
    changed = cli("train", "--resume", "part", "--set", "trainer.max_steps=5", "--json")
    assert changed.code == 0, changed.err
    assert "has changed since" in changed.err
    assert cli("train", "--resume", "part", "--set", "model.name=plugin_data:Words").code == 64


def test_run_without_its_dataset_class_still_generates(train: Cli, cli: Cli, modules: Path) -> None:
    assert train("data.name=plugin_data:Words", "output.run_id=words").code == 0
    (modules / "plugin_data.py").unlink()
    del sys.modules["plugin_data"]
    assert cli("generate", "--run", "words", "--prompt", "one", "--max-new-tokens", "2", "--json").code == 0
    assert cli("runs", "list", "--json").code == 0
    assert cli("train", "--resume", "words", "--set", "trainer.max_steps=5").code == 64


def test_recorded_directory_is_used_only_below_the_current_one(
    train_plugin: Cli, cli: Cli, modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was copied to another machine must not decide which code is executed."""
    (modules / "code").mkdir()
    (modules / "plugin_model.py").rename(modules / "code" / "plugin_model.py")
    (modules / "code" / "net.yaml").write_text("schema_version: 3\nmodel: {name: 'plugin_model:Adapter'}\n")
    train_plugin(config="code/net.yaml")
    (run,) = (modules / "runs").iterdir()

    def generate() -> Any:
        sys.modules.pop("plugin_model", None)
        sys.path[:] = [entry for entry in sys.path if not entry.startswith(str(modules))]
        return cli("generate", "--run", run, "--prompt", "one", "--max-new-tokens", "2", "--json")

    assert generate().code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    refused = generate()
    assert refused.code == 64
    assert str(modules / "code") in refused.json["remedy"]
    monkeypatch.syspath_prepend(modules / "code")
    assert cli("generate", "--run", run, "--prompt", "one", "--max-new-tokens", "2", "--json").code == 0

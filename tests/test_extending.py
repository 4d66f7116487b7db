"""docs/extending.md: its files, in an empty directory, are trained, resumed, used and launched by its own commands."""

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.runs.metrics import read_metrics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extending.md"
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.S)
COMMAND = re.compile(r"^    llmtrain (.+)$", re.M)
Cli = Callable[..., Any]


@pytest.fixture
def project(workdir: Path) -> Path:
    """The files of the page in the current directory."""
    for name, text in FILE.findall(PAGE.read_text()):
        (workdir / name).write_text(text)
    return workdir


def commands(word: str) -> list[list[str]]:
    found = [shlex.split(line) for line in COMMAND.findall(PAGE.read_text())]
    return [words for words in found if words[0] == word]


CPU = ("--set", "run.device=cpu", "--set", "run.threads=1")


def test_page_trains_resumes_generates_and_evaluates(project: Path, cli: Cli) -> None:
    (check,) = commands("validate")
    assert cli(*check).code == 0
    start, resume, _ = commands("train")
    for words in (start, resume):
        done = cli(*words, *CPU, "--json")
        assert done.code == 0, done.err
    assert done.json["steps"] == 40
    run = project / "runs" / "numbers"
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    logged = [
        (row["step"], row["train/loss"]) for row in read_metrics(run.joinpath("metrics.jsonl")) if "train/loss" in row
    ]
    assert [(int(step), float(value)) for step, name, value in rows if name == "train/loss"] == logged
    assert logged[-1][1] < logged[0][1]
    check_record(project, run)
    (generate,) = commands("generate")
    assert cli(*generate, "--json").code == 0
    (evaluate,) = commands("eval")
    assert cli(*evaluate, "--json").code == 0
    assert cli("export", "--run", "numbers", "--to", "out").code == 64
    assert not (project / "out").exists()


def check_record(project: Path, run: Path) -> None:
    """Module, class, directory and source hash, in meta.json and in every checkpoint."""
    recorded = json.loads((run / "meta.json").read_text())["plugins"]
    assert set(recorded) == {"model.name", "data.name", "tracking.custom.0"}
    assert (recorded["model.name"]["module"], recorded["model.name"]["class"]) == ("mine", "Bag")
    assert recorded["model.name"]["directory"] == str(project)
    checkpoint = CheckpointStore(run / "checkpoints").newest_usable()
    assert checkpoint
    assert checkpoint.state()["plugins"]["model.name"] == recorded["model.name"]


def install(project: Path, where: Path) -> None:
    """What pip writes for the pyproject.toml of the page: the module, and metadata with its entry points."""
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    name, version = settings["project"]["name"], settings["project"]["version"]
    info = where / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = settings["project"]["entry-points"].items()
    text = "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items()) for group, rows in groups)
    (info / "entry_points.txt").write_text(text)
    for module in settings["tool"]["setuptools"]["py-modules"]:
        (project / f"{module}.py").rename(where / f"{module}.py")


def test_entry_points_of_page_are_names_in_configs(
    project: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(project, tmp_path / "site-packages")
    config = (project / "numbers.yaml").read_text()
    for path, name in (("mine:Bag", "bag"), ("mine:Numbers", "numbers"), ("mine:Csv", "csv")):
        config = config.replace(f"name: {path}", f"name: {name}")
    (project / "numbers.yaml").write_text(config)
    assert cli("validate", "--config", "numbers.yaml").code == 64
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert cli("validate", "--config", "numbers.yaml").code == 0
    done = cli("train", "--config", "numbers.yaml", *CPU, "--set", "trainer.max_steps=3", "--json")
    assert done.code == 0, done.err
    recorded = json.loads((project / "runs/numbers/meta.json").read_text())["plugins"]["data.name"]
    assert (recorded["name"], recorded["module"], recorded["directory"]) == ("numbers", "mine", None)
    names = cli("config-schema").json["$defs"]["PluginModelSection"]["properties"]["name"]
    assert {"enum": ["bag"]} in names["anyOf"]


def test_launch_of_page_ships_the_directory(project: Path, cli: Cli) -> None:
    (words,) = commands("launch")
    done = cli(*words, "--dry-run", "--json")
    assert done.code == 0, done.err
    code = done.json["manifests"][1]
    assert code["data"]["mine.py"] == (project / "mine.py").read_text()


@pytest.mark.slow
def test_page_trains_the_same_run_in_two_processes(project: Path, cli: Cli) -> None:
    start, _, in_two = commands("train")
    reproducible = ("--set", "distributed.reproducible_reduce=true", "--json")
    one = cli(*start, *CPU, "--set", "trainer.grad_accum_steps=2", *reproducible)
    two = cli(*in_two, *CPU, *reproducible)
    assert (one.code, two.code) == (0, 0), two.err
    assert one.json["state_sha256"] == json.loads((project / "runs/two/finished.json").read_text())["state_sha256"]

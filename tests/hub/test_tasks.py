"""The data of stock tasks: found without importing lm_eval, downloaded once, with hashes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stock_task_data import DATA, dataset_files

from hub_server import FakeHub, Repo, serve
from llmtrain.errors import DataError, UsageError
from llmtrain.hub.task_index import find_stock_tasks, read_task_file, task_folder
from llmtrain.hub.tasks import HASHES, fetch_tasks, find_task_data

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve() as hub:
        for task in ("arc_easy", "piqa"):
            hub.repos[DATA[task][0]] = Repo(dataset_files(task, 8), kind="dataset")
        yield hub


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path) -> Run:
    """llmtrain's command line in a process that uses only this hub; offline, none."""

    def run(*words: object, offline: bool = False) -> "subprocess.CompletedProcess[str]":
        unset = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        environment = {**kept, **hub.environment(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
        if offline:
            environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
        command = [sys.executable, "-m", "llmtrain", *map(str, words)]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_every_stock_task_is_found() -> None:
    """By its name, as the whole file says it."""
    for name in ("hellaswag", "arc_challenge", "lambada_openai", "gsm8k", "mmlu_anatomy"):
        ((task,), groups) = find_stock_tasks([name])
        assert task.name == name
        assert groups == {}
        assert read_task_file(task.file)["dataset_path"] == task.dataset
    assert find_stock_tasks(["arc_challenge"])[0][0].dataset == "allenai/ai2_arc"  # of the file that it includes


def test_groups_and_tags_stand_for_their_tasks() -> None:
    tasks, groups = find_stock_tasks(["mmlu"])
    assert len(tasks) == 57
    assert set(groups) == {"mmlu", "mmlu_stem", "mmlu_other", "mmlu_social_sciences", "mmlu_humanities"}
    assert {task.dataset for task in tasks} == {"cais/mmlu"}
    assert {task.name for task in find_stock_tasks(["ai2_arc"])[0]} >= {"arc_easy", "arc_challenge"}


def test_an_unknown_task_gets_the_nearest_names() -> None:
    with pytest.raises(UsageError) as error:
        find_stock_tasks(["helaswag"])
    assert "'hellaswag'" in error.value.what


def test_lm_eval_is_not_imported_to_find_tasks() -> None:
    code = (
        "import sys; from llmtrain.hub.task_index import find_stock_tasks; find_stock_tasks(['mmlu']); "
        "print([name for name in ('lm_eval', 'torch', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_lm_eval_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError) as error:
        task_folder()
    assert error.value.exit_code == 64
    assert "my.jsonl" in str(error.value.remedy)


def test_tasks_are_downloaded_once_with_hashes_and_scored_offline(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    done = run("fetch-tasks", "arc_easy,piqa,grammar", "--to", "tasks", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert [row["dataset"] for row in value["datasets"]] == ["allenai/ai2_arc", "baber/piqa"]
    assert all(row["downloaded"] for row in value["datasets"])
    hashes = json.loads((tmp_path / "tasks" / HASHES).read_text())
    assert set(hashes["allenai/ai2_arc"]["files"]) == set(dataset_files("arc_easy", 8))
    requests = len(hub.requests)
    again = run("fetch-tasks", "arc_easy", "--to", "tasks", "--json")
    assert not json.loads(again.stdout)["datasets"][0]["downloaded"]
    assert len(hub.requests) == requests

    from task_models import llama_model

    llama_model(tmp_path / "base")
    scored = run("eval", "--model", "base", "--tasks", "arc_easy", "--tasks-dir", "tasks", "--json", offline=True)
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout)["tasks"]["arc_easy"]["items"] == 8
    assert len(hub.requests) == requests


def test_damaged_data_is_refused_and_fetched_again(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    run("fetch-tasks", "arc_easy", "--to", "tasks")
    (task,) = find_stock_tasks(["arc_easy"])[0]
    path = tmp_path / "tasks" / "allenai" / "ai2_arc" / "ARC-Easy" / "test-00000-of-00001.parquet"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        find_task_data(task, tmp_path / "tasks")
    assert "fetch-tasks arc_easy" in str(error.value.remedy)
    assert path.name in str(error.value)
    assert run("fetch-tasks", "arc_easy", "--to", "tasks").returncode == 0
    assert find_task_data(task, tmp_path / "tasks").is_dir()
    assert hub.gets(path.name) == 2


def test_offline_the_error_names_the_command(tmp_path: Path) -> None:
    (task,) = find_stock_tasks(["piqa"])[0]
    with pytest.raises(DataError) as error:  # tests are offline
        find_task_data(task, tmp_path / "tasks")
    assert "llmtrain fetch-tasks piqa --to" in str(error.value.remedy)
    with pytest.raises(UsageError) as unreachable:
        fetch_tasks(["piqa"], tmp_path / "tasks")
    assert unreachable.value.remedy == error.value.remedy


def test_a_record_of_hashes_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (task,) = find_stock_tasks(["piqa"])[0]
    folder = tmp_path / "tasks" / "baber" / "piqa"
    folder.mkdir(parents=True)
    (folder / "a.parquet").write_bytes(b"")
    hashes = {"baber/piqa": {"files": {"../../../precious": "0"}}}
    (tmp_path / "tasks" / HASHES).write_text(json.dumps(hashes))
    with pytest.raises(DataError):
        find_task_data(task, tmp_path / "tasks")


def test_launch_and_prefetch_know_the_tasks_of_a_config(run: Run, tmp_path: Path) -> None:
    config: dict[str, Any] = {"trainer.eval_tasks": json.dumps({"tasks": ["piqa", "grammar"], "dir": "tasks"})}
    sets = [part for field, value in config.items() for part in ("--set", f"{field}={value}")]
    done = run("prefetch", "--config", "gpt_smoke", *sets, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"fetched": ["task piqa"]}
    assert (tmp_path / "tasks" / "baber" / "piqa").is_dir()
    assert run("prefetch", "--config", "gpt_smoke", *sets, offline=True).returncode == 0

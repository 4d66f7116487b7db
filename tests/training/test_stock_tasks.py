"""Stock tasks of lm_eval: the numbers are those of its own model class on the exported model."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval_reference import assert_equal, hflm_results
from stock_task_data import TASKS, write_task_data
from task_models import gpt_model, llama_model

from llmtrain.config.task_specs import parse_tasks
from llmtrain.errors import UsageError
from llmtrain.hub.task_index import find_stock_tasks
from llmtrain.training.tasks.score import TaskScore
from llmtrain.training.tasks.task_model import TaskModel
from llmtrain.training.tasks.task_set import load_tasks

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_data(tmp_path_factory.mktemp("tasks"))


def score(model: TaskModel, names: str, data: Path, limit: int | None = None) -> dict[str, TaskScore]:
    tasks = load_tasks(parse_tasks([names], "--tasks"), data, limit)
    return {each.task: each for each in tasks.score(model)}


def exported(model: TaskModel, directory: Path) -> Path:
    model.adapter.export(model.module, directory, model.tokenizer.end_of_text)
    model.tokenizer.export(directory, model.max_length)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_scores_of_a_gpt_are_those_of_its_export(tmp_path: Path, data: Path, kind: str) -> None:
    model = gpt_model(kind)
    directory = tmp_path / "exported"
    directory.mkdir()
    expected = hflm_results(exported(model, directory), TASKS, data)
    assert_equal(score(model, ",".join(TASKS), data), expected)


@pytest.mark.slow
def test_scores_of_a_llama_are_those_of_lm_eval(tmp_path: Path, data: Path) -> None:
    model = llama_model(tmp_path / "base")
    assert_equal(score(model, ",".join(TASKS), data), hflm_results(tmp_path / "base", TASKS, data))
    names = ("arc_easy", "winogrande", "sciq")
    with_examples = ",".join(f"{name}:2" for name in names)
    assert_equal(score(model, with_examples, data), hflm_results(tmp_path / "base", names, data, few_shot=2))


def test_two_tasks_as_lm_eval_scores_them(tmp_path: Path, data: Path) -> None:
    model = llama_model(tmp_path / "base")
    scores = score(model, "arc_easy,winogrande", data)
    assert_equal(scores, hflm_results(tmp_path / "base", ("arc_easy", "winogrande"), data))
    arc = scores["arc_easy"]
    assert (arc.items, arc.few_shot, arc.version, arc.truncated) == (40, 0, "1.0", 0)
    assert arc.metrics["acc"] == sum(arc.values["acc"]) / 40
    assert arc.stderr["acc"] == pytest.approx(np.std(arc.values["acc"], ddof=1) / 40**0.5)


def test_examples_are_the_same_each_time_and_random_state_is_kept(data: Path) -> None:
    model = gpt_model()
    tasks = load_tasks(parse_tasks(["sciq:2"], "--tasks"), data, limit=5)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    first = tasks.score(model)
    second = tasks.score(model)
    found = (random.random(), np.random.rand(), torch.rand(1).item())
    assert first == second
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert found == (random.random(), np.random.rand(), torch.rand(1).item())
    assert first[0].few_shot == 2
    assert first[0].items == 5


def test_a_metric_whose_code_is_on_the_hub_is_refused_before_scoring(tmp_path: Path) -> None:
    """lm_eval logs that it has no function, and fails after the model has answered."""
    folder = tmp_path / "allegro" / "klej-polemo2-in"
    folder.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        rows = [{"sentence": "a b c", "target": "__label__meta_zero"}] * 3
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError) as error:  # tests are offline
        load_tasks(parse_tasks(["polemo2_in"], "--tasks"), tmp_path, None)
    assert "network" in error.value.what
    assert "'f1'" in error.value.what


def test_a_group_has_the_mean_of_its_tasks(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighted by the number of items, as the group says; its tasks are found by a tag that they inherit."""
    from llmtrain.hub import task_index

    folder = tmp_path / "stock" / "pair"
    folder.mkdir(parents=True)
    original = find_stock_tasks(["openbookqa"])[0][0].file
    (folder / "_base").write_text(f"include: {original}\ntag: pair_tasks\n")
    (folder / "one.yaml").write_text("include: _base\ntask: one\n")
    (folder / "two.yaml").write_text("include: _base\ntask: two\ntest_split: null\nvalidation_split: train\n")
    (folder / "pair.yaml").write_text(
        "group: pair\ntask:\n  - pair_tasks\naggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
    )
    monkeypatch.setattr(task_index, "task_folder", lambda: tmp_path / "stock")
    scores = score(gpt_model(), "pair", data)
    assert set(scores) == {"pair", "one", "two"}
    assert scores["pair"].items == 80
    values = [*scores["one"].values["acc"], *scores["two"].values["acc"]]
    assert scores["pair"].metrics["acc"] == pytest.approx(sum(values) / 80)
    assert scores["one"].sha256 != scores["two"].sha256

"""A real chat model scored on stock tasks: the same accuracies as lm_eval's own model class, to the last digit."""

from pathlib import Path

import pytest
from lm_eval_reference import assert_equal, hflm_results
from stock_task_data import write_task_data

from llmtrain.core.arguments import Source
from llmtrain.inference.load import load_model
from llmtrain.inference.tasks import TaskOptions, evaluate_tasks, read_tasks
from real_model import smollm2

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
TASKS = ("hellaswag", "arc_easy", "piqa", "winogrande", "lambada_openai", "openbookqa")


def test_scores_of_a_real_model_are_those_of_lm_eval(tmp_path: Path) -> None:
    directory = smollm2(tmp_path)
    data = write_task_data(tmp_path / "tasks", TASKS, count=8)
    expected = hflm_results(directory, TASKS, data, working_dir=tmp_path)
    loaded = load_model(Source(model=str(directory)), "cpu")
    tasks = read_tasks([",".join(TASKS)], str(data), None)
    found = evaluate_tasks(loaded, tasks, TaskOptions(chat_template=False))
    assert_equal(found.tasks, expected)

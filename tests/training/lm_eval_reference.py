"""What lm_eval computes with its own model class, to compare with."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.hub.task_index import find_stock_tasks
from llmtrain.training.tasks.score import TaskScore


def hflm_results(
    directory: Path, names: tuple[str, ...], data: Path, few_shot: int | None = None, working_dir: Path | None = None
) -> dict[str, Any]:
    """What lm_eval itself computes, with its own model class, from the same files."""
    import yaml
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = (working_dir or directory.parent) / "lm-eval-yaml"
    folder.mkdir(exist_ok=True)
    for task in find_stock_tasks(names)[0]:
        values = {"include": str(task.file), "task": task.name, "dataset_path": str(data / str(task.dataset))}
        (folder / f"{task.name}.yaml").write_text(yaml.safe_dump(values))
    model = HFLM(pretrained=str(directory), dtype="float32", device="cpu", batch_size=8)
    results = simple_evaluate(
        model,
        tasks=list(names),
        num_fewshot=few_shot,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    return dict(results["results"])


def assert_equal(scores: dict[str, TaskScore], expected: dict[str, Any]) -> None:
    compared = 0
    for task, values in expected.items():
        for key, value in values.items():
            metric, comma, _ = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            found = scores[task].metrics[metric]
            if metric == "perplexity":
                assert found == pytest.approx(value, rel=1e-5)
            else:
                assert found == value, f"{task} {metric}"
            compared += 1
    assert compared >= len(expected)

"""What a run is predicted to need, beside what it needs."""

import json
from pathlib import Path

import pytest
from tests.conftest import Cli
from tests.plan.plan_cases import GPT2, GPU, make_config

from llmtrain.core.text import format_bytes
from llmtrain.plan.history import past_runs
from llmtrain.plan.prediction import beside, predict, recorded_prediction, usage_of
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.view import RunView

GPT = ("model.name=gpt", "model.n_layers=1", "model.n_heads=2", "trainer.max_steps=8")


def test_start_records_a_prediction_and_the_result_has_it(train: Cli, workdir: Path) -> None:
    done = train(*GPT, "output.run_id=first", more=["--json"])
    assert done.code == 0, done.err
    predicted = done.json["predicted"]
    view = RunView(RunDirectory(workdir / "runs" / "first"))
    recorded = recorded_prediction(view)
    assert recorded is not None
    assert recorded.as_dict() == predicted
    assert json.loads(view.run.finished.read_text())["predicted"] == predicted
    assert predicted["peak_memory_bytes"] > 100e6
    assert "formula" in predicted["memory_source"]
    assert predicted["seconds"] > 0
    assert "FLOPs" in predicted["time_source"]
    usage = usage_of(view)
    assert usage.peak_memory_bytes == done.json["peak_memory_bytes"]
    assert usage.seconds == view.seconds


def test_second_run_of_a_shape_is_predicted_from_the_first(train: Cli, workdir: Path) -> None:
    assert train(*GPT, "output.run_id=first").code == 0
    done = train(*GPT, "output.run_id=second", more=["--json"])
    assert len(past_runs("runs")) == 2
    predicted = done.json["predicted"]
    assert predicted["memory_source"] == "measured by run first"
    assert "from run first" in predicted["time_source"]
    first = json.loads((workdir / "runs" / "first" / "finished.json").read_text())
    assert predicted["peak_memory_bytes"] == first["peak_memory_bytes"]
    assert predicted["tokens_per_second"] == first["tokens_per_second"]


def test_model_that_the_formula_does_not_know_says_so(train: Cli) -> None:
    done = train("output.run_id=dummy", more=["--json"])  # dummy_gpt
    assert done.code == 0, done.err
    predicted = done.json["predicted"]
    assert (predicted["peak_memory_bytes"], predicted["seconds"]) == (None, None)
    assert "dummy_gpt" in predicted["memory_source"]


def test_show_has_both_numbers(train: Cli, cli: Cli) -> None:
    assert train(*GPT, "output.run_id=first").code == 0
    shown = cli("runs", "show", "first").out
    (memory,) = [line for line in shown.splitlines() if line.startswith("memory ")]
    (time,) = [line for line in shown.splitlines() if line.startswith("time ")]
    assert "predicted" in memory
    assert "predicted" in time
    value = cli("runs", "show", "first", "--json").json
    assert value["predicted"]["peak_memory_bytes"] > 0
    assert value["usage"]["peak_memory_bytes"] > 0


@pytest.mark.parametrize("damaged", [7, [], {"peak_memory_bytes": "much", "seconds": -1, "time_source": None}])
def test_damaged_record_is_not_an_error(tmp_path: Path, damaged: object) -> None:
    row = {"generation": 1, "from_step": 0, "crashes": 0, "predicted": damaged}
    (tmp_path / "generations.json").write_text(json.dumps([row]))
    found = recorded_prediction(RunView(RunDirectory(tmp_path)))
    if found is not None:
        assert (found.peak_memory_bytes, found.seconds) == (None, None)


def test_unknown_parts_have_a_reason() -> None:
    found = predict(make_config(GPT2), GPU)  # of the GPU only the memory is known
    assert found.peak_memory_bytes is not None
    assert found.seconds is None
    assert "not its speed" in found.time_source


def test_text_of_two_numbers() -> None:
    assert beside(20e9, 22e9, format_bytes) == "20 GB, predicted 22 GB (+10 %)"
    assert beside(None, 22e9, format_bytes) == "predicted 22 GB"
    assert beside(20e9, None, format_bytes) == "20 GB"
    assert beside(None, None, format_bytes) is None

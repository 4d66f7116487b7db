"""What a run records for the plans of later runs: its device, and the seconds that are not training."""

import json
from pathlib import Path

from llmtrain.plan.history import past_runs
from llmtrain.runs.metadata import cpu_name


def test_run_records_device_and_times(train, workdir: Path) -> None:
    sets = ("trainer.max_steps=8", "trainer.eval_every_steps=4", "trainer.save_every_steps=4")
    done = train("output.run_id=first", "plan.prices.gpu_hour={h100: 2.5}", *sets)
    assert done.code == 0, done.err
    result = json.loads((workdir / "runs" / "first" / "finished.json").read_text())
    assert result["device_name"] == cpu_name()
    assert (result["gpu_hours"], result["cost"]) == (None, None)  # a CPU
    timing = result["timing"]
    assert (timing["evaluations"], timing["saves"]) == (2, 2)
    assert min(timing["first_step"], timing["evaluating"], timing["saving"]) > 0
    (row,) = json.loads((workdir / "runs" / "first" / "generations.json").read_text())
    assert row["device_name"] == cpu_name()
    (past,) = past_runs(str(workdir / "runs"))
    assert (past.run_id, past.is_gpu, past.world_size) == ("first", False, 1)
    assert past.seconds_per_save is not None

"""llmtrain.run_sweep: a sweep from a script or a notebook."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.config.load import ConfigSource, load_config
from llmtrain.config.schema import Config
from llmtrain.core.arguments import as_text
from llmtrain.errors import UsageError
from llmtrain.sweep.driver import drive
from llmtrain.sweep.local import LocalWorkers, default_parallel, warn_of_inexact_gpus
from llmtrain.sweep.prepare import prepare, reopen
from llmtrain.sweep.record import SweepDirectory, find_sweep
from llmtrain.sweep.show import describe
from llmtrain.sweep.space import parse_space
from llmtrain.sweep.spec import read_spec


@dataclass(frozen=True)
class SweepResult:
    """A sweep that is complete."""

    name: str
    path: Path
    rows: list[dict[str, Any]] = field(repr=False)
    """One per trial, in order of their numbers: `trial`, `values`, `status`, `step`, `score`, `seeds`, ..."""
    winner: dict[str, Any] | None
    """The best trial: its number, run id, values and score (the metric). None if every trial diverged or failed."""

    @property
    def best_config(self) -> Config | None:
        """The config of the best trial, ready to train."""
        best = SweepDirectory(self.path).best
        return load_config(best) if self.winner else None


def run_sweep(
    config: ConfigSource | None = None,
    space: str | Mapping[str, Any] | None = None,
    *,
    trials: int | None = None,
    parallel: int | None = None,
    search: str = "halton",
    halving: int | Mapping[str, Any] | None = None,
    seeds: int = 1,
    metric: str = "val/loss",
    name: str | None = None,
    resume: str | None = None,
    root: str = "runs",
) -> SweepResult:
    """Search for the best values of config fields, with `llmtrain train` processes on this machine.

    config: as for load_config. Default: gpt_stdlib.
    space: as for --space, or a dict such as {"trainer.lr": "log(1e-3,1e-1)", "model.n_layers": [4, 8]}.
    trials: number of trials. parallel: trials at a time. search: halton, random, grid or optuna.
    halving: least number of steps after which trials are compared, or a dict with `first_rung`, `eta` and `bracket`.
    seeds: seeds per finalist; without a space, of the config. metric: what is compared, as for
    trainer.best_metric.
    name: name of the sweep. resume: name of a sweep to continue, in the directory `root`, instead of all of these.

    Raises Interrupted if it was stopped by SIGTERM or Ctrl-C and can be continued.
    """
    if parallel is not None and parallel < 1:
        raise UsageError(f"parallel must be at least 1, got {parallel}.")
    if resume is not None:
        others = (config, space, trials, halving, name)
        if any(each is not None for each in others) or (search, seeds, metric) != ("halton", 1, "val/loss"):
            raise UsageError(
                "resume continues a sweep as it was started.", remedy="Pass nothing else but root and parallel."
            )
        sweep = reopen(find_sweep(as_text("root", root), as_text("resume", resume)))
    else:
        values: dict[str, Any] = {
            "name": name,
            "space": parse_space(space) if isinstance(space, str) else space,
            "trials": trials,
            "search": search,
            "halving": {"first_rung": halving} if isinstance(halving, int) else halving,
            "seeds": seeds,
            "metric": metric,
        }
        spec, read = read_spec({key: value for key, value in values.items() if value is not None}, "run_sweep")
        sweep, known = prepare(spec, read, config)
        sweep.create(known)
    run = sweep.base.run
    warn_of_inexact_gpus(run)
    workers = LocalWorkers(sweep.directory, run.device, sweep.search_path)
    drive(sweep, workers, parallel or default_parallel(run, sweep.threads or 1))
    return result_of(sweep.directory)


def result_of(directory: SweepDirectory) -> SweepResult:
    table = describe(directory)
    rows: Sequence[dict[str, Any]] = table["rows"]
    return SweepResult(directory.name, directory.path, list(rows), table["winner"])

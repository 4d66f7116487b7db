"""A sweep before its first trial: everything is checked, with every problem at once, then recorded; or read back."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.document import Document
from llmtrain.config.load import ConfigSource, load_config, read_config
from llmtrain.config.schema import Config, differences
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.files import is_there
from llmtrain.core.text import first_names, plural
from llmtrain.distributed.machine_limits import omp_threads
from llmtrain.errors import ConfigError, UsageError
from llmtrain.launch.code_bundle import CodeBundle, read_bundle
from llmtrain.runs.directory import check_writable, new_run_id
from llmtrain.sweep.halving import rungs_to
from llmtrain.sweep.jobs import Budget
from llmtrain.sweep.optuna_search import check_installed
from llmtrain.sweep.record import SweepDirectory, already_exists
from llmtrain.sweep.search import draw
from llmtrain.sweep.space import Space, read_space
from llmtrain.sweep.spec import GRID, MAX_NAME, MAX_TRIALS, OPTUNA, SweepSpec, dump_spec, load_spec
from llmtrain.sweep.trials import Trial, TrialConfigs, check_trials, number_trials

VERSION = 1


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was started: nothing of it changes while it runs."""

    directory: SweepDirectory
    spec: SweepSpec
    space: Space
    budget: Budget
    configs: TrialConfigs
    base: Config
    """The config without the values of a trial."""
    source: str | None
    """Path of the config file, or name of the preset; None if a program passed the config."""
    threads: int | None
    is_launched: bool
    code: CodeBundle | None = None
    """What is shipped to the pods of a launched sweep."""

    @property
    def search_path(self) -> str:
        """The directory of the config, where its plugins are looked for."""
        if self.source is None or not Path(self.source).is_file():
            return ""
        return str(Path(self.source).parent.absolute())

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "spec": dump_spec(self.spec),
            "trials": self.budget.trials,
            "rungs": [steps for steps in self.budget.rungs if steps is not None],
            "config": self.source,
            "threads": self.threads,
            "is_launched": self.is_launched,
            "code_sha256": self.code.sha256 if self.code else None,
        }

    def create(self, trials: Sequence[Trial]) -> None:
        """Record it, with the trials that are known."""
        document = self.configs.document
        base = {"source": document.source, "document": document.values, "shared": self.configs.shared}
        self.directory.create(self.as_dict(), base, trials, self.code.contents if self.code else None)


def prepare(
    spec: SweepSpec,
    space: Space,
    config: ConfigSource | None,
    overrides: Sequence[Any] = (),
    launch_root: str | None = None,
    with_code: str | None = None,
) -> tuple[Sweep, list[Trial]]:
    """A new sweep, and its trials as far as they are known before the first one. Nothing is written yet. `overrides`:
    those of the command line, which come after those of the spec. `launch_root`: train on a cluster, and keep the
    record and the fetched metrics in this directory; output.root_dir is one of the pods. `with_code`: directory of code
    to ship to them."""
    launch = launch_root is not None
    if spec.search == OPTUNA:
        check_installed()
    shared: list[Any] = [*spec.overrides(), *overrides]
    base = load_config(config, shared, for_launch=launch)  # with plugins, and notes on an old document
    document, _ = read_config(config, [], for_launch=launch)
    name = spec.name or new_run_id(base.run.name)[:MAX_NAME].rstrip("-")
    directory = SweepDirectory(Path(launch_root or base.output.root_dir).expanduser() / name)
    threads = None
    if not launch:
        threads = base.run.threads or omp_threads(os.environ) or 1
        shared.append(("run.threads", threads))
    if base.tracking.group is None:
        shared.append(("tracking.group", name))
    budget = _budget(spec, space, base.trainer)
    source = str(config) if isinstance(config, str | Path) else None
    configs = TrialConfigs(document, shared, launch)
    code = None if with_code is None else read_bundle(with_code)
    sweep = Sweep(directory, spec, space, budget, configs, base, source, threads, launch, code)
    trials = _first_trials(sweep)
    check_trials(spec, trials, configs)
    _check_free(sweep)
    return sweep, trials


def reopen(directory: SweepDirectory, config: ConfigSource | None = None) -> Sweep:
    """A sweep that was started before. Raises UsageError if its config has changed since."""
    recorded = directory.read_spec()
    spec = load_spec(recorded["spec"])
    space = read_space(spec.space, [])
    recorded_base = directory.read_base()
    document = Document(recorded_base["source"], recorded_base["document"])
    shared = [each if isinstance(each, str) else (each[0], each[1]) for each in recorded_base["shared"]]
    is_launched = bool(recorded["is_launched"])
    configs = TrialConfigs(document, shared, is_launched)
    base = load_config(document.values, shared, for_launch=is_launched)
    budget = Budget.of(spec, recorded["trials"], recorded["rungs"])
    code_sha256 = recorded.get("code_sha256")
    sweep = Sweep(
        directory,
        spec,
        space,
        budget,
        configs,
        base,
        recorded["config"],
        recorded["threads"],
        is_launched,
        directory.read_code(code_sha256) if code_sha256 else None,
    )
    _check_unchanged(sweep, config)
    return sweep


def _budget(spec: SweepSpec, space: Space, trainer: TrainerSection) -> Budget:
    trials = spec.trials or 1
    if spec.search == GRID and spec.trials is None:
        trials = space.count(at_most=MAX_TRIALS + 1) or 1
        if trials > MAX_TRIALS:
            raise ConfigError("the sweep", [f"the grid has more than {MAX_TRIALS:,} combinations. Set trials."])
    rungs: list[int] = []
    if spec.halving and trainer.max_epochs is None:
        rungs = rungs_to(trainer.steps, spec.halving.first_rung, spec.halving.eta)
    return Budget.of(spec, trials, rungs)


def _first_trials(sweep: Sweep) -> list[Trial]:
    """All trials, or the first bracket of a search that learns from results."""
    count = sweep.budget.trials
    search = "halton" if sweep.spec.search == OPTUNA else sweep.spec.search  # nothing is known yet
    drawn = draw(sweep.space, search, sweep.spec.seed, count)
    if len(drawn) < count:
        what = f"trials is {count}, but only {plural(len(drawn), 'different trial')} can be drawn from the space"
        raise ConfigError(
            "the sweep",
            [f"{what}: numbers of a range have four significant digits. Widen a range, or lower trials."],
        )
    if sweep.spec.search == OPTUNA:
        drawn = drawn[: sweep.budget.size]
    return number_trials(sweep.directory.name, drawn, sweep.configs)


def _check_free(sweep: Sweep) -> None:
    """Refuse a name that is taken."""
    directory = sweep.directory
    check_writable(directory.root)
    if is_there(directory.path):
        raise already_exists(directory)
    numbers = range(sweep.budget.trials)
    taken = [
        f"{directory.name}-{number}" for number in numbers if is_there(directory.root / f"{directory.name}-{number}")
    ]
    if taken:
        raise UsageError(
            f"The trials of a sweep '{directory.name}' would be runs that exist already: {first_names(taken)}.",
            remedy="Choose another --name.",
        )


def _check_unchanged(sweep: Sweep, config: ConfigSource | None) -> None:
    """Refuse another config than the sweep was started with."""
    source = config if config is not None else sweep.source
    if source is None:
        return
    if config is None and isinstance(source, str) and not Path(source).is_file():
        return  # a preset, or a file that was deleted: what was recorded counts
    document, _ = read_config(source, [], for_launch=sweep.is_launched)
    now = load_config(document.values, sweep.configs.shared, for_launch=sweep.is_launched)
    changes = differences(sweep.base.as_dict(), now.as_dict())
    if changes:
        fields = "".join(f"\n  - {path}: {old!r} -> {new!r}" for path, old, new in changes)
        raise UsageError(
            f"The config has changed since sweep '{sweep.directory.name}' was started:{fields}",
            remedy="Undo the changes, or start another sweep with --name.",
        )

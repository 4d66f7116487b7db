"""What a sweep is asked to do: the fields of a sweep file, which the options of `llmtrain sweep` fill in too."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError

from llmtrain.config.best_metric import VAL_LOSS, is_higher_better, is_known, known_metrics
from llmtrain.config.document import Document, read_document
from llmtrain.config.load import flat_overrides
from llmtrain.config.problems import describe_error
from llmtrain.config.section import RUN_ID_PATTERN, CountOrZero, PositiveInt, Problem, Section
from llmtrain.errors import ConfigError, UsageError, nearest
from llmtrain.sweep.space import Space, read_space

MAX_NAME = 30
"""Characters of a name: a trial adds its number and perhaps a seed, and is a run id."""
MAX_TRIALS = 10_000
"""Each of them is a process, a run directory and a row of the table."""
GRID = "grid"
OPTUNA = "optuna"
OPTUNA_BATCH = 8
"""Trials that Optuna proposes at a time, without halving. Not the number of workers, on which nothing may depend."""


class HalvingSection(Section):
    """Successive halving: trials that are worse than others after a few steps train no longer."""

    first_rung: PositiveInt
    """Least number of steps after which trials are compared for the first time."""
    eta: Annotated[int, Field(ge=2, le=100)] = 3
    """One trial in `eta` trains on to the next rung, which has `eta` times as many steps."""
    bracket: PositiveInt | None = None
    """Trials that are compared with each other; trials of the next bracket use workers that would wait. null means all
    trials; with search optuna, as many as leave one for the last rung, so that later brackets can learn from them."""


class SweepSpec(Section):
    """A sweep: the space, the search and the budget."""

    name: Annotated[str, Field(pattern=RUN_ID_PATTERN, max_length=MAX_NAME)] | None = None
    """Name of the sweep, and of its directory; trials are the runs NAME-0, NAME-1, ... null derives it from run.name
    and the time."""
    config: Annotated[str, Field(min_length=1)] | None = None
    """Config file or name of a preset that all trials share. null means gpt_stdlib."""
    set: dict[str, JsonValue] = {}
    """Fields of the config that have another value in all trials."""
    space: dict[str, JsonValue] = {}
    """Field -> [a, b], uniform(a,b), log(a,b) or int(a,b); or a mapping with these `values`, and `when`: the values of
    earlier fields with which the field is varied."""
    search: Literal["halton", "random", "grid", "optuna"] = "halton"
    """`halton` fills the space evenly, `random` does not, `grid` takes all combinations of lists and integers, `optuna`
    learns from finished trials (extra `optuna`)."""
    trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)] | None = None
    """Number of trials. null means all combinations of a grid, and 1 without a space."""
    seeds: Annotated[int, Field(ge=1, le=100)] = 1
    """Runs per finalist, each with another run.seed: their scores have a mean and a standard error."""
    finalists: Annotated[int, Field(ge=1, le=100)] = 3
    """The best trials that are trained with several seeds."""
    metric: str = VAL_LOSS
    """What is compared, of the evaluation at a trial's last step: any metric that trainer.best_metric accepts. Of some
    the lower is better (val/loss), of others the higher (tasks/NAME/acc)."""
    halving: HalvingSection | None = None
    """Successive halving; null trains every trial to its end."""
    seed: CountOrZero = 0
    """Seed of the search. run.seed is that of the trials."""

    def problems(self) -> Iterator[Problem]:
        if not is_known(self.metric):
            known = list(known_metrics())
            yield (
                ("metric",),
                f"metric '{self.metric}' is written by no evaluation.{nearest(self.metric, known)} "
                f"Known: {', '.join(known)}.",
            )
        if self.space and self.trials is None and self.search != GRID:
            yield (("trials",), "trials is missing: say how many (--trials 27), or choose search grid.")
        if not self.space and (self.trials or 1) > 1:
            yield (("trials", "space"), f"trials is {self.trials}, but there is no space: all trials would be equal.")
        if self.halving and not self.space:
            yield (("halving", "space"), "halving needs a space with several trials.")
        if not self.space and self.seeds == 1:
            yield (
                ("space", "seeds"),
                "there is nothing to compare: pass a space (--space), or several seeds (--seeds 3).",
            )

    @property
    def is_higher_better(self) -> bool:
        return is_higher_better(self.metric)

    def overrides(self) -> list[tuple[str, Any]]:
        """`set` as load_config takes it."""
        return flat_overrides(self.set)


def dump_spec(spec: SweepSpec) -> dict[str, Any]:
    """The spec as JSON values, without `set`, which may contain passwords. The space is a list: the order of its fields
    matters, and JSON files are sorted."""
    return {**spec.model_dump(mode="json", exclude={"set", "space"}), "space": list(spec.space.items())}


def load_spec(values: Mapping[str, Any]) -> SweepSpec:
    """What dump_spec wrote."""
    return SweepSpec(**{**values, "space": dict(values["space"])})


def read_spec(values: Mapping[str, Any], source: str) -> tuple[SweepSpec, Space]:
    """The checked spec and its space. Raises ConfigError with all problems. `source`: what messages call it."""
    problems: list[str] = []
    space = Space()
    given = values.get("space")
    if isinstance(given, Mapping):
        space = read_space({str(path): value for path, value in given.items()}, problems)
    spec, invalid = _build(dict(values), problems)
    for concerned, text in spec.problems():
        if not invalid.intersection(concerned):
            problems.append(text)
    if not problems:
        problems += _counts(spec, space)
    if problems:
        raise ConfigError(source, problems)
    return spec, space


def read_file(path: Path) -> Document:
    """A sweep file, not checked yet. Its config is relative to it."""
    document = read_document(path)
    config = document.values.get("config")
    if isinstance(config, str) and (path.parent / config).is_file():
        document.values["config"] = str(path.parent / config)
    return document


def _build(values: dict[str, Any], problems: list[str]) -> tuple[SweepSpec, set[str]]:
    """The spec without its invalid fields, and their names; what is wrong with them is added to problems."""
    try:
        return SweepSpec(**values), set()
    except ValidationError as error:
        errors = error.errors(include_url=False)
    except TypeError:
        raise UsageError("The fields of a sweep must be text.") from None
    invalid = set()
    for each in errors:
        name = str(each["loc"][0])
        if name not in invalid:
            path = ("sweep", *map(str, each["loc"]))
            problems.append(describe_error(path, each, SweepSpec, values.get(name)))
        invalid.add(name)
    return SweepSpec(**{name: value for name, value in values.items() if name not in invalid}), invalid


def _counts(spec: SweepSpec, space: Space) -> Iterator[str]:
    """Problems with the number of trials."""
    if spec.search == GRID:
        for each in space.fields:
            if each.range.count is None:
                yield f"space {each.path}: search grid needs a list or int(a,b), got a range of real numbers."
    trials = spec.trials or 0
    count = space.count(at_most=trials)
    if count is not None and trials > count:
        yield f"trials is {trials}, but the space has only {count} combinations. Lower it, or widen the space."

"""`trainer.objective`: what a run minimizes. One class per objective, chosen by `trainer.objective.name`."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from llmtrain.config.section import PLUGIN_TAG, ClassName, NotNegative, Section, kind_tag

DEFAULT_OBJECTIVE = "next_token"
Beta = Annotated[float, Field(gt=0, le=100)]


class ObjectiveSection(Section):
    """What every objective has."""

    name: str
    """Name of the objective."""


class NextTokenSection(ObjectiveSection):
    """Predict the next token: the mean cross-entropy of the target tokens of a step."""

    name: Literal["next_token"] = "next_token"
    """Name of the objective."""


class DpoSection(ObjectiveSection):
    """Direct preference optimization: -log sigmoid(beta * ((chosen - its reference) - (rejected - its reference))), of
    log-probabilities summed over each answer. The reference is the model at step 0."""

    name: Literal["dpo"]
    """Name of the objective."""
    beta: Beta = 0.1
    """How far the model may move from the reference; a larger value keeps it closer."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are assumed to be labeled the wrong way round (conservative DPO)."""


class IpoSection(ObjectiveSection):
    """Identity preference optimization: (difference of the log-ratios - 1 / (2 * beta))**2, of mean log-probabilities
    per token, compared with those of the model at step 0."""

    name: Literal["ipo"]
    """Name of the objective."""
    beta: Beta = 0.1
    """The margin that is aimed at is 1 / (2 * beta)."""


class OrpoSection(ObjectiveSection):
    """Odds ratio preference optimization: the loss per token of the chosen answer, and beta times the negative log
    sigmoid of the log odds ratio. Without a reference; it replaces supervised fine-tuning, too."""

    name: Literal["orpo"]
    """Name of the objective."""
    beta: Beta = 0.1
    """Weight of the odds ratio."""


class SimpoSection(ObjectiveSection):
    """Simple preference optimization: -log sigmoid(beta * (chosen - rejected) - gamma), of mean log-probabilities per
    token. Without a reference."""

    name: Literal["simpo"]
    """Name of the objective."""
    beta: Beta = 2.0
    """Scale of the difference."""
    gamma: NotNegative = 1.0
    """Margin by which the chosen answer should win."""


class PluginObjectiveSection(ObjectiveSection):
    """An objective class of your own (docs/extending.md)."""

    name: ClassName
    """Import path of the class, or the name of an entry point in the group `llmtrain.objectives`."""
    options: dict[str, JsonValue] = {}
    """Options of the class, validated by its `Options`."""


OBJECTIVES: dict[str, type[ObjectiveSection]] = {
    "next_token": NextTokenSection,
    "dpo": DpoSection,
    "ipo": IpoSection,
    "orpo": OrpoSection,
    "simpo": SimpoSection,
}

ObjectiveConfig = Annotated[
    Annotated[NextTokenSection, Tag("next_token")]
    | Annotated[DpoSection, Tag("dpo")]
    | Annotated[IpoSection, Tag("ipo")]
    | Annotated[OrpoSection, Tag("orpo")]
    | Annotated[SimpoSection, Tag("simpo")]
    | Annotated[PluginObjectiveSection, Tag(PLUGIN_TAG)],
    Discriminator(kind_tag(*OBJECTIVES)),
]


def objective_class(values: Any) -> type[ObjectiveSection] | None:
    """The class of an objective with these fields; None if `name` is not text."""
    name = DEFAULT_OBJECTIVE
    if isinstance(values, dict):
        name = values.get("name", DEFAULT_OBJECTIVE)
    if not isinstance(name, str):
        return None
    return OBJECTIVES.get(name, PluginObjectiveSection)

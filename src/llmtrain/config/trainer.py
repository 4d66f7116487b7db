"""The `trainer` section: batch, optimizer, schedule, evaluation and checkpoints."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from llmtrain.config.best_metric import OF_PAIRS, OF_TOKENS, VAL_LOSS, is_known, known_metrics, task_of
from llmtrain.config.objective import NextTokenSection, ObjectiveConfig, PluginObjectiveSection
from llmtrain.config.section import (
    CountOrZero,
    DefaultMarker,
    MayChange,
    Names,
    NotNegative,
    OrDefault,
    Positive,
    PositiveInt,
    Problem,
    Section,
    Share,
    Text,
    TwoOrMoreOrAll,
)
from llmtrain.config.task_specs import TaskSpec, parse_tasks
from llmtrain.errors import UsageError

DEFAULT_STEPS = 1000
BF16_ACTIVATIONS = ("bf16", "fp8")
"""Precisions whose activations are bfloat16."""
FP8_MULTIPLE = 16
"""Widths of matrices that a GPU multiplies in FP8 are multiples of this."""
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "muon": {"lr": 0.01, "schedule": "wsd", "decay_fraction": 0.5, "momentum": 0.95, "momentum_warmup_steps": 250},
}
"""Defaults that depend on the optimizer. They are filled in when a config is loaded, and recorded with it."""


def with_optimizer_defaults(trainer: dict[str, Any]) -> dict[str, Any]:
    """The fields of a trainer section, with the defaults of its optimizer for those that are not set or null."""
    filled: dict[str, Any] = {}
    optimizer = trainer.get("optimizer")
    if isinstance(optimizer, str):
        filled |= OPTIMIZER_DEFAULTS.get(optimizer, {})
    for name, value in trainer.items():
        if value is not None or not _is_defaulted(name):
            filled[name] = value
    return filled


def _is_defaulted(name: str) -> bool:
    info = TrainerSection.model_fields.get(name)
    return info is not None and any(isinstance(each, DefaultMarker) for each in info.metadata)


class EvalTasksSection(Section):
    """Tasks to score the model on while it trains (docs/evaluating.md)."""

    tasks: Names
    """Names of tasks: of lm_eval (hellaswag, arc_easy:5), of llmtrain (arithmetic, grammar, spelling), or files of
    items (my.jsonl)."""
    limit: PositiveInt | None = None
    """Score only the first items of each task. null scores all of them."""
    every: PositiveInt = 1
    """Score at every n-th evaluation, and at the last one."""
    dir: Text | None = None
    """Directory of `llmtrain fetch-tasks`. null means tasks/ in data.cache_dir."""

    def specs(self) -> list[TaskSpec]:
        return parse_tasks(self.tasks, "trainer.eval_tasks.tasks")

    def problems(self) -> Iterator[Problem]:
        try:
            self.specs()
        except UsageError as problem:
            yield ("tasks",), str(problem)


class TrainerSection(Section):
    """Batch, optimizer, schedule, evaluation and checkpoints. A step is one optimizer step."""

    max_steps: MayChange[PositiveInt | None] = None
    """Number of optimizer steps. null means as many as max_epochs takes, or 1000."""
    max_epochs: MayChange[PositiveInt | None] = None
    """Number of passes over the training data, if max_steps is not reached first. The model is evaluated and saved
    after each."""
    best_metric: Text = VAL_LOSS
    """What decides which checkpoint is the best one and when training stops early: `val/loss`, another metric of the
    evaluations, or a score such as `tasks/hellaswag/acc_norm`, of a task in eval_tasks."""
    early_stopping_patience: MayChange[PositiveInt | None] = None
    """Stop after this many evaluations without a better value of best_metric. null disables early stopping."""
    micro_batch_size: OrDefault[PositiveInt] = 8
    """Sequences per forward pass of one process."""
    grad_accum_steps: OrDefault[PositiveInt] = 1
    """Micro-batches per step, over all processes; at least the number of processes."""
    objective: ObjectiveConfig = NextTokenSection()
    """What the run minimizes: `next_token`, or with pairs of data.name preference_jsonl `dpo`, `ipo`, `orpo` or
    `simpo`, each with fields of its own."""
    scale_batch: bool = False
    """Count `grad_accum_steps` per process instead, so that the batch grows with the number of processes. Results then
    depend on that number."""
    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"
    """Optimizer. `muon` orthogonalizes the updates of the blocks' matrices and uses AdamW for all other weights: it
    reaches the same loss in fewer steps and needs less memory than `adamw`; not with LoRA. `adafactor` needs the least
    memory."""
    lr: OrDefault[Positive] = 3e-4
    """Peak learning rate. null means the default (docs/recipes.md). Default with muon: 0.01, for a
    modern GPT by its width. It is the rate of the matrices, whose updates are scaled by sqrt(max(1, rows / columns))
    and which have no warmup. Embeddings and output layer have 0.6 of it, norms and biases 0.3."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the schedule."""
    schedule: OrDefault[Literal["cosine", "linear", "constant", "wsd"]] = "cosine"
    """Learning-rate schedule after the warmup: `cosine` and `linear` decay to min_lr, `constant` stays at lr, `wsd`
    (warmup, stable, decay) stays at lr and decays linearly at the end. Default with muon: wsd."""
    schedule_steps: PositiveInt | None = None
    """Steps until the schedule reaches min_lr. null means max_steps. Set it if max_steps may be raised later."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warmup to lr. With muon, matrices have no warmup of their learning rate; all other weights do."""
    decay_fraction: OrDefault[Annotated[float, Field(gt=0, le=1)]] = 0.2
    """Share of the schedule that `wsd` spends decaying. Default with muon: 0.5."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices; biases and norms have none."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    """AdamW's beta1 and beta2."""
    momentum: OrDefault[Share | None] = None
    """Muon's momentum (Nesterov). Default with muon: 0.95. Other optimizers do not use it."""
    momentum_warmup_steps: OrDefault[CountOrZero | None] = None
    """Steps in which muon's momentum rises from 0.85. Default with muon: 250."""
    max_grad_norm: Positive | None = 1.0
    """Clip the gradient norm to this value. null disables clipping."""
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    """`bf16` computes forward and backward in bfloat16; weights, gradients and optimizer state stay float32. A CPU
    without bfloat16 instructions computes in float32. `fp8` (experimental) is bf16 with the matrix products of the
    blocks' linear layers in FP8 while they are trained, on GPUs of compute capability 8.9 and later, for widths of
    2,048 and more (docs/fine-tuning.md)."""
    compile: bool = False
    """Use torch.compile."""
    activation_checkpointing: MayChange[Literal["none", "blocks", "selective"]] = "none"
    """Compute activations again in the backward pass to save memory: `blocks` keeps only the input of each transformer
    block; `selective` also keeps what attention needs and computes, which is faster and needs more memory. With
    model.attention eager, `selective` keeps the results of all matrix products."""
    log_every_steps: MayChange[PositiveInt] = 10
    """Steps between logged training losses."""
    eval_every_steps: MayChange[PositiveInt | None] = 200
    """Steps between evaluations. null evaluates only at the end."""
    eval_batches: PositiveInt | None = None
    """Micro-batches per evaluation, always the same ones. null evaluates the whole validation split."""
    eval_prompts: MayChange[Names] = []
    """Prompts to complete at each evaluation; the completions are logged and stored in the run's samples/."""
    eval_prompt_tokens: MayChange[PositiveInt] = 64
    """Maximum number of tokens of such a completion."""
    eval_tasks: MayChange[EvalTasksSection | None] = None
    """Tasks to score the model on at evaluations. null scores none."""
    save_every_steps: MayChange[PositiveInt | None] = 200
    """Steps between checkpoints. null saves only at the end and for a new best validation loss."""
    async_save: MayChange[bool] = False
    """Write checkpoints in the background, from a copy in memory."""
    keep_checkpoints: MayChange[TwoOrMoreOrAll] = 3
    """Number of most recent checkpoints to keep, or `all`. The best one is always kept."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return with_optimizer_defaults(values)
        return values  # pydantic refuses it

    @property
    def computes_in_bf16(self) -> bool:
        """Whether activations are bfloat16."""
        return self.precision in BF16_ACTIVATIONS

    @property
    def steps(self) -> int:
        """max_steps with its default. With max_epochs alone, max_steps must have been resolved from the data."""
        assert self.max_steps is not None or self.max_epochs is None
        return self.max_steps or DEFAULT_STEPS

    def problems(self) -> Iterator[Problem]:
        if self.min_lr > self.lr:
            yield (
                ("lr", "min_lr"),
                f"trainer.min_lr {self.min_lr} is above trainer.lr {self.lr}. Set it to at most trainer.lr.",
            )
        yield from self._best_metric_problems()
        if self.max_steps is None and self.max_epochs is not None and self.schedule_steps is None:
            return  # the length of the schedule depends on the data
        length = self.schedule_steps or self.steps
        if self.schedule != "constant" and self.warmup_steps >= length and length > 1:
            yield (
                ("max_steps", "schedule_steps", "warmup_steps", "schedule"),
                f"trainer.warmup_steps {self.warmup_steps} is not below the {length} steps of the schedule. "
                "Lower it, or raise trainer.max_steps.",
            )

    def _best_metric_problems(self) -> Iterator[Problem]:
        if not is_known(self.best_metric):
            known = ", ".join(known_metrics())
            yield (
                ("best_metric",),
                f"trainer.best_metric must be a metric of the evaluations ({known}), got '{self.best_metric}'.",
            )
        for field, text in self.missing(self.best_metric):
            yield (("best_metric", field), f"trainer.best_metric is {self.best_metric}, {text}")

    def missing(self, metric: str) -> Iterator[tuple[str, str]]:
        """Why evaluations do not write a metric that they could write: the field that decides, and what to do."""
        is_of_tokens = isinstance(self.objective, NextTokenSection)
        is_missing = metric in (OF_PAIRS if is_of_tokens else OF_TOKENS)
        if is_missing and not isinstance(self.objective, PluginObjectiveSection):
            yield "objective", f"which trainer.objective {self.objective.name} does not measure."
        task = task_of(metric)
        scored = {spec.name for spec in self.eval_tasks.specs()} if self.eval_tasks else set()
        if task is not None and task not in scored:
            yield "eval_tasks", f"and the task '{task}' is not in trainer.eval_tasks.tasks. Add it there."

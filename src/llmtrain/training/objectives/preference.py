"""The base of objectives that compare the chosen with the rejected answer of a pair."""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from llmtrain.config.objective import ObjectiveSection
from llmtrain.data.batches import Batch
from llmtrain.models.group_losses import Groups
from llmtrain.plugins import plugin_errors, wrong_result
from llmtrain.training.objectives.base import BatchLosses, Objective, Sums

METRICS = (
    "accuracy",
    "margin",
    "rewards_chosen",
    "rewards_rejected",
    "logps_chosen",
    "logps_rejected",
)
KL = "kl"


@dataclass(frozen=True)
class Answers:
    """What the model says about the answers of some pairs. Column 0 is the chosen answer, column 1 the rejected one."""

    log_probabilities: torch.Tensor  # (P, 2) float32: sum over the tokens of each answer
    references: torch.Tensor  # (P, 2): the same of the model at step 0; zeros for objectives without a reference
    tokens: torch.Tensor  # (P, 2): number of tokens of each answer

    @property
    def ratios(self) -> torch.Tensor:  # (P, 2)
        """Log-probabilities relative to the reference."""
        return self.log_probabilities - self.references

    @property
    def means(self) -> torch.Tensor:  # (P, 2)
        """Log-probabilities per token."""
        return self.log_probabilities / self.tokens


class PreferenceObjective(Objective):
    """A subclass says what the loss of a pair is, and what it rewards."""

    compares_answers = True

    def __init__(self, config: ObjectiveSection) -> None:
        super().__init__(config)
        self.metric_names = (*METRICS, KL) if self.needs_reference else METRICS

    @abstractmethod
    def losses(self, answers: Answers) -> torch.Tensor:
        """The loss of each pair: (P,)."""

    @abstractmethod
    def rewards(self, answers: Answers) -> torch.Tensor:
        """What the loss pushes up for chosen and down for rejected answers, for the metrics: (P, 2)."""

    def items(self, batch: Batch) -> int:
        return 0 if batch.pairs is None else batch.pairs.total

    def sums(self, model: BatchLosses, batch: Batch) -> Sums:
        pairs = batch.pairs
        assert pairs is not None
        losses = model.group_losses(batch, Groups(pairs.answers, 2 * pairs.total))
        log_probabilities = -losses.view(-1, 2)
        references = torch.zeros_like(log_probabilities)
        if pairs.reference is not None:
            references = pairs.reference.view(-1, 2)
        elif self.needs_reference:  # before the first step: the model is its own reference
            references = log_probabilities.detach()
        answers = Answers(log_probabilities, references, pairs.lengths.view(-1, 2).float())
        with plugin_errors(type(self), "losses"):
            each = self.losses(answers)
        if each.shape != (pairs.total,):
            raise wrong_result(type(self), "losses returned", each, f"a tensor of shape ({pairs.total},)")
        return Sums(each.sum(), self._metrics(answers))

    @torch.no_grad()
    def _metrics(self, answers: Answers) -> torch.Tensor:
        """Sums over the pairs, in the order of metric_names."""
        with plugin_errors(type(self), "rewards"):
            rewards = self.rewards(answers)
        margins = rewards[:, 0] - rewards[:, 1]
        columns = [(margins > 0).float(), margins, *rewards.unbind(1), *answers.log_probabilities.unbind(1)]
        if self.needs_reference:
            # If the reference had written the answers, this would estimate KL(reference || model) per token.
            columns.append((-answers.ratios / answers.tokens).mean(1))
        return torch.stack(columns).sum(1)

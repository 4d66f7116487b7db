"""`orpo`: odds ratio preference optimization (Hong et al., 2024)."""

import torch
import torch.nn.functional as F

from llmtrain.config.objective import OrpoSection
from llmtrain.training.objectives.preference import Answers, PreferenceObjective

_ALMOST_CERTAIN = -1e-12
"""Of a mean log-probability: the odds of a certain answer are infinite."""


class Orpo(PreferenceObjective):
    config: OrpoSection

    def losses(self, answers: Answers) -> torch.Tensor:
        means = answers.means
        certain = means.clamp(max=_ALMOST_CERTAIN)
        log_odds = certain - torch.log(-torch.expm1(certain))  # log(p / (1 - p))
        ratio = F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
        return -means[:, 0] - self.config.beta * ratio

    def rewards(self, answers: Answers) -> torch.Tensor:
        return self.config.beta * answers.means

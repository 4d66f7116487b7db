"""`simpo`: simple preference optimization (Meng et al., 2024)."""

import torch
import torch.nn.functional as F

from llmtrain.config.objective import SimpoSection
from llmtrain.training.objectives.preference import Answers, PreferenceObjective


class Simpo(PreferenceObjective):
    config: SimpoSection

    def losses(self, answers: Answers) -> torch.Tensor:
        means = answers.means
        return -F.logsigmoid(self.config.beta * (means[:, 0] - means[:, 1]) - self.config.gamma)

    def rewards(self, answers: Answers) -> torch.Tensor:
        return self.config.beta * answers.means

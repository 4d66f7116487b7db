"""`dpo`: direct preference optimization (Rafailov et al., 2023)."""

import torch
import torch.nn.functional as F

from llmtrain.config.objective import DpoSection
from llmtrain.training.objectives.preference import Answers, PreferenceObjective


class Dpo(PreferenceObjective):
    config: DpoSection
    needs_reference = True

    def losses(self, answers: Answers) -> torch.Tensor:
        ratios = answers.ratios
        scaled = self.config.beta * (ratios[:, 0] - ratios[:, 1])
        smoothing = self.config.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)

    def rewards(self, answers: Answers) -> torch.Tensor:
        return self.config.beta * answers.ratios

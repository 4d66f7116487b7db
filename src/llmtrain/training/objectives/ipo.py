"""`ipo`: identity preference optimization (Azar et al., 2023), with means per token as its authors recommend."""

import torch

from llmtrain.config.objective import IpoSection
from llmtrain.training.objectives.preference import Answers, PreferenceObjective


class Ipo(PreferenceObjective):
    config: IpoSection
    needs_reference = True

    def losses(self, answers: Answers) -> torch.Tensor:
        ratios = answers.ratios / answers.tokens
        return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * self.config.beta)).square()

    def rewards(self, answers: Answers) -> torch.Tensor:
        return self.config.beta * answers.ratios / answers.tokens

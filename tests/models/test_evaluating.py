"""Evaluation leaves every part of a model in its own mode, so results do not depend on when a run evaluates."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import llmtrain
from llmtrain.models.base import evaluating

PLUGIN = """
from torch import nn

from llmtrain.models.base import ModelAdapter


class Model(ModelAdapter):
    def build(self):
        never_dropped = nn.Dropout(0.5).eval()
        return nn.Sequential(nn.Embedding(self.vocab_size, 8), never_dropped, nn.Linear(8, self.vocab_size))
"""


def test_parts_keep_their_own_mode() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    module[1].eval()
    module[1][1].train()
    with evaluating(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == [True, True, False, False, True]


@pytest.mark.filterwarnings("ignore:.*does not have it")
def test_result_does_not_depend_on_evaluations(workdir: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that the model keeps in eval mode stays there, before and after an evaluation and a resume."""
    (workdir / "frozen_part.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(workdir))
    overrides = [each for each in tiny if not each.startswith("model.d_model")]
    base = llmtrain.load_config("gpt_smoke", [*overrides, "model.name=frozen_part:Model", "trainer.schedule=constant"])

    def trained(run_id: str, resume: str | None = None, **trainer: Any) -> str:
        config = llmtrain.load_config(base, {"output": {"run_id": run_id}, "trainer": trainer})
        return llmtrain.train(config, resume=resume, progress="none").state_sha256

    often = trained("often", eval_every_steps=1)
    assert trained("never", eval_every_steps=None) == often
    trained("resumed", max_steps=2)
    assert trained("resumed", resume="resumed") == often

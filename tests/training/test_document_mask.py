"""Runs with data.document_mask: attention stops at document ends, and a resume is exact."""

from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import torch
from test_fine_tune_faults import Material, fine_tune_config, trained

from llmtrain.config.data import TextFilesSection
from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.models.base import evaluating
from llmtrain.training.components import build_components
from tiny_llama import WORDS

pytestmark = pytest.mark.hf
BLOCK = 48


@pytest.fixture
def text(tmp_path: Path) -> list[Path]:
    files = []
    for number in range(40):
        words = [WORDS[(3 * number + place) % len(WORDS)] for place in range(2 + number % 9)]
        files.append(tmp_path / f"{number:02}.txt")
        files[-1].write_text(" ".join(words))
    return files


def config_of(root: Path, cache: Path, material: Material, text: list[Path], **changes: Any) -> Config:
    data = TextFilesSection(files=[str(path) for path in text], val_fraction=0.2, cache_dir=str(cache), **changes)
    config = fine_tune_config(root, cache, material, model__block_size=BLOCK, trainer__eval_prompts=[])
    return config.model_copy(update={"data": data})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_document_has_the_logits_that_it_has_alone(
    tmp_path: Path, cache: Path, material: Material, text: list[Path], attention: str
) -> None:
    config = config_of(tmp_path / "runs", cache, material, text, document_mask=True)
    config = config.with_values("model", attention=attention)
    components = build_components(config, World())
    batch = components.train_batches[0]
    module = components.module
    positions = batch.positions
    assert positions is not None
    starts = torch.nonzero(positions[0] == 0).flatten().tolist()
    assert len(starts) > 2
    with torch.no_grad(), evaluating(module):
        masked = module(batch.inputs, positions=positions)[0]
        whole = module(batch.inputs)[0]
        for start, end in zip(starts, [*starts[1:], BLOCK], strict=True):
            alone = module(batch.inputs[:1, start:end])[0]
            torch.testing.assert_close(masked[start:end], alone, rtol=1e-4, atol=1e-4)
            if start:
                assert (whole[start:end] - alone).abs().max() > 1e-2


def test_resume_is_exact_and_the_mask_matters(
    tmp_path: Path, cache: Path, material: Material, text: list[Path]
) -> None:
    whole = config_of(tmp_path / "whole", cache, material, text, document_mask=True)
    expected = trained(whole)
    other = trained(config_of(tmp_path / "other", cache, material, text))
    assert other["state_sha256"] != expected["state_sha256"]
    config = config_of(tmp_path / "killed", cache, material, text, document_mask=True)
    ended = harness.run(config, fault="after_optimizer:4:0:kill")
    assert ended.code == -9, ended.output
    assert trained(config, 2, "tiny")["state_sha256"] == expected["state_sha256"]
    refused = harness.run(config.with_values("data", document_mask=False), "tiny")
    assert refused.code == 64
    assert "data.document_mask" in refused.output

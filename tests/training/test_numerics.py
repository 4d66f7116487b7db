"""A run keeps the numerics it was started with; new runs have the latest."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import torch
from fault_harness import RUN_ID

from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.compat.numerics import LATEST, Numerics
from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.config.schema import Config
from llmtrain.errors import CheckpointError
from llmtrain.models import losses
from llmtrain.models.gpt.adapter import GPTAdapter

MakeConfig = Callable[..., Config]
BF16 = {"trainer__precision": "bf16", "trainer__eval_batches": 1}


def as_version_1() -> None:
    """Train as before numerics had versions, with checkpoints that do not record one."""
    from llmtrain.training import components, run

    harness.emulate_bf16()
    fingerprint = components.resume_fingerprint

    def without_numerics(*arguments: Any) -> dict[str, Any]:
        recorded = fingerprint(*arguments)
        return Recorded({name: value for name, value in recorded.items() if name != "numerics"})

    components.resume_fingerprint = without_numerics
    run.recorded_numerics = lambda _: Numerics(1)


class Recorded(dict[str, Any]):
    """Without the entry, but meta.json is written from it."""

    def __missing__(self, name: str) -> None:
        assert name == "numerics"


def trained(config: Config, **options: Any) -> dict[str, Any]:
    ended = harness.run(config, **options)
    assert ended.code == 0, ended.output
    assert ended.result is not None
    return ended.result


def last_state(config: Config) -> dict[str, Any]:
    folder = Path(config.output.root_dir) / RUN_ID / "checkpoints"
    return Checkpoint(folder / f"step_{harness.STEPS}").state()


def test_new_run_records_the_latest_version(make_config: MakeConfig) -> None:
    config = make_config()
    trained(config)
    assert last_state(config)["numerics"] == LATEST
    meta = json.loads((Path(config.output.root_dir) / RUN_ID / "meta.json").read_text())
    assert meta["numerics"] == LATEST


def test_version_1_run_resumes_with_its_bits(make_config: MakeConfig) -> None:
    golden = trained(make_config(**BF16), before=as_version_1)["state_sha256"]
    latest = trained(make_config(**BF16), before=harness.emulate_bf16)["state_sha256"]
    assert latest != golden, "the versions do not differ"
    config = make_config(**BF16)
    assert harness.run(config, fault="after_optimizer:5:0:kill", before=as_version_1).code == -9
    assert "numerics" not in harness.checkpoints(Path(config.output.root_dir))[-1].state()
    resumed = trained(config, resume=RUN_ID, before=harness.emulate_bf16)
    assert resumed["resumed_from"] > 0
    assert resumed["state_sha256"] == golden
    assert last_state(config)["numerics"] == 1


@pytest.mark.parametrize("section", [GptSection, ModernGptSection])
def test_loss_of_a_gpt_has_the_numerics_of_its_run(monkeypatch: pytest.MonkeyPatch, section: Any) -> None:
    adapter = GPTAdapter(section(block_size=8, d_model=16, n_layers=1, n_heads=2), 40)
    adapter.numerics = Numerics(2)
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", 100)
    seen = []
    inner = losses.ChunkedLoss.__call__
    monkeypatch.setattr(
        losses.ChunkedLoss, "__call__", lambda loss, *values: seen.append(loss.numerics) or inner(loss, *values)
    )
    tokens = torch.arange(8)[None]
    adapter.loss(adapter.build(), tokens, tokens)
    assert seen == [Numerics(2)]


@pytest.mark.parametrize("version", [0, LATEST + 1, "2", None, True, 2.0])
def test_unknown_version_is_refused(version: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        Numerics.recorded({"numerics": version}, "mine")
    assert caught.value.remedy


def test_bf16_resume_is_exact(make_config: MakeConfig) -> None:
    golden = trained(make_config(**BF16), before=harness.emulate_bf16)["state_sha256"]
    config = make_config(**BF16)
    assert harness.run(config, fault="after_optimizer:5:0:kill", before=harness.emulate_bf16).code == -9
    assert trained(config, resume=RUN_ID, before=harness.emulate_bf16)["state_sha256"] == golden

"""Bit-exactness holds per CPU architecture: it is recorded, compared, and a change warns."""

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import RUN_ID

from llmtrain.config.schema import Config
from llmtrain.runs.metadata import architecture_of, cpu_architecture

MakeConfig = Callable[..., Config]
OTHER = "x86_64" if cpu_architecture() == "aarch64" else "aarch64"


@pytest.mark.parametrize(
    ("machine", "name"), [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("arm64", "aarch64"), ("riscv64", "riscv64")]
)
def test_architecture_names_are_normalized(monkeypatch: pytest.MonkeyPatch, machine: str, name: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert cpu_architecture() == name


@pytest.mark.parametrize(
    ("meta", "name"),
    [
        ({"machine": {"architecture": "aarch64", "platform": "Linux-x86_64"}}, "aarch64"),
        ({"machine": {"platform": "Linux-6.1.0-x86_64-with-glibc2.36"}}, "x86_64"),
        ({"machine": {"platform": "macOS-15.0-arm64-arm-64bit"}}, "aarch64"),
        ({"machine": {"platform": "Plan9"}}, None),
        ({"machine": "?"}, None),
        ({}, None),
    ],
)
def test_run_records_its_architecture(meta: dict[str, Any], name: str | None) -> None:
    assert architecture_of(meta) == name


def test_runs_compare_names_two_architectures(
    train: Callable[..., Any], cli: Callable[..., Any], workdir: Path
) -> None:
    for run in ("here", "there"):
        assert train(f"output.run_id={run}").code == 0
    meta = workdir / "runs" / "there" / "meta.json"
    values = json.loads(meta.read_text())
    assert values["machine"]["architecture"] == cpu_architecture()
    compared = cli("runs", "compare", "here", "there", "--json").json
    assert compared["architectures"] == [[cpu_architecture()]] * 2
    assert compared["threads"] == [[1], [1]]
    assert cpu_architecture() not in cli("runs", "compare", "here", "there").out
    generations = workdir / "runs" / "there" / "generations.json"
    starts = json.loads(generations.read_text())
    generations.write_text(json.dumps([*starts, {**starts[0], "generation": 2, "architecture": OTHER, "threads": 2}]))
    compared = cli("runs", "compare", "here", "there", "--json").json
    assert compared["architectures"] == [[cpu_architecture()], [cpu_architecture(), OTHER]]
    assert compared["threads"] == [[1], [1, 2]]
    assert OTHER not in cli("runs", "compare", "here", "there").out, (
        "the states are identical: there is nothing to explain"
    )
    finished = workdir / "runs" / "there" / "finished.json"
    finished.write_text(finished.read_text().replace('"state_sha256": "', '"state_sha256": "0'))
    output = cli("runs", "compare", "here", "there").out
    assert cpu_architecture() in output
    assert OTHER in output
    generations.unlink()
    values["machine"]["architecture"] = OTHER
    meta.write_text(json.dumps(values))
    compared = cli("runs", "compare", "here", "there", "--json").json
    assert compared["architectures"] == [[cpu_architecture()], [OTHER]], (
        "a run of an earlier version has meta.json alone"
    )
    meta.write_text("[1, 2]")
    assert cli("runs", "compare", "here", "there", "--json").json["architectures"] == [[cpu_architecture()], []]
    assert cli("runs", "list").code == 0


def test_resuming_on_another_architecture_warns(make_config: MakeConfig) -> None:
    def elsewhere() -> None:
        from llmtrain.training import components

        components.cpu_architecture = lambda: OTHER

    config = make_config()
    assert harness.run(config, fault="after_optimizer:3:0:term").code == 75
    stopped = harness.checkpoints(Path(config.output.root_dir))[-1].state()
    assert stopped["architecture"] == cpu_architecture()
    ended = harness.run(config, RUN_ID, before=elsewhere)
    assert ended.code == 0, ended.output
    (warning,) = [line for line in ended.output.splitlines() if OTHER in line]
    assert "warning" in warning
    assert cpu_architecture() in warning

"""Secrets must not appear in any file that a run writes."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import RUN_ID
from rank_harness import start_cli

from llmtrain.config.load import dump_config
from llmtrain.config.schema import Config
from slow_cases import some

CANARIES = {
    "HF_TOKEN": "hf_CanaryOneQw7",
    "HUGGING_FACE_HUB_TOKEN": "hf_CanaryTwoXe3",
    "AWS_SECRET_ACCESS_KEY": "aws/CanaryThree+Zr9",
    "MLFLOW_TRACKING_PASSWORD": "CanaryFourLogin",
}
LEAKY_TRACKER = """
import os
from llmtrain.tracking.base import Tracker

class Leaky(Tracker):
    def __init__(self, run, options):
        pass

    def log(self, step, metrics):
        raise ConnectionError(f"https://me:CanaryInUrl@127.0.0.1 refused the token {os.environ['HF_TOKEN']}")
"""
MakeConfig = Callable[..., Config]


def hits(folder: Path, canaries: list[str]) -> list[str]:
    """Files below a directory that contain a canary, in any encoding that our files use."""
    return [
        f"{path}: {canary}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for canary in canaries
        if canary.encode() in path.read_bytes() or canary in path.name
    ]


def test_search_finds_planted_secrets(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\0\1some CanaryHere\2")
    assert len(hits(tmp_path, ["CanaryHere"])) == 1


@pytest.mark.parametrize("password", some(["CanaryPassword", "Can@ryPassword"], "Can@ryPassword"))
def test_no_secrets_from_environment_and_tracking_uri(make_config: MakeConfig, tmp_path: Path, password: str) -> None:
    config = make_config(
        tracking__mlflow__enabled=True,
        tracking__mlflow__tracking_uri=f"http://somebody:{password}@127.0.0.1:9",
        run__notes=f"do not keep {CANARIES['HF_TOKEN']}",
    )
    ended = harness.run(config, env={**CANARIES, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
    assert ended.code == 0, ended.output
    assert "MLflow failed" in ended.output
    tail = password.rpartition("@")[2]
    found = [line for line in ended.output.splitlines() if any(c in line for c in [*CANARIES.values(), tail])]
    assert found == []
    assert hits(tmp_path, [*CANARIES.values(), tail]) == []


def test_no_secrets_in_the_error_of_a_tracker(make_config: MakeConfig, tmp_path: Path) -> None:
    """Errors of libraries have the URL that they could not reach."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "leaky.py").write_text(LEAKY_TRACKER)
    config = make_config(tracking__custom=[{"name": "leaky:Leaky"}])
    ended = harness.run(config, env=CANARIES, before=lambda: sys.path.insert(0, str(plugins)))
    assert ended.code == 0, ended.output
    assert "Leaky failed" in ended.output
    assert [line for line in ended.output.splitlines() if "Canary" in line] == []
    assert hits(tmp_path / "runs", ["CanaryInUrl", CANARIES["HF_TOKEN"]]) == []


def test_no_secrets_in_a_local_mlflow_store(make_config: MakeConfig, empty_store: Path, tmp_path: Path) -> None:
    def wait_longer() -> None:
        from llmtrain.tracking import background

        background.FLUSH_SEC = 120.0  # a busy machine takes more than 30 s, and the artifacts would be missing

    store = tmp_path / "mlflow"
    store.mkdir()
    shutil.copy(empty_store, store / "mlflow.db")
    before = (store / "mlflow.db").read_bytes()
    config = make_config(
        tracking__mlflow__enabled=True,
        tracking__mlflow__tracking_uri=str(store),
        tracking__mlflow__run_name="with secrets around",
        run__notes=f"{CANARIES['AWS_SECRET_ACCESS_KEY']} was pasted here",
    )
    ended = harness.run(config, env=CANARIES, before=wait_longer)
    assert ended.code == 0, ended.output
    assert "MLflow failed" not in ended.output, ended.output
    assert (store / "mlflow.db").read_bytes() != before
    assert list(store.rglob("config.yaml"))
    assert hits(tmp_path, list(CANARIES.values())) == []


def test_no_secrets_in_an_interrupted_and_resumed_run(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tracking__mlflow__tracking_uri="http://somebody:CanaryPassword@127.0.0.1:9")
    assert harness.run(config, env=CANARIES, fault="after_optimizer:3:0:term").code == 75
    changed = config.with_values("trainer", lr=1.0)
    ended = harness.run(changed, RUN_ID, env=CANARIES)
    assert ended.code == 64, ended.output
    assert harness.run(config, RUN_ID, env=CANARIES).code == 0
    assert hits(tmp_path, [*CANARIES.values(), "CanaryPassword"]) == []


def test_no_secrets_from_the_command_line(make_config: MakeConfig, tmp_path: Path) -> None:
    """meta.json records the command line; --json prints the result and errors."""
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(make_config()))
    words = ["train", "--config", str(file), "--json"]
    words += ["--set", "tracking.mlflow.tracking_uri=https://somebody:CanaryPassword@tracking.example"]
    words += ["--set", f"run.notes={CANARIES['HF_TOKEN']}"]

    def set_command_line() -> None:
        sys.argv = ["llmtrain", *words]

    done = start_cli(*words, env=CANARIES, before=set_command_line)
    assert done.wait() == 0, done.err
    for canary in [*CANARIES.values(), "CanaryPassword"]:
        assert canary not in done.out
        assert canary not in done.err
    assert "tracking.example" in (tmp_path / "runs" / RUN_ID / "meta.json").read_text()
    assert hits(tmp_path, [*CANARIES.values(), "CanaryPassword"]) == []

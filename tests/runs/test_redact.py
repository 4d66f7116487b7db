import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.config.load import dump_config, load_config
from llmtrain.config.schema import Config
from llmtrain.runs.metadata import collect_metadata
from llmtrain.runs.redact import ENVIRONMENT_ALLOWED, allowed_environment, redact

CANARY = "canary-5f3a91c07e"


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "my_api_key", "OPENAI_APIKEY", "GOOGLE_CREDENTIALS"]
)
def test_values_of_secret_variables_are_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, CANARY)
    assert redact(f"--set run.notes={CANARY} and {CANARY}") == "--set run.notes=*** and ***"


def test_other_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "some-editor-name")
    monkeypatch.setenv("SHORT_TOKEN", "cpu")  # too short to be one, and it would hide ordinary words
    assert redact("some-editor-name on cpu") == "some-editor-name on cpu"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://user:pass@host/x", "https://***@host/x"),
        ("postgresql://me@db:5432/x", "postgresql://***@db:5432/x"),
        ("https://host/x@y", "https://host/x@y"),
        ("me@example.org", "me@example.org"),
        ("http://a:b@h1 http://c:d@h2", "http://***@h1 http://***@h2"),
        ("https://user:p@ss@host/x", "https://***@host/x"),
    ],
)
def test_logins_in_urls_are_hidden(text: str, hidden: str) -> None:
    assert redact(text) == hidden


def test_only_named_variables_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("SOMETHING_ELSE", "x")
    found = allowed_environment()
    assert found["OMP_NUM_THREADS"] == "3"
    assert set(found) <= set(ENVIRONMENT_ALLOWED)


def test_metadata_is_complete_and_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("HOSTNAME", f"pod-{CANARY}")
    monkeypatch.setattr("sys.argv", ["llmtrain", "train", "--set", f"run.notes={CANARY}"])
    meta = collect_metadata("one", "name", "cpu")
    assert {"run_id", "argv", "git", "versions", "machine", "environment", "started_at"} <= set(meta)
    assert meta["versions"].keys() >= {"llmtrain", "python", "torch"}
    assert CANARY not in json.dumps(meta)


def test_the_config_copy_of_a_run_still_loads(
    train: Callable[..., object], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in for a secret must be a value that YAML can read, or the run cannot be resumed by its id."""
    monkeypatch.setenv("HF_TOKEN", CANARY)
    train(f"run.notes={CANARY}", "output.run_id=one", "mlflow.tracking_uri=https://me:word@host")
    text = (workdir / "runs" / "one" / "config.yaml").read_text()
    assert CANARY not in text
    assert load_config(workdir / "runs" / "one" / "config.yaml").run.name == "gpt-smoke"


def test_no_secret_no_change() -> None:
    text = dump_config(Config())
    assert redact(text) == text

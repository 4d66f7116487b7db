"""Where tokens are stored: data.cache_dir, and in pods by default the runs volume."""

import os
from pathlib import Path

import pytest

from llmtrain.config.data import DummyTextSection
from llmtrain.data.cache_dir import token_cache_dir
from llmtrain.data.text.dummy_text import DummyText

DEFAULT = Path("~/.cache/llmtrain").expanduser()


def test_default_is_the_home_directory() -> None:
    assert token_cache_dir(DummyTextSection()) == DEFAULT


def test_pods_keep_tokens_on_the_runs_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pod opens what the first one has written."""
    shared = tmp_path / "out" / ".cache" / "llmtrain"
    monkeypatch.setenv("LLMTRAIN_TOKEN_CACHE", str(shared))
    first = DummyText(DummyTextSection(), 1).prepare(1)
    (store,) = [path for path in (shared / "tokens").iterdir() if path.is_dir()]
    written = store.stat().st_mtime_ns
    again = DummyText(DummyTextSection(), 1).prepare(1)
    assert again.fingerprint == first.fingerprint
    assert store.stat().st_mtime_ns == written


def test_config_has_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTRAIN_TOKEN_CACHE", str(tmp_path / "shared"))
    assert token_cache_dir(DummyTextSection(cache_dir=str(tmp_path / "mine"))) == tmp_path / "mine"


@pytest.mark.parametrize("owned", [".", "tokens"])
def test_volume_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owned: str) -> None:
    shared = tmp_path / "shared"
    (shared / owned).mkdir(parents=True)
    monkeypatch.setenv("LLMTRAIN_TOKEN_CACHE", str(shared))
    assert token_cache_dir(DummyTextSection()) == shared
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != (shared / owned).resolve())  # noqa: ARG005
    assert token_cache_dir(DummyTextSection()) == DEFAULT

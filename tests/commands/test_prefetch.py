"""llmtrain prefetch, the init container of pods: downloads what the config names on the hub, and nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hub_server import FakeHub, Repo, serve
from llmtrain.hub.token import TOKEN_VARIABLES

Cli = Callable[..., Any]
TOKEN = "hf_CanaryPrefetchToken71"
MODEL = ("--set", "model.name=hf_causal_lm", "--set", "model.path=somebody/tiny")
TOKENIZER = ("--set", "model.tokenizer_path=somebody/words")
FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "model.safetensors": b"weights" * 100,
    "modeling_tiny.py": b"raise SystemExit('never run')",
    "pytorch_model.bin": b"a pickle",
}


@dataclass
class Pod:
    """The hub, and the volume that all containers of a pod share."""

    hub: FakeHub
    home: Path

    def run(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        unset = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", *TOKEN_VARIABLES)
        unset = (*unset, "http_proxy", "HTTP_PROXY", "ALL_PROXY")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        return subprocess.run(
            [sys.executable, "-m", "llmtrain", "prefetch", "--config", "ddp_smoke", *words],
            env={**kept, **self.hub.environment(self.home), **env},
            cwd=self.home.parent,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def fetched(self) -> set[str]:
        """Names of files in the hub's cache, as repository/file."""
        found = self.home.glob("hub/models--*/snapshots/*/*")
        return {f"{path.parts[-4].removeprefix('models--').replace('--', '/')}/{path.name}" for path in found}


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with serve() as hub:
        hub.repos["somebody/tiny"] = Repo(dict(FILES), token=TOKEN)
        hub.repos["somebody/words"] = Repo({"tokenizer.json": b"{}", "README.md": b"# Words"}, token=TOKEN)
        hub.repos["somebody/other"] = Repo(dict(FILES))
        (tmp_path / "home").mkdir()
        yield Pod(hub, tmp_path / "home")


def test_prefetched_model_and_tokenizer_need_no_network(pod: Pod) -> None:
    first = pod.run(*MODEL, *TOKENIZER, "--json", HF_TOKEN=TOKEN)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout) == {"fetched": ["model somebody/tiny", "tokenizer somebody/words"]}
    assert "[DATA] fetched: model somebody/tiny" in first.stderr
    expected = {"somebody/tiny/config.json", "somebody/tiny/model.safetensors", "somebody/words/tokenizer.json"}
    assert pod.fetched == expected, "no code, and no pickle"
    assert pod.hub.tokens == {TOKEN}
    assert TOKEN not in first.stdout + first.stderr
    # The next container has no token and is offline.
    pod.hub.requests.clear()
    again = pod.run(*MODEL, *TOKENIZER, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert pod.hub.requests == []


def test_snapshot_is_in_configured_cache(pod: Pod, tmp_path: Path) -> None:
    """launch.env.HF_HUB_CACHE: scripts find the model in DIR/models--OWNER--NAME/snapshots/COMMIT."""
    done = pod.run(*MODEL, HF_TOKEN=TOKEN, HF_HUB_CACHE=str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    (snapshot,) = (tmp_path / "model" / "models--somebody--tiny" / "snapshots").iterdir()
    assert (snapshot / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_hub_error_is_reported(pod: Pod) -> None:
    """Exits with 64, after which no platform restarts."""
    refused = pod.run(*MODEL, "--json")
    assert refused.returncode == 64, refused.stderr
    assert "somebody/tiny" in json.loads(refused.stdout)["what"]
    assert pod.fetched == set()


def test_code_is_fetched_only_if_trusted(pod: Pod) -> None:
    done = pod.run(*MODEL, "--set", "model.trust_remote_code=true", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert "somebody/tiny/modeling_tiny.py" in pod.fetched
    assert "somebody/tiny/pytorch_model.bin" not in pod.fetched


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--set", "model.name=hf_causal_lm", "--set", "model.path=/models/tiny"),
        (*MODEL, "--set", "model.local_files_only=true"),
    ],
    ids=["own model", "path", "local only"],
)
def test_nothing_to_fetch(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli("prefetch", "--config", "ddp_smoke", *words)
    assert (done.code, done.out) == (0, "Nothing to download: all files are local.\n"), done.err
    assert cli("prefetch", "--config", "ddp_smoke", *words, "--json").json == {"fetched": []}


def test_dataset_and_gpt2_tokenizer(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both splits, as training loads them."""
    from llmtrain.data import hf_datasets
    from llmtrain.data.tokenizers import gpt2

    requested: list[str] = []
    monkeypatch.setattr(hf_datasets, "load_split", lambda data, split: requested.append(f"{data.dataset_name} {split}"))
    monkeypatch.setattr(gpt2, "GPT2Tokenizer", lambda: requested.append("gpt2"))
    data = ("data.name=hf_text", "data.dataset_name=somebody/rows", "data.tokenizer=gpt2")
    done = cli("prefetch", "--config", "gpt_smoke", *(word for text in data for word in ("--set", text)), "--json")
    assert done.code == 0, done.err
    assert done.json == {"fetched": ["dataset somebody/rows", "tokenizer gpt2"]}
    assert requested == ["somebody/rows train", "somebody/rows val", "gpt2"]


def test_missing_dataset(cli: Cli) -> None:
    """The tests are offline."""
    sets = ("--set", "data.name=hf_text", "--set", "data.dataset_name=somebody/rows")
    done = cli("prefetch", "--config", "gpt_smoke", *sets, "--json")
    assert done.code == 65
    assert "somebody/rows" in done.json["what"]


def test_config_error_exits_64(cli: Cli) -> None:
    assert cli("prefetch", "--config", "gpt_smoke", "--set", "model.nlayers=2", "--json").code == 64
    assert cli("prefetch", "--config", "missing.yaml").code == 64


class TestReport:
    """--report: permanent errors are reported to `llmtrain node`; after temporary ones the platform retries."""

    def test_report_of_hub_error(self, pod: Pod) -> None:
        report = pod.home / "prefetch.json"
        done = pod.run(*MODEL, "--report", str(report))
        assert done.returncode == 0, done.stderr
        error = json.loads(report.read_text())
        assert (error["error"], error["exit_code"]) == ("UsageError", 64)
        assert "somebody/tiny" in error["what"]
        assert error["what"] in done.stdout, "the log of the container has it too"

    def test_report_of_data_error(self, cli: Cli, tmp_path: Path) -> None:
        report = tmp_path / "prefetch.json"
        sets = ("--set", "data.name=hf_text", "--set", "data.dataset_name=somebody/rows")
        assert cli("prefetch", "--config", "gpt_smoke", *sets, "--report", report).code == 0
        assert json.loads(report.read_text())["exit_code"] == 65

    def test_report_of_config_error(self, cli: Cli, tmp_path: Path) -> None:
        report = tmp_path / "prefetch.json"
        assert cli("prefetch", "--set", "model.nlayers=2", "--report", report).code == 0
        assert "model.nlayers" in json.loads(report.read_text())["what"]

    @pytest.mark.parametrize("kind", ["LlmtrainError", "ClusterError", "Interrupted", "OSError"])
    def test_temporary_error_is_raised(
        self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        from llmtrain import errors
        from llmtrain.data import hf_datasets

        error = getattr(errors, kind, OSError)

        def fail(*_: object) -> None:
            raise error("no disk, no hub")

        monkeypatch.setattr(hf_datasets, "load_split", fail)
        report = tmp_path / "prefetch.json"
        sets = ("--set", "data.name=hf_text", "--set", "data.dataset_name=somebody/rows")
        done = cli("prefetch", "--config", "gpt_smoke", *sets, "--report", report)
        assert done.code == getattr(error, "exit_code", 1) != 0
        assert "no disk, no hub" in done.err
        assert not report.exists()

    def test_no_report_without_error(self, cli: Cli, tmp_path: Path) -> None:
        assert cli("prefetch", "--config", "ddp_smoke", "--report", tmp_path / "prefetch.json").code == 0
        assert not (tmp_path / "prefetch.json").exists()

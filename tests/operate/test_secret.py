"""llmtrain secret hf-token: the token goes from the file to the Secret, and nowhere else."""

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmtrain.commands import cluster_options, secret
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.hub.token import first_token
from llmtrain.kubernetes.labels import COMMON_LABELS

CANARY = "hf_CanaryCanaryCanaryCanary$HOME"


class Secrets:
    """A stand-in for a cluster that keeps Secrets, and merges as it does."""

    name = "near"
    namespace = "ns"

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.refusal = ""

    def get(self, api_version: str, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        assert (api_version, kind) == ("v1", "Secret")
        return self.objects.get(f"{namespace}/{name}")

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.refusal:
            raise UsageError(self.refusal)
        self.objects[f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"] = manifest
        return manifest

    def patch(self, api_version: str, kind: str, name: str, namespace: str, change: dict[str, Any]) -> dict[str, Any]:
        assert (api_version, kind) == ("v1", "Secret")
        found = self.objects[f"{namespace}/{name}"]
        found["data"] |= change["data"]
        return found


class Tool:
    """Runs the command; no word of the token may come out of it."""

    def __init__(self, cluster: Secrets, capfd: pytest.CaptureFixture[str]) -> None:
        self.cluster, self._capfd = cluster, capfd

    def __call__(self, *words: object) -> tuple[str, str]:
        self._capfd.readouterr()
        problem = None
        try:
            secret.app(["hf-token", *map(str, words)], standalone_mode=False)
        except LlmtrainError as raised:
            problem = raised
        out, err = self._capfd.readouterr()
        output = out + err + (f"{problem} {json.dumps(problem.as_dict())}" if problem else "")
        assert CANARY not in output
        assert "Canary" not in output
        assert base64.b64encode(CANARY.encode()).decode() not in output
        if problem:
            raise problem
        return out, err

    def token(self, name: str = "hf-token", key: str = "token", namespace: str = "ns") -> str:
        return base64.b64decode(self.cluster.objects[f"{namespace}/{name}"]["data"][key]).decode()


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tool:
    cluster = Secrets()
    monkeypatch.setattr(cluster_options, "connect", lambda *_: cluster)
    return Tool(cluster, capfd)


@pytest.fixture
def env(tmp_path: Path) -> Path:
    file = tmp_path / ".env"
    file.touch(mode=0o600)
    file.write_text(f"# mine\nOTHER=1\nexport HF_TOKEN='{CANARY}'\n")
    return file


def test_secret_is_created_updated_or_unchanged(tool: Tool, env: Path) -> None:
    out, err = tool("--from-env-file", env)
    assert "is created" in out
    assert "launch.hf_token_secret.name: hf-token" in out
    assert err == ""
    made = tool.cluster.objects["ns/hf-token"]
    assert (made["type"], made["metadata"]["labels"]) == ("Opaque", COMMON_LABELS)
    assert tool.token() == CANARY  # with its $
    assert "is unchanged" in tool("--from-env-file", env)[0]
    env.write_text("HUGGING_FACE_HUB_TOKEN=hf_another\n")
    assert "is updated" in tool("--from-env-file", env)[0]
    assert tool.token() == "hf_another"


def test_name_key_namespace_json(tool: Tool, env: Path) -> None:
    out, _ = tool("--from-env-file", env, "--name", "mine", "--key", "hub", "-n", "other", "--json")
    assert json.loads(out) == {"secret": "mine", "key": "hub", "namespace": "other", "done": "created"}
    assert tool.token("mine", "hub", "other") == CANARY
    out, _ = tool("--from-env-file", env, "--key", "hub")
    assert "launch.hf_token_secret.key: hub" in out
    for wrong in (["--name", "Big"], ["--key", "a/b"], ["--name", "a b"]):
        with pytest.raises(UsageError, match="--name"):
            tool("--from-env-file", env, *wrong)


def test_foreign_secret_is_refused(tool: Tool, env: Path) -> None:
    foreign = {"metadata": {"name": "hf-token", "namespace": "ns"}, "data": {"token": "eA=="}}
    tool.cluster.objects["ns/hf-token"] = foreign
    with pytest.raises(UsageError, match="hf-token"):
        tool("--from-env-file", env)
    assert foreign["data"] == {"token": "eA=="}


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("OTHER=1\n", "sets none of HF_TOKEN"),
        ("HF_TOKEN=\n", "sets none of HF_TOKEN"),
        (f"HF_TOKEN='{CANARY} {CANARY}'\n", "HF_TOKEN is not a valid token"),
        (f'HF_TOKEN="{CANARY}\n{CANARY}"\n', "HF_TOKEN is not a valid token"),
        (f"HF_TOKEN={CANARY}é\n", "HF_TOKEN is not a valid token"),
        (b"HF_TOKEN=\xff\xfe\n", "not UTF-8"),
    ],
)
def test_files_without_a_token(tool: Tool, env: Path, text: str | bytes, fact: str) -> None:
    env.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=fact):
        tool("--from-env-file", env)
    assert tool.cluster.objects == {}


def test_missing_file_is_refused(tool: Tool, tmp_path: Path) -> None:
    for file in (tmp_path / "nothing", tmp_path):
        with pytest.raises(UsageError, match="not readable"):
            tool("--from-env-file", file)


def test_warns_if_others_can_read_the_file(tool: Tool, env: Path) -> None:
    env.chmod(0o644)
    assert "chmod 600" in tool("--from-env-file", env)[1]


def test_warns_if_git_does_not_ignore_the_file(tool: Tool, env: Path) -> None:
    subprocess.run(["git", "init", "-q", str(env.parent)], check=True)
    assert ".gitignore" in tool("--from-env-file", env)[1]
    (env.parent / ".gitignore").write_text(".env\n")
    assert tool("--from-env-file", env)[1] == ""


def test_refusal_that_quotes_the_token_is_redacted(tool: Tool, env: Path) -> None:
    tool.cluster.refusal = f"denied: {{'token': '{base64.b64encode(CANARY.encode()).decode()}'}}"
    with pytest.raises(UsageError, match="Secret hf-token"):
        tool("--from-env-file", env)


def test_environment_is_neither_read_nor_changed(tool: Tool, env: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes would see a token in the environment."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_shell")
    tool("--from-env-file", env)
    assert tool.token() == CANARY
    assert CANARY not in os.environ.values()


def test_first_token() -> None:
    assert first_token({"HUGGINGFACE_HUB_TOKEN": "c", "HF_TOKEN": " a \n"}) == "a"
    assert first_token({"HF_TOKEN": None}) is None

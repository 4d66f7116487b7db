"""Base models of the hub, local files without a network, and tokens that are never written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")


from fine_tune_workspace import ONE_STEP, Cli, Workspace, read_base

from hub_server import FakeHub, Repo, serve
from llmtrain.hub.token import TOKEN_VARIABLES
from tiny_llama import make_tokenizer

pytestmark = pytest.mark.hf


# Local files and the network.


def saved_config(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    return dict(yaml.safe_load(Path(done.json["run_dir"], "config.yaml").read_text()))


def test_short_options_set_model_fields(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    shutil.copytree(workspace.base, workdir / "model", ignore=shutil.ignore_patterns("tokenizer*", "chat*"))
    make_tokenizer(workdir / "tokenizer")
    paths = ("--model-local-dir", str(workdir / "model"), "--tokenizer-local-dir", str(workdir / "tokenizer"))
    model = saved_config(cli(*workspace.train(*ONE_STEP, "model.path=somebody/model", more=paths)))["model"]
    assert model["path"] == str(workdir / "model")
    assert model["tokenizer_path"] == str(workdir / "tokenizer")
    assert model["local_files_only"] is True


@pytest.mark.parametrize("options", [(), ("--local-files-only",)])
def test_local_files_only(workspace: Workspace, cli: Cli, options: tuple[str, ...]) -> None:
    model = saved_config(cli(*workspace.train(*ONE_STEP, more=options)))["model"]
    assert model["path"] == str(workspace.base)
    assert model["tokenizer_path"] is None
    assert model["local_files_only"] is bool(options)


OFFLINE = """
import json, os, socket, sys
attempts = []
def refuse(name, real):
    def replacement(*args, **kwargs):
        family = getattr(args[0], "family", None)
        if family in (socket.AF_INET, socket.AF_INET6, None):
            attempts.append(f"{name} {args[1:] if family else args}")
            raise OSError("no network here")
        return real(*args, **kwargs)
    return replacement
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse(name, getattr(socket.socket, name)))
for name in ("getaddrinfo", "create_connection"):
    setattr(socket, name, refuse(name, getattr(socket, name)))
from llmtrain.cli import main
codes = []
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as ended:
        codes.append([ended.code, len(attempts)])
print(json.dumps(codes), file=open(sys.argv[2], "w"))
"""


def without_variables(*names: str) -> dict[str, str]:
    dropped = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", *TOKEN_VARIABLES, *names}
    return {name: value for name, value in os.environ.items() if name not in dropped}


@pytest.mark.slow
def test_model_directory_does_not_use_the_network(workspace: Workspace, tmp_path: Path) -> None:
    """No connection attempts; the last call is the control, which must make one."""
    calls = [
        workspace.train(*ONE_STEP, "output.run_id=offline"),
        ["generate", "--run", "offline", "--prompt", "say red", "--max-new-tokens", "2"],
        ["eval", "--adapter", "runs/offline/adapter", "--file", str(workspace.val)],
        ["export", "--no-check", "--run", "offline", "--merge", "--to", "merged"],
        workspace.train(*ONE_STEP, "model.path=somebody/model"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, json.dumps(calls), "codes.json"],
        cwd=tmp_path,
        env={**without_variables(), "HF_HOME": str(tmp_path / "hf-home"), "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes[:4] == [[0, 0]] * 4, done.stderr
    assert codes[4][0] == 64
    assert codes[4][1] > 0
    assert "fetch-model" in done.stderr


# Secrets.


def repo_of(directory: Path, token: str, gated: bool = False) -> Repo:
    return Repo({path.name: path.read_bytes() for path in directory.iterdir()}, token=token, gated=gated)


@pytest.fixture(scope="module")
def hub(workspace: Workspace) -> Iterator[FakeHub]:
    with serve() as server:
        server.repos["somebody/gated"] = repo_of(workspace.base, "hf_CanaryUnused", gated=True)
        yield server


def files_with(directory: Path, canary: str) -> list[Path]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 20
    return [path for path in files if canary.encode() in path.read_bytes() or canary in path.name]


FROM_HUB = """
import json, os, sys
from llmtrain.cli import main
calls, codes = json.load(sys.stdin), []  # not argv, which meta.json records
for variable, token, arguments in calls:
    os.environ[variable] = token
    try:
        main(arguments)
    except SystemExit as ended:
        codes.append(ended.code)
    del os.environ[variable]
sys.exit(0 if codes == [0] * len(calls) else f"exit codes {codes}")
"""


def run_script(
    hub: FakeHub, directory: Path, script: str, *arguments: str, stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        input=stdin,
        cwd=directory,
        env={**without_variables("http_proxy", "HTTP_PROXY"), **hub.environment(directory / "hf-home")},
        capture_output=True,
        text=True,
        check=False,
    )


TOKENS_OF_HUB = {name: f"hf_CanaryNumber{number}Xq7" for number, name in enumerate(TOKEN_VARIABLES)}


@pytest.fixture(scope="module")
def from_hub(workspace: Workspace, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory in which one process trained and exported models of the hub, and the output of that process. Each
    variable gives access to a repository that only its token opens."""
    directory = tmp_path_factory.mktemp("from-hub")
    calls = []
    for name, token in TOKENS_OF_HUB.items():
        repo = f"somebody/{name.lower()}"
        hub.repos[repo] = repo_of(workspace.base, token)
        cache = f"data.cache_dir={directory / 'cache'}"
        run_id = f"output.run_id={name.lower().replace('_', '-')}"
        calls.append((name, token, workspace.train(*ONE_STEP, f"model.path={repo}", cache, run_id)))
    name, token = next(iter(TOKENS_OF_HUB.items()))
    commands = [
        ["export", "--no-check", "--run", "hf-token", "--to", "adapter"],
        ["fetch-model", "somebody/hf_token", "--to", "fetched/base"],
        workspace.train(*ONE_STEP, "model.path=fetched/base", "output.run_id=fetched", cache),
        ["export", "--no-check", "--run", "fetched", "--to", "fetched-adapter"],
        workspace.train(*ONE_STEP, "model.path=fetched/base", "model.lora=null", "output.run_id=full", cache),
    ]
    calls += [(name, token, command) for command in commands]
    ended = run_script(hub, directory, FROM_HUB, stdin=json.dumps(calls))
    assert ended.returncode == 0, ended.stderr
    return directory, ended.stdout + ended.stderr


def test_tokens_are_used_and_never_written(hub: FakeHub, from_hub: tuple[Path, str]) -> None:
    directory, output = from_hub
    assert hub.tokens >= set(TOKENS_OF_HUB.values())
    for token in TOKENS_OF_HUB.values():
        assert token not in output
        assert files_with(directory, token) == []


def test_base_model_of_the_hub_is_named_with_its_commit(
    hub: FakeHub, from_hub: tuple[Path, str], cli: Cli, workdir: Path
) -> None:
    directory, output = from_hub
    commit = hub.repos["somebody/hf_token"].commit
    expected = ("somebody/hf_token", "somebody/hf_token", commit)
    runs = directory / "runs"
    for adapter in (runs / "hf-token/adapter", runs / "fetched/adapter", "adapter", "fetched-adapter"):
        assert read_base(directory / adapter) == expected, adapter
    assert "--base-model" not in output
    for run_id in ("fetched", "full"):
        (checkpoint,) = (runs / run_id / "checkpoints").glob("step_*")
        assert json.loads((checkpoint / "state.json").read_text())["base_model"] == f"somebody/hf_token@{commit}"
    # The run knows it, also when the directory that was fetched is gone.
    (directory / "fetched").rename(directory / "moved")
    done = cli("export", "--no-check", "--run", "full", "--root", runs, "--to", workdir / "full", "--json")
    (directory / "moved").rename(directory / "fetched")
    assert (done.code, done.json["base_model"]) == (0, f"somebody/hf_token@{commit}"), done.err
    head = yaml.safe_load((workdir / "full" / "README.md").read_text().split("---\n")[1])
    assert head["base_model"] == "somebody/hf_token"


def test_gated_model_without_token_is_refused(workspace: Workspace, hub: FakeHub, tmp_path: Path) -> None:
    script = "from llmtrain.cli import main; main()"
    ended = run_script(hub, tmp_path, script, *workspace.train(*ONE_STEP, "model.path=somebody/gated"))
    assert ended.returncode == 64, ended.stderr
    error = json.loads(ended.stdout)
    assert error["exit_code"] == 64
    assert "somebody/gated" in error["what"]
    assert "gated" in error["what"]
    assert "HF_TOKEN" in error["remedy"]
    assert "license" in error["remedy"]
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_secret_in_the_notes_is_redacted(
    workspace: Workspace, cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People upload README.md with the adapter."""
    monkeypatch.setenv("HF_TOKEN", "hf_CanaryInTheNotes5")
    done = cli(*workspace.train(*ONE_STEP, "run.notes=pasted hf_CanaryInTheNotes5 here"))
    assert done.code == 0, done.err
    exported = cli("export", "--no-check", "--run", done.json["run_id"], "--to", workdir / "out", "--merge")
    assert exported.code == 0, exported.err
    assert "CanaryInTheNotes5" not in done.out + done.err + exported.out
    assert files_with(workdir, "CanaryInTheNotes5") == []

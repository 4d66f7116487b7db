"""The hub, simulated by a local server. The library reads its settings on import, so each call is a subprocess."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hub_server import FakeHub, Repo, serve
from limits import limit, wait_until
from llmtrain.errors import DataError, UsageError
from llmtrain.hub import download, find
from llmtrain.hub import errors as explain
from llmtrain.hub import token as tokens
from llmtrain.hub.model_names import HubModel, hub_model_of, parse_hub_model
from slow_cases import some

TOKEN = "hf_CanaryHubToken9f3"
NAME = "somebody/tiny-model"
COMMANDS = """
import sys, typer
from llmtrain import cli
from llmtrain.commands import fetch_data, fetch_model
cli.app = typer.Typer(pretty_exceptions_enable=False)
cli.app.command("fetch-model")(fetch_model.command)
cli.app.command("fetch-data")(fetch_data.command)
cli.main()
"""
FIND = """
import json, os, sys
from llmtrain.errors import LlmtrainError
from llmtrain.hub.find import find_model
if "late" in sys.argv:
    import huggingface_hub.constants
    os.environ["HF_HUB_OFFLINE"] = "1"
try:
    found = {"path": str(find_model(sys.argv[1], sys.argv[2] or None, False, code="code" in sys.argv))}
except LlmtrainError as error:
    found = error.as_dict()
print(json.dumps({**found, "imported": "huggingface_hub" in sys.modules}))
"""


@dataclass
class Sandbox:
    """A fake hub and a directory to download to."""

    hub: FakeHub
    directory: Path
    to: Path
    unset = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", *tokens.TOKEN_VARIABLES, "http_proxy", "HTTP_PROXY", "ALL_PROXY")

    def start(self, script: str, *arguments: str, **env: str) -> "subprocess.Popen[str]":
        kept = {name: value for name, value in os.environ.items() if name not in self.unset}
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env={**kept, **self.hub.environment(self.directory / "hf-home"), **env},
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fetch(self, *more: str, name: str = NAME, verb: str = "fetch-model", **env: str) -> "Ended":
        return Ended.of(self.start(COMMANDS, verb, name, "--to", str(self.to), *more, **env))

    def find(self, path: str, *, revision: str = "", more: tuple[str, ...] = (), **env: str) -> dict[str, Any]:
        ended = Ended.of(self.start(FIND, path, revision, *more, **env))
        assert ended.code == 0, ended.err
        return ended.json


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @classmethod
    def of(cls, process: "subprocess.Popen[str]") -> "Ended":
        out, err = process.communicate()
        return cls(process.returncode, out, err)

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with serve() as server:
        server.repos[NAME] = Repo(
            {
                "config.json": b'{"model_type": "tiny"}',
                "model.safetensors": b"weights" * 1000,
                "tokenizer.json": b"{}",
                "modeling_tiny.py": b"raise SystemExit('never run')",
                "pytorch_model.bin": b"a pickle",
                "original/params.json": b"{}",
                "README.md": b"# Tiny",
            }
        )
        yield Sandbox(server, tmp_path, tmp_path / "volume" / "model")


def fetched(directory: Path) -> set[str]:
    """Files of the repository, without markers and the files of the library."""
    paths = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    return {str(path) for path in paths if not path.parts[0].startswith(".")}


def hits(directory: Path, canary: str) -> list[Path]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if canary.encode() in path.read_bytes() or canary in path.name]


# Downloading.


def test_second_fetch_downloads_nothing(sandbox: Sandbox) -> None:
    first = sandbox.fetch("--json")
    assert first.code == 0, first.err
    assert first.err.count("\n") == 1, "one line says what is downloaded, and no progress bar is in it"
    commit = sandbox.hub.repos[NAME].commit
    assert first.json == {
        "repo": NAME,
        "revision": "main",
        "commit": commit,
        "to": str(sandbox.to),
        "files": 3,
        "bytes": 22 + 7000 + 2,
        "downloaded": True,
    }
    assert fetched(sandbox.to) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (sandbox.to / "model.safetensors").read_bytes() == b"weights" * 1000
    marker = json.loads((sandbox.to / download.MARKER).read_text())
    assert marker["commit"] == commit
    assert marker["files"]["config.json"]["bytes"] == 22
    assert not (sandbox.to / download.PARTIAL).exists()
    assert hub_model_of(sandbox.to) == HubModel(NAME, commit)

    sandbox.hub.requests.clear()
    second = sandbox.fetch("--json")
    assert (second.code, second.json["downloaded"]) == (0, False), second.err
    assert "already complete" in second.err
    by_commit = sandbox.fetch("--revision", commit)
    assert by_commit.code == 0, by_commit.err
    assert sandbox.hub.requests == []


def test_code_is_fetched_only_with_option(sandbox: Sandbox) -> None:
    assert sandbox.fetch("--json").code == 0
    assert "modeling_tiny.py" not in fetched(sandbox.to)
    assert sandbox.fetch("--code").code == 0
    assert "modeling_tiny.py" in fetched(sandbox.to)
    assert sandbox.hub.gets("model.safetensors") == 1
    sandbox.hub.requests.clear()
    assert sandbox.fetch().code == 0
    assert sandbox.hub.requests == []


def test_dataset_is_fetched_completely(sandbox: Sandbox) -> None:
    files = {"train.jsonl": b'{"a": 1}\n', "original/part.bin": b"0", ".llmtrain-fetch.json": b"{}"}
    sandbox.hub.repos["somebody/rows"] = Repo(files, kind="dataset")
    ended = sandbox.fetch(name="somebody/rows", verb="fetch-data")
    assert ended.code == 0, ended.err
    assert "2 files" in ended.out
    assert fetched(sandbox.to) == {"train.jsonl", "original/part.bin"}
    ended = sandbox.fetch(name="somebody/rows")
    assert ended.code == 64
    assert "contains dataset 'somebody/rows'" in ended.err


# Fast tests with each of them: test_tokens_are_used_and_never_written of tests/training/test_fine_tune_hub.py.
@pytest.mark.parametrize("variable", some(tokens.TOKEN_VARIABLES, "HF_TOKEN"))
def test_each_token_variable_is_sent(sandbox: Sandbox, variable: str) -> None:
    sandbox.hub.repos[NAME].token = TOKEN
    ended = sandbox.fetch(**{variable: f" {TOKEN}\n"})
    assert ended.code == 0, ended.err
    assert sandbox.hub.tokens == {TOKEN}


def test_token_is_written_nowhere(sandbox: Sandbox) -> None:
    """The variable has white space around the token, so that only our own care keeps it out of messages."""
    gated = "somebody/gated-model"
    sandbox.hub.repos[gated] = Repo({"config.json": b"{}"}, token="hf_of_another_account", gated=True)
    env = {"HUGGINGFACE_HUB_TOKEN": f" {TOKEN} ", "HF_DEBUG": "1"}
    good = sandbox.fetch("--json", **env)
    assert good.code == 0, good.err
    ends = [good]
    for name in (gated, "somebody/missing", f"no--name/{TOKEN}"):
        sandbox.to = sandbox.directory / "volume" / str(len(ends))
        ends += [sandbox.fetch("--json", name=name, **env)]
        assert ends[-1].code == 64, ends[-1].err
        assert ends[-1].json["error"] == "UsageError"
    assert "***" in ends[-1].err
    assert TOKEN in sandbox.hub.tokens
    assert [text for ended in ends for text in (ended.out, ended.err) if TOKEN in text] == []
    assert hits(sandbox.directory, TOKEN) == []
    assert hits(sandbox.directory, "weights")


def test_interrupted_file_is_resumed(sandbox: Sandbox) -> None:
    """The library keeps whole pieces of 10 MB."""
    data = os.urandom(1 << 16) * 352
    sandbox.hub.repos[NAME].files["model.safetensors"] = data
    sandbox.hub.breaks["model.safetensors"] = 21 << 20
    ended = sandbox.fetch()
    assert ended.code == 0, ended.err
    ranges = [r.range for r in sandbox.hub.requests if r.method == "GET" and r.path.endswith("model.safetensors")]
    assert ranges == [None, f"bytes={20 << 20}-"]
    assert (sandbox.to / "model.safetensors").read_bytes() == data


def test_killed_download_keeps_complete_files(sandbox: Sandbox) -> None:
    sandbox.hub.stalls["model.safetensors"] = 3000
    process = sandbox.start(COMMANDS, "fetch-model", NAME, "--to", str(sandbox.to))
    try:
        assert sandbox.hub.is_stalled.wait(limit(30))
        wait_until(lambda: (sandbox.to / "config.json").exists() and (sandbox.to / "tokenizer.json").exists())
        time.sleep(0.3)  # the library's own note about them comes after the files
    finally:
        process.kill()
        Ended.of(process)
        sandbox.hub.unblock.set()
    assert not (sandbox.to / download.MARKER).exists()
    other = sandbox.fetch(name="somebody/other")
    assert "contains model 'somebody/tiny-model'" in other.err
    pieces = list(sandbox.to.rglob("*.incomplete"))
    assert pieces
    for piece in pieces:
        os.utime(piece, (1, 1))
    ended = sandbox.fetch()
    assert ended.code == 0, ended.err
    assert [sandbox.hub.gets(name) for name in ("config.json", "tokenizer.json", "model.safetensors")] == [1, 1, 2]
    assert (sandbox.to / "model.safetensors").read_bytes() == b"weights" * 1000
    assert list(sandbox.to.rglob("*.incomplete")) == []


def test_two_processes_download_once(sandbox: Sandbox) -> None:
    sandbox.hub.stalls["model.safetensors"] = 10
    arguments = ("fetch-model", NAME, "--to", str(sandbox.to), "--json")
    both = [sandbox.start(COMMANDS, *arguments)]
    assert sandbox.hub.is_stalled.wait(limit(30))
    both += [sandbox.start(COMMANDS, *arguments)]
    assert both[1].stderr
    waiting = both[1].stderr.readline()
    sandbox.hub.unblock.set()
    first, second = (Ended.of(process) for process in both)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.json["downloaded"], second.json["downloaded"]) == (True, False)
    assert f"waiting for another process that is downloading into {sandbox.to}" in waiting
    assert [sandbox.hub.gets(name) for name in fetched(sandbox.to)] == [1, 1, 1]


def test_damaged_file_is_fetched_again(sandbox: Sandbox) -> None:
    """With its old time, so that the library alone would not see it; and at the old commit, since main has moved."""
    assert sandbox.fetch().code == 0
    weights = sandbox.to / "model.safetensors"
    then = weights.stat().st_mtime
    weights.write_bytes(b"weigh")
    os.utime(weights, (then, then))
    commit = sandbox.hub.repos[NAME].commit
    sandbox.hub.repos[NAME].change({"model.safetensors": b"others"})
    ended = sandbox.fetch("--json")
    assert ended.code == 0, ended.err
    assert (ended.json["downloaded"], ended.json["commit"]) == (True, commit)
    assert weights.read_bytes() == b"weights" * 1000
    assert [sandbox.hub.gets(name) for name in ("config.json", "model.safetensors")] == [1, 2]
    (sandbox.to / "config.json").unlink()
    assert sandbox.fetch().code == 0
    assert sandbox.hub.gets("config.json") == 2


def test_again_updates_to_branch_and_removes_old_files(sandbox: Sandbox) -> None:
    assert sandbox.fetch().code == 0
    split = {"model.safetensors": None, "model-00001-of-00001.safetensors": b"weights"}
    sandbox.hub.repos[NAME].change({"config.json": b'{"model_type": "TINY"}', **split})
    assert sandbox.fetch("--json").json["downloaded"] is False
    ended = sandbox.fetch("--again", "--json")
    assert ended.json["commit"] == sandbox.hub.repos[NAME].commit
    assert (sandbox.to / "config.json").read_bytes() == b'{"model_type": "TINY"}'
    assert fetched(sandbox.to) == {"config.json", "model-00001-of-00001.safetensors", "tokenizer.json"}
    assert sandbox.hub.gets("tokenizer.json") == 1
    other = sandbox.fetch("--revision", "v2")
    assert other.code == 64
    assert "'somebody/tiny-model' at revision 'main', not 'v2'" in other.err


def test_unavailable_file_is_not_taken_as_current(sandbox: Sandbox) -> None:
    """The library would keep the old file, of the same size, with a warning."""
    assert sandbox.fetch().code == 0
    sandbox.hub.repos[NAME].change({"config.json": b'{"model_type": "TINY"}'})
    sandbox.hub.failing_heads.add("config.json")
    ended = sandbox.fetch("--again")
    assert ended.code == 65, ended.err
    assert "403" in ended.err
    assert not (sandbox.to / download.MARKER).exists()
    sandbox.hub.failing_heads.clear()
    assert sandbox.fetch().code == 0
    assert (sandbox.to / "config.json").read_bytes() == b'{"model_type": "TINY"}'


def test_foreign_directories_are_refused(sandbox: Sandbox) -> None:
    sandbox.to.mkdir(parents=True)
    (sandbox.to / "thesis.tex").write_text("all of it")
    ended = sandbox.fetch()
    assert ended.code == 64
    assert "is not empty" in ended.err
    assert "thesis.tex" in ended.err
    assert sandbox.hub.requests == []
    assert [path.name for path in sandbox.to.iterdir()] == ["thesis.tex"]
    (sandbox.to / "thesis.tex").unlink()
    (sandbox.to / "lost+found").mkdir()
    assert sandbox.fetch().code == 0


def test_file_name_outside_the_directory_is_refused(sandbox: Sandbox) -> None:
    outside = sandbox.to.parent / "precious.json"
    outside.parent.mkdir()
    outside.write_text("keep")
    sandbox.hub.repos[NAME].files["../precious.json"] = b"bad"
    ended = sandbox.fetch()
    assert ended.code == 65
    assert "outside the directory" in ended.err
    assert outside.read_text() == "keep"


@pytest.mark.parametrize("how", some(["above", "absolute", "link"], "above", "link"))
def test_marker_with_outside_files_is_refused(sandbox: Sandbox, how: str) -> None:
    """Nothing outside is removed as a file of an earlier commit; the marker may have come with the directory."""
    assert sandbox.fetch().code == 0
    outside = sandbox.to.parent / "outside" / "precious.json"
    outside.parent.mkdir()
    outside.write_text("keep")
    (sandbox.to / "linked").symlink_to(outside.parent)
    name = {"above": "../outside/precious.json", "absolute": str(outside), "link": "linked/precious.json"}[how]
    marker = json.loads((sandbox.to / download.MARKER).read_text())
    marker["files"][name] = {"bytes": 4, "id": "x"}
    (sandbox.to / download.MARKER).write_text(json.dumps(marker))
    ended = sandbox.fetch("--again")
    assert ended.code == 65, ended.err
    assert outside.read_text() == "keep"


def test_error_responses_of_the_hub(sandbox: Sandbox) -> None:
    gated = Repo({"config.json": b"{}"}, token="hf_of_another_account", gated=True)
    sandbox.hub.repos["somebody/gated"] = gated
    without = sandbox.fetch(name="somebody/gated")
    assert (without.code, "is gated.\n  Accept its license" in without.err) == (64, True), without.err
    assert all(variable in without.err for variable in tokens.TOKEN_VARIABLES)
    having = sandbox.fetch(name="somebody/gated", HUGGING_FACE_HUB_TOKEN=TOKEN)
    assert having.code == 64
    assert "the token in HUGGING_FACE_HUB_TOKEN has no access" in having.err

    sandbox.to = sandbox.directory / "other"
    missing = sandbox.fetch(name="somebody/missing")
    assert (missing.code, "is not on the hub, or is private." in missing.err) == (64, True), missing.err
    revision = sandbox.fetch("--revision", "v9")
    assert (revision.code, "at revision 'v9': the hub has no such revision" in revision.err) == (64, True)
    sandbox.hub.refused_tokens.add(TOKEN)
    refused = sandbox.fetch(HF_TOKEN=TOKEN)
    assert (refused.code, "does not accept the token in HF_TOKEN" in refused.err) == (64, True), refused.err
    assert list(sandbox.to.iterdir()) == []


def test_unreachable_hub(sandbox: Sandbox) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ended = sandbox.fetch(HF_ENDPOINT=closed)
        assert (ended.code, "the hub cannot be reached" in ended.err) == (64, True), ended.err
        found = sandbox.find(NAME, HF_ENDPOINT=closed)
    assert "the hub cannot be reached" in found["what"]
    assert f"llmtrain fetch-model {NAME} --to DIR" in found["remedy"]
    offline = sandbox.fetch(HF_HUB_OFFLINE="1")
    assert (offline.code, "(offline)" in offline.err) == (64, True), offline.err


# Finding.


def test_directory_needs_no_hub(sandbox: Sandbox) -> None:
    (sandbox.directory / "some" / "model").mkdir(parents=True)
    for path in (str(sandbox.directory / "some" / "model"), "some/model", "~/some/model"):
        found = sandbox.find(path, HOME=str(sandbox.directory))
        assert Path(found["path"]) in (sandbox.directory / "some" / "model", Path("some/model"))
        assert found["imported"] is False
    assert sandbox.hub.requests == []


def test_model_is_downloaded_then_cached(sandbox: Sandbox) -> None:
    sandbox.hub.repos[NAME].token = TOKEN
    found = sandbox.find(NAME, HUGGINGFACE_HUB_TOKEN=TOKEN)
    assert fetched(Path(found["path"])) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert found["imported"] is True
    assert hub_model_of(Path(found["path"])) == HubModel(NAME, sandbox.hub.repos[NAME].commit)
    sandbox.hub.requests.clear()
    assert sandbox.find(NAME, TRANSFORMERS_OFFLINE="yes")["path"] == found["path"]
    assert sandbox.find(NAME, more=("late",))["path"] == found["path"], "set after the library has looked"
    assert sandbox.hub.requests == []
    assert "modeling_tiny.py" in fetched(Path(sandbox.find(NAME, more=("code",), HF_TOKEN=TOKEN)["path"]))


def test_offline_without_cache_is_usage_error(sandbox: Sandbox) -> None:
    found = sandbox.find(NAME, revision="v2", HF_HUB_OFFLINE="1")
    assert found["exit_code"] == 64
    assert f"model.path '{NAME}' at revision 'v2' (not a local directory) is not in the local cache" in found["what"]
    assert f"llmtrain fetch-model {NAME} --to DIR" in found["remedy"]
    assert "set model.path to DIR" in found["remedy"]
    assert sandbox.hub.requests == []


@pytest.mark.parametrize("path", ["/no/such", "./model", "../model", "~/model", "a/b/c", "gpt2/", "."])
def test_missing_directories_are_refused(path: str, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workdir)
    if path == ".":
        assert find.find_model(path, None, False) == Path()
        return
    with pytest.raises(UsageError, match=r"data\.path '.*' does not exist"):
        find.find_model(path, None, False, field="data.path")


@pytest.mark.parametrize("name", ["", "owner/na me", "a--b/c", "x..y", "-a/b", "a/b.git", "a\\b", "a" * 120, "ü/b"])
def test_invalid_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name on the hub"):
        download.download_model(name, None, tmp_path / "unused")
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("name", ["gpt2", "a/b", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "a_b/c.d_e-f"])
def test_valid_names_are_accepted(name: str) -> None:
    find.check_id(name, "no name")


# Settings and messages


@pytest.fixture
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tokens.TOKEN_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_tokens")
def test_token_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens.hub_token() is None
    monkeypatch.setenv("HUGGINGFACE_HUB_TOKEN", "third")
    assert tokens.hub_token() == "third"
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "second\n")
    monkeypatch.setenv("HF_TOKEN", "  ")
    assert tokens.hub_token() == "second"
    monkeypatch.setenv("HF_TOKEN", "first")
    assert tokens.hub_token() == "first"


@pytest.mark.usefixtures("no_tokens")
@pytest.mark.parametrize("token", ["hf_two\nlines", "hf_in two", "hf_ü"])
def test_invalid_token_is_refused(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", token)
    with pytest.raises(UsageError, match="HUGGING_FACE_HUB_TOKEN") as caught:
        tokens.hub_token()
    assert "hf_" not in json.dumps(caught.value.as_dict())


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("True", True), ("ON", True), ("0", False), ("", False)])
def test_is_offline(monkeypatch: pytest.MonkeyPatch, value: str, offline: bool) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        monkeypatch.setenv("TRANSFORMERS_OFFLINE", "")
        monkeypatch.setenv(name, value)
        assert tokens.is_offline() is offline


def test_full_disk_error() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/volume/model")
    error = explain.explain_hub_error(full, "Model 'a/b'")
    assert isinstance(error, UsageError)
    assert error.what == "Model 'a/b' cannot be written to disk: No space left on device (/volume/model)."


def test_wrapped_cause_is_used() -> None:
    wrapped = OSError("transformers says something long")
    wrapped.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert "the hub cannot be reached" in explain.explain_hub_error(wrapped, "Model 'a/b'").what


@pytest.mark.usefixtures("no_tokens")
def test_unknown_error_is_data_error_without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN} ")
    error = explain.explain_hub_error(KeyError(f"odd {TOKEN}"), "Dataset 'a/b'")
    assert isinstance(error, DataError)
    assert error.what == "Dataset 'a/b' cannot be downloaded: KeyError: 'odd ***'"
    proxy = explain.explain_hub_error(ConnectionError("no proxy http://me:CanaryLogin@proxy:3128"), "Model 'a/b'")
    assert "http://***@proxy:3128" in proxy.what


def test_unwritable_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Not a directory"):
        download.download_model(NAME, None, tmp_path / "file" / "model")


# Names of models.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt2", HubModel("gpt2")),
        ("somebody/tiny", HubModel("somebody/tiny")),
        ("somebody/tiny@refs/pr/1", HubModel("somebody/tiny", "refs/pr/1")),
    ],
)
def test_name_with_a_revision(text: str, expected: HubModel) -> None:
    assert parse_hub_model(text, "field") == expected
    assert str(expected) == text


@pytest.mark.parametrize("marker", ["{", {"repo": "/etc", "commit": "ab"}, {"repo": "a/b", "commit": "x y"}, None])
def test_directory_from_elsewhere_has_no_name(tmp_path: Path, marker: Any) -> None:
    if isinstance(marker, dict):
        marker = json.dumps({"kind": "model", "revision": "main", "code": False, "files": {}, **marker})
    if marker is not None:
        (tmp_path / download.MARKER).write_text(marker)
    assert hub_model_of(tmp_path) is None


def test_dataset_is_not_a_model(tmp_path: Path) -> None:
    marker = {"kind": "dataset", "repo": "a/b", "commit": "ab", "revision": "main", "code": False, "files": {}}
    (tmp_path / download.MARKER).write_text(json.dumps(marker))
    assert hub_model_of(tmp_path) is None

"""Copying a run directory to object storage: complete, in a consistent order, and only once."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from limits import limit
from llmtrain.commands.sync import command
from llmtrain.config.document import Document
from llmtrain.config.load import build_config, load_config
from llmtrain.config.schema import may_change
from llmtrain.errors import ConfigError, LlmtrainError, UsageError
from llmtrain.runs import sync
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.sync import parse_uri, sync_run
from s3_server import FakeS3, serve

SECRET = "test-secret-access-key"
URI = "s3://runs/team/a"


@pytest.fixture(scope="session")
def _boto3() -> None:
    pytest.importorskip("boto3", reason="needs boto3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path, tiny: list[str]) -> Path:
    """A real run, created once; tests copy it."""
    from llmtrain.training.run import run_training

    root = tmp_path_factory.mktemp("trained") / "runs"
    overrides = [*tiny, f"output.root_dir={root}", "output.run_id=made", f"data.cache_dir={cache}"]
    assert run_training(load_config("gpt_smoke", overrides))
    return root / "made"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(Path(shutil.copytree(trained, tmp_path / "here" / "made")))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, _boto3: None) -> Iterator[FakeS3]:
    with serve() as store:
        store.buckets["runs"] = {}
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        yield store


def stored(s3: FakeS3) -> dict[str, bytes]:
    """Keys below the run id."""
    return {key.removeprefix("team/a/made/"): item.data for key, item in s3.buckets["runs"].items()}


def wanted_files(run: RunDirectory) -> dict[str, bytes]:
    files = {path.relative_to(run.path).as_posix(): path for path in run.path.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in files.items()
        if not name.startswith((".", "heartbeats/", "exits/", "lock")) and "/." not in name
    }


def test_sync_sends_everything_and_finished_json_last(s3: FakeS3, run: RunDirectory) -> None:
    value = sync_run(run, URI)
    assert stored(s3) == wanted_files(run)
    assert {"config.yaml", "metrics.jsonl", "checkpoints/step_4/manifest.json", "finished.json"} <= stored(s3).keys()
    assert value["uri"] == "s3://runs/team/a/made"
    assert (value["files"], value["skipped"]) == (len(wanted_files(run)), 0)
    assert value["bytes"] == sum(map(len, wanted_files(run).values()))
    for item in s3.buckets["runs"].values():
        assert item.metadata["sha256"] == hashlib.sha256(item.data).hexdigest()
    order = [key.removeprefix("team/a/made/") for key in s3.uploads]
    assert order[-1] == "finished.json"
    assert set(order[-3:-1]) == {"checkpoints/latest", "checkpoints/best"}
    for step in (2, 4):
        own = [name for name in order if name.startswith(f"checkpoints/step_{step}/")]
        assert own[-1].endswith("manifest.json")


def test_list_of_removed_checkpoints_is_sent(s3: FakeS3, run: RunDirectory) -> None:
    (run.checkpoints / "removed.jsonl").write_text('{"step": 2}\n')
    sync_run(run, URI)
    assert "checkpoints/removed.jsonl" in stored(s3)


def test_repeated_sync_sends_nothing(s3: FakeS3, run: RunDirectory) -> None:
    first = sync_run(run, URI)
    count = len(s3.uploads)
    again = sync_run(run, URI + "/")
    assert (again["files"], again["bytes"], again["skipped"]) == (0, 0, first["files"])
    assert len(s3.uploads) == count


def test_changed_file_of_same_size_is_sent(s3: FakeS3, run: RunDirectory) -> None:
    sync_run(run, URI)
    before = run.config.read_bytes()
    run.config.write_bytes(before.replace(b"a", b"b", 1))
    with run.metrics.open("a") as file:
        file.write('{"step": 5}\n')
    count = len(s3.uploads)
    assert sync_run(run, URI)["files"] == 2
    assert s3.uploads[count:] == ["team/a/made/config.yaml", "team/a/made/metrics.jsonl"]
    assert stored(s3) == wanted_files(run)


def test_foreign_object_is_replaced(s3: FakeS3, run: RunDirectory) -> None:
    """The same size is not enough without the hash."""
    sync_run(run, URI)
    key = "team/a/made/config.yaml"
    s3.buckets["runs"][key] = type(s3.buckets["runs"][key])(b"x" * run.config.stat().st_size, {})
    assert sync_run(run, URI)["files"] == 1
    assert stored(s3) == wanted_files(run)


def test_incomplete_files_are_not_sent(s3: FakeS3, run: RunDirectory) -> None:
    run.lock.write_text("{}")
    (run.path / ".config.yaml.7.tmp").write_text("half")
    (run.path / ".new-adapter").mkdir()
    (run.path / ".new-adapter" / "x").write_text("half")
    (run.path / "elsewhere").symlink_to("/etc/hostname")
    for name in ("step_6", ".tmp-step_8-x", "superseded-step_9"):
        shutil.copytree(run.checkpoints / "step_4", run.checkpoints / name)
    (run.checkpoints / "step_6" / "manifest.json").unlink()
    (run.checkpoints / "step_2" / "state.json").write_text("cut")
    (run.checkpoints / "latest").write_text("step_6\n")
    (run.checkpoints / "best").write_text("step_4\n")
    run.finished.unlink()
    sync_run(run, URI)
    names = stored(s3).keys()
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} == {"step_4", "best"}
    assert not [name for name in names if name.startswith((".", "heartbeats", "lock", "elsewhere", "finished"))]


def test_manifest_with_outside_files_is_refused(s3: FakeS3, run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("mine")
    path = run.checkpoints / "step_2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../../../../private"] = {"bytes": 4, "sha256": "0"}
    path.write_text(json.dumps(manifest))
    sync_run(run, URI)
    assert not [key for key in s3.buckets["runs"] if "step_2" in key or "private" in key]


def test_hashes_of_checkpoints_are_not_computed_again(
    s3: FakeS3, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the hard links of output.layout epochs either."""
    source = run.checkpoints / "step_4" / "model.safetensors"
    assert source.is_file()
    run.best.mkdir()
    os.link(source, run.best / source.name)
    hashed: list[Path] = []
    original = sync.file_sha256

    def note(path: Path) -> str:
        hashed.append(path)
        return original(path)

    monkeypatch.setattr(sync, "file_sha256", note)
    sync_run(run, URI)
    assert {path.name for path in hashed if "checkpoints" in path.parts} == {"manifest.json"}
    assert run.best / source.name not in hashed
    assert stored(s3) == wanted_files(run)


def test_large_file_is_sent_in_parts(s3: FakeS3, run: RunDirectory) -> None:
    run.adapter.mkdir(exist_ok=True)
    (run.adapter / "adapter_model.safetensors").write_bytes(os.urandom(9 << 20))
    sync_run(run, URI)
    assert stored(s3) == wanted_files(run)
    assert sync_run(run, URI)["files"] == 0


def test_interrupted_sync_resumes(s3: FakeS3, run: RunDirectory) -> None:
    s3.stuck_after = 5
    code = "import sys; from pathlib import Path; from llmtrain.runs.directory import RunDirectory; "
    code += "from llmtrain.runs.sync import sync_run; sync_run(RunDirectory(Path(sys.argv[1])), sys.argv[2])"
    child = subprocess.Popen([sys.executable, "-c", code, str(run.path), URI])
    assert s3.is_stuck.wait(limit(60))
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    s3.go_on.set()
    s3.stuck_after = None
    assert "finished.json" not in stored(s3)
    assert "checkpoints/latest" not in stored(s3)
    value = sync_run(run, URI)
    assert value["skipped"] == 5
    assert stored(s3) == wanted_files(run)


def test_checkpoint_removed_meanwhile_is_skipped(
    s3: FakeS3, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is training and keeps only its newest checkpoints."""
    original = sync._send_checkpoint

    def removed(checkpoint: sync._Checkpoint, copy: sync._Copy) -> bool:
        if checkpoint.path.name == "step_2":
            (checkpoint.path / "state.json").unlink()
        return original(checkpoint, copy)

    monkeypatch.setattr(sync, "_send_checkpoint", removed)
    sync_run(run, URI)
    assert "checkpoints/step_2/manifest.json" not in stored(s3)
    assert "checkpoints/step_4/manifest.json" in stored(s3)


def test_missing_bucket_is_usage_error(s3: FakeS3, run: RunDirectory) -> None:
    with pytest.raises(UsageError, match="'nowhere'") as problem:
        sync_run(run, "s3://nowhere/x")
    assert problem.value.remedy
    assert not s3.uploads


@pytest.mark.parametrize("how", ["key", "read only"])
def test_missing_permission_is_usage_error(s3: FakeS3, run: RunDirectory, how: str) -> None:
    """read only: the listing succeeds, the upload fails, and boto3 wraps its error."""
    s3.read_only = how == "read only"
    s3.refused_keys = {"test-access-key-id"} if how == "key" else set()
    with pytest.raises(UsageError, match="credentials") as problem:
        sync_run(run, URI)
    assert "s3:PutObject" in str(problem.value)
    assert SECRET not in str(problem.value)


def test_missing_credentials_is_usage_error(s3: FakeS3, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID"):
        sync_run(run, URI)
    assert not s3.uploads


@pytest.mark.usefixtures("s3")
def test_unreachable_endpoint(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://someone:{SECRET}@127.0.0.1:{port}")
    with pytest.raises(LlmtrainError, match="AWS_ENDPOINT_URL_S3") as problem:
        sync_run(run, URI)
    assert not isinstance(problem.value, UsageError)
    assert SECRET not in str(problem.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "not an endpoint")
    with pytest.raises(UsageError, match="settings"):
        sync_run(run, URI)


@pytest.mark.parametrize(
    "uri",
    ["", "runs", "/tmp/x", "gs://runs/a", "s3://", "s3:///a", f"s3://me:{SECRET}@runs/a", f"s3://runs/{SECRET}@a"],
)
def test_bad_uri_is_refused_without_being_shown(uri: str) -> None:
    with pytest.raises(UsageError, match="s3://bucket/prefix") as problem:
        parse_uri(uri)
    assert SECRET not in str(problem.value)


def test_parse_uri() -> None:
    assert parse_uri("s3://runs") == parse_uri("s3://runs/") == ("runs", "")
    assert parse_uri("s3://runs/a//b/") == ("runs", "a/b/")


def test_missing_boto3_is_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="boto3 is not installed"):
        sync_run(RunDirectory(tmp_path), URI)


def test_sync_uri_in_config(tmp_path: Path) -> None:
    assert load_config("gpt_smoke").output.sync_uri is None
    assert load_config("gpt_smoke", [f"output.sync_uri={URI}"]).output.sync_uri == URI
    assert may_change("output.sync_uri")
    path = tmp_path / "config.yaml"
    path.write_text(f"output: {{sync_uri: 's3://me:{SECRET}@runs/a'}}\n")
    with pytest.raises(ConfigError, match=r"output\.sync_uri") as problem:
        load_config(path)
    assert SECRET not in str(problem.value)
    with pytest.raises(ConfigError, match=r"output\.sync_uri"):
        build_config(Document("test", {"schema_version": 3, "output": {"sync_uri": "/tmp/x"}}))


def test_finished_run_is_synced(s3: FakeS3, train, workdir: Path) -> None:
    ended = train(f"output.sync_uri={URI}", "output.run_id=made")
    assert ended.code == 0, ended.err
    run = RunDirectory(workdir / "runs" / "made")
    assert stored(s3) == wanted_files(run)
    generations = json.loads(stored(s3)["generations.json"])
    assert generations[-1]["ended"] == "finished"
    assert "[DONE]" in stored(s3)["logs/train.log"].decode()
    count = len(s3.uploads)
    again = train(f"output.sync_uri={URI}", more=["--resume", "made"])
    assert again.code == 0, again.err
    assert len(s3.uploads) == count, "what is there is not sent again"


@pytest.mark.parametrize("words", [["train", "--resume", "made"], ["node"]])
def test_killed_sync_is_completed_by_next_start(
    s3: FakeS3, train, cli, tiny: list[str], workdir: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """In a pod: its launch has ended for the other nodes, but finished.json, which is sent last, is missing."""
    sets = [*tiny, f"output.sync_uri={URI}", "output.run_id=made"]
    assert train(*sets).code == 0
    whole = stored(s3)
    for key in ("finished.json", "metrics.jsonl"):
        del s3.buckets["runs"][f"team/a/made/{key}"]
    if words[0] == "node":
        monkeypatch.setenv("LLMTRAIN_LAUNCH", "1")
        (workdir / "runs" / "made" / "ended.json").write_text('{"launch": "1", "exit_code": 0}')
    again = cli(*words, "--config", "gpt_smoke", *(word for text in sets for word in ("--set", text)))
    assert again.code == 0, again.err
    assert {name: stored(s3).get(name) for name in whole} == whole


@pytest.mark.usefixtures("s3")
def test_failed_sync_leaves_run_finished(train, workdir: Path) -> None:
    ended = train("output.sync_uri=s3://nowhere/x", "output.run_id=made", more=["--json"])
    assert ended.code == 0, ended.err
    assert ended.json["status"] == "finished"
    assert (workdir / "runs" / "made" / "finished.json").is_file()
    assert "'nowhere'" in ended.err
    assert "llmtrain sync runs/made s3://nowhere/x" in ended.err
    assert "Traceback" not in ended.err


def test_interrupted_run_is_not_synced(s3: FakeS3, train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTRAIN_FAULT", "after_optimizer:3:0:term")
    ended = train(f"output.sync_uri={URI}", "output.run_id=made")
    assert ended.code == 75, ended.err
    assert not s3.buckets["runs"]


def test_sync_command(s3: FakeS3, run: RunDirectory) -> None:
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, ["made", URI, "--root", str(run.path.parent)])
    assert done.exit_code == 0, done.output
    assert "files sent" in done.output
    done = CliRunner().invoke(app, [str(run.path), URI, "--json"])
    value = json.loads(done.stdout)
    assert (value["files"], value["skipped"]) == (0, len(stored(s3)))

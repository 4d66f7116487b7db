"""fetch, with the reader pod as a local process (tests/local_pods_cluster.py) and a real run directory."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from filelock import FileLock

from limits import wait_until
from llmtrain.checkpoint import store as checkpoint_module
from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.cli import main
from llmtrain.commands import cluster_options
from llmtrain.commands import fetch as fetch_command
from llmtrain.errors import CheckpointError, ClusterError, DataError, LlmtrainError, UsageError
from llmtrain.operate.fetch import fetch_run as fetch_module
from llmtrain.operate.fetch import reader_pod, transfer
from llmtrain.operate.fetch.checkpoint import CHECKSUMS, read_checksums
from llmtrain.operate.fetch.fetch_run import fetch_run
from llmtrain.operate.fetch.reader import reader_pod as open_reader
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.runs.checksums import checksums_text
from llmtrain.runs.lock import RunLock
from local_pods_cluster import LocalPodsCluster, record_of_claim

RUN = "remote-run"
NOT_FETCHED = {"lock", ".lock.guard"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The volume of a finished run: gpt_smoke with three checkpoints."""
    volume = tmp_path_factory.mktemp("volume")
    values = [f"output.root_dir={volume}", f"output.run_id={RUN}", f"data.cache_dir={cache}", "run.device=cpu"]
    values += ["run.threads=1", "trainer.max_steps=6", "trainer.save_every_steps=2", "trainer.eval_every_steps=2"]
    values += ["trainer.keep_checkpoints=3", "trainer.log_every_steps=1", "trainer.eval_batches=1"]
    sets = [word for value in values for word in ("--set", value)]
    with pytest.raises(SystemExit) as ended:
        main(["train", "-c", "gpt_smoke", *sets])
    assert ended.value.code == 0
    return volume


@pytest.fixture
def volume(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "volume")
    remote = tmp_path / "volume" / RUN
    (remote / "heartbeats").mkdir(exist_ok=True)
    (remote / "heartbeats" / "rank-0.json").write_text("{}")
    (remote / "checkpoints" / ".tmp-step_8-x").mkdir()
    (remote / "checkpoints" / ".tmp-step_8-x" / "model.safetensors").write_bytes(b"half")
    return tmp_path / "volume"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RETRY_SEC", 0.0)
    monkeypatch.setattr(reader_pod, "POLL_SEC", 0.01)


def fetch(cluster: LocalPodsCluster, to: Path, only: Any = "all") -> dict[str, Any]:
    try:
        return fetch_run(ObservedRun(cluster, record_of_claim(RUN)), to, only).as_dict()  # type: ignore[arg-type]
    finally:
        assert cluster.pods == {}, "the reader pod is always deleted"


def contents(run: Path) -> dict[str, bytes]:
    """Contents of the files that fetch downloads."""
    files = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    return {
        name: data
        for name, data in files.items()
        if name not in NOT_FETCHED and not name.startswith("heartbeats/") and "/." not in f"/{name}"
    }


def step(directory: Path, number: int) -> Path:
    return directory / RUN / "checkpoints" / f"step_{number}"


def test_fetched_run_is_complete_and_usable(volume: Path, tmp_path: Path, cli: Any) -> None:
    cluster = LocalPodsCluster(volume)
    value = fetch(cluster, tmp_path / "here")
    remote, local = volume / RUN, tmp_path / "here" / RUN
    assert contents(local) == contents(remote)
    assert not (local / "lock").exists()
    assert not (local / "heartbeats").exists()
    assert value["files"] == len(contents(remote)) - 2  # pointers are written, not fetched
    assert value["checkpoints"] == ["step_2", "step_4", "step_6"]
    assert value["is_finished"] is True
    assert (local / "metrics.jsonl").stat().st_mtime_ns == (remote / "metrics.jsonl").stat().st_mtime_ns
    for number in (2, 4, 6):
        Checkpoint(step(tmp_path / "here", number)).verify()
    store = CheckpointStore(local / "checkpoints")
    latest = store.pointed("latest")
    assert latest is not None
    assert latest.step == 6
    again = fetch(cluster, tmp_path / "here")
    assert (again["files"], again["bytes"]) == (0, 0)
    assert again["skipped"] == value["files"]
    generated = cli("generate", "--run", RUN, "--root", tmp_path / "here", "--prompt", "a", "--max-new-tokens", 3)
    assert generated.code == 0, generated.err


def test_reader_pod_is_read_only_and_removed(volume: Path, tmp_path: Path) -> None:
    cluster = LocalPodsCluster(volume)
    fetch(cluster, tmp_path / "here", "metrics")
    (pod,) = cluster.made
    labels, spec = pod["metadata"]["labels"], pod["spec"]
    assert labels["llmtrain/reader"] == RUN
    assert "llmtrain.dev/run" not in labels  # or a Service or StatefulSet would select it
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 3600
    (container,) = spec["containers"]
    assert container["image"] == "me/llmtrain:1"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/out", "readOnly": True}]
    assert all(len(" ".join(words)) < 6000 for words in cluster.commands)


@pytest.mark.parametrize("security", ["restricted", "baseline", "none"])
def test_reader_pod_runs_as_the_user_of_the_run(security: str) -> None:
    record = record_of_claim(RUN)
    record = replace(record, config=record.config.with_values("launch", security=security))
    spec = reader_pod.reader_manifest(record, "reader")["spec"]
    assert spec.get("securityContext", {}).get("runAsUser") == (1000 if security == "restricted" else None)
    assert ("securityContext" in spec["containers"][0]) == (security == "restricted")


@pytest.mark.parametrize("every", [1000, 30_000])
def test_broken_connections_do_not_repeat_bytes(volume: Path, tmp_path: Path, every: int) -> None:
    value = fetch(LocalPodsCluster(volume, breaks=[None] * 3 + [every] * 12), tmp_path / "here")
    remote = contents(volume / RUN)
    assert contents(tmp_path / "here" / RUN) == remote
    read_separately = ("latest", "best", CHECKSUMS)
    assert value["bytes"] == sum(len(remote[name]) for name in remote if not name.endswith(read_separately))


def test_fetch_fails_after_retries_without_progress(volume: Path, tmp_path: Path) -> None:
    cluster = LocalPodsCluster(volume, breaks=[1] * 99)
    with pytest.raises(ClusterError, match="broke off"):
        fetch(cluster, tmp_path / "here")
    assert len(cluster.commands) == transfer.MAX_RETRIES + 1
    assert not (tmp_path / "here").exists()


def test_lost_reader_pod_is_replaced(volume: Path, tmp_path: Path) -> None:
    cluster = LocalPodsCluster(volume, breaks=[])

    def lose_once(words: list[str]) -> None:
        if any("model.safetensors" in word for word in words) and len(cluster.made) == 1:
            cluster.pods.clear()
            raise ClusterError("The node is gone.")

    cluster.before = lose_once
    fetch(cluster, tmp_path / "here")
    assert len(cluster.made) == 2
    assert contents(tmp_path / "here" / RUN) == contents(volume / RUN)


def test_damaged_checkpoint_on_the_volume_is_named(volume: Path, tmp_path: Path) -> None:
    file = step(volume, 4) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    cluster = LocalPodsCluster(volume)
    with pytest.raises(CheckpointError, match=r"step_4/model\.safetensors"):
        fetch(cluster, tmp_path / "here")
    asked = [words for words in cluster.commands if any("step_4/model" in word for word in words)]
    assert len(asked) == 2  # it might have been the line
    assert not step(tmp_path / "here", 4).exists()
    Checkpoint(step(tmp_path / "here", 6)).verify()  # the others are local
    assert (tmp_path / "here" / RUN / "finished.json").is_file()
    assert not list((tmp_path / "here").rglob(".tmp-*"))


def test_damaged_manifest_is_named(volume: Path, tmp_path: Path) -> None:
    text = (step(volume, 2) / CHECKSUMS).read_text()
    (step(volume, 2) / CHECKSUMS).write_text(text.replace('"bytes": ', '"bytes": 1', 1))
    with pytest.raises(CheckpointError, match=f"step_2/{CHECKSUMS}"):
        fetch(LocalPodsCluster(volume), tmp_path / "here")
    assert not step(tmp_path / "here", 2).exists()


def test_damaged_local_files_are_fetched_again(volume: Path, tmp_path: Path) -> None:
    fetch(LocalPodsCluster(volume), tmp_path / "here")
    file = step(tmp_path / "here", 6) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    value = fetch(LocalPodsCluster(volume), tmp_path / "here")
    assert value["bytes"] == len(data)  # only that file
    assert contents(tmp_path / "here" / RUN) == contents(volume / RUN)


def test_checkpoint_deleted_during_fetch_is_skipped(volume: Path, tmp_path: Path) -> None:
    cluster = LocalPodsCluster(volume)

    def prune(words: list[str]) -> None:
        doomed = step(volume, 2)
        if any("step_2/state" in word for word in words) and doomed.exists():
            doomed.rename(doomed.with_name(".doomed-step_2"))

    cluster.before = prune
    value = fetch(cluster, tmp_path / "here")
    assert value["checkpoints"] == ["step_4", "step_6"]
    assert sorted(path.name for path in (tmp_path / "here" / RUN / "checkpoints").iterdir()) == [
        "best",
        "latest",
        "step_4",
        "step_6",
    ]


def test_newer_checkpoint_is_fetched_if_the_latest_is_deleted(volume: Path, tmp_path: Path) -> None:
    """The newest checkpoint is deleted while it is fetched; by then there is a newer one."""
    (volume / RUN / "finished.json").unlink()
    shutil.move(step(volume, 6), tmp_path / "later")
    for pointer in ("latest", "best"):
        (volume / RUN / "checkpoints" / pointer).write_text("step_4\n")
    cluster = LocalPodsCluster(volume)

    def advance(words: list[str]) -> None:
        if any("step_4/state" in word for word in words) and not step(volume, 6).exists():
            shutil.rmtree(step(volume, 4))
            shutil.move(tmp_path / "later", step(volume, 6))
            for pointer in ("latest", "best"):
                (volume / RUN / "checkpoints" / pointer).write_text("step_6\n")

    cluster.before = advance
    value = fetch(cluster, tmp_path / "here", "best")
    assert value["checkpoints"] == ["step_6"]
    assert (tmp_path / "here" / RUN / "checkpoints" / "best").read_text() == "step_6\n"


def test_appended_files_end_with_a_complete_line(volume: Path, tmp_path: Path) -> None:
    metrics = volume / RUN / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + b'{"step": 7, "tra')
    fetch(LocalPodsCluster(volume), tmp_path / "here", "metrics")
    local = tmp_path / "here" / RUN / "metrics.jsonl"
    assert local.read_bytes() == whole
    metrics.write_bytes(whole + b'{"step": 7, "train/loss": 1.0}\n')
    fetch(LocalPodsCluster(volume), tmp_path / "here", "metrics")
    assert local.read_bytes() == metrics.read_bytes()
    metrics.write_bytes(b"no line at all")
    fetch(LocalPodsCluster(volume), tmp_path / "here", "metrics")
    assert local.read_bytes() == b""


@pytest.mark.parametrize(
    ("only", "there", "not_there"),
    [
        ("best", ["config.yaml", "tokenizer", "metrics.jsonl", "finished.json", "checkpoints/best"], ["logs"]),
        ("metrics", ["metrics.jsonl", "meta.json"], ["checkpoints", "logs", "tokenizer"]),
        ("logs", ["logs/train.log", "meta.json"], ["checkpoints", "metrics.jsonl", "finished.json"]),
    ],
)
def test_only_selects_files(volume: Path, tmp_path: Path, only: str, there: list[str], not_there: list[str]) -> None:
    value = fetch(LocalPodsCluster(volume), tmp_path / "here", only)
    local = tmp_path / "here" / RUN
    assert [name for name in there if not (local / name).exists()] == []
    assert [name for name in not_there if (local / name).exists()] == []
    assert len(value["checkpoints"]) == (1 if only == "best" else 0)


def test_metrics_include_finished_json(volume: Path, tmp_path: Path) -> None:
    value = fetch(LocalPodsCluster(volume), tmp_path / "here", "metrics")
    remote, local = (parent / RUN / "finished.json" for parent in (volume, tmp_path / "here"))
    assert local.read_bytes() == remote.read_bytes()
    assert value["is_finished"] is True


def test_symbolic_links_are_not_followed(volume: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (volume / RUN / "note").symlink_to(tmp_path / "secret")
    (volume / RUN / "samples").symlink_to(tmp_path)
    fetch(LocalPodsCluster(volume), tmp_path / "here")
    assert not (tmp_path / "here" / RUN / "note").exists()
    assert not (tmp_path / "here" / RUN / "samples").exists()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "there" / RUN).mkdir(parents=True)
    shutil.copy(volume / RUN / "meta.json", tmp_path / "there" / RUN)
    (tmp_path / "there" / RUN / "logs").symlink_to(outside)
    with pytest.raises(UsageError, match="symbolic link"):
        fetch(LocalPodsCluster(volume), tmp_path / "there")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "logs/../../evil", "a//b", ""])
def test_paths_outside_the_run_directory_are_refused(volume: Path, tmp_path: Path, name: str) -> None:
    class Liar(LocalPodsCluster):
        def run(self, pod: str, namespace: str, container: str, command: list[str]) -> Iterator[bytes]:
            if "list" in command:
                yield json.dumps({"path": name, "size": 4, "mtime_ns": 1, "version": "v"}).encode() + b"\n"
            else:
                yield from super().run(pod, namespace, container, command)

    with pytest.raises(DataError, match="outside the run directory"):
        fetch(Liar(volume), tmp_path / "here")
    assert not (tmp_path / "here").exists()
    assert not (tmp_path / "evil").exists()


def test_another_run_is_not_overwritten(volume: Path, tmp_path: Path) -> None:
    local = tmp_path / "here" / RUN
    local.mkdir(parents=True)
    (local / "meta.json").write_text(json.dumps({"run_id": RUN, "started_at": "2020-01-01T00:00:00+0000"}))
    with pytest.raises(UsageError, match=str(tmp_path)):
        fetch(LocalPodsCluster(volume), tmp_path / "here")
    (local / "meta.json").rename(local / "notes.txt")
    with pytest.raises(UsageError, match="not a run directory"):
        fetch(LocalPodsCluster(volume), tmp_path / "here")
    assert [path.name for path in local.iterdir()] == ["notes.txt"]


def test_run_trained_or_resumed_locally_is_not_overwritten(volume: Path, tmp_path: Path) -> None:
    fetch(LocalPodsCluster(volume), tmp_path / "here", "logs")
    local = tmp_path / "here" / RUN
    with RunLock(local / "lock"), pytest.raises(UsageError, match="being trained"):
        fetch(LocalPodsCluster(volume), tmp_path / "here")
    rows = json.loads((local / "generations.json").read_text())
    started = {**rows[-1], "generation": 2, "started_at": "2099-01-01T00:00:00+0000"}
    (local / "generations.json").write_text(json.dumps([*rows, started]))
    with pytest.raises(UsageError, match="resumed locally"):
        fetch(LocalPodsCluster(volume), tmp_path / "here")


def test_run_with_more_starts_than_are_kept(volume: Path, tmp_path: Path) -> None:
    fetch(LocalPodsCluster(volume), tmp_path / "here", "logs")
    local = tmp_path / "here" / RUN / "generations.json"
    remote = volume / RUN / "generations.json"
    first = {**json.loads(remote.read_text())[-1], "launch": "1-abc"}
    local.write_text(json.dumps([first]))
    rows = [{**first, "generation": n, "started_at": f"2099-01-01T00:00:{n - 10:02}+0000"} for n in range(10, 60)]
    remote.write_text(json.dumps(rows))
    fetch(LocalPodsCluster(volume), tmp_path / "here", "logs")
    local.write_text(json.dumps([{**first, "launch": None}]))
    with pytest.raises(UsageError):  # by hand, which no start of the cluster's was
        fetch(LocalPodsCluster(volume), tmp_path / "here", "logs")
    local.write_text(json.dumps([{**rows[-1], "generation": 60, "started_at": "2099-01-02T00:00:00+0000"}]))
    with pytest.raises(UsageError):
        fetch(LocalPodsCluster(volume), tmp_path / "here", "logs")


def test_run_resumed_from_an_older_step(volume: Path, tmp_path: Path) -> None:
    fetch(LocalPodsCluster(volume), tmp_path / "here")
    shutil.rmtree(step(volume, 6))
    (volume / RUN / "finished.json").unlink()
    for pointer in ("latest", "best"):
        (volume / RUN / "checkpoints" / pointer).write_text("step_4\n")
    fetch(LocalPodsCluster(volume), tmp_path / "here")
    store = CheckpointStore(tmp_path / "here" / RUN / "checkpoints")
    assert store.steps() == [2, 4]
    assert (store.folder / "superseded-step_6").is_dir()


def test_insufficient_disk_space_is_refused(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda _: usage._replace(free=fetch_module.MIN_FREE_BYTES))
    with pytest.raises(UsageError, match="MB free"):
        fetch(LocalPodsCluster(volume), tmp_path / "here")
    assert contents(tmp_path / "here" / RUN) == {}


def test_full_disk(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfer, "_copy", fill)
    with pytest.raises(UsageError, match="No space left on device"):
        fetch(LocalPodsCluster(volume), tmp_path / "here")


def test_one_fetch_at_a_time(volume: Path, tmp_path: Path) -> None:
    (tmp_path / "here" / RUN).mkdir(parents=True)
    with FileLock(tmp_path / "here" / RUN / ".fetch.lock"), pytest.raises(UsageError, match="Another fetch"):
        fetch(LocalPodsCluster(volume), tmp_path / "here")


def test_image_whose_python_prints_a_banner(volume: Path, tmp_path: Path) -> None:
    class Chatty(LocalPodsCluster):
        def run(self, *words: Any) -> Iterator[bytes]:
            yield b"Welcome!\n"
            yield from super().run(*words)

    with pytest.raises(DataError, match="Welcome!"):
        fetch(Chatty(volume), tmp_path / "here")


def test_run_without_files(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    with pytest.raises(UsageError, match="no files on claim runs"):
        fetch(LocalPodsCluster(tmp_path / "volume"), tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_shared_files_are_downloaded_once(volume: Path, tmp_path: Path) -> None:
    """With output.layout epochs, best/ shares files with a checkpoint."""
    shutil.copytree(step(volume, 6), volume / RUN / "best", copy_function=os.link)
    cluster = LocalPodsCluster(volume)
    fetch(cluster, tmp_path / "here")
    assert contents(tmp_path / "here" / RUN) == contents(volume / RUN)
    assert (tmp_path / "here" / RUN / "best" / "model.safetensors").samefile(
        step(tmp_path / "here", 6) / "model.safetensors"
    )
    assert not any(word.startswith("best/") for words in cluster.commands for word in words)


KILLED = """
import sys; sys.path.insert(0, sys.argv[3])
from pathlib import Path
from local_pods_cluster import LocalPodsCluster, record_of_claim
from llmtrain.operate.fetch.fetch_run import fetch_run
from llmtrain.operate.observed_run import ObservedRun
cluster = LocalPodsCluster(Path(sys.argv[1]), pause_sec=0.002)
fetch_run(ObservedRun(cluster, record_of_claim("remote-run")), Path(sys.argv[2]))
"""


def test_fetch_continues_after_kill_9(volume: Path, tmp_path: Path) -> None:
    big = os.urandom(10_000_000)
    (step(volume, 6) / "model.safetensors").write_bytes(big)
    rows = json.loads((step(volume, 6) / CHECKSUMS).read_text())["files"]
    rows["model.safetensors"] = {"bytes": len(big), "sha256": hashlib.sha256(big).hexdigest()}
    (step(volume, 6) / CHECKSUMS).write_text(checksums_text(rows))
    words = [sys.executable, "-c", KILLED, str(volume), str(tmp_path / "here"), str(Path(__file__).parents[1])]
    process = subprocess.Popen(words)
    half = step(tmp_path / "here", 6).with_name(".tmp-step_6-fetch")

    def is_half_done() -> bool:
        assert process.poll() is None
        return any(part.stat().st_size > 1_000_000 for part in half.glob(".model.safetensors.*.part"))

    wait_until(is_half_done)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not step(tmp_path / "here", 6).exists()
    came = next(half.glob("*.part")).stat().st_size
    value = fetch(LocalPodsCluster(volume), tmp_path / "here")
    assert value["bytes"] < len(big) - came + 2_000_000
    assert contents(tmp_path / "here" / RUN) == contents(volume / RUN)
    assert not list((tmp_path / "here").rglob("*.part"))


WAITING = {"name": "reader", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
BROKEN = {"name": "reader", "state": {"terminated": {"reason": "StartError", "message": "exec: python3: not found"}}}
FULL = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available: Insufficient memory."}


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        ({"phase": "Pending", "containerStatuses": [WAITING]}, UsageError, "me/llmtrain:1"),
        ({"phase": "Failed", "containerStatuses": [BROKEN]}, UsageError, "python3: not found"),
        ({"phase": "Pending", "conditions": [FULL]}, ClusterError, "Insufficient memory"),
        ({"phase": "Failed", "message": "evicted"}, ClusterError, "evicted"),
    ],
)
def test_reader_pod_that_does_not_start(
    volume: Path,
    tmp_path: Path,
    status: dict[str, Any],
    kind: type[LlmtrainError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_pod, "START_SEC", 0.05)
    cluster = LocalPodsCluster(volume)
    cluster.status = status
    with pytest.raises(kind, match=words):
        fetch(cluster, tmp_path / "here")


def test_missing_claim_lists_the_others(volume: Path, tmp_path: Path) -> None:
    cluster = LocalPodsCluster(volume)
    cluster.claims = {"other": {}}
    with pytest.raises(UsageError, match=r"no claim runs .* Known: other"):
        fetch(cluster, tmp_path / "here")


def test_read_from_offset(volume: Path) -> None:
    with open_reader(ObservedRun(LocalPodsCluster(volume), record_of_claim(RUN))) as reader:  # type: ignore[arg-type]
        text = (volume / RUN / "metrics.jsonl").read_bytes()
        assert b"".join(reader.read("metrics.jsonl", 10)) == text[10:]
        assert list(reader.read("nothing")) == []
        assert [file.path for file in reader.files("logs")] == ["logs/train.log"]


def test_read_checksums_accepts_those_of_training(volume: Path) -> None:
    assert CHECKSUMS == checkpoint_module.CHECKSUMS
    read = read_checksums("step_6", (step(volume, 6) / CHECKSUMS).read_bytes())
    assert read.files == Checkpoint(step(volume, 6))._checksums()


def test_command_finds_the_claim_of_a_deleted_run(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = LocalPodsCluster(volume)
    monkeypatch.setattr(cluster_options, "connect", lambda *_: cluster)
    app = typer.Typer()
    app.command()(fetch_command.command)
    words = [RUN, "--to", str(tmp_path / "here"), "--json"]
    with pytest.raises(UsageError, match="does not exist in namespace"):
        app(words, standalone_mode=False)
    labels = {"app": "llmtrain", "llmtrain.dev/run": RUN}
    cluster.claims[f"{RUN}-runs"] = {"metadata": {"labels": labels}}
    capfd.readouterr()
    app(words, standalone_mode=False)
    assert json.loads(capfd.readouterr().out)["checkpoints"] == ["step_2", "step_4", "step_6"]
    (pod,) = cluster.made
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": f"{RUN}-runs"}
    app([RUN, "--to", str(tmp_path / "there"), "--claim", "runs", "--only", "logs"], standalone_mode=False)
    assert "files fetched" in capfd.readouterr().out
    for wrong in (["--only", "everything"], ["--mlflow-uri", "x"], ["--to-mlflow", "--only", "logs"]):
        with pytest.raises(UsageError):
            app([RUN, *wrong], standalone_mode=False)

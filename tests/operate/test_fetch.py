"""fetch, with the far side as a process on this machine (tests/near_cluster.py) and a real run directory."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from filelock import FileLock

from llmtrain.checkpoint import store as checkpoint_module
from llmtrain.checkpoint.checkpoint import Checkpoint
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.cli import main
from llmtrain.commands import fetch as fetch_command
from llmtrain.errors import CheckpointError, ClusterError, DataError, LlmtrainError, UsageError
from llmtrain.operate.fetch import fetch_run as fetch_module
from llmtrain.operate.fetch import reader_pod, transfer
from llmtrain.operate.fetch.checkpoint import MANIFEST, read_manifest
from llmtrain.operate.fetch.fetch_run import fetch_run
from llmtrain.operate.fetch.reader import reader_pod as open_reader
from llmtrain.runs.lock import RunLock
from llmtrain.runs.manifest import manifest_text
from near_cluster import NearCluster, near_record

RUN = "far-run"
NOT_FETCHED = {"lock", ".lock.guard"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The volume of a run that has finished: gpt_smoke, three checkpoints."""
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
    far = tmp_path / "volume" / RUN
    (far / "heartbeats").mkdir(exist_ok=True)
    (far / "heartbeats" / "rank-0.json").write_text("{}")
    (far / "checkpoints" / ".tmp-step_8-x").mkdir()
    (far / "checkpoints" / ".tmp-step_8-x" / "model.safetensors").write_bytes(b"half")
    return tmp_path / "volume"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PAUSE_SEC", 0.0)
    monkeypatch.setattr(reader_pod, "POLL_SEC", 0.01)


def bring(cluster: NearCluster, to: Path, only: Any = "all") -> dict[str, Any]:
    try:
        return fetch_run(cluster, near_record(RUN), to, only)  # type: ignore[arg-type]
    finally:
        assert cluster.pods == {}, "the reader pod is removed, whatever happens"


def contents(run: Path) -> dict[str, bytes]:
    """Of the files that a fetch brings."""
    files = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    return {
        name: data
        for name, data in files.items()
        if name not in NOT_FETCHED and not name.startswith("heartbeats/") and "/." not in f"/{name}"
    }


def step(folder: Path, number: int) -> Path:
    return folder / RUN / "checkpoints" / f"step_{number}"


def test_the_whole_run_comes_once_and_can_be_used(volume: Path, tmp_path: Path, cli: Any) -> None:
    cluster = NearCluster(volume)
    value = bring(cluster, tmp_path / "here")
    far, here = volume / RUN, tmp_path / "here" / RUN
    assert contents(here) == contents(far)
    assert not (here / "lock").exists()
    assert not (here / "heartbeats").exists()
    assert value["files"] == len(contents(far)) - 2  # the pointers are written, not fetched
    assert value["checkpoints"] == ["step_2", "step_4", "step_6"]
    assert value["is_finished"] is True
    assert (here / "metrics.jsonl").stat().st_mtime_ns == (far / "metrics.jsonl").stat().st_mtime_ns
    for number in (2, 4, 6):
        Checkpoint(step(tmp_path / "here", number)).verify()
    store = CheckpointStore(here / "checkpoints")
    latest = store.pointed("latest")
    assert latest is not None
    assert latest.step == 6
    again = bring(cluster, tmp_path / "here")
    assert (again["files"], again["bytes"]) == (0, 0)
    assert again["skipped"] == value["files"]
    said = cli("generate", "--run", RUN, "--root", tmp_path / "here", "--prompt", "a", "--max-new-tokens", 3)
    assert said.code == 0, said.err


def test_the_reader_pod(volume: Path, tmp_path: Path) -> None:
    cluster = NearCluster(volume)
    bring(cluster, tmp_path / "here", "metrics")
    (pod,) = cluster.made
    labels, spec = pod["metadata"]["labels"], pod["spec"]
    assert labels["llmtrain/reader"] == RUN
    assert "llmtrain.dev/run" not in labels  # a Service or a StatefulSet would take it for its own
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 3600
    (box,) = spec["containers"]
    assert box["image"] == "me/llmtrain:1"
    assert box["securityContext"]["readOnlyRootFilesystem"] is True
    assert box["volumeMounts"] == [{"name": "runs", "mountPath": "/out", "readOnly": True}]
    assert all(len(" ".join(words)) < 6000 for words in cluster.commands)


@pytest.mark.parametrize("security", ["restricted", "baseline", "none"])
def test_the_reader_pod_has_the_user_that_wrote_the_files(security: str) -> None:
    record = near_record(RUN)
    record = replace(record, config=record.config.with_values("launch", security=security))
    spec = reader_pod.reader_manifest(record, "reader")["spec"]
    assert spec.get("securityContext", {}).get("runAsUser") == (1000 if security == "restricted" else None)
    assert ("securityContext" in spec["containers"][0]) == (security == "restricted")


@pytest.mark.parametrize("every", [1000, 30_000])
def test_broken_connections_cost_nothing(volume: Path, tmp_path: Path, every: int) -> None:
    value = bring(NearCluster(volume, breaks=[None] * 3 + [every] * 12), tmp_path / "here")
    far = contents(volume / RUN)
    assert contents(tmp_path / "here" / RUN) == far
    read_apart = ("latest", "best", MANIFEST)
    assert value["bytes"] == sum(len(far[name]) for name in far if not name.endswith(read_apart))  # none came twice


def test_gives_up_where_nothing_comes(volume: Path, tmp_path: Path) -> None:
    cluster = NearCluster(volume, breaks=[1] * 99)
    with pytest.raises(ClusterError, match="broke off"):
        bring(cluster, tmp_path / "here")
    assert len(cluster.commands) == transfer.RETRIES + 1
    assert not (tmp_path / "here").exists()


def test_a_pod_that_has_gone_is_made_anew(volume: Path, tmp_path: Path) -> None:
    cluster = NearCluster(volume, breaks=[])

    def lose_once(words: list[str]) -> None:
        if any("model.safetensors" in word for word in words) and len(cluster.made) == 1:
            cluster.pods.clear()
            raise ClusterError("The machine is gone.")

    cluster.before = lose_once
    bring(cluster, tmp_path / "here")
    assert len(cluster.made) == 2
    assert contents(tmp_path / "here" / RUN) == contents(volume / RUN)


def test_damage_on_the_volume_is_named(volume: Path, tmp_path: Path) -> None:
    file = step(volume, 4) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    cluster = NearCluster(volume)
    with pytest.raises(CheckpointError, match=r"step_4/model\.safetensors"):
        bring(cluster, tmp_path / "here")
    asked = [words for words in cluster.commands if any("step_4/model" in word for word in words)]
    assert len(asked) == 2  # it might have been the line
    assert not step(tmp_path / "here", 4).exists()
    Checkpoint(step(tmp_path / "here", 6)).verify()  # the others are here
    assert (tmp_path / "here" / RUN / "finished.json").is_file()
    assert not list((tmp_path / "here").rglob(".tmp-*"))


def test_a_damaged_manifest_is_named(volume: Path, tmp_path: Path) -> None:
    text = (step(volume, 2) / MANIFEST).read_text()
    (step(volume, 2) / MANIFEST).write_text(text.replace('"bytes": ', '"bytes": 1', 1))
    with pytest.raises(CheckpointError, match=f"step_2/{MANIFEST}"):
        bring(NearCluster(volume), tmp_path / "here")
    assert not step(tmp_path / "here", 2).exists()


def test_damage_here_is_mended(volume: Path, tmp_path: Path) -> None:
    bring(NearCluster(volume), tmp_path / "here")
    file = step(tmp_path / "here", 6) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    value = bring(NearCluster(volume), tmp_path / "here")
    assert value["bytes"] == len(data)  # only that file
    assert contents(tmp_path / "here" / RUN) == contents(volume / RUN)


def test_a_checkpoint_that_is_pruned_meanwhile_is_passed_over(volume: Path, tmp_path: Path) -> None:
    cluster = NearCluster(volume)

    def prune(words: list[str]) -> None:
        doomed = step(volume, 2)
        if any("step_2/state" in word for word in words) and doomed.exists():
            doomed.rename(doomed.with_name(".doomed-step_2"))

    cluster.before = prune
    value = bring(cluster, tmp_path / "here")
    assert value["checkpoints"] == ["step_4", "step_6"]
    assert sorted(path.name for path in (tmp_path / "here" / RUN / "checkpoints").iterdir()) == [
        "best",
        "latest",
        "step_4",
        "step_6",
    ]


def test_a_run_that_goes_on_is_looked_at_again(volume: Path, tmp_path: Path) -> None:
    """Its newest checkpoint is removed while it comes; by then there is a newer one."""
    (volume / RUN / "finished.json").unlink()
    shutil.move(step(volume, 6), tmp_path / "later")
    for pointer in ("latest", "best"):
        (volume / RUN / "checkpoints" / pointer).write_text("step_4\n")
    cluster = NearCluster(volume)

    def go_on(words: list[str]) -> None:
        if any("step_4/state" in word for word in words) and not step(volume, 6).exists():
            shutil.rmtree(step(volume, 4))
            shutil.move(tmp_path / "later", step(volume, 6))
            for pointer in ("latest", "best"):
                (volume / RUN / "checkpoints" / pointer).write_text("step_6\n")

    cluster.before = go_on
    value = bring(cluster, tmp_path / "here", "best")
    assert value["checkpoints"] == ["step_6"]
    assert (tmp_path / "here" / RUN / "checkpoints" / "best").read_text() == "step_6\n"


def test_growing_files_come_in_whole_lines(volume: Path, tmp_path: Path) -> None:
    metrics = volume / RUN / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + b'{"step": 7, "tra')
    bring(NearCluster(volume), tmp_path / "here", "metrics")
    here = tmp_path / "here" / RUN / "metrics.jsonl"
    assert here.read_bytes() == whole
    metrics.write_bytes(whole + b'{"step": 7, "train/loss": 1.0}\n')
    bring(NearCluster(volume), tmp_path / "here", "metrics")
    assert here.read_bytes() == metrics.read_bytes()
    metrics.write_bytes(b"no line at all")
    bring(NearCluster(volume), tmp_path / "here", "metrics")
    assert here.read_bytes() == b""


@pytest.mark.parametrize(
    ("only", "there", "not_there"),
    [
        ("best", ["config.yaml", "tokenizer", "metrics.jsonl", "finished.json", "checkpoints/best"], ["logs"]),
        ("metrics", ["metrics.jsonl", "meta.json"], ["checkpoints", "logs", "tokenizer"]),
        ("logs", ["logs/train.log", "meta.json"], ["checkpoints", "metrics.jsonl", "finished.json"]),
    ],
)
def test_a_part(volume: Path, tmp_path: Path, only: str, there: list[str], not_there: list[str]) -> None:
    value = bring(NearCluster(volume), tmp_path / "here", only)
    here = tmp_path / "here" / RUN
    assert [name for name in there if not (here / name).exists()] == []
    assert [name for name in not_there if (here / name).exists()] == []
    assert len(value["checkpoints"]) == (1 if only == "best" else 0)


def test_the_result_comes_with_the_metrics(volume: Path, tmp_path: Path) -> None:
    value = bring(NearCluster(volume), tmp_path / "here", "metrics")
    far, here = (folder / RUN / "finished.json" for folder in (volume, tmp_path / "here"))
    assert here.read_bytes() == far.read_bytes()
    assert value["is_finished"] is True


def test_links_lead_nowhere(volume: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (volume / RUN / "note").symlink_to(tmp_path / "secret")
    (volume / RUN / "samples").symlink_to(tmp_path)
    bring(NearCluster(volume), tmp_path / "here")
    assert not (tmp_path / "here" / RUN / "note").exists()
    assert not (tmp_path / "here" / RUN / "samples").exists()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "there" / RUN).mkdir(parents=True)
    shutil.copy(volume / RUN / "meta.json", tmp_path / "there" / RUN)
    (tmp_path / "there" / RUN / "logs").symlink_to(outside)
    with pytest.raises(UsageError, match="symbolic link"):
        bring(NearCluster(volume), tmp_path / "there")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "logs/../../evil", "a//b", ""])
def test_names_that_lead_out_are_refused(volume: Path, tmp_path: Path, name: str) -> None:
    class Liar(NearCluster):
        def run(self, pod: str, namespace: str, container: str, command: list[str]) -> Iterator[bytes]:
            if "list" in command:
                yield json.dumps({"path": name, "size": 4, "mtime_ns": 1, "version": "v"}).encode() + b"\n"
            else:
                yield from super().run(pod, namespace, container, command)

    with pytest.raises(DataError, match="outside the run directory"):
        bring(Liar(volume), tmp_path / "here")
    assert not (tmp_path / "here").exists()
    assert not (tmp_path / "evil").exists()


def test_another_run_is_not_overwritten(volume: Path, tmp_path: Path) -> None:
    here = tmp_path / "here" / RUN
    here.mkdir(parents=True)
    (here / "meta.json").write_text(json.dumps({"run_id": RUN, "started_at": "2020-01-01T00:00:00+0000"}))
    with pytest.raises(UsageError, match="another run of the same name"):
        bring(NearCluster(volume), tmp_path / "here")
    (here / "meta.json").rename(here / "notes.txt")
    with pytest.raises(UsageError, match="is not a run"):
        bring(NearCluster(volume), tmp_path / "here")
    assert [path.name for path in here.iterdir()] == ["notes.txt"]


def test_a_run_that_is_used_here_is_left_alone(volume: Path, tmp_path: Path) -> None:
    bring(NearCluster(volume), tmp_path / "here", "logs")
    here = tmp_path / "here" / RUN
    with RunLock(here / "lock"), pytest.raises(UsageError, match="is being trained here"):
        bring(NearCluster(volume), tmp_path / "here")
    rows = json.loads((here / "generations.json").read_text())
    started = {**rows[-1], "generation": 2, "started_at": "2099-01-01T00:00:00+0000"}
    (here / "generations.json").write_text(json.dumps([*rows, started]))
    with pytest.raises(UsageError, match="was continued here"):
        bring(NearCluster(volume), tmp_path / "here")


def test_a_run_that_restarted_more_often_than_its_list_of_starts_is_long(volume: Path, tmp_path: Path) -> None:
    bring(NearCluster(volume), tmp_path / "here", "logs")
    here = tmp_path / "here" / RUN / "generations.json"
    far = volume / RUN / "generations.json"
    first = {**json.loads(far.read_text())[-1], "launch": "1-abc"}
    here.write_text(json.dumps([first]))
    rows = [{**first, "generation": n, "started_at": f"2099-01-01T00:00:{n - 10:02}+0000"} for n in range(10, 60)]
    far.write_text(json.dumps(rows))
    bring(NearCluster(volume), tmp_path / "here", "logs")
    here.write_text(json.dumps([{**first, "launch": None}]))
    with pytest.raises(UsageError):  # by hand, which no start of the cluster's was
        bring(NearCluster(volume), tmp_path / "here", "logs")
    here.write_text(json.dumps([{**rows[-1], "generation": 60, "started_at": "2099-01-02T00:00:00+0000"}]))
    with pytest.raises(UsageError):
        bring(NearCluster(volume), tmp_path / "here", "logs")


def test_a_run_that_went_back(volume: Path, tmp_path: Path) -> None:
    bring(NearCluster(volume), tmp_path / "here")
    shutil.rmtree(step(volume, 6))
    (volume / RUN / "finished.json").unlink()
    for pointer in ("latest", "best"):
        (volume / RUN / "checkpoints" / pointer).write_text("step_4\n")
    bring(NearCluster(volume), tmp_path / "here")
    store = CheckpointStore(tmp_path / "here" / RUN / "checkpoints")
    assert store.steps() == [2, 4]
    assert (store.folder / "superseded-step_6").is_dir()


def test_no_room(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda _: usage._replace(free=fetch_module.ROOM))
    with pytest.raises(UsageError, match="not enough room"):
        bring(NearCluster(volume), tmp_path / "here")
    assert contents(tmp_path / "here" / RUN) == {}


def test_a_full_disk(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfer, "_copy", fill)
    with pytest.raises(UsageError, match="No space left on device"):
        bring(NearCluster(volume), tmp_path / "here")


def test_one_fetch_at_a_time(volume: Path, tmp_path: Path) -> None:
    (tmp_path / "here" / RUN).mkdir(parents=True)
    with FileLock(tmp_path / "here" / RUN / ".fetch.lock"), pytest.raises(UsageError, match="Another fetch"):
        bring(NearCluster(volume), tmp_path / "here")


def test_an_image_whose_python_prints(volume: Path, tmp_path: Path) -> None:
    class Chatty(NearCluster):
        def run(self, *words: Any) -> Iterator[bytes]:
            yield b"Welcome!\n"
            yield from super().run(*words)

    with pytest.raises(DataError, match="Welcome!"):
        bring(Chatty(volume), tmp_path / "here")


def test_nothing_there_yet(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    with pytest.raises(UsageError, match="has no files on the claim runs yet"):
        bring(NearCluster(tmp_path / "volume"), tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_shared_files_come_once(volume: Path, tmp_path: Path) -> None:
    """best/ of output.layout epochs: the very files of a checkpoint."""
    shutil.copytree(step(volume, 6), volume / RUN / "best", copy_function=os.link)
    cluster = NearCluster(volume)
    bring(cluster, tmp_path / "here")
    assert contents(tmp_path / "here" / RUN) == contents(volume / RUN)
    assert (tmp_path / "here" / RUN / "best" / "model.safetensors").samefile(
        step(tmp_path / "here", 6) / "model.safetensors"
    )
    assert not any(word.startswith("best/") for words in cluster.commands for word in words)


KILLED = """
import sys; sys.path.insert(0, sys.argv[3])
from pathlib import Path
from near_cluster import NearCluster, near_record
from llmtrain.operate.fetch.fetch_run import fetch_run
fetch_run(NearCluster(Path(sys.argv[1]), pause_sec=0.002), near_record("far-run"), Path(sys.argv[2]))
"""


def test_kill_9_and_again(volume: Path, tmp_path: Path) -> None:
    big = os.urandom(10_000_000)
    (step(volume, 6) / "model.safetensors").write_bytes(big)
    rows = json.loads((step(volume, 6) / MANIFEST).read_text())["files"]
    rows["model.safetensors"] = {"bytes": len(big), "sha256": hashlib.sha256(big).hexdigest()}
    (step(volume, 6) / MANIFEST).write_text(manifest_text(rows))
    words = [sys.executable, "-c", KILLED, str(volume), str(tmp_path / "here"), str(Path(__file__).parents[1])]
    process = subprocess.Popen(words)
    deadline = time.monotonic() + 60
    half = step(tmp_path / "here", 6).with_name(".tmp-step_6-fetch")
    while not any(part.stat().st_size > 1_000_000 for part in half.glob(".model.safetensors.*.part")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not step(tmp_path / "here", 6).exists()
    came = next(half.glob("*.part")).stat().st_size
    value = bring(NearCluster(volume), tmp_path / "here")
    assert value["bytes"] < len(big) - came + 2_000_000
    assert contents(tmp_path / "here" / RUN) == contents(volume / RUN)
    assert not list((tmp_path / "here").rglob("*.part"))


WAITING = {"name": "reader", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
BROKEN = {"name": "reader", "state": {"terminated": {"reason": "StartError", "message": "exec: python3: not found"}}}
FULL = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available: Insufficient memory."}


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        ({"phase": "Pending", "containerStatuses": [WAITING]}, UsageError, "me/llmtrain:1 cannot be pulled"),
        ({"phase": "Failed", "containerStatuses": [BROKEN]}, UsageError, "It needs python3"),
        ({"phase": "Pending", "conditions": [FULL]}, ClusterError, "Insufficient memory"),
        ({"phase": "Failed", "message": "evicted"}, ClusterError, "has ended: evicted"),
    ],
)
def test_a_pod_that_does_not_start(
    volume: Path,
    tmp_path: Path,
    status: dict[str, Any],
    kind: type[LlmtrainError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_pod, "START_SEC", 0.05)
    cluster = NearCluster(volume)
    cluster.status = status
    with pytest.raises(kind, match=words):
        bring(cluster, tmp_path / "here")


def test_a_claim_that_is_not_there(volume: Path, tmp_path: Path) -> None:
    cluster = NearCluster(volume)
    cluster.claims = {"other": {}}
    with pytest.raises(UsageError, match=r"no claim runs .* Known: other"):
        bring(cluster, tmp_path / "here")


def test_reading_a_file_from_a_byte_on(volume: Path) -> None:
    with open_reader(NearCluster(volume), near_record(RUN)) as reader:  # type: ignore[arg-type]
        text = (volume / RUN / "metrics.jsonl").read_bytes()
        assert b"".join(reader.read("metrics.jsonl", 10)) == text[10:]
        assert list(reader.read("nothing")) == []
        assert [file.path for file in reader.files("logs")] == ["logs/train.log"]


def test_manifests_are_those_of_training(volume: Path) -> None:
    assert MANIFEST == checkpoint_module.MANIFEST
    read = read_manifest("step_6", (step(volume, 6) / MANIFEST).read_bytes())
    assert read.files == Checkpoint(step(volume, 6))._manifest()


def test_the_command_finds_the_claim_of_a_forgotten_run(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = NearCluster(volume)
    monkeypatch.setattr(fetch_command, "connect", lambda *_: cluster)
    app = typer.Typer()
    app.command()(fetch_command.command)
    words = [RUN, "--to", str(tmp_path / "here"), "--json"]
    with pytest.raises(UsageError, match="is not in namespace"):
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

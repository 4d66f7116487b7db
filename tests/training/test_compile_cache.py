"""Compiled code outlives the machine, and only code that is intact and ours is used."""

import fcntl
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
import torch

from limits import limit
from llmtrain.compat.numerics import Numerics
from llmtrain.config.load import dump_config
from llmtrain.config.model import GptSection
from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.training import compile_cache as module
from llmtrain.training.compilation import WHOLE_MODEL_STEPS, compiled_parts
from llmtrain.training.compile_cache import CompileCache
from llmtrain.training.start_up import starting_up

MakeConfig = Callable[..., Config]


def new_machine(path: Path, folder: Path) -> CompileCache:
    folder.mkdir()
    cache = CompileCache(path, folder / "key")
    cache.unpack()
    return cache


def compiled(folder: Path, name: str = "inductor/ab/code.so", content: bytes = b"code") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The file that a first start has written."""
    cache = new_machine(tmp_path / "cache" / "key.tar", tmp_path / "first")
    assert not cache.is_filled
    compiled(cache.local)
    compiled(cache.local, "inductor/locks/code.lock")
    cache.save(29.0)
    return cache.path


@pytest.fixture
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of its own, in a process that has not compiled anything."""
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in (module.INDUCTOR_DIRECTORY, module.TRITON_DIRECTORY):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever torch sets it to
        monkeypatch.delenv(name)
    return tmp_path


def test_another_machine_has_the_code(saved: Path, tmp_path: Path) -> None:
    cache = new_machine(saved, tmp_path / "second")
    assert cache.is_filled
    assert cache.compile_seconds == 29.0
    files = [path for path in cache.local.rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["code.so"], "locks are left out"
    assert files[0].read_bytes() == b"code"
    before = saved.read_bytes()
    cache.save(3.0)
    assert saved.read_bytes() == before, "nothing new was compiled"
    compiled(cache.local, "inductor/cd/more.so")
    cache.save(3.0)
    third = new_machine(saved, tmp_path / "third")
    assert (third.local / "inductor/cd/more.so").exists()
    assert third.compile_seconds == 29.0


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "no header", "a list"])
def test_damaged_file_is_ignored_and_replaced(
    saved: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = saved.read_bytes()
    damaged = {
        "changed": content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
        "cut": content[:-1],
        "empty": b"",
        "no header": content.partition(b"\n")[2],
        "a list": b"[]\n" + content.partition(b"\n")[2],
    }
    saved.write_bytes(damaged[damage])
    cache = new_machine(saved, tmp_path / "second")
    assert not cache.is_filled
    assert not list(cache.local.iterdir())
    assert f"ignoring the compiled code in {saved}" in caplog.text
    compiled(cache.local)
    cache.save(12.0)
    assert new_machine(saved, tmp_path / "third").is_filled


def test_file_of_another_user_is_ignored(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.os, "getuid", lambda: 4242)
    if os.geteuid() == 0:
        os.chown(saved, 4243, -1)
    assert not new_machine(saved, tmp_path / "second").is_filled
    assert "belongs to another user" in caplog.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_what_is_no_regular_file_or_too_large_is_not_read(
    saved: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved.unlink()
    if kind == "pipe":
        os.mkfifo(saved)
    elif kind == "device":
        saved.symlink_to("/dev/zero")
    else:
        with saved.open("wb") as file:
            file.truncate(module.MOST_BYTES + 1)
    assert not new_machine(saved, tmp_path / "second").is_filled
    assert ("at most" if kind == "huge" else "not a regular file") in caplog.text


def test_second_start_on_a_machine_knows_how_long_compiling_took(saved: Path, tmp_path: Path) -> None:
    again = CompileCache(saved, tmp_path / "first" / "key")
    again.unpack()
    assert (again.is_filled, again.compile_seconds) == (True, 29.0)
    compiled(again.local, "inductor/cd/more.so")
    again.save()
    assert new_machine(saved, tmp_path / "second").compile_seconds == 29.0


def test_local_directory_may_be_below_a_temporary_one(tmp_path: Path) -> None:
    """As of TMPDIR=$(mktemp -d); what compilers are writing has such a name, too. Links are left out."""
    cache = new_machine(tmp_path / "key.tar", tmp_path / "tmp.AbC")
    compiled(cache.local)
    compiled(cache.local, "triton/tmp.pid_3/kernel.so")
    (cache.local / "link.so").symlink_to("inductor/ab/code.so")
    cache.save()
    other = new_machine(cache.path, tmp_path / "second")
    assert [path.name for path in other.local.rglob("*") if path.is_file()] == ["code.so"]


@pytest.mark.parametrize(
    "content", [gzip.compress(b"x" * 2000)[:-30], gzip.compress(b"x" * 2000)], ids=["cut", "other"]
)
def test_archive_that_cannot_be_read_is_ignored(
    saved: Path, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    header = json.dumps({"sha256": hashlib.sha256(content).hexdigest()})
    saved.write_bytes(header.encode() + b"\n" + content)
    assert not new_machine(saved, tmp_path / "second").is_filled
    assert "cannot be unpacked" in caplog.text


def test_archive_does_not_leave_its_directory(saved: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../outside"))
    content = buffer.getvalue()
    header = json.dumps({"sha256": hashlib.sha256(content).hexdigest()})
    saved.write_bytes(header.encode() + b"\n" + content)
    cache = new_machine(saved, tmp_path / "second")
    assert not cache.is_filled
    assert not (tmp_path / "second" / "outside").exists()


def test_run_does_not_fail_if_the_file_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("not a directory")
    cache = new_machine(tmp_path / "cache" / "key.tar", tmp_path / "first")
    compiled(cache.local)
    cache.save(1.0)
    assert "the next start compiles again" in caplog.text


def test_old_files_are_deleted(tmp_path: Path) -> None:
    for number in range(module.MOST_FILES + 3):
        cache = new_machine(tmp_path / "cache" / f"{number}.tar", tmp_path / f"machine-{number}")
        compiled(cache.local)
        cache.save()
        os.utime(cache.path, (number, number))
    assert len(list((tmp_path / "cache").iterdir())) == module.MOST_FILES
    assert not (tmp_path / "cache" / "0.tar").exists()


def test_files_of_killed_starts_are_deleted(saved: Path, tmp_path: Path) -> None:
    killed = saved.with_name(f".{saved.name}.0123abcd.tmp")
    other = saved.with_name(f".{saved.name}.4567abcd.tmp")
    killed.touch()
    other.touch()
    os.utime(killed, (1, 1))
    cache = new_machine(saved.with_name("other.tar"), tmp_path / "second")
    compiled(cache.local)
    cache.save()
    assert not killed.exists()
    assert other.exists(), "another process may be writing it"


def directories_of_keys(folder: Path) -> set[str]:
    return {path.name for path in (folder / f"llmtrain-compiled-{os.getuid()}").iterdir() if path.is_dir()}


def test_unused_directories_of_a_machine_are_deleted(own_machine: Path) -> None:
    local = own_machine / f"llmtrain-compiled-{os.getuid()}"

    def start(key: str) -> None:
        with module.compile_cache(own_machine / "volume", key):
            pass

    keys = [f"key-{number}" for number in range(module.MOST_FILES + 3)]
    start(keys[0])
    with (local / f"{keys[0]}.used").open() as still_running:
        fcntl.flock(still_running, fcntl.LOCK_SH)
        for number, key in enumerate(keys):
            start(key)
            os.utime(local / key, (number, number))
        start(keys[-1])
        assert directories_of_keys(own_machine) == {keys[0], *keys[-module.MOST_FILES :]}
    start(keys[-1])
    assert keys[0] not in directories_of_keys(own_machine)


def test_what_killed_starts_have_left_of_directories_is_deleted(own_machine: Path) -> None:
    local = module._private_directory()
    for name in ("key.partial", "key.deleted", "other.deleted", "used.partial"):
        (local / name).mkdir()
        (local / name / "code.so").touch()
    with (local / "used.used").open("a+") as unpacking:
        fcntl.flock(unpacking, fcntl.LOCK_SH)
        with module.compile_cache(own_machine / "volume", "third"):
            assert directories_of_keys(own_machine) == {"third", "used.partial"}


def test_processes_of_a_machine_use_the_directory_together(own_machine: Path) -> None:
    program = """
import sys
from pathlib import Path
from llmtrain.training.compile_cache import compile_cache
with compile_cache(Path(sys.argv[1]), "key") as cache:
    print(cache.local.is_dir(), flush=True)
"""
    command = [sys.executable, "-c", program, str(own_machine / "volume")]
    environment = {**os.environ, "TMPDIR": str(own_machine)}
    with module.compile_cache(own_machine / "volume", "key") as cache:
        assert cache is not None
        with cache.local.with_suffix(".used").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in (module.INDUCTOR_DIRECTORY, module.TRITON_DIRECTORY):
            environment.pop(name, None)
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit(60))
    assert second.stdout == "True\n", second.stderr


def test_default_that_torch_has_set_is_not_the_users_choice(own_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == os.environ[module.INDUCTOR_DIRECTORY]
    with module.compile_cache(own_machine / "volume", "key") as cache:
        assert cache is not None
        assert os.environ[module.INDUCTOR_DIRECTORY] == str(cache.local / "inductor")
    monkeypatch.setenv(module.INDUCTOR_DIRECTORY, str(own_machine / "chosen"))
    with module.compile_cache(own_machine / "volume", "key") as cache:
        assert cache is None


def test_local_directory_must_be_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"llmtrain-compiled-{os.getuid()}"
    assert module._private_directory() == folder
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="no one else"):
        module._private_directory()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        module._private_directory()


@pytest.mark.usefixtures("own_machine")
def test_file_depends_on_what_is_compiled(make_config: MakeConfig) -> None:
    def key(**changes: object) -> str:
        config = make_config(trainer__compile=True, **changes)
        with starting_up(config, World(device=torch.device("cpu")), 0.0) as start:
            assert start.cache is not None
            return start.cache.path.name

    same = {key(), key(trainer__lr=0.5), key(trainer__max_steps=4), key(run__seed=9)}
    assert len(same) == 1, "trials of a sweep share it"
    others = {key(trainer__micro_batch_size=3), key(model__d_model=48), key(trainer__precision="bf16")}
    assert len(others | same) == 4


def test_long_runs_compile_the_whole_model(make_config: MakeConfig) -> None:
    trainer = make_config(trainer__compile=True).trainer
    adapter = GPTAdapter(GptSection(), 256)
    assert compiled_parts(adapter, trainer, WHOLE_MODEL_STEPS - 1) == "blocks"
    assert compiled_parts(adapter, trainer, WHOLE_MODEL_STEPS) == "model"
    assert compiled_parts(adapter, trainer.model_copy(update={"compile": False}), 10) is None
    adapter.numerics = Numerics.recorded({"numerics": 6, "compiled": "blocks"}, "mine")
    assert compiled_parts(adapter, trainer, WHOLE_MODEL_STEPS) == "blocks", "a run that has become longer"
    adapter.numerics = Numerics.recorded({"numerics": 5}, "mine")
    assert compiled_parts(adapter, trainer, 10) == "model", "as it was before version 6"


@pytest.mark.slow
def test_restarted_machine_compiles_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    """Killed in step 5 and resumed on a machine with an empty temporary directory: the same bits, no compilation."""

    def train(config: Config, machine: str, *words: str, fault: str = "") -> subprocess.CompletedProcess[str]:
        (tmp_path / machine).mkdir(exist_ok=True)
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(config))
        command = [sys.executable, "-m", "llmtrain", "train", "--config", str(file), "--json", *words]
        environment = {**os.environ, "TMPDIR": str(tmp_path / machine), "LLMTRAIN_FAULT": fault}
        # torch sets them when another test compiles in this process
        for name in (module.INDUCTOR_DIRECTORY, module.TRITON_DIRECTORY):
            environment.pop(name, None)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit(300))

    changes = {
        "trainer__compile": True,
        "model__dropout": 0.0,
        "data__cache_dir": str(tmp_path / "volume"),
        "output__run_id": "compiled",
    }
    whole = make_config(**changes)
    ended = train(whole, "first")
    assert ended.returncode == 0, ended.stderr
    assert "most of them for compiling" in ended.stderr
    expected = harness.outcome(Path(whole.output.root_dir), json.loads(ended.stdout))
    (packed,) = (tmp_path / "volume" / "compiled").iterdir()
    before = packed.read_bytes()

    again = make_config(**changes)
    assert again.output.root_dir != whole.output.root_dir
    assert train(again, "second", fault="after_optimizer:5:0:kill").returncode == -9
    ended = train(again, "second", "--resume", "auto")
    assert ended.returncode == 0, ended.stderr
    assert "with the compiled code of an earlier start" in ended.stderr
    assert harness.outcome(Path(again.output.root_dir), json.loads(ended.stdout)) == expected
    assert packed.read_bytes() == before, "the second machine has compiled nothing that the first had not"

"""file_server.py as the reader pod runs it: isolated Python with the source in a variable."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmtrain.core.env import READER_SCRIPT
from llmtrain.launch.pod_scripts import file_server
from llmtrain.operate.fetch.reader_pod import COMMAND

SOURCE = Path(file_server.__file__).read_text()


def run_script(*words: object) -> bytes:
    done = subprocess.run(
        [sys.executable, *COMMAND[1:], *map(str, words)],
        env={**os.environ, READER_SCRIPT: SOURCE},
        capture_output=True,
        check=True,
    )
    return done.stdout


def listed(directory: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in run_script("list", directory).splitlines()]
    return {row["path"]: row for row in rows}


def parse(stream: bytes) -> list[tuple[dict[str, Any], bytes]]:
    responses = []
    while stream:
        line, _, stream = stream.partition(b"\n")
        header = json.loads(line)
        size = header.get("size", 0)
        responses.append((header, stream[:size]))
        stream = stream[size:]
    return responses


def test_script_runs_without_installed_packages() -> None:
    assert COMMAND[1:3] == ["-I", "-S"]


def test_list_returns_regular_files_only(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    run = tmp_path / "run"
    (run / "a" / "b").mkdir(parents=True)
    (run / "a" / "b" / "file\n name").write_bytes(b"12345")
    (run / "link").symlink_to(outside / "secret")
    (run / "folder").symlink_to(outside)
    os.mkfifo(run / "pipe")
    rows = listed(run)
    assert list(rows) == ["a/b/file\n name"]
    assert rows["a/b/file\n name"]["size"] == 5
    assert rows["a/b/file\n name"]["mtime_ns"] == (run / "a/b/file\n name").stat().st_mtime_ns
    assert run_script("list", tmp_path / "nowhere") == b""


def test_send_reports_missing_files(tmp_path: Path) -> None:
    big = os.urandom(3 * file_server.BLOCK + 17)
    (tmp_path / "big").write_bytes(big)
    (tmp_path / "empty").write_bytes(b"")
    sent = parse(run_script("send", tmp_path, 0, "-", "big", 0, "-", "no", 0, "-", "empty"))
    assert [header["path"] for header, _ in sent] == ["big", "no", "empty"]
    assert sent[0][1] == big
    assert sent[1][0] == {"path": "no", "gone": True}
    assert sent[2][0]["size"] == 0


def test_send_continues_at_offset_only_for_the_same_version(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    version = listed(tmp_path)["file"]["version"]
    ((header, data),) = parse(run_script("send", tmp_path, 4, version, "file"))
    assert (header["offset"], data) == (4, b"456789")
    ((header, data),) = parse(run_script("send", tmp_path, 4, "1-2-3", "file"))
    assert (header["offset"], data) == (0, b"0123456789")
    ((header, data),) = parse(run_script("send", tmp_path, 7, file_server.ANY, "file"))
    assert data == b"789"
    ((header, data),) = parse(run_script("send", tmp_path, 99, file_server.ANY, "file"))
    assert (header["offset"], data) == (10, b"")


def test_send_refuses_paths_outside_the_directory(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    run = tmp_path / "run"
    run.mkdir()
    (run / "link").symlink_to(tmp_path / "secret")
    (run / "folder").symlink_to(tmp_path)
    os.mkfifo(run / "pipe")  # opening one would wait for a writer
    for name in ("../secret", "link", "folder/secret", str(tmp_path / "secret"), ".", "pipe"):
        assert parse(run_script("send", run, 0, "-", name)) == [({"path": name, "gone": True}, b"")]


def test_wait_returns_after_the_idle_time() -> None:
    """Outside a pod other processes exist, so only an idle time of zero ends it."""
    assert run_script("wait", 0) == b""

"""heartbeats/rank-K.json: the last heartbeat of every rank of the newest generation."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from llmtrain.runs.heartbeats import Heartbeat, announce_start, clear_heartbeats, read_heartbeats, started_again


def test_heartbeat_fields(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path / "beats", rank=3, generation=2)
    assert read_heartbeats(tmp_path / "beats") == {}
    heart.write(step=5, progress=17)
    beat = read_heartbeats(tmp_path / "beats")[3]
    assert beat["time"] == pytest.approx(time.time(), abs=5)
    assert {name: beat[name] for name in beat if name != "time"} == {
        "rank": 3,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "generation": 2,
        "beat": 1,
        "step": 5,
        "progress": 17,
    }


def test_beat_counts_up_without_progress(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0, 1)
    for number in (1, 2, 3):
        heart.write(4, 9)
        assert read_heartbeats(tmp_path)[0]["beat"] == number
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"], "no half-written file stays"


def test_older_generation_does_not_overwrite_newer(tmp_path: Path) -> None:
    old, new = Heartbeat(tmp_path, 0, 1), Heartbeat(tmp_path, 0, 2)
    clear_heartbeats(tmp_path, 1)
    old.write(9, 90)
    clear_heartbeats(tmp_path, 2)
    new.write(4, 40)
    old.write(10, 100)
    beat = read_heartbeats(tmp_path)[0]
    assert (beat["generation"], beat["step"]) == (2, 4)
    Heartbeat(tmp_path, 0, 2).write(5, 50)
    assert read_heartbeats(tmp_path)[0]["step"] == 5, "its own generation may"
    Heartbeat(tmp_path, 7, 1).write(9, 90)
    assert list(read_heartbeats(tmp_path)) == [0], "a rank that only the older one had does not come back"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rank": "x"}', "{}"])
def test_damaged_heartbeat_is_ignored_and_overwritten(tmp_path: Path, content: str) -> None:
    Heartbeat(tmp_path, 0, 1).write(1, 1)
    (tmp_path / "rank-1.json").write_text(content)
    assert list(read_heartbeats(tmp_path)) == [0]
    Heartbeat(tmp_path, 1, 1).write(2, 2)
    assert read_heartbeats(tmp_path)[1]["step"] == 2


def test_storage_error_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "beats").write_text("not a directory")
    Heartbeat(tmp_path / "beats", 0, 1).write(1, 1)
    assert (tmp_path / "beats").read_text() == "not a directory"


def test_invalid_generation_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "generation.json").write_text(json.dumps({"generation": "newest"}))
    Heartbeat(tmp_path, 0, 1).write(1, 1)
    assert list(read_heartbeats(tmp_path)) == [0]


def test_clear_heartbeats_removes_all_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        Heartbeat(tmp_path, rank, 1).write(1, 1)
    (tmp_path / "notes.txt").write_text("mine")
    clear_heartbeats(tmp_path, 2)
    assert read_heartbeats(tmp_path) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generation.json", "notes.txt"]
    clear_heartbeats(tmp_path / "nowhere", 1)


class TestStarts:
    def test_nothing_is_written_for_missing_run(self, tmp_path: Path) -> None:
        start = announce_start(tmp_path / "run" / "heartbeats", 0)
        assert list(tmp_path.iterdir()) == []
        assert started_again(tmp_path / "run" / "heartbeats", [start]) is None

    def test_known_starts_are_not_reported(self, tmp_path: Path) -> None:
        starts = [announce_start(tmp_path / "heartbeats", node) for node in range(3)]
        assert started_again(tmp_path / "heartbeats", starts) is None
        assert started_again(tmp_path / "heartbeats", reversed(starts)) is None

    @pytest.mark.parametrize("is_first", [True, False])
    def test_new_start_is_reported(self, tmp_path: Path, is_first: bool) -> None:
        directory = tmp_path / "run" / "heartbeats"
        directory.parent.mkdir() if not is_first else None
        starts = [announce_start(directory, node) for node in range(2)]
        directory.parent.mkdir(exist_ok=True)
        word = announce_start(directory, 1).split()[0]
        assert started_again(directory, starts) == (1, word)

    def test_older_file_is_not_reported(self, tmp_path: Path) -> None:
        """As a network file system may show it for a while."""
        directory = tmp_path / "heartbeats"
        announce_start(directory, 0)
        before = (directory / "last-start.json").read_bytes(), (directory / "last-start.json").stat().st_mtime_ns
        starts = [announce_start(directory, 0)]
        (directory / "last-start.json").write_bytes(before[0])
        os.utime(directory / "last-start.json", ns=(before[1], before[1]))
        assert started_again(directory, starts) is None

    @pytest.mark.parametrize(
        "content", ["{", "[]", "{}", '{"start": "x"}', '{"start": "x", "node": null}', '{"node": 1}']
    )
    def test_damaged_file_is_not_reported(self, tmp_path: Path, content: str) -> None:
        starts = [announce_start(tmp_path / "heartbeats", 0)]
        (tmp_path / "heartbeats" / "last-start.json").write_text(content)
        assert started_again(tmp_path / "heartbeats", starts) is None

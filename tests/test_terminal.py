"""Standard output in any encoding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_characters_outside_the_encoding_are_escaped(env: dict[str, str], tmp_path: Path) -> None:
    """U+2603 is in the config, and print-config --json would escape it: so it comes as an error, and as text."""
    (tmp_path / "snow.yaml").write_text("run: {name: \N{SNOWMAN}, unknown\N{SNOWMAN}: 1}\n", encoding="utf-8")
    command = [sys.executable, "-m", "llmtrain", "runs", "list", "--root", "no-\N{SNOWMAN}"]
    rest = {"cwd": tmp_path, "capture_output": True, "check": False, "env": {**os.environ, **env}}
    listed = subprocess.run(command, **rest)
    assert (listed.returncode, listed.stderr) == (0, b"")
    refused = subprocess.run([sys.executable, "-m", "llmtrain", "validate", "-c", "snow.yaml"], **rest)
    assert refused.returncode == 64
    assert b"\\u2603" in refused.stderr
    assert b"Traceback" not in refused.stderr

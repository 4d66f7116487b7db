"""The commands and the file of docs/sweeps.md are accepted: each is run with --dry-run."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_commands_of_the_page_are_accepted(cli: Callable[..., Any], workdir: Path, repo: Path) -> None:
    text = (repo / "docs" / "sweeps.md").read_text()
    (workdir / "sweep.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    lines = text.replace("\\\n", "").splitlines()
    commands = [line.strip() for line in lines if line.startswith("    llmtrain sweep -")]
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command)[1:]
        if "--launch" in words:
            words += ["--set", "launch.image=me/train:1", "--set", "launch.runs_volume.claim=runs"]
        result = cli(*words, "--set", "run.device=cpu", "--dry-run", "--json")
        assert result.code == 0, f"{command}\n{result.err}"
        assert result.json["price"]["steps"] > 0

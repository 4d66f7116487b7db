import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))  # the harness that trains in forked children


@pytest.fixture
def make_config(tmp_path: Path, cache: Path) -> Iterator[Callable[..., Any]]:
    """Configs of tiny runs, each in a directory of its own."""
    import fault_harness as harness

    made = []

    def make(**changes: Any) -> Any:
        made.append(None)
        return harness.tiny_config(tmp_path / str(len(made)) / "runs", cache, **changes)

    yield make
    harness.end_all()

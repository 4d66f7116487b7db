"""What is here already under the run's name: whether it may be written to."""

import json
from typing import Any

from llmtrain.errors import UsageError
from llmtrain.files import read_json
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import MAX_GENERATIONS, read_generations, valid_rows
from llmtrain.runs.lock import is_held

_ELSEWHERE = "Fetch to another directory with --to; nothing was changed."


def check_local(run: RunDirectory) -> None:
    """What can be said before the cluster is asked."""
    if run.path.is_symlink() or (run.path.exists() and not run.path.is_dir()):
        raise UsageError(f"{run.path} is in the way: it is no directory.", remedy=_ELSEWHERE)
    if is_held(run.lock):
        raise UsageError(f"Run '{run.run_id}' is being trained here, in {run.path}.", remedy=_ELSEWHERE)


def check_same(run: RunDirectory, meta: bytes | None, generations: bytes | None) -> None:
    """Refuse to write over another run, or over one that was continued here."""
    if not run.path.is_dir():
        return
    here = read_json(run.meta)
    if here is None:
        if any(not path.name.startswith(".") for path in run.path.iterdir()):
            raise UsageError(f"{run.path} is there already, and is not a run.", remedy=_ELSEWHERE)
        return
    far = _parse(meta)
    fields = ("run_id", "started_at")
    if not isinstance(far, dict) or any(far.get(field) != here.get(field) for field in fields):
        raise UsageError(
            f"{run.path} is another run of the same name: it started at {here.get('started_at')}, the one in the "
            f"cluster at {far.get('started_at') if isinstance(far, dict) else 'an unknown time'}.",
            remedy=_ELSEWHERE,
        )
    rows = read_generations(run)
    if rows and not _is_known(rows[-1], valid_rows(_parse(generations))):
        raise UsageError(
            f"{run.path} was continued here after it was fetched: the cluster knows nothing of its start at "
            f"{rows[-1].get('started_at')}.",
            remedy=_ELSEWHERE,
        )


def _is_known(last: dict[str, Any], far: list[dict[str, Any]]) -> bool:
    """Whether a start of the run was in the cluster. It keeps the last starts only: one that is older than all of them
    was, unless it was by hand where all of the cluster's are by a launcher."""
    if any(row.get("started_at") == last.get("started_at") for row in far):
        return True
    is_forgotten = len(far) >= MAX_GENERATIONS and last["generation"] < far[0]["generation"]
    is_by_hand = last.get("launch") is None and all(row.get("launch") is not None for row in far)
    return is_forgotten and not is_by_hand


def _parse(text: bytes | None) -> Any:
    try:
        return json.loads(text or b"")
    except ValueError:
        return None

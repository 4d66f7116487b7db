"""Whether an existing local directory with the run's name may be written to."""

import json
from typing import Any

from llmtrain.errors import UsageError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import MAX_GENERATIONS, valid_rows
from llmtrain.runs.lock import is_held
from llmtrain.runs.view import RunView

_ELSEWHERE = "Fetch to another directory with --to; nothing was changed."


def check_local(run: RunDirectory) -> None:
    """Checks that need no data from the cluster."""
    if run.path.is_symlink() or (run.path.exists() and not run.path.is_dir()):
        raise UsageError(f"{run.path} exists and is not a directory.", remedy=_ELSEWHERE)
    if is_held(run.lock):
        raise UsageError(f"Run '{run.run_id}' is being trained locally in {run.path}.", remedy=_ELSEWHERE)


def check_same(run: RunDirectory, meta: bytes | None, generations: bytes | None) -> None:
    """Refuse to overwrite another run, or one that was resumed locally."""
    if not run.path.is_dir():
        return
    view = RunView(run)
    local = view.meta
    if not local:
        if any(not path.name.startswith(".") for path in run.path.iterdir()):
            raise UsageError(f"{run.path} exists and is not a run directory.", remedy=_ELSEWHERE)
        return
    remote = _parse(meta)
    if not isinstance(remote, dict):
        remote = {"started_at": "an unknown time"}
    if (remote.get("run_id"), remote.get("started_at")) != (local.get("run_id"), local.get("started_at")):
        raise UsageError(
            f"{run.path} is another run of the same name: it started at {local.get('started_at')}, the one on the "
            f"cluster at {remote.get('started_at')}.",
            remedy=_ELSEWHERE,
        )
    last = view.last_start
    if last and not _is_known(last, valid_rows(_parse(generations))):
        raise UsageError(
            f"{run.path} was resumed locally after it was fetched: the cluster has no start at "
            f"{last.get('started_at')}.",
            remedy=_ELSEWHERE,
        )


def _is_known(last: dict[str, Any], remote: list[dict[str, Any]]) -> bool:
    """Whether a start of the run was on the cluster. Only the latest starts are kept: an older one counts as known,
    unless it was started by hand while all those of the cluster were launched."""
    if any(row.get("started_at") == last.get("started_at") for row in remote):
        return True
    is_dropped = len(remote) >= MAX_GENERATIONS and last["generation"] < remote[0]["generation"]
    is_by_hand = last.get("launch") is None and all(row.get("launch") is not None for row in remote)
    return is_dropped and not is_by_hand


def _parse(text: bytes | None) -> Any:
    try:
        return json.loads(text or b"")
    except ValueError:
        return None

"""The data of stock tasks: each data set in a directory of its own below the directory of tasks, with its hashes.

tasks/allenai/ai2_arc/     what `llmtrain fetch-tasks arc_easy --to tasks` downloads
tasks/hashes.json          SHA-256 of every file, checked before a task is scored
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from llmtrain.core.files import file_sha256, read_json, write_json
from llmtrain.errors import DataError, UsageError
from llmtrain.hub.dataset_names import full_dataset_name
from llmtrain.hub.download import MARKER, download_data
from llmtrain.hub.find import is_id
from llmtrain.hub.task_index import StockTask, find_stock_tasks
from llmtrain.hub.token import is_offline

HASHES = "hashes.json"
_LOCK = ".llmtrain-tasks.lock"


def fetch_tasks(names: Sequence[str], directory: Path, force: bool = False) -> list[dict[str, Any]]:
    """Download the data of stock tasks, each data set once. `force` updates what has changed on the hub."""
    directory = directory.expanduser()
    tasks, _ = find_stock_tasks(names)
    results = {}
    for task in tasks:
        if task.dataset and task.dataset not in results:
            results[task.dataset] = _fetch(task, task.dataset, directory, force)
        elif not task.dataset:
            raise _needs_network(task)
    return list(results.values())


def find_task_data(task: StockTask, directory: Path) -> Path:
    """The directory with the data of a task, downloaded if it is missing; raises DataError if it is damaged."""
    if task.dataset is None:
        raise _needs_network(task)
    directory = directory.expanduser()
    folder = directory / task.dataset
    if not _is_there(folder):
        if is_offline():
            raise DataError(
                f"The data of task '{task.name}' is not in {directory}, and the hub must not be contacted (offline).",
                remedy=_offline_remedy(task),
            )
        _fetch(task, task.dataset, directory, force=False)
    _check_hashes(task, task.dataset, directory)
    return folder.absolute()


def _is_there(folder: Path) -> bool:
    """Downloaded completely, or filled by the user."""
    if (folder / MARKER).is_file():
        return True
    is_partial = folder.is_dir() and any(path.name.startswith(".llmtrain-fetch") for path in folder.iterdir())
    return folder.is_dir() and not is_partial and any(folder.iterdir())


def _fetch(task: StockTask, dataset: str, directory: Path, force: bool) -> dict[str, Any]:
    name = full_dataset_name(dataset, directory)
    if not is_id(name):
        raise _needs_network(task)
    folder = directory / dataset
    for path in _damaged(dataset, directory):
        path.unlink(missing_ok=True)  # the download replaces what is missing
    result = download_data(name, None, folder, force=force, remedy=_offline_remedy(task))
    state = read_json(folder / MARKER) or {}
    files = {path: file_sha256(folder / path) for path in sorted(state.get("files", {}))}
    with FileLock(directory / _LOCK):  # several data sets may be downloaded at once
        recorded = read_json(directory / HASHES) or {}
        recorded[dataset] = {"commit": result["commit"], "files": files}
        write_json(directory / HASHES, recorded)
    return {"task": task.name, "dataset": dataset, **result}


def _check_hashes(task: StockTask, dataset: str, directory: Path) -> None:
    damaged = _damaged(dataset, directory)
    if damaged:
        raise DataError(
            f"The data of task '{task.name}' is damaged: {damaged[0]} is not the file that was downloaded.",
            remedy=f"Download it again: llmtrain fetch-tasks {task.name} --to {directory}",
        )


def _damaged(dataset: str, directory: Path) -> list[Path]:
    """Files whose SHA-256 is not the recorded one. A directory that the user has filled has none recorded."""
    recorded = (read_json(directory / HASHES) or {}).get(dataset)
    folder = directory / dataset
    damaged = []
    for name, expected in (recorded or {}).get("files", {}).items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):  # the record may be from an untrusted source
            raise DataError(f"{directory / HASHES} lists a file outside of {folder}: {name!r:.80}.")
        if not path.is_file() or file_sha256(path) != expected:
            damaged.append(path)
    return damaged


def _offline_remedy(task: StockTask) -> str:
    return (
        f"On a machine with network access, run `llmtrain fetch-tasks {task.name} --to DIR`, then pass DIR with "
        "--tasks-dir, or set trainer.eval_tasks.dir to it."
    )


def _needs_network(task: StockTask) -> UsageError:
    return UsageError(
        f"Task '{task.name}' gets its data in its own way, which needs the network each time.",
        remedy="Choose another task, or write its items to a .jsonl file.",
    )

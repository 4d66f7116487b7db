"""Checks that all ranks of a run work on the same things."""

import time

from llmtrain.distributed.world import World
from llmtrain.errors import UsageError
from llmtrain.files import read_json
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.lock import Lock
from llmtrain.training.build import Components

SHARED_STORAGE_SEC = 10.0
"""Network storage may show a new file this late."""


def check_same_data_and_model(world: World, components: Components) -> None:
    data = f"{components.prepared.fingerprint} {components.recorded['tokenizer_sha256']}"
    check_same_on_all_ranks(world, "data", data, "Give every process the same data files.")
    code = str({field: facts["sha256"] for field, facts in components.recorded.get("plugins", {}).items()})
    check_same_on_all_ranks(world, "code", code, "Give every process the same version of your classes.")
    base = str([(path.name, path.stat().st_size) for path in components.adapter.base_files()])
    check_same_on_all_ranks(world, "base model", base, "Give every process the same model directory.")


def check_same_on_all_ranks(world: World, what: str, value: str, remedy: str) -> None:
    values = world.control.gather(value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        ranks = ", ".join(map(str, different[:10]))
        raise UsageError(f"The {what} of rank {ranks} differs from that of rank 0.", remedy=remedy)


def check_shared_directory(world: World, run: RunDirectory, lock: Lock) -> None:
    """Every rank writes and reads checkpoints, so all must see one run directory."""
    deadline = time.monotonic() + SHARED_STORAGE_SEC
    while not (is_visible := (read_json(run.lock) or {}).get("token") == lock.token) and time.monotonic() < deadline:
        time.sleep(0.1)
    visible = world.control.gather(is_visible)
    if not visible[0]:  # another generation took over the run while data was prepared
        world.control.on_rank0(lock.check)
    blind = [str(rank) for rank, is_visible in enumerate(visible) if not is_visible]
    if blind:
        raise UsageError(
            f"Rank {', '.join(blind[:10])} does not see {run.shown()}, which rank 0 created.",
            remedy="Set output.root_dir to a directory that all nodes share (a ReadWriteMany volume, NFS).",
        )

"""Every environment variable that llmtrain defines. docs/config.md lists them from VARIABLES.

What the platform or torchrun sets (RANK, PET_*, JOB_COMPLETION_INDEX, ...) is read in distributed/platform_env.py.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

CODE_DIR = "LLMTRAIN_CODE_DIR"
CODE_HASH = "LLMTRAIN_CODE_HASH"
DEBUG = "LLMTRAIN_DEBUG"
DIST_TIMEOUT = "LLMTRAIN_DIST_TIMEOUT"
EXIT_CODES = "LLMTRAIN_EXIT_CODES"
FAULT = "LLMTRAIN_FAULT"
FAULT_FILE = "LLMTRAIN_FAULT_FILE"
HOLD_SCRIPT = "LLMTRAIN_HELD"
LAUNCH = "LLMTRAIN_LAUNCH"
MASTER_READY_TIMEOUT = "LLMTRAIN_MASTER_READY_TIMEOUT"
NODE = "LLMTRAIN_NODE"
NODE_NAME = "LLMTRAIN_NODE_NAME"
PREFETCHED = "LLMTRAIN_PREFETCHED"
READER_SCRIPT = "LLMTRAIN_READER"
RUN_DIR = "LLMTRAIN_RUN_DIR"
SHARED_CORES = "LLMTRAIN_SHARED_CORES"
START = "LLMTRAIN_START"
TERMINATION_LOG = "LLMTRAIN_TERMINATION_LOG"
TOKEN_CACHE = "LLMTRAIN_TOKEN_CACHE"
WEBHOOK = "LLMTRAIN_WEBHOOK"
WORK = "LLMTRAIN_WORK"
WORKER = "LLMTRAIN_WORKER"

VARIABLES = {
    "Set by you": {
        DEBUG: "`1` logs every decision made during start-up.",
        DIST_TIMEOUT: "Seconds in which all processes must have joined. Overrides `distributed.join_timeout_sec`.",
        MASTER_READY_TIMEOUT: "Seconds to wait for the master. Overrides `distributed.master_ready_timeout_sec`.",
        WEBHOOK: "URL to which `llmtrain guard` posts a message when a run ends or needs help.",
    },
    "Set in pods and worker processes": {
        CODE_DIR: "Directory of the code that `launch --with-code` shipped.",
        CODE_HASH: "SHA-256 of that code, which `llmtrain node` checks.",
        EXIT_CODES: "Platform whose exit-code convention applies: `pytorchjob` or `statefulset`.",
        HOLD_SCRIPT: "Source of the program that keeps the pods of `launch --hold` running.",
        LAUNCH: "Number of the launch of this run; a resume is a new launch.",
        NODE: "`1` in processes started by `llmtrain node`.",
        NODE_NAME: "Name of the Kubernetes node, for exit reports.",
        PREFETCHED: "File with the error of the init container that downloads models and data.",
        READER_SCRIPT: "Source of the program that `logs` and `fetch` run to read the runs volume.",
        RUN_DIR: "Directory for the files of `llmtrain launch -- COMMAND`; `llmtrain fetch` downloads it.",
        SHARED_CORES: "`1` when llmtrain chose OMP_NUM_THREADS, so that it is not taken for your own choice.",
        START: "Identifies this start of the processes of a node.",
        TOKEN_CACHE: "Directory of tokenized data on the runs volume. Replaces the default of `data.cache_dir`.",
        WORK: "Working directory of pods launched with `--hold`.",
        WORKER: "`1` in worker processes, whose errors are printed by their parent.",
    },
    "For tests": {
        FAULT: "`point:step:rank:action`: injects a fault.",
        FAULT_FILE: "The `wait` fault lasts for as long as this file exists.",
        TERMINATION_LOG: "Path of the termination message (in pods `/dev/termination-log`).",
    },
}


def openmp_variables() -> dict[str, str]:
    """To be set while torch is imported: limits how long OpenMP threads spin while they wait, unless the user has
    decided. On shared cores, or under a CPU limit, they keep the thread they wait for from running: with one busy
    process on two cores, small models trained 68 times slower."""
    is_set = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
    return {} if is_set else {"GOMP_SPINCOUNT": "1000"}


@contextmanager
def scoped_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process inside the block, and restore them afterwards."""
    with restored_environment(variables):
        os.environ.update(variables)
        yield


@contextmanager
def restored_environment(names: Iterable[str]) -> Iterator[None]:
    """Restore environment variables that may change inside the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

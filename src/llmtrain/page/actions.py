"""Stop, resume, recover and delete, with --allow-actions: the same commands that a person would type."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time

from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.page.local_runs import LOCAL
from llmtrain.page.run_catalog import RunCatalog
from llmtrain.page.run_values import Values
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.lock import is_held, owner_pid
from llmtrain.runs.state import RunState

ACTIONS = ("stop", "resume", "recover", "delete")
TIMEOUT_SEC = 900.0
"""`stop` waits until the pods have saved a checkpoint."""
START_SEC = 120.0
"""How long a run that is resumed may take until it holds its lock; importing torch takes some seconds."""
POLL_SEC = 0.1
_MAX_OUTPUT = 20_000


def possible_actions(row: Values) -> list[str]:
    state = row["state"]
    if row["where"] != LOCAL:
        return ["resume", "delete"] if RunState(state).has_ended else ["stop", "recover", "delete"]
    if state == RunState.RUNNING:
        return ["stop"]
    if state in (RunState.FINISHED, RunState.NOT_STARTED):
        return ["delete"]
    return ["resume", "delete"]


def act(catalog: RunCatalog, key: str, action: str, confirm: str) -> str:
    """Do it, and return what the command printed. `confirm` is the run id, typed by the user."""
    row = catalog.row(key)
    if action not in ACTIONS or action not in possible_actions(row):
        raise UsageError(f"'{action}' is not possible for a run that is {row['state']}.", remedy="Reload the page.")
    if confirm != row["run_id"]:
        raise UsageError("The confirmation does not name the run.", remedy=f"Type {row['run_id']}.")
    if row["where"] != LOCAL:
        more = {"resume": ["--detach"]}.get(action, [])
        return _run([action, row["run_id"], *catalog.cluster_options(row["where"]), *more])
    run = catalog.view(key).run
    if action == "stop":
        return _stop(run)
    if action == "delete":
        return _run(["runs", "prune", row["run_id"], "--root", str(run.path.parent), "--yes"])
    return _resume(run)


def _run(words: list[str]) -> str:
    command = [sys.executable, "-m", "llmtrain", *words]
    shown = f"$ {shlex.join(['llmtrain', *words])}\n"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=False
        )
    except subprocess.TimeoutExpired:
        raise LlmtrainError(f"`llmtrain {words[0]}` has not ended after {TIMEOUT_SEC:.0f} s.") from None
    output = f"{shown}{done.stderr}{done.stdout}"[-_MAX_OUTPUT:]
    if done.returncode:
        raise UsageError(f"`llmtrain {words[0]}` ended with exit code {done.returncode}.", remedy=output)
    return output


def _stop(run: RunDirectory) -> str:
    pid = owner_pid(run.lock)
    if pid is None:
        raise UsageError(
            f"Run '{run.run_id}' is not trained by a process of this machine.", remedy="Stop it where it was started."
        )
    os.kill(pid, signal.SIGTERM)
    return f"SIGTERM was sent to process {pid}. The run saves a checkpoint and ends."


def _resume(run: RunDirectory) -> str:
    """Start training in a process of its own, which does not end with the page. Its log is in the run directory."""
    words = ["train", "--resume", str(run.path)]
    shown = f"$ {shlex.join(['llmtrain', *words])}\n"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmtrain", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SEC
        while process.poll() is None and not is_held(run.lock) and time.monotonic() < deadline:
            time.sleep(POLL_SEC)
        if not process.returncode:
            threading.Thread(target=process.wait, daemon=True).start()  # a zombie would look like a run that is alive
            return f"{shown}Process {process.pid} trains the run. Its log is in {run.logs}."
        output.seek(0)
        text = output.read().decode("utf-8", "replace")[-_MAX_OUTPUT:]
    raise UsageError(f"`llmtrain train` ended with exit code {process.returncode}.", remedy=shown + text)

"""Storage errors of a run, as errors with a remedy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtrain.core.files import disk_full, is_full
from llmtrain.errors import LlmtrainError, TrainingFailed

_TRANSIENT = (errno.EIO, errno.ESTALE)  # such as an NFS server that is down
_PERMANENT = (
    errno.EACCES,
    errno.EEXIST,
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
)


@contextmanager
def explain_storage_errors(root_dir: str) -> Iterator[None]:
    """Turn an OSError of the storage into TrainingFailed (65), which a restart does not fix, or for a transient error
    into a crash, after which platforms restart. Other errors, such as those of the network, pass through."""
    try:
        yield
    except OSError as problem:
        path = problem.filename2 or problem.filename
        why = problem.strerror or str(problem)
        if is_full(problem):
            what = f"{why} ({path})" if path else why
            raise disk_full(Path(root_dir).expanduser(), what) from None
        if problem.errno not in (*_TRANSIENT, *_PERMANENT):
            raise
        error = LlmtrainError if problem.errno in _TRANSIENT else TrainingFailed
        raise error(
            f"{path or root_dir} cannot be read or written: {why}.",
            remedy="Check the storage, and that no other file or directory has this name. Then resume the run with "
            "--resume.",
        ) from None

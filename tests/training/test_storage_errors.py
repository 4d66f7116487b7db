"""Storage errors end a run with one line, and with an exit code that tells whether a restart helps."""

import errno
import os

import pytest

from llmtrain.errors import LlmtrainError
from llmtrain.training.storage_errors import explain_storage_errors


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, 65), (errno.EDQUOT, 65), (errno.EROFS, 65), (errno.EISDIR, 65), (errno.EIO, 1), (errno.ESTALE, 1)],
)
def test_storage_error_exit_code(number: int, code: int) -> None:
    with pytest.raises(LlmtrainError) as caught, explain_storage_errors("runs"):
        raise OSError(number, os.strerror(number), "/runs/demo/metrics.jsonl")
    assert caught.value.exit_code == code
    assert "/runs/demo/metrics.jsonl" in caught.value.what
    assert caught.value.remedy


def test_network_errors_pass_through() -> None:
    with pytest.raises(ConnectionResetError), explain_storage_errors("runs"):
        raise ConnectionResetError(errno.ECONNRESET, "reset")

"""`python -m llmtrain` is the same as the console script."""

import os
import signal

from llmtrain.core.env import EXIT_CODES
from llmtrain.core.interrupts import handle_sigint
from llmtrain.errors import ExitCode

if os.getpid() == 1:
    # The first process of a container: the kernel drops a SIGTERM without a handler. Until the command has installed
    # its own there is nothing to save, so the process ends at once. A PyTorchJob restarts codes from 128 only.
    _OFFSET = 128 if os.environ.get(EXIT_CODES) == "pytorchjob" else 0
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_OFFSET + ExitCode.INTERRUPTED))


def main() -> None:
    handle_sigint()  # before the imports of the command line
    from llmtrain.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()

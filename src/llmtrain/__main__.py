"""`python -m llmtrain` is the same as the console script."""

import os
import signal

from llmtrain.env import EXIT_CODES
from llmtrain.interrupts import handle_sigint

if os.getpid() == 1:
    # The first process of a container: the kernel drops a SIGTERM that nobody handles. Until the command has a handler
    # of its own there is nothing to save, so it ends at once: 75, resume me (which a PyTorchJob hears as 203).
    _CODE = 203 if os.environ.get(EXIT_CODES) == "pytorchjob" else 75
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_CODE))


def main() -> None:
    handle_sigint()  # before the imports of the command line
    from llmtrain.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()

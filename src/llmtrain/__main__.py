"""`python -m llmtrain` is the same as the console script."""

import os
import signal

from llmtrain.env import EXIT_CODES

if os.getpid() == 1:
    # The first process of a container: the kernel drops a SIGTERM that nobody handles. Until the command has a handler
    # of its own there is nothing to save, so it ends at once: 75, resume me (which a PyTorchJob hears as 203).
    _CODE = 203 if os.environ.get(EXIT_CODES) == "pytorchjob" else 75
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_CODE))

from llmtrain.cli import main

if __name__ == "__main__":
    main()

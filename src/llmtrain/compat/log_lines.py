"""Log lines of 0.1.0 that say something which is read from elsewhere today."""

import re

from llmtrain.core.logs import split_line

# A pod of a StatefulSet logged this and then waited to be deleted; today its container exits once with this code.
_IDLE = re.compile(r"^ended with exit code (\d{1,3});")


def idle_code(line: str) -> int | None:
    """The exit code in the line of a pod that waits to be deleted; None for any other line."""
    tag, text = split_line(line)
    found = _IDLE.search(text)
    if tag != "DDP" or found is None:
        return None
    return int(found[1])

"""Text that appears on standard output while it is generated."""

import sys

from llmtrain.core.terminal import printable


class TextStream:
    """Prints what is new in a growing text, after the text it continues. What is printed is not taken back."""

    def __init__(self, before: str = "") -> None:
        self._shown = ""
        self._before = before

    def show(self, text: str) -> None:
        """Print the rest of the text so far."""
        if text.startswith(self._shown):
            self._print(text[len(self._shown) :])
            self._shown = text

    def end(self, text: str) -> None:
        """Print the rest of the complete text, and end its line."""
        self._print(text[len(self._shown) :] + "\n")

    def _print(self, text: str) -> None:
        print(printable(self._before + text), end="", flush=True)
        self._before = ""


def is_streaming(as_json: bool) -> bool:
    """Whether standard output is a terminal, so that text is printed as it is generated."""
    return sys.stdout.isatty() and not as_json

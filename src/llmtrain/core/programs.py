"""Running other programs: without a shell, with their output on standard error as it is printed."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress


def run_program(words: Sequence[str], input_: str = "") -> tuple[int, str]:
    """Exit code and output of a program. The output is copied to standard error: stdout is for our own result."""
    output = []
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            with suppress(BrokenPipeError):  # it exited without reading its input
                process.stdin.write(input_)
                process.stdin.close()
            for line in process.stdout:
                output.append(line)
                print(line, end="", file=sys.stderr, flush=True)
        except BaseException:
            process.kill()  # kind does not handle signals either
            process.wait()  # it must not run while the caller cleans up
            raise
    return process.returncode, "".join(output)

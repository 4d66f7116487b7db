"""Write the tables of exit codes and errors in the docs, and the tree in the docstring of errors.py.

python tools/exit_codes.py            write them
python tools/exit_codes.py --check    only check that they are up to date
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from llmtrain.errors import ExitCode, LlmtrainError

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/llmtrain/errors.py"
CODES = ("docs/guarantees.md", "docs/failures.md")
ERRORS = ("docs/python-api.md",)
BEGIN = "<!-- written by tools/exit_codes.py -->\n\n"
END = "\n<!-- end -->\n"
Error = type[LlmtrainError]


def subclasses(error: Error) -> list[Error]:
    """Those of errors.py, in its order; other modules define errors for their own use."""
    return [each for each in error.__subclasses__() if each.__module__ == LlmtrainError.__module__]


def tree(error: Error, first: str = "", rest: str = "") -> Iterator[tuple[str, Error]]:
    """(name with the branches in front of it, error) of an error and all of its subclasses."""
    yield first + error.__name__, error
    below = subclasses(error)
    for each in below:
        if each is below[-1]:
            yield from tree(each, f"{rest}└── ", f"{rest}    ")
        else:
            yield from tree(each, f"{rest}├── ", f"{rest}│   ")


def meaning(error: Error) -> str:
    return (error.__doc__ or "").partition("\n")[0]


def tree_text() -> str:
    lines = [f"    {name:<21} {int(error.exit_code):>2}  {meaning(error)}\n" for name, error in tree(LlmtrainError)]
    return "".join(lines)


def code_table() -> str:
    rows = [f"| {int(code)} | {code.meaning} | {code.remedy} |\n" for code in ExitCode]
    other = "| other | a crash | report it; `--resume` continues from the newest checkpoint |\n"
    return "| code | meaning | what to do |\n|---|---|---|\n" + "".join(rows) + other


def error_table() -> str:
    rows = []
    for _, error in tree(LlmtrainError):
        base = error.__bases__[0]
        kind = "" if base in (Exception, LlmtrainError) else f"`{base.__name__}`: "
        rows.append(f"| `{error.__name__}` | {int(error.exit_code)} | {kind}{meaning(error)} |\n")
    return "| error | exit code | meaning |\n|---|---|---|\n" + "".join(rows)


def written(path: str) -> str:
    """The text of a file with its table replaced."""
    text = (ROOT / path).read_text()
    if path == SOURCE:
        pattern = r"^    LlmtrainError .*?\n(?=\n)"
        new = tree_text()
    else:
        pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
        new = BEGIN + (code_table() if path in CODES else error_table()) + END
    text, count = re.subn(pattern, lambda _: new, text, count=1, flags=re.S | re.M)
    assert count == 1, f"{path} has no table to replace"
    return text


def main() -> None:
    for path in (SOURCE, *CODES, *ERRORS):
        if "--check" not in sys.argv:
            (ROOT / path).write_text(written(path))
        elif (ROOT / path).read_text() != written(path):
            sys.exit(f"{path} is out of date: run python tools/exit_codes.py")


if __name__ == "__main__":
    main()

"""The layers of src/llmtrain, and the map of its packages in CONTRIBUTING.md. tests/test_import_directions.py checks
the imports.

python tools/layers.py            write the map
python tools/layers.py --check    only check that it is up to date
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN = "<!-- {name}, written by tools/layers.py -->\n\n"
END = "\n<!-- end -->\n"
NAME_WIDTH = 16

# Packages and modules of one layer, from the top.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("api", "diagnose"),
    ("guard", "inference", "page"),
    ("sweep",),
    ("training", "operate", "doctor", "lint", "local_cluster"),
    ("checkpoint", "launch"),
    ("plan",),
    ("models", "data", "distributed", "tracking", "kubernetes"),
    ("hub",),
    ("runs",),
    ("config", "compat"),
    ("registry",),
    ("plugins",),
    ("core",),
    ("errors", "version"),
)


def source(name: str) -> Path:
    """The file of a module, or the directory of a package."""
    path = ROOT / "src" / "llmtrain" / name
    return path if path.is_dir() else path.with_suffix(".py")


def diagram() -> str:
    lines = []
    for packages in LAYERS:
        paths = [source(package) for package in packages]
        lines.append("  ".join(f"{path.name}/" if path.is_dir() else path.name for path in paths))
    return "\n".join(lines)


def package_map() -> str:
    """The first line of the docstring of each package."""
    lines = []
    for package in sorted(package for packages in LAYERS for package in packages):
        init = source(package) / "__init__.py"
        if init.is_file():
            docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
            lines.append(f"{package + '/':<{NAME_WIDTH}}{docstring.splitlines()[0]}")
    return "\n".join(lines)


def written() -> str:
    """The text of the page with the current map and layers."""
    text = PAGE.read_text()
    for name, content in (("map", package_map()), ("layers", diagram())):
        begin = BEGIN.format(name=name)
        block = f"{begin}```\n{content}\n```\n{END}"
        text, count = re.subn(re.escape(begin) + ".*?" + re.escape(END), lambda _, block=block: block, text, flags=re.S)
        assert count == 1, f"{PAGE} has no {name} to replace"
    return text


def main() -> None:
    if "--check" not in sys.argv:
        PAGE.write_text(written())
    elif PAGE.read_text() != written():
        sys.exit(f"{PAGE.name} is out of date: run python tools/layers.py")


if __name__ == "__main__":
    main()

"""The page's ES modules as one script for a report: a file opened from disk cannot import others."""

import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";\n', re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const|let) (\w+)(?: = [^;\n]*?((?:, \w+ = \w+)*);)?", re.M)
_REPLACED = {"api.js": "report_api.js"}


def bundle(entry: str) -> str:
    """Each module becomes a function that returns its exports; the modules that it imports come before it."""
    parts: list[str] = []
    _add(entry, parts, set())
    return "const modules = {};\n" + "".join(parts)


def _add(name: str, parts: list[str], done: set[str]) -> None:
    if name in done:
        return
    done.add(name)
    text = (STATIC / _REPLACED.get(name, name)).read_text(encoding="utf-8")
    for _, imported in _IMPORT.findall(text):
        _add(imported, parts, done)
    exported = [name for match in _EXPORT.finditer(text) for name in _names(match)]
    body = re.sub(r"^export ", "", _IMPORT.sub(r'const {\1} = modules["\2"];' + "\n", text), flags=re.M)
    parts.append(f'modules["{name}"] = (() => {{\n{body}return {{ {", ".join(exported)} }};\n}})();\n')


def _names(match: "re.Match[str]") -> list[str]:
    """The exported names of a declaration, which may be a list: `export const post = null, Stream = null;`"""
    return [match[1], *re.findall(r", (\w+) =", match[2] or "")]

"""Plugins: classes that users bring, named `package.module:Class` or by an entry point, and their options."""

import hashlib
import importlib
import inspect
import logging
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from llmtrain.core.files import file_sha256
from llmtrain.core.logs import log
from llmtrain.core.text import one_line
from llmtrain.errors import LlmtrainError, UsageError, nearest

SHOWN_LENGTH = 200
INSTALLED = ("site-packages", "dist-packages")
PACKAGE = str(Path(__file__).parent)

OptionProblem = tuple[tuple[str, ...], str]
"""(path of the option, what is wrong with it)"""


@dataclass(frozen=True)
class PluginKind:
    """A place in the config where a plugin may be named."""

    field: str
    group: str
    """Entry-point group whose names are accepted too."""
    base: str
    """`module:Class` that a plugin must be a subclass of."""


def search_in(directories: Iterable[Path]) -> None:
    """Let modules be imported from these directories, after installed packages and PYTHONPATH: a file named like a
    package that is installed never hides it."""
    known = {Path(entry or ".").absolute() for entry in sys.path}
    for directory in map(Path.absolute, directories):
        if directory not in known:
            known.add(directory)
            sys.path.append(str(directory))


def is_plugin(kind: PluginKind, name: str) -> bool:
    """Whether a name is an import path or that of an installed entry point."""
    return ":" in name or name in installed_names(kind)


def installed_names(kind: PluginKind) -> list[str]:
    from importlib.metadata import entry_points  # slow to import, and most configs need none

    return sorted(entry_points(group=kind.group).names)


def load_plugin(kind: PluginKind, name: str) -> type[Any]:
    """Import the class with this name, and check that it is complete. Every problem is a UsageError."""
    module_name, _, attribute = _import_path(kind, name).partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"{kind.field} must be written as package.module:Class, got '{name}'.")
    module = _import(kind, name, module_name)
    found = getattr(module, attribute, None)
    base = _class_at(kind.base)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
        raise UsageError(
            f"{kind.field} {name}: {module_name} ({_file(module)}) has no class '{attribute}'."
            f"{nearest(attribute, vars(module))}",
            known=[key for key in classes if not inspect.isabstract(vars(module)[key])],
        )
    wanted = kind.base.replace(":", ".")
    if not isinstance(found, type) or not issubclass(found, base):
        raise UsageError(
            f"{kind.field} {name} is not a subclass of {wanted}.",
            remedy=f"Write `class {attribute}({base.__name__}):`, see docs/extending.md.",
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UsageError(f"{kind.field} {name} does not implement {', '.join(missing)}, which {wanted} requires.")
    return found


def _import_path(kind: PluginKind, name: str) -> str:
    from importlib.metadata import entry_points

    if ":" in name:
        return name
    found = list(entry_points(group=kind.group, name=name))
    if not found:
        raise UsageError(
            f"{kind.field} '{name}' is unknown: no installed package has an entry point of this name in the group "
            f"{kind.group}.",
            known=installed_names(kind),
            remedy="Install the package that has it, or write package.module:Class.",
        )
    values = sorted({point.value for point in found})
    if len(values) > 1:
        raise UsageError(
            f"{kind.field} '{name}' is registered by several packages: {', '.join(values)}.",
            remedy=f"Write the one to use, such as {values[0]}.",
        )
    return values[0]


def _class_at(path: str) -> type[Any]:
    module, _, attribute = path.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found


def _import(kind: PluginKind, name: str, module: str) -> ModuleType:
    importlib.invalidate_caches()  # the file may be newer than the last look at its directory
    try:
        with redirect_stdout(sys.stderr):  # standard output has the result of the command
            return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{module}.".startswith(f"{problem.name}."):
            raise _import_failed(kind, name, module, problem) from None
        places = [entry for entry in sys.path if Path(entry).is_dir() and not _is_installed(entry)]
        raise UsageError(
            f"{kind.field} {name}: there is no module '{problem.name}' among the installed packages or in "
            f"{', '.join(places)}.",
            remedy=f"Run llmtrain in the directory that contains {module.partition('.')[0]}, set PYTHONPATH to it, or "
            "install the package.",
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise _import_failed(kind, name, module, problem) from None


def _import_failed(kind: PluginKind, name: str, module: str, problem: BaseException) -> UsageError:
    error = UsageError(f"{kind.field} {name}: importing {module} failed at {_place(problem)}: {_last_line(problem)}")
    error.details["missing_module"] = problem.name if isinstance(problem, ModuleNotFoundError) else None
    return error


def is_plugin_class(kind: type[Any]) -> bool:
    """Whether a class is a plugin, not one of llmtrain."""
    return kind.__module__.partition(".")[0] != "llmtrain"


def class_name(kind: type[Any]) -> str:
    """The name of a class as it is written in a config."""
    return f"{kind.__module__}:{kind.__qualname__}"


@contextmanager
def plugin_errors(kind: type[Any], what: str, error: type[LlmtrainError] = UsageError) -> Iterator[None]:
    """Turn an exception that a plugin raises into one error with file and line. `what` names the method.
    LLMTRAIN_DEBUG=1 logs the traceback. What classes of llmtrain raise is not changed."""
    try:
        yield
    except (LlmtrainError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as problem:
        if not is_plugin_class(kind):
            raise
        from llmtrain.core.redact import redact

        log("TRAIN", redact("".join(traceback.format_exception(problem)).rstrip()), logging.DEBUG)
        raise error(f"{class_name(kind)}: {what} failed at {_place(problem)}: {_last_line(problem)}") from None


def wrong_result(
    kind: type[Any], what: str, value: object, expected: str, error: type[LlmtrainError] = UsageError
) -> LlmtrainError:
    """The error for a method that `what` ("build returned") says gave this value."""
    name = type(value).__qualname__
    if value is None:
        shown = "None"
    elif (shape := getattr(value, "shape", None)) is not None:  # a tensor or an array
        shown = f"a {name} of shape {tuple(shape)}"
    else:
        shown = f"{one_line(repr(value), SHOWN_LENGTH)} ({name})"
    where = f"{class_name(kind)}{_defined_at(kind)}"
    return error(f"{where}: {what} {shown}; expected {expected}.", remedy="See docs/extending.md.")


def _defined_at(kind: type[Any]) -> str:
    """` (file:line)` of a plugin; empty if it has no file."""
    if not is_plugin_class(kind):
        return ""
    try:
        file = inspect.getsourcefile(kind)
        return f" ({file}:{inspect.getsourcelines(kind)[1]})" if file else ""
    except (OSError, TypeError):  # defined in an interactive session
        return ""


def _last_line(problem: BaseException) -> str:
    """Type and message of an exception, as at the end of its traceback, on one line."""
    return one_line(traceback.format_exception_only(problem)[-1])


def _place(problem: BaseException) -> str:
    """file:line of the user's code in which an exception was raised."""
    if isinstance(problem, SyntaxError) and problem.filename:
        return f"{problem.filename}:{problem.lineno}"
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if not frame.filename.startswith("<")]
    others = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
    written = [frame for frame in others if not _is_installed(frame.filename)]
    last = (written or others or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def _is_installed(path: str) -> bool:
    """Whether a path belongs to Python or to its packages."""
    library = sysconfig.get_path("stdlib")
    return path.startswith(library) or path.endswith(".zip") or any(name in Path(path).parts for name in INSTALLED)


def _file(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "no file"


def read_options(kind: type[Any], options: Mapping[str, Any]) -> tuple[BaseModel | None, list[OptionProblem]]:
    """The options of a class, validated by its own pydantic model `Options`; else None and the problems."""
    model = kind.Options
    if not isinstance(model, type) or not issubclass(model, BaseModel):
        return None, [((), f"{kind.__qualname__}.Options must be a pydantic BaseModel.")]
    accepted = ", ".join(sorted(model.model_fields)) or "none"
    accepted_by = f"Accepted by {kind.__qualname__}: {accepted}."
    names = {*model.model_fields, *(info.alias for info in model.model_fields.values())}
    problems: list[OptionProblem] = []
    known = {}
    for name, value in options.items():
        if name in names or model.model_config.get("extra") == "allow":
            known[name] = value
        else:
            problems.append(((name,), f"is unknown.{nearest(name, model.model_fields)} {accepted_by}"))
    try:
        return model.model_validate(known), problems
    except ValidationError as error:
        for row in error.errors(include_url=False, include_context=False):
            message = row["msg"][:1].lower() + row["msg"][1:]
            if row["type"] != "missing":
                message += f", got {repr(row['input'])[:SHOWN_LENGTH]}"
            problems.append((tuple(map(str, row["loc"])), f"{message}. {accepted_by}"))
    except Exception as problem:  # raised by a validator of the plugin
        problems.append(((), f"cannot be validated: {type(problem).__name__} at {_place(problem)}: {problem}"))
    return None, problems


def parse_options(kind: type[Any], options: Mapping[str, Any]) -> BaseModel:
    """The validated options of a class; raises UsageError for the first problem."""
    parsed, problems = read_options(kind, options)
    if problems:
        path, text = problems[0]
        raise UsageError(option_problem(("options", *path), text))
    assert parsed is not None
    return parsed


def option_problem(path: Iterable[str], text: str) -> str:
    """`options.width is unknown. ...`, or `options.width: must be ...`"""
    colon = "" if text.startswith("is unknown") else ":"
    return f"{'.'.join(path)}{colon} {text}"


def source_sha256(kind: type[Any]) -> str | None:
    """Hash of the Python files of the class's top-level package, or of its module; None if it has no file."""
    root, files = _source_files(kind)
    if root is None:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root).as_posix()} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _source_files(kind: type[Any]) -> tuple[Path | None, list[Path]]:
    """The directory from which the top-level module of a class was imported, and the Python files of that module."""
    top = sys.modules.get(kind.__module__.partition(".")[0])
    directories = [Path(entry) for entry in getattr(top, "__path__", [])]
    if directories:
        return directories[0].parent, sorted(directories[0].rglob("*.py"))
    file = getattr(top, "__file__", None)
    if file and Path(file).is_file():
        return Path(file).parent, [Path(file)]
    return None, []


def describe_plugin(name: str, kind: type[Any]) -> dict[str, Any]:
    """What a run records about a class: where it is defined, and a hash of its source."""
    root, _ = _source_files(kind)
    return {
        "name": name,
        "module": kind.__module__,
        "class": kind.__qualname__,
        "directory": str(root.absolute()) if root and not _is_installed(str(root)) else None,
        "sha256": source_sha256(kind),
    }

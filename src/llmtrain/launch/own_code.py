"""The user's own code of a launch: read, and checked here before a pod imports it."""

from llmtrain.code_bundle import CodeBundle, import_directory, read_bundle
from llmtrain.config.check_plugins import Choice, check_plugins, choices
from llmtrain.config.document import Document
from llmtrain.config.schema import Config


def own_code(config: Config, source: str, with_code: str | None) -> tuple[CodeBundle | None, list[str]]:
    """The code to ship (`--with-code`), and warnings. Classes of the config that it contains are imported and their
    options validated; others must be in the image, which is not known here. `source`: the config, for messages."""
    code = read_bundle(with_code) if with_code is not None else None
    modules = {path.partition("/")[0].removesuffix(".py") for path in code.paths} if code else set()
    chosen = list(choices(config))
    shipped = [choice for choice in chosen if _top_module(choice) in modules]
    remedy = f"It is not in --with-code {with_code}." if with_code else "--with-code DIR ships code that is not."
    warnings = [
        f"{choice.name} ({choice.field}) must be installed in the image {config.launch.image}. {remedy}"
        for choice in chosen
        if choice not in shipped
    ]
    if with_code and shipped:
        check_plugins(config, Document(source, {}), [import_directory(with_code)], chosen=shipped, unchecked=warnings)
    return code, warnings


def _top_module(choice: Choice) -> str | None:
    """The top-level module of an import path; None for an entry point, which an installed package must have."""
    return choice.name.partition(":")[0].partition(".")[0] if ":" in choice.name else None

"""The user's own code of a launch: read, and checked here before a pod imports it."""

import posixpath

from llmtrain.config.check_plugins import Choice, check_plugins, choices
from llmtrain.config.document import Document
from llmtrain.config.schema import Config
from llmtrain.distributed.shell_command import ReadScript, read_script
from llmtrain.launch.code_bundle import CodeBundle, import_directory, read_bundle
from llmtrain.launch.pod_task import CODE_PATH


def plugin_code(config: Config, source: str, with_code: str | None) -> tuple[CodeBundle | None, list[str]]:
    """The code to ship (`--with-code`), and warnings. Classes of the config that it contains are imported and their
    options validated; others must be in the image, which is not known here. `source`: the config, for messages."""
    code = None if with_code is None else read_bundle(with_code)
    return code, check_code(config, source, code, with_code)


def check_code(config: Config, source: str, code: CodeBundle | None, with_code: str | None) -> list[str]:
    """Check a config with code that was read already. Returns warnings."""
    modules = set()
    remedy = "--with-code DIR ships code that is not."
    if code is not None:
        modules = {path.partition("/")[0].removesuffix(".py") for path in code.paths}
        remedy = f"It is not in --with-code {with_code}."
    shipped = []
    warnings = []
    for choice in choices(config):
        if _top_module(choice) in modules:
            shipped.append(choice)
        else:
            image = config.launch.image
            warnings.append(f"{choice.name} ({choice.field}) must be installed in the image {image}. {remedy}")
    if with_code and shipped:
        check_plugins(config, Document(source, {}), [import_directory(with_code)], chosen=shipped, unchecked=warnings)
    return warnings


def script_reader(code: CodeBundle | None) -> ReadScript:
    """Reads scripts of a launched command: those of --with-code as they are in the pod; others, which are in the image,
    from this machine, where the image was probably built from the same files."""

    def read(path: str) -> str | None:
        if code is None or not path.startswith(f"{CODE_PATH}/"):
            return read_script(path)
        content = code.contents.get(posixpath.normpath(path.removeprefix(f"{CODE_PATH}/")))
        return None if content is None else content.decode(errors="replace")

    return read


def _top_module(choice: Choice) -> str | None:
    """The top-level module of an import path; None for an entry point, which an installed package must have."""
    module, colon, _ = choice.name.partition(":")
    if not colon:
        return None
    return module.partition(".")[0]

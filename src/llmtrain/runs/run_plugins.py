"""The plugins that a run was trained with, when it is resumed or used."""

from collections.abc import Sequence
from pathlib import Path

from llmtrain.config.check_plugins import Choice, check_plugins
from llmtrain.config.document import Document
from llmtrain.config.schema import Config
from llmtrain.errors import ConfigError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.json_values import dictionary
from llmtrain.runs.view import RunView


def check_run_plugins(
    config: Config, document: Document, run: RunDirectory, chosen: Sequence[Choice] | None = None
) -> None:
    """Like check_plugins, for the config of a run. The directory from which the run imported its classes is used if it
    is below the current one: a run that was copied here must not decide which other code is executed."""
    directories = _recorded_directories(run)
    here = Path.cwd()
    own = [each for each in directories if each.is_relative_to(here) and not each.is_relative_to(run.path.absolute())]
    try:
        check_plugins(config, document, own, chosen=chosen)
    except ConfigError as error:
        others = [str(each) for each in directories if each not in own and each != here]
        if others:
            error.remedy = (
                f"Run '{run.run_id}' imported its classes from {', '.join(others)}. If that is your code, run llmtrain "
                f"there, or set PYTHONPATH={':'.join(others)}."
            )
        raise


def _recorded_directories(run: RunDirectory) -> list[Path]:
    plugins = dictionary(RunView(run).meta.get("plugins"))
    names = [dictionary(facts).get("directory") for facts in plugins.values()]
    return [Path(name) for name in dict.fromkeys(names) if isinstance(name, str)]

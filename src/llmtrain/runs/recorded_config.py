"""The config of a run that is resumed, or started from another, without one."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from llmtrain.config.document import read_document
from llmtrain.config.load import build_config
from llmtrain.config.output import OutputSection
from llmtrain.config.schema import Config
from llmtrain.errors import UsageError
from llmtrain.runs.checksums import POINTERS
from llmtrain.runs.directory import RunDirectory, find_run
from llmtrain.runs.json_values import dictionary
from llmtrain.runs.run_plugins import check_run_plugins
from llmtrain.runs.view import RunView

STEP = re.compile(r"(?:step_)?([0-9]{1,18})")


def is_checkpoint_path(resume: str) -> bool:
    """Whether --resume names a checkpoint, rather than a run; .pt: as version 1 named them."""
    path = Path(resume).expanduser()
    return path.parent.name == "checkpoints" or path.suffix == ".pt"


def config_to_resume(resume: str, overrides: Sequence[str] = ()) -> Config:
    """The recorded config of a run, named by its id, its directory or one of its checkpoints, with overrides."""
    path = Path(resume).expanduser()
    name = str(path.absolute().parents[1]) if path.parent.name == "checkpoints" else resume
    run = _with_config(find_run(_root(overrides), name))
    document = read_document(run.config)
    config = build_config(document, [*_current_location(run, document.values.get("output")), *overrides])
    check_run_plugins(config, document, run)
    return config


def split_reference(reference: str) -> tuple[str, str]:
    """RUN[@STEP] of `train --from`: `first@50` -> (`first`, `50`); without @: the best checkpoint."""
    name, _, at = reference.rpartition("@")
    is_valid = bool(name) and (at in POINTERS or STEP.fullmatch(at) is not None)
    if is_valid and ("@" not in name or Path(name).expanduser().exists()):
        return name, at
    if reference and ("@" not in reference or Path(reference).expanduser().exists()):
        return reference, "best"
    raise UsageError(
        f"--from {reference!r} is not RUN or RUN@STEP.",
        remedy="RUN is a run id or the path of a run. STEP is best (the default), latest or the number of a step, such "
        "as first@50.",
    )


def config_to_start_from(reference: str, overrides: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The config file of the run that RUN[@STEP] names, and overrides for a new run beside it."""
    run = _with_config(find_run(_root(overrides), split_reference(reference)[0]))
    location = [each for each in _current_location(run, RunView(run).config.get("output")) if "root_dir" in each]
    return str(run.config), [*location, "output.run_id=null", "run.threads=null", *overrides]


def _root(overrides: Sequence[str]) -> str:
    default = OutputSection().root_dir
    return next((each.split("=", 1)[1] for each in overrides if each.startswith("output.root_dir=")), default)


def _with_config(run: RunDirectory) -> RunDirectory:
    if not run.config.is_file():
        raise UsageError(f"Run '{run.run_id}' has no config.yaml.", remedy="Pass its config with --config.")
    return run


def _current_location(run: RunDirectory, output: object) -> list[str]:
    """Overrides for a run that was renamed, copied or moved: its config.yaml has its first location."""
    recorded = dictionary(output)
    overrides = []
    if recorded.get("run_id") != run.run_id:
        overrides.append(f"output.run_id={json.dumps(run.run_id)}")
    here = run.path.absolute().parent
    if Path(str(recorded.get("root_dir", OutputSection().root_dir))).expanduser().absolute() != here:
        overrides.append(f"output.root_dir={json.dumps(str(here))}")
    return overrides

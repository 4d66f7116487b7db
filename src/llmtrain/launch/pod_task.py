"""What the pods of a run execute."""

from dataclasses import dataclass
from typing import Literal

from llmtrain.config.distributed import DEFAULT_MASTER_PORT, DistributedSection
from llmtrain.core.env import HOLD_SCRIPT
from llmtrain.launch.pod_scripts import script_command

CONFIG_DIR = "/config"
CONFIG_FILE = "train.yaml"
WORK_DIR = "/work"  # in held pods: the target of `push` and the working directory of `exec`
MODES_WITH_FILES = ("train", "command", "hold")  # the other modes write nothing to the runs volume
CODE_PATH = "/code"  # the code of `launch --with-code`, on PYTHONPATH
HELD_COMMAND = script_command(HOLD_SCRIPT, "hold.py")


@dataclass(frozen=True)
class PodTask:
    mode: Literal["train", "smoke", "doctor", "command", "hold"] = "train"
    command: tuple[str, ...] = ()
    """Mode `command`: the user's command, which every process runs."""
    launcher: Literal["llmtrain", "torchrun"] = "llmtrain"
    """Mode `command`: what starts the processes; torchrun for images without llmtrain."""


def master_port(distributed: DistributedSection) -> int:
    return distributed.master_port or DEFAULT_MASTER_PORT

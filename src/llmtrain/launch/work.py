"""What the pods of a run execute."""

from dataclasses import dataclass
from typing import Literal

from llmtrain.config.distributed import DEFAULT_MASTER_PORT
from llmtrain.config.schema import Config
from llmtrain.env import HOLD_SCRIPT
from llmtrain.launch.pod_scripts import script_command

CONFIG_DIR = "/config"
CONFIG_FILE = "train.yaml"
WORK_DIR = "/work"  # in held pods: the target of `push` and the working directory of `exec`
CODE_PATH = "/code"  # the code of `launch --with-code`, on PYTHONPATH
HELD_COMMAND = script_command(HOLD_SCRIPT, "hold.py")


@dataclass(frozen=True)
class Work:
    mode: Literal["train", "smoke", "doctor", "command", "hold"] = "train"
    command: tuple[str, ...] = ()
    """Mode `command`: the user's command, which every process runs."""
    launcher: Literal["llmtrain", "torchrun"] = "llmtrain"
    """Mode `command`: what starts the processes; torchrun for images without llmtrain."""


def master_port(config: Config) -> int:
    return config.distributed.master_port or DEFAULT_MASTER_PORT

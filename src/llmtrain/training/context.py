"""What the steps of one training run share."""

from dataclasses import dataclass

from llmtrain.config.schema import Config
from llmtrain.distributed.world import World
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.lock import Lock
from llmtrain.tracking.base import OnLog
from llmtrain.training.origin import Origin
from llmtrain.training.resume import Resumption
from llmtrain.training.shutdown import StopFlag
from llmtrain.training.start_up import StartUp


@dataclass(frozen=True)
class RunContext:
    config: Config
    """The config with the numbers of threads and steps resolved."""
    requested_config: Config
    """The config as it was passed, with the number of threads resolved: what config.yaml and checkpoints record."""
    world: World
    run: RunDirectory
    lock: Lock
    generation: int
    """Number of this start of the run."""
    resumption: Resumption | None
    """None for a new run."""
    stop: StopFlag
    start_up: StartUp
    origin: Origin | None = None
    """Whose weights the run starts from, until its first checkpoint."""
    on_log: OnLog | None = None
    """The caller's own function, called with the metrics of a step on rank 0."""

    @property
    def resumed_step(self) -> int | None:
        """Step of the checkpoint the run was resumed from."""
        if self.resumption is None or self.resumption.checkpoint is None:
            return None
        return self.resumption.checkpoint.step

"""Training in several processes of this machine: `llmtrain train --processes N`."""

from llmtrain.config.schema import Config
from llmtrain.core.logs import log
from llmtrain.core.text import plural
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.distributed.workers import local_node, run_processes, worker_command
from llmtrain.runs.directory import RunDirectory, new_run
from llmtrain.runs.exit_report import set_run_exits
from llmtrain.training.resume import find_resumed_run


def train_in_processes(
    config: Config, processes: int, max_restarts: int, resume: str | None, options: list[str]
) -> None:
    """Start the processes and wait for their end. `options`: of `llmtrain train`, for all of them. The run id is chosen
    here, so that restarted processes find their run."""
    micro_batches_in_step(config.trainer, config.distributed, processes)
    run: RunDirectory | None
    if resume is None:
        run = new_run(config.output.root_dir, config.output.run_id, config.run.name)
        options = [*options, "--set", f"output.run_id={run.run_id}", "--resume", "auto"]
    else:
        run = find_resumed_run(config.output, config.run.name, resume)
        options = [*options, "--resume", resume]
    if run:
        set_run_exits(run.absolute().exits)
    log("SETUP", f"starting {plural(processes, 'process')}")
    run_processes(local_node(processes), worker_command("train", *options), config.distributed, max_restarts)

"""The list of the doctor's checks of one process, in order (public: llmtrain/diagnose.py).

They join no process group, and write only temporary files.
"""

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.schema import Config
from llmtrain.core.env import LAUNCH
from llmtrain.core.findings import Check, Finding, passed, run_checks
from llmtrain.doctor import environment, machine, memory, network
from llmtrain.errors import LlmtrainError

Checks = list[tuple[str, Check]]


def diagnose(config: Config | None = None, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Check this machine and environment, without joining other processes. Usable from any script."""
    config = config or Config()
    environ = os.environ if environ is None else environ
    return run_checks([*own_checks(config, environ), *master_checks(config.distributed, environ)])


def own_checks(config: Config, environ: Mapping[str, str], *, time_writing: bool = True) -> Checks:
    """Checks of this process and its machine. One process per node checks the volumes: several that write at once would
    each measure a part of the speed."""
    position = environment.find_position(environ, config.distributed)
    processes = position.local_world_size
    # Two checks need the plan, which traces a step.
    plan = functools.cache(lambda: memory.plan_here(config, position))
    checks: Checks = [
        ("versions", environment.versions),
        ("identity", lambda: environment.identity(environ, config.distributed)),
        ("environment", lambda: environment.variables(environ)),
        ("interfaces", lambda: network.chosen_interfaces(environ)),
        ("gpu", lambda: machine.gpus(config.run, processes, environ)),
        ("cores", lambda: machine.cores(config.run, processes)),
        ("memory", lambda: memory.memory(plan())),
        ("shared memory", lambda: machine.shared_memory(config.run, config.data.num_workers)),
    ]
    if position.local_rank == 0:

        def output() -> Iterator[Finding]:
            if config.launch.runs_volume is None and LAUNCH in os.environ:
                return iter([passed("output", "no volume for files (launch.runs_volume is null)")])
            needed = plan().memory
            size = needed.checkpoint if needed else None
            return machine.output_directory(config.output, config.trainer, size, time_writing)

        checks.append(("output", output))
        checks.append(("cache", lambda: machine.cache_directory(config.data)))
    return checks


def master_checks(distributed: DistributedSection, environ: Mapping[str, str]) -> Checks:
    """Checks of the connection to the master, if there is one."""
    position = environment.find_position(environ, distributed)
    master = position.master
    if master is None:
        return []
    return [
        ("master name", lambda: network.route_to_master(master, position.node_rank)),
        ("master port", lambda: network.master_port(master)),
    ]


def checks_after(error: LlmtrainError, distributed: DistributedSection, environ: Mapping[str, str]) -> Checks:
    """Checks of the connection to the master after a failed start. The port is not checked where this process hosted it
    (it is closed again), or if the error is about the port."""
    position = environment.find_position(environ, distributed)
    master = position.master
    is_remote = master is not None and not master.is_hosted_here
    host = error.details.get("host")
    port = error.details.get("port")
    if isinstance(host, str) and isinstance(port, int):  # may come from an option of `llmtrain node`
        if master is None:
            master = environment.Master(host, port, is_hosted_here=False)
        else:
            master = replace(master, host=host, port=port)
    if master is None:
        return []
    checks: Checks = [("master name", lambda: network.route_to_master(master, position.node_rank))]
    if is_remote and "failed" not in error.details:
        checks.append(("master port", lambda: network.master_port(master)))
    return checks

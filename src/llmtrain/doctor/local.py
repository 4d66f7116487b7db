"""The checks of one process, in order. They join no process group, and write only a temporary file."""

import functools
import os
from collections.abc import Mapping
from dataclasses import replace

from llmtrain.config.schema import Config
from llmtrain.doctor import environment, machine, memory_estimate, network
from llmtrain.errors import LlmtrainError
from llmtrain.findings import Check, Finding, run_checks

Checks = list[tuple[str, Check]]


def diagnose(config: Config | None = None, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Check this machine and environment, without joining other processes. Usable from any script."""
    config = config or Config()
    environ = os.environ if environ is None else environ
    return run_checks([*own_checks(config, environ), *master_checks(config, environ)])


def own_checks(config: Config, environ: Mapping[str, str], *, time_writing: bool = True) -> Checks:
    """Checks of this process and its machine. One process per node checks the volumes: several that write at once would
    each measure a part of the speed."""
    position = environment.find_position(environ, config.distributed)
    processes = position.local_world_size
    count = functools.cache(lambda: memory_estimate.count_parameters(config))
    checks: Checks = [
        ("versions", environment.versions),
        ("identity", lambda: environment.identity(environ, config.distributed)),
        ("environment", lambda: environment.variables(environ)),
        ("interfaces", lambda: network.chosen_interfaces(environ)),
        ("gpu", lambda: machine.gpus(config, processes, environ)),
        ("cores", lambda: machine.cores(config, processes)),
        ("memory", lambda: memory_estimate.memory(config, count(), position.world_size, processes)),
        ("shared memory", lambda: machine.shared_memory(config)),
    ]
    if position.local_rank == 0:
        checkpoint_bytes = functools.partial(memory_estimate.checkpoint_bytes, config)
        checks.append(("volumes", lambda: machine.volumes(config, checkpoint_bytes(count()), time_writing)))
    return checks


def master_checks(config: Config, environ: Mapping[str, str]) -> Checks:
    """Checks of the connection to the master, if there is one."""
    position = environment.find_position(environ, config.distributed)
    master = position.master
    if master is None:
        return []
    return [
        ("master name", lambda: network.route_to_master(master, position.node_rank)),
        ("master port", lambda: network.master_port(master)),
    ]


def checks_after(error: LlmtrainError, config: Config, environ: Mapping[str, str]) -> Checks:
    """Checks of the connection to the master after a failed start. The port is not checked where this process hosted it
    (it is closed again), or if the error is about the port."""
    position = environment.find_position(environ, config.distributed)
    master, host, port = position.master, error.details.get("host"), error.details.get("port")
    is_remote = master is not None and not master.is_hosted_here
    if isinstance(host, str) and isinstance(port, int):  # may come from an option of `llmtrain node`
        master = replace(master or environment.Master(host, port, is_hosted_here=False), host=host, port=port)
    if master is None:
        return []
    checks: Checks = [("master name", lambda: network.route_to_master(master, position.node_rank))]
    if is_remote and "failed" not in error.details:
        checks.append(("master port", lambda: network.master_port(master)))
    return checks

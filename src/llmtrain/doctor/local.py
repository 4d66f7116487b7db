"""The checks of one process, in order. Nothing is joined, and nothing but a probe file is written."""

import functools
import os
from collections.abc import Mapping
from dataclasses import replace

from llmtrain.config.schema import Config
from llmtrain.doctor import environment, machine, needs, network
from llmtrain.errors import LlmtrainError
from llmtrain.findings import Check, Finding, run_checks

Checks = list[tuple[str, Check]]


def diagnose(config: Config | None = None, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """What is right and wrong with this machine and environment, without joining anything; for any script."""
    config = config or Config()
    environ = os.environ if environ is None else environ
    return run_checks([*own_checks(config, environ), *master_checks(config, environ)])


def own_checks(config: Config, environ: Mapping[str, str], *, time_writing: bool = True) -> Checks:
    """What concerns this process and its machine only. Volumes are looked at by one process of a node: several that
    write at once would each see a share of the speed."""
    spot = environment.find_spot(environ, config.distributed)
    processes = spot.local_world_size
    count = functools.cache(lambda: needs.count_parameters(config))
    checks: Checks = [
        ("versions", environment.versions),
        ("identity", lambda: environment.identity(environ, config.distributed)),
        ("environment", lambda: environment.variables(environ)),
        ("interfaces", lambda: network.chosen_interfaces(environ)),
        ("gpu", lambda: machine.gpus(config, processes, environ)),
        ("cores", lambda: machine.cores(config, processes)),
        ("memory", lambda: needs.memory(config, count(), spot.world_size, processes)),
        ("shared memory", lambda: machine.shared_memory(config)),
    ]
    if spot.local_rank == 0:
        checks.append(
            ("volumes", lambda: machine.volumes(config, needs.checkpoint_bytes(config, count()), time_writing))
        )
    return checks


def master_checks(config: Config, environ: Mapping[str, str]) -> Checks:
    """The way to the master, where there is one."""
    spot = environment.find_spot(environ, config.distributed)
    master = spot.master
    if master is None:
        return []
    return [
        ("master name", lambda: network.way_to_master(master, spot.node_rank)),
        ("master port", lambda: network.master_port(master)),
    ]


def checks_after(error: LlmtrainError, config: Config, environ: Mapping[str, str]) -> Checks:
    """The way to the master once a start has failed. The port is asked only where that tells something new: whoever
    hosts it has just let it go, and an error about the port has said it already."""
    spot = environment.find_spot(environ, config.distributed)
    master, host, port = spot.master, error.details.get("host"), error.details.get("port")
    is_elsewhere = master is not None and not master.is_hosted_here
    if isinstance(host, str) and isinstance(port, int):  # `llmtrain node` may know it from an option
        known = master or environment.Master(host, port, is_hosted_here=False)
        master = replace(known, host=host, port=port)
    if master is None:
        return []
    checks: Checks = [("master name", lambda: network.way_to_master(master, spot.node_rank))]
    if is_elsewhere and "failed" not in error.details:
        checks.append(("master port", lambda: network.master_port(master)))
    return checks

"""A node with one process needs no elastic agent: `llmtrain node` itself trains, or is replaced by the command."""

import os

from llmtrain.distributed.network import setup_network
from llmtrain.distributed.platform_env import NAMES
from llmtrain.distributed.process_info import NodeInfo
from llmtrain.errors import UsageError

# Variables in which platforms count pods, where torchrun counts processes.
_NODE_VARIABLES = [
    name
    for key in (
        *("rank", "world_size", "local_rank", "local_world_size", "group_rank"),
        *("nodes", "node_rank", "processes_per_node"),
    )
    for name in NAMES[key]
]


def is_single_process(node: NodeInfo, max_restarts: int, is_command: bool) -> bool:
    """Whether this process can do the work of the node: there is nothing to restart, and its rank is known. Commands on
    several nodes need the agents, which start together: a short command could have ended on node 0 before node 1
    starts, and node 1 would wait for a master that is gone."""
    if is_command and node.nodes > 1:
        return False
    is_fixed = not node.is_elastic and node.rdzv_backend in (None, "static")
    return node.processes_per_node == 1 and is_fixed and not max_restarts


def set_process_variables(node: NodeInfo, is_command: bool) -> None:
    """Set the variables that torchrun sets for a worker. A single process needs them only to run a user's command."""
    for name in _NODE_VARIABLES:
        os.environ.pop(name, None)
    if node.nodes == 1 and not is_command:
        return
    os.environ.update(
        RANK=str(node.node_rank),
        WORLD_SIZE=str(node.nodes),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(node.node_rank),
        MASTER_ADDR=node.master_addr,
        MASTER_PORT=str(node.master_port),
    )


def exec_command(command: list[str], node: NodeInfo) -> None:
    """Replace this process with the command; the exit code is the command's."""
    setup_network(node.master_addr)
    os.environ.update(TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0")  # scripts under torchrun read them
    try:
        os.execvp(command[0], command)
    except OSError as problem:
        raise UsageError(f"Cannot run {command[0]}: {problem.strerror}.") from None

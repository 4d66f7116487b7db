"""The command line of the training container, which is the same in every pod and for every kind."""

from llmtrain.config.distributed import DistributedSection
from llmtrain.config.launch import LaunchSection
from llmtrain.launch.pod_task import CONFIG_DIR, CONFIG_FILE, HELD_COMMAND, PodTask, master_port


def pod_command(
    launch: LaunchSection,
    distributed: DistributedSection,
    task: PodTask,
    *,
    run_id: str,
    namespace: str,
    launch_id: str,
    master_addr: str,
    index_variable: str,
) -> list[str]:
    """The node rank is not part of it: `llmtrain node` reads it from the environment, torchrun gets it from Kubernetes,
    which replaces $(NAME)."""
    user_command = [word.replace("$", "$$") for word in task.command]  # else Kubernetes would expand $(NAME)
    if task.mode == "hold":
        return [*HELD_COMMAND, "hold"]
    if task.launcher == "torchrun":
        return [*_torchrun(launch, distributed, run_id, master_addr, index_variable), *user_command]
    command = ["python", "-m", "llmtrain", "node"]
    if task.mode != "command":
        command += ["--config", f"{CONFIG_DIR}/{CONFIG_FILE}"]
    if task.mode in ("smoke", "doctor"):
        command.append(f"--{task.mode}")
    command += ["--nodes", str(launch.nodes)]
    command += ["--processes-per-node", str(launch.processes_per_node)]
    command += _rendezvous(distributed, master_addr, run_id, f"{namespace}-{run_id}-{launch_id}")
    command += ["--grace-sec", str(launch.grace_period_sec)]
    if task.mode == "command":
        command += ["--", *user_command]
    return command


def _rendezvous(distributed: DistributedSection, master_addr: str, run_id: str, etcd_id: str) -> list[str]:
    """`etcd_id`: many runs share one etcd server, so the id must differ from that of a run of this name in another
    namespace and from that of the previous launch, whose pods may still be terminating."""
    rendezvous = distributed.rendezvous
    if rendezvous.backend == "etcd-v2":
        endpoint = str(rendezvous.endpoint)
        return ["--rdzv-backend", rendezvous.backend, "--rdzv-endpoint", endpoint, "--rdzv-id", etcd_id]
    arguments = ["--master-addr", master_addr, "--master-port", str(master_port(distributed))]
    if rendezvous.backend:
        arguments += ["--rdzv-backend", rendezvous.backend]
    return [*arguments, "--rdzv-id", run_id]


def _torchrun(
    launch: LaunchSection, distributed: DistributedSection, run_id: str, master_addr: str, index_variable: str
) -> list[str]:
    """torchrun and its options; the command follows them."""
    port = master_port(distributed)
    min_nodes, max_nodes = launch.node_range
    if min_nodes < max_nodes or distributed.rendezvous.backend == "c10d":
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={master_addr}:{port}", f"--rdzv-id={run_id}"]
    else:
        rendezvous = [f"--node-rank=$({index_variable})", f"--master-addr={master_addr}", f"--master-port={port}"]
    sizes = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.processes_per_node}"]
    return ["torchrun", *sizes, *rendezvous, "--no-python"]

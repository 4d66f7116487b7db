"""The command line of the training container, which is the same in every pod and for every workload."""

from llmtrain.config.schema import Config
from llmtrain.launch.work import CONFIG_DIR, CONFIG_FILE, HELD_COMMAND, Work, master_port


def pod_command(
    config: Config, work: Work, *, run_id: str, namespace: str, launch_id: str, master_addr: str, index_variable: str
) -> list[str]:
    """The node rank is not part of it: `llmtrain node` reads it from the environment, torchrun gets it from Kubernetes,
    which replaces $(NAME)."""
    launch = config.launch
    command = [word.replace("$", "$$") for word in work.command]  # else Kubernetes would expand $(NAME)
    if work.mode == "hold":
        return [*HELD_COMMAND, "hold"]
    if work.launcher == "torchrun":
        return _torchrun(config, command, run_id, master_addr, index_variable)
    return [
        *("python", "-m", "llmtrain", "node"),
        *(() if work.mode == "command" else ("--config", f"{CONFIG_DIR}/{CONFIG_FILE}")),
        *({"smoke": ["--smoke"], "doctor": ["--doctor"]}.get(work.mode, [])),
        *("--nodes", str(launch.nodes)),
        *("--processes-per-node", str(launch.processes_per_node)),
        *_rendezvous(config, master_addr, run_id, f"{namespace}-{run_id}-{launch_id}"),
        *("--grace-sec", str(launch.grace_period_sec)),
        *(("--", *command) if work.mode == "command" else ()),
    ]


def _rendezvous(config: Config, master_addr: str, run_id: str, etcd_id: str) -> list[str]:
    """`etcd_id`: many runs share one etcd server, so the id must differ from that of a run of this name in another
    namespace and from that of the previous launch, whose pods may still be terminating."""
    rendezvous = config.distributed.rendezvous
    backend = ["--rdzv-backend", rendezvous.backend] if rendezvous.backend else []
    if rendezvous.backend == "etcd-v2":
        return [*backend, "--rdzv-endpoint", str(rendezvous.endpoint), "--rdzv-id", etcd_id]
    master = ["--master-addr", master_addr, "--master-port", str(master_port(config))]
    return [*master, *backend, "--rdzv-id", run_id]


def _torchrun(config: Config, command: list[str], run_id: str, master_addr: str, index_variable: str) -> list[str]:
    launch = config.launch
    min_nodes, max_nodes = launch.node_range
    if min_nodes < max_nodes or config.distributed.rendezvous.backend == "c10d":
        endpoint = f"{master_addr}:{master_port(config)}"
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"]
    else:
        master = [f"--master-addr={master_addr}", f"--master-port={master_port(config)}"]
        rendezvous = [f"--node-rank=$({index_variable})", *master]
    sizes = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.processes_per_node}"]
    return ["torchrun", *sizes, *rendezvous, "--no-python", *command]

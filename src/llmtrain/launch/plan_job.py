"""plan_job: config -> JobPlan, after every check that needs no cluster."""

from llmtrain.config.schema import Config
from llmtrain.hub.needs import hub_needs
from llmtrain.hub.token import is_offline
from llmtrain.kubernetes.kubeconfig import DEFAULT_NAMESPACE
from llmtrain.kubernetes.labels import RUN_LABEL
from llmtrain.launch.checks import check_config, check_launch
from llmtrain.launch.code_bundle import CodeBundle
from llmtrain.launch.egress import egress_ports
from llmtrain.launch.job import JobPlan, launch_id
from llmtrain.launch.job_warnings import plan_warnings
from llmtrain.launch.kinds.base import find_kind
from llmtrain.launch.pod_command import pod_command
from llmtrain.launch.pod_memory import with_pod_memory
from llmtrain.launch.pod_task import PodTask, master_port
from llmtrain.runs.directory import new_run_id

# Fields of the config that describe one process; in a cluster each pod reads them from its environment.
PROCESS_FIELDS = ("rank", "world_size", "local_rank", "master_addr", "init_method")


def plan_job(
    config: Config,
    task: PodTask = PodTask(),  # noqa: B008 (frozen)
    number: int = 1,
    nonce: str = "",
    *,
    code: CodeBundle | None = None,
    run_label: str = RUN_LABEL,
    is_launched: bool = False,
) -> JobPlan:
    """Pure, except that it generates a run id if the config has none. `is_launched`: the run is on the cluster already,
    where refusing a part of its config would only prevent removing it."""
    if not is_launched:
        config = with_pod_memory(config, task)
    launch = config.launch
    kind = find_kind(launch)
    run_id = config.output.run_id or new_run_id(config.run.name)
    min_nodes, max_nodes = launch.node_range
    namespace = launch.namespace or DEFAULT_NAMESPACE
    master_addr = kind.master_addr(run_id)
    check_config(config, task, kind, master_addr, has_code=code is not None)
    if not is_launched:
        check_launch(config, task)
    resolved = _config_in_pod(config, run_id)
    needs_hub = hub_needs(config.model, config.data, config.trainer.eval_tasks).any
    is_fetching = task.mode in ("train", "hold") and needs_hub and not is_offline(launch.env)
    return JobPlan(
        run_id=run_id,
        namespace=namespace,
        min_nodes=min_nodes,
        nodes=max_nodes,
        processes_per_node=launch.processes_per_node,
        container=kind.container,
        master_addr=master_addr,
        config=resolved,
        master_port=master_port(config.distributed),
        mounts=launch.mounts(resolved.output.mount_path),
        tracking_uri=config.tracking.mlflow.tracking_uri,
        command=pod_command(
            launch,
            config.distributed,
            task,
            run_id=run_id,
            namespace=namespace,
            launch_id=launch_id(number, nonce),
            master_addr=master_addr,
            index_variable=kind.index_variable,
        ),
        egress_ports=egress_ports(resolved, task, kind, uses_hub=is_fetching or task.mode in ("command", "hold")),
        is_fetching=is_fetching,
        launch=launch,
        task=task,
        code=code,
        number=number,
        nonce=nonce,
        run_label=run_label,
        warnings=plan_warnings(resolved, task, kind.limits_crashes),
        is_launched=is_launched,
    )


def _config_in_pod(config: Config, run_id: str) -> Config:
    """The config as the pods read it."""
    config = config.with_values("output", run_id=run_id, root_dir=config.output.mount_path)
    return config.with_values("distributed", **dict.fromkeys(PROCESS_FIELDS))

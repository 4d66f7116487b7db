"""plan_job: config -> JobPlan. Names, labels and process counts are decided here once; workloads only translate them
into the objects of their platform."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from llmtrain import registry
from llmtrain.code_bundle import CodeBundle
from llmtrain.config.document import dump_document
from llmtrain.config.launch import LaunchSection
from llmtrain.config.load import dump_config
from llmtrain.config.schema import SCHEMA_VERSION, Config
from llmtrain.config.upgrade import downgrade
from llmtrain.hub.needs import hub_needs
from llmtrain.hub.token import is_offline
from llmtrain.kubernetes.kubeconfig import DEFAULT_NAMESPACE
from llmtrain.kubernetes.labels import COMMON_LABELS, RUN_LABEL, run_selector
from llmtrain.launch.checks import check_config, check_launch
from llmtrain.launch.endpoints import egress_ports
from llmtrain.launch.plan_warnings import plan_warnings
from llmtrain.launch.pod_command import pod_command
from llmtrain.launch.work import Work, master_port
from llmtrain.runs.directory import new_run_id

Manifest = dict[str, Any]

JOB_FILE = "job.json"
METRICS_PORT = "metrics"  # name of the port on which pod 0 serves Prometheus metrics
# Fields of the config that describe one process; in a cluster each pod reads them from its environment.
PROCESS_FIELDS = ("rank", "world_size", "local_rank", "master_addr", "init_method")


@dataclass(frozen=True)
class JobPlan:
    """Everything that a workload needs. `launch` holds what is copied unchanged (resources, tolerations, ...)."""

    run_id: str
    namespace: str
    min_nodes: int
    nodes: int  # pods to create
    processes_per_node: int
    container: str
    master_addr: str
    config: Config
    """The config as the pods read it."""
    master_port: int
    mounts: dict[str, str]
    """Volume -> path in the pods."""
    tracking_uri: str | None
    command: list[str]
    egress_ports: list[int]
    is_fetching: bool
    """Whether an init container downloads models or data from the hub."""
    launch: LaunchSection
    work: Work = field(default_factory=Work)
    code: CodeBundle | None = None
    """The user's own code, mounted in every pod."""
    number: int = 1
    """Number of this launch of the run: 1, incremented by each resume."""
    nonce: str = ""
    """Distinguishes launches of one run name when the record of the earlier run was deleted and its data kept."""
    run_label: str = RUN_LABEL
    """Key of the label that carries the run id: that of the run's first launch (see kubernetes/labels.py)."""
    warnings: list[str] = field(default_factory=list)
    is_launched: bool = field(default=False, compare=False)
    """The plan of a run that is on the cluster already."""

    @property
    def world_size(self) -> int:
        """Number of processes when all pods are running."""
        return self.nodes * self.processes_per_node

    @property
    def config_text(self) -> str:
        """The config for the ConfigMap, in a schema that the image can read."""
        if self.launch.image_schema == SCHEMA_VERSION:
            return dump_config(self.config)
        return dump_document(downgrade(self.config.as_dict()))

    @property
    def metrics_port(self) -> int | None:
        """Port on which pod 0 serves Prometheus metrics."""
        return self.config.tracking.prometheus.port if self.work.mode == "train" else None

    @property
    def launch_id(self) -> str:
        return launch_id(self.number, self.nonce)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of every object of the run."""
        standard = {"app.kubernetes.io/instance": self.run_id, "app.kubernetes.io/managed-by": "llmtrain"}
        return {**COMMON_LABELS, **standard, self.run_label: self.run_id, **self.launch.labels}

    @property
    def selector(self) -> dict[str, str]:
        """Labels that select the pods of the run."""
        return run_selector(self.run_id, self.run_label)

    @property
    def service(self) -> str:
        """The headless Service, which gives the pods DNS names."""
        return self.run_id

    @property
    def config_map(self) -> str:
        return config_map_name(self.run_id)

    @property
    def code_map(self) -> str:
        """The ConfigMap of the code. Its name changes with the code, so that a resume with other code leaves it alone
        until the new one is there."""
        assert self.code
        return f"{self.run_id}-code-{self.code.sha256[:8]}"

    def claim(self, volume: str) -> str:
        """The claim of a volume: the existing one that the config names, else the one that is created."""
        return self.launch.volumes[volume].claim or f"{self.run_id}-{volume}"


def launch_id(number: int, nonce: str) -> str:
    return f"{number}-{nonce}" if nonce else str(number)


def config_map_name(run_id: str) -> str:
    """The object that records a run."""
    return f"{run_id}-config"


class Workload(Protocol):
    """A way to run pods: one module in workloads/, one row in registry.WORKLOADS."""

    api_version: str
    kind: str
    """Kubernetes kind of the job."""
    container: str
    """Name of the training container; some platforms require one."""
    states: dict[str, str]
    """Condition type -> `finished`, `failed` or `suspended`. Empty: it never ends."""

    @staticmethod
    def index_variable(launch: LaunchSection) -> str:
        """The environment variable that holds the node rank in a pod."""

    @staticmethod
    def master_addr(run_id: str, launch: LaunchSection) -> str:
        """The DNS name of pod 0; never that of the Service, which resolves to every pod."""

    @staticmethod
    def pod_0_labels(launch: LaunchSection) -> dict[str, str]:
        """Labels that of all pods of the run only pod 0 has."""

    @staticmethod
    def render(plan: JobPlan) -> list[Manifest]:
        """The job, preceded by the objects that it needs."""


def find_workload(launch: LaunchSection) -> Workload:
    workload: Workload = registry.resolve("launch.kind", launch.kind, registry.WORKLOADS)
    return workload


def plan_job(
    config: Config,
    work: Work = Work(),  # noqa: B008 (frozen)
    number: int = 1,
    nonce: str = "",
    *,
    code: CodeBundle | None = None,
    run_label: str = RUN_LABEL,
    is_launched: bool = False,
) -> JobPlan:
    """Pure, except that it generates a run id if the config has none. `is_launched`: the run is on the cluster already,
    where refusing a part of its config would only prevent removing it."""
    launch = config.launch
    workload = find_workload(launch)
    run_id = config.output.run_id or new_run_id(config.run.name)
    min_nodes, max_nodes = launch.node_range
    namespace = launch.namespace or DEFAULT_NAMESPACE
    master_addr = workload.master_addr(run_id, launch)
    check_config(config, work, master_addr, has_code=code is not None)
    if not is_launched:
        check_launch(config, work)
    resolved = _config_in_pod(config, run_id)
    is_fetching = work.mode in ("train", "hold") and hub_needs(resolved).any and not is_offline(launch.env)
    return JobPlan(
        run_id=run_id,
        namespace=namespace,
        min_nodes=min_nodes,
        nodes=max_nodes,
        processes_per_node=launch.processes_per_node,
        container=workload.container,
        master_addr=master_addr,
        config=resolved,
        master_port=master_port(config),
        mounts=launch.mounts(resolved.output.mount_path),
        tracking_uri=config.tracking.mlflow.tracking_uri,
        command=pod_command(
            config,
            work,
            run_id=run_id,
            namespace=namespace,
            launch_id=launch_id(number, nonce),
            master_addr=master_addr,
            index_variable=workload.index_variable(launch),
        ),
        egress_ports=egress_ports(resolved, work, uses_hub=is_fetching or work.mode in ("command", "hold")),
        is_fetching=is_fetching,
        launch=launch,
        work=work,
        code=code,
        number=number,
        nonce=nonce,
        run_label=run_label,
        warnings=plan_warnings(resolved, work),
        is_launched=is_launched,
    )


def _config_in_pod(config: Config, run_id: str) -> Config:
    """The config as the pods read it."""
    config = config.with_values("output", run_id=run_id, root_dir=config.output.mount_path)
    return config.with_values("distributed", **dict.fromkeys(PROCESS_FIELDS))

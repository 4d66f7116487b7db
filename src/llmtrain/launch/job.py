"""JobPlan: the names, labels and process counts of a launch. plan_job.py decides them once; kinds only translate them
into the objects of their platform."""

from dataclasses import dataclass, field
from typing import Any

from llmtrain.compat.records import config_for_image
from llmtrain.config.launch import LaunchSection
from llmtrain.config.schema import Config
from llmtrain.kubernetes.labels import COMMON_LABELS, RUN_LABEL, run_selector
from llmtrain.launch.code_bundle import CodeBundle
from llmtrain.launch.pod_task import PodTask

Manifest = dict[str, Any]

JOB_FILE = "job.json"
PREFETCH = "prefetch"  # name of the init container that downloads models and data
METRICS_PORT = "metrics"  # name of the port on which pod 0 serves Prometheus metrics


@dataclass(frozen=True)
class JobPlan:
    """Everything that a kind needs. `launch` holds what is copied unchanged (resources, tolerations, ...)."""

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
    task: PodTask = field(default_factory=PodTask)
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
        return config_for_image(self.config)

    @property
    def metrics_port(self) -> int | None:
        """Port on which pod 0 serves Prometheus metrics."""
        return self.config.tracking.prometheus.port if self.task.mode == "train" else None

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

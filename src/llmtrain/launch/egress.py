"""Servers outside the run that its pods connect to: the hub, tracking servers, etcd, S3, the kind's controller."""

from urllib.parse import urlsplit

from llmtrain.config.launch import LaunchSection
from llmtrain.config.schema import Config
from llmtrain.config.tracking import MlflowSection
from llmtrain.hub.token import is_offline
from llmtrain.launch.kinds.base import Kind
from llmtrain.launch.pod_task import PodTask

HTTPS_PORT = 443
DEFAULT_PORTS = {"http": 80, "https": HTTPS_PORT, "s3": HTTPS_PORT}
TRACKING_VARIABLE = "MLFLOW_TRACKING_URI"
# Variables that redirect libraries to another server.
ENDPOINT_VARIABLES = (
    "WANDB_BASE_URL",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "HF_ENDPOINT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)


def egress_ports(config: Config, task: PodTask, kind: Kind, *, uses_hub: bool) -> list[int]:
    """TCP ports that the NetworkPolicy must allow."""
    launch = config.launch
    ports = set()
    if uses_hub and not is_offline(launch.env):
        ports.add(HTTPS_PORT)
    rendezvous = config.distributed.rendezvous
    if rendezvous.backend == "etcd-v2":
        ports.add(int(str(rendezvous.endpoint).rpartition(":")[2]))
    uris = [value for name, value in launch.env.items() if name.upper() in ENDPOINT_VARIABLES]
    tracking = tracking_uri(config.tracking.mlflow, launch, task)
    if tracking:
        uris.append(tracking[1])
    if config.output.sync_uri:
        uris.append(config.output.sync_uri)
    wandb = config.tracking.wandb
    if task.mode == "train" and wandb.enabled and not wandb.offline and "WANDB_BASE_URL" not in launch.env:
        uris.append("https://api.wandb.ai")
    for text in uris:
        uri = urlsplit(text)
        if uri.scheme in DEFAULT_PORTS:
            ports.add(uri.port or DEFAULT_PORTS[uri.scheme])
    if kind.status_port and task.mode == "train":
        ports.add(kind.status_port)
    return sorted(ports)


def tracking_uri(mlflow: MlflowSection, launch: LaunchSection, task: PodTask) -> tuple[str, str] | None:
    """(config field, URI) of the tracking store that pods use. A user's command only sees the environment; in llmtrain
    the config takes precedence over it."""
    in_env = (f"launch.env.{TRACKING_VARIABLE}", launch.env.get(TRACKING_VARIABLE))
    in_config = ("tracking.mlflow.tracking_uri", mlflow.tracking_uri)
    if task.mode == "train" and mlflow.enabled:
        candidates = [in_config, in_env]
    elif task.mode in ("command", "hold"):
        candidates = [in_env, in_config]
    else:
        return None
    for field, uri in candidates:
        if uri:
            return field, uri
    return None

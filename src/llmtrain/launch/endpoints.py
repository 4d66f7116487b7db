"""Servers outside the run that its pods connect to: the hub, tracking servers, etcd, S3, the TrainJob's controller."""

from urllib.parse import urlsplit

from llmtrain.config.schema import Config
from llmtrain.hub.token import is_offline
from llmtrain.launch.work import Work
from llmtrain.tracking.train_job import PORT as STATUS_PORT

HTTPS_PORT = 443
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


def egress_ports(config: Config, work: Work, *, uses_hub: bool) -> list[int]:
    """TCP ports that the NetworkPolicy must allow."""
    ports = {HTTPS_PORT} if uses_hub and not is_offline(config.launch.env) else set()
    rendezvous = config.distributed.rendezvous
    if rendezvous.backend == "etcd-v2":
        ports.add(int(str(rendezvous.endpoint).rpartition(":")[2]))
    uris = [
        *(tracking_uri(config, work) or ())[1:],
        config.output.sync_uri,
        "https://api.wandb.ai" if work.mode == "train" and uses_wandb_server(config) else None,
        *(value for name, value in config.launch.env.items() if name.upper() in ENDPOINT_VARIABLES),
    ]
    for text in uris:
        uri = urlsplit(text or "")
        if uri.scheme in ("http", "https", "s3"):
            ports.add(uri.port or (80 if uri.scheme == "http" else HTTPS_PORT))
    if config.launch.kind == "train_job" and work.mode == "train":
        ports.add(STATUS_PORT)
    return sorted(ports)


def uses_wandb_server(config: Config) -> bool:
    wandb = config.tracking.wandb
    return wandb.enabled and not wandb.offline and "WANDB_BASE_URL" not in config.launch.env


def tracking_uri(config: Config, work: Work) -> tuple[str, str] | None:
    """(config field, URI) of the tracking store that pods use. A user's command only sees the environment; in llmtrain
    the config takes precedence over it."""
    launch = config.launch
    in_env = (f"launch.env.{TRACKING_VARIABLE}", launch.env.get(TRACKING_VARIABLE))
    mlflow = config.tracking.mlflow
    in_config = ("tracking.mlflow.tracking_uri", mlflow.tracking_uri)
    by_mode = {
        "train": [in_config, in_env] * mlflow.enabled,
        "command": [in_env, in_config],
        "hold": [in_env, in_config],
    }
    return next(((field, uri) for field, uri in by_mode.get(work.mode, []) if uri), None)

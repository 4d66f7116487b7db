"""The `tracking` section: experiment trackers besides metrics.jsonl."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

from typing import Annotated

from pydantic import Field, JsonValue

from llmtrain.config.section import ClassName, Section, Text


class MlflowSection(Section):
    """MLflow (extra `mlflow`)."""

    enabled: bool = False
    """Send parameters, metrics, config and metadata to MLflow."""
    tracking_uri: str | None = None
    """Server, sqlite URI or directory; on a cluster, as pods reach it. null uses MLFLOW_TRACKING_URI, else a sqlite
    file in output.root_dir. A directory gets MLflow's file store if MLflow still opens one (before 3.13, or with
    MLFLOW_ALLOW_FILE_STORE=true), else a sqlite file, mlflow.db."""
    experiment: Text = "llmtrain"
    """Experiment name."""
    run_name: str | None = None
    """Name of the MLflow run. null uses the run id."""
    log_models: bool = False
    """Upload the best checkpoint at the end."""


class TensorboardSection(Section):
    """TensorBoard (extra `tensorboard`)."""

    enabled: bool = False
    """Write TensorBoard event files to the run directory."""


class WandbSection(Section):
    """Weights & Biases (extra `wandb`)."""

    enabled: bool = False
    """Send metrics, config, samples and report to Weights & Biases. The API key comes from `wandb login` or
    WANDB_API_KEY; pods get it from a Secret in launch.env_secrets."""
    project: Text = "llmtrain"
    """Project name."""
    entity: Text | None = None
    """User or team that owns the project. null uses the default of the account."""
    run_name: Text | None = None
    """Name of the W&B run. null uses the run id."""
    offline: bool = False
    """Write to the directory `wandb` of the run instead of a server. Upload it later with `wandb sync`."""


class PrometheusSection(Section):
    """Prometheus (extra `prometheus`)."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on which rank 0 serves /metrics for Prometheus. null serves none. On a cluster, pods get the annotations
    `prometheus.io/scrape`, `port` and `path`, and the NetworkPolicy admits connections to the port."""
    host: Text | None = None
    """Address to listen on. null means all addresses in pods, else 127.0.0.1."""


class PluginTrackerSection(Section):
    """A tracker class of your own (docs/extending.md)."""

    name: ClassName
    """Import path of the class, or the name of an entry point in the group `llmtrain.trackers`."""
    options: dict[str, JsonValue] = {}
    """Options of the class, validated by its `Options`."""


class TrackingSection(Section):
    """Experiment trackers. metrics.jsonl is always written."""

    mlflow: MlflowSection = MlflowSection()
    """MLflow (extra `mlflow`)."""
    tensorboard: TensorboardSection = TensorboardSection()
    """TensorBoard (extra `tensorboard`)."""
    wandb: WandbSection = WandbSection()
    """Weights & Biases (extra `wandb`)."""
    prometheus: PrometheusSection = PrometheusSection()
    """Prometheus (extra `prometheus`)."""
    group: Text | None = None
    """Group of this run in W&B, and the tag `llmtrain.group` in MLflow. A sweep sets its name."""
    custom: list[PluginTrackerSection] = []
    """Trackers of your own, a `name` and `options` each."""

"""Opens the trackers that a config enables."""

import importlib
import os

from llmtrain import registry
from llmtrain.config.tracking import TrackingSection
from llmtrain.core.logs import warn
from llmtrain.core.progress import is_notebook
from llmtrain.plugins import parse_options
from llmtrain.tracking.base import TrackedRun, Tracker, Trackers


def check_trackers(tracking: TrackingSection) -> None:
    """Raise if a tracker is enabled whose package is not installed."""
    for name in enabled_trackers(tracking):
        check_tracker(name)


def check_tracker(name: str) -> None:
    importlib.import_module(f"llmtrain.tracking.{name}").check_installed()


def enabled_trackers(tracking: TrackingSection) -> list[str]:
    """The trackers that need a package of their own."""
    names = [name for name in ("mlflow", "tensorboard", "wandb") if getattr(tracking, name).enabled]
    if tracking.prometheus.port:
        names.append("prometheus")
    return names


def open_trackers(run: TrackedRun) -> Tracker:
    """A tracker that cannot be opened is left out: metrics.jsonl has everything, and only that one is necessary."""
    from llmtrain.tracking import train_job  # not above: its HTTPS client would slow the start of `llmtrain validate`

    names = ["jsonl", "console", *enabled_trackers(run.config.tracking)]
    if is_notebook():
        names.append("notebook")
    if train_job.URL in os.environ:
        names.append("train_job")
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(registry.resolve("tracker", name, registry.TRACKERS)(run))
        except Exception as problem:
            if name == "jsonl":
                raise  # other commands need the run's own metrics
            _warn_disabled(name, problem)
    for plugin in run.config.tracking.custom:
        try:
            kind = registry.resolve("tracking.custom", plugin.name, {})
            opened.append(kind(run, parse_options(kind, plugin.options)))
        except KeyboardInterrupt:
            raise
        except BaseException as problem:
            _warn_disabled(plugin.name, problem)
    return Trackers(opened)


def _warn_disabled(name: str, problem: BaseException) -> None:
    warn("TRAIN", f"{name} could not be opened and is disabled; training continues: {problem}")

"""llmtrain fetch: download a run from the cluster's volume."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from llmtrain.commands.cluster_options import RunArgument, check_image, connect_to_namespace
from llmtrain.commands.options import CURRENT, DEFAULT_ROOT, JsonOption, show, with_option_groups
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.terminal import say
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.operate.fetch.transfer import FetchProgress

PARTS = ("best", "metrics", "logs")
PRINT_EVERY_SEC = 5.0


@with_option_groups
def command(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="Directory in which the run directory is created.")] = DEFAULT_ROOT,
    only: Annotated[
        str | None,
        typer.Option(help="best (the best checkpoint), metrics or logs. Default: everything.", show_default=False),
    ] = None,
    claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim to read if the run has been deleted.", show_default=False)
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Image of the reader pod; it only needs python3.", show_default=False)
    ] = None,
    to_mlflow: Annotated[bool, typer.Option("--to-mlflow", help="Also replay the run into MLflow.")] = False,
    mlflow_uri: Annotated[
        str | None,
        typer.Option(
            help="MLflow tracking URI for --to-mlflow. Default: the one used for training.", show_default=False
        ),
    ] = None,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Download a run from the cluster's volume, while it runs or after all of its pods are gone. Run it again to
    download what is new or to continue an interrupted download."""
    from llmtrain.operate.cluster_run import ClusterRun
    from llmtrain.operate.fetch.choice import Only
    from llmtrain.operate.fetch.find_record import find_run_to_fetch
    from llmtrain.runs.directory import RunDirectory, check_run_id

    if only is not None and only not in PARTS:
        raise UsageError(f"--only '{only}' is unknown.", known=PARTS)
    if mlflow_uri is not None and not to_mlflow:
        raise UsageError("--mlflow-uri requires --to-mlflow.")
    if to_mlflow and only == "logs":
        raise UsageError("--to-mlflow needs the metrics, which --only logs does not fetch.", remedy="Omit --only logs.")
    check_run_id(run)
    check_image(image)
    directory = Path(to).expanduser()
    cluster, namespace = connect_to_namespace(place, run)
    record = find_run_to_fetch(cluster, run, namespace, claim, image)
    with _display(json_) as progress:
        fetched = ClusterRun(cluster, record).fetch(directory, only=cast(Only, only or "all"), on_progress=progress)
    value = fetched.as_dict()
    if to_mlflow:
        value["mlflow"] = _replay(RunDirectory(directory / run), mlflow_uri)
    show(json_, value, _text(value))


def _replay(run: Any, uri: str | None) -> Any:
    from llmtrain.tracking.replay import replay_run

    return replay_run(run, uri)


@contextmanager
def _display(is_silent: bool) -> Iterator[Callable[["FetchProgress"], None]]:
    """A progress bar in a terminal, a line every few seconds elsewhere, nothing with --json."""
    if is_silent:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress("fetching", *columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("fetch", total=None)
            yield lambda progress: bar.update(
                task, completed=progress.received, total=max(progress.expected, progress.received)
            )
    else:
        yield _ProgressLines()


class _ProgressLines:
    def __init__(self) -> None:
        self._next = time.monotonic() + PRINT_EVERY_SEC

    def __call__(self, progress: "FetchProgress") -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PRINT_EVERY_SEC
        total = max(progress.expected, progress.received)
        say(f"fetched {progress.received / 1e6:.1f} of {total / 1e6:.1f} MB", sys.stderr)


def _text(value: dict[str, Any]) -> str:
    speed = value["bytes"] / 1e6 / max(value["seconds"], 0.01)
    checkpoints = ", ".join(value["checkpoints"]) or "none"
    lines = [
        f"{value['path']}: {value['files']} files fetched ({value['bytes'] / 1e6:.1f} MB in {value['seconds']:.1f} s, "
        f"{speed:.1f} MB/s), {value['skipped']} already up to date.",
    ]
    if value["only"] in ("all", "best"):
        state = "finished" if value["is_finished"] else "not finished"
        lines.append(f"Checkpoints: {checkpoints}. The run is {state}.")
    if "mlflow" in value:
        mlflow = value["mlflow"]
        lines.append(f"MLflow: run {mlflow['mlflow_run_id']} of {mlflow['experiment']} at {mlflow['tracking_uri']}.")
    return "\n".join(lines)

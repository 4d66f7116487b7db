"""llmtrain fetch: a run of the cluster as a run directory on this machine."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, RunArgument, connect
from llmtrain.commands.options import DEFAULT_ROOT, JsonOption, show
from llmtrain.errors import UsageError
from llmtrain.terminal import say

if TYPE_CHECKING:
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.launch.record import Record
    from llmtrain.operate.fetch.transfer import Tally

PARTS = ("best", "metrics", "logs")
LINE_EVERY_SEC = 5.0


def command(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="Directory of runs; the run's own is made in it.")] = DEFAULT_ROOT,
    only: Annotated[
        str | None, typer.Option(help="best (its best checkpoint), metrics or logs. Default: all.", show_default=False)
    ] = None,
    claim: Annotated[
        str | None, typer.Option(help="Volume claim to read, of a run the cluster forgot.", show_default=False)
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Image of the pod that reads; python3 is enough.", show_default=False)
    ] = None,
    to_mlflow: Annotated[bool, typer.Option("--to-mlflow", help="Then replay it into an MLflow store.")] = False,
    mlflow_uri: Annotated[
        str | None, typer.Option(help="With --to-mlflow: the store. Default: as for training.", show_default=False)
    ] = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Bring a run from the cluster's volume here, while it goes on or after all of its pods have gone. Again: only what
    is new, or where it broke off."""
    from llmtrain.operate.fetch.choice import Only
    from llmtrain.operate.fetch.fetch_run import fetch_run
    from llmtrain.runs.directory import RunDirectory, check_run_id

    if only is not None and only not in PARTS:
        raise UsageError(f"--only '{only}' is unknown.", known=PARTS)
    if mlflow_uri is not None and not to_mlflow:
        raise UsageError("--mlflow-uri goes with --to-mlflow.")
    if to_mlflow and only == "logs":
        raise UsageError("--to-mlflow needs the metrics.", remedy="Leave --only logs out.")
    check_run_id(run)
    folder = Path(to).expanduser()
    cluster = connect(kubeconfig, context)
    record = _find(cluster, run, namespace or cluster.namespace, claim, image)
    with _display(json_) as progress:
        value = fetch_run(cluster, record, folder, cast(Only, only or "all"), progress)
    if to_mlflow:
        value["mlflow"] = _replay(RunDirectory(folder / run), mlflow_uri)
    show(json_, value, _text(value))


def _find(cluster: "Cluster", run: str, namespace: str, claim: str | None, image: str | None) -> "Record":
    """What the cluster remembers of the run; of one it has forgotten, what its volume is enough for."""
    from llmtrain.kubernetes.labels import IMAGE_ANNOTATION, belongs_to_run
    from llmtrain.launch.record import find_record

    if claim is None:
        try:
            record = find_record(cluster, run, namespace)
        except UsageError as problem:
            claim = f"{run}-runs"
            found = cluster.get("v1", "PersistentVolumeClaim", claim, namespace)
            if found is None or not belongs_to_run(found, run):
                problem.remedy = f"{problem.remedy or ''} Files of a run it forgot are found by --claim.".strip()
                raise
            image = image or (found["metadata"].get("annotations") or {}).get(IMAGE_ANNOTATION)
        else:
            return replace(record, config=record.config.with_values("launch", image=image)) if image else record
    return _made_up(run, namespace, claim, image)


def _made_up(run: str, namespace: str, claim: str, image: str | None) -> "Record":
    from llmtrain.config.document import Document
    from llmtrain.config.load import build_config
    from llmtrain.launch.record import Record
    from llmtrain.launch.work import Work

    launch: dict[str, Any] = {"name": run, "namespace": namespace, "runs_volume": {"claim": claim}}
    launch |= {"image": image} if image else {}
    config = build_config(Document("--claim", {"launch": launch}))
    return Record(run, namespace, config, Work(), number=1, launched_at="", stopped_at=None)


def _replay(run: Any, uri: str | None) -> Any:
    from llmtrain.tracking.replay import replay_run

    return replay_run(run, uri)


@contextmanager
def _display(is_silent: bool) -> Iterator[Callable[["Tally"], None]]:
    """A bar in a terminal, a line now and then elsewhere; with --json nothing."""
    if is_silent:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress("fetching", *columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("fetch", total=None)
            yield lambda tally: bar.update(task, completed=tally.received, total=max(tally.expected, tally.received))
    else:
        yield _Lines()


class _Lines:
    def __init__(self) -> None:
        self._next = time.monotonic() + LINE_EVERY_SEC

    def __call__(self, tally: "Tally") -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LINE_EVERY_SEC
        say(f"fetched {tally.received / 1e6:.1f} of {max(tally.expected, tally.received) / 1e6:.1f} MB", sys.stderr)


def _text(value: dict[str, Any]) -> str:
    speed = value["bytes"] / 1e6 / max(value["seconds"], 0.01)
    checkpoints = ", ".join(value["checkpoints"]) or "none"
    lines = [
        f"{value['run_id']} is in {value['path']}: {value['files']} files fetched ({value['bytes'] / 1e6:.1f} MB in "
        f"{value['seconds']:.1f} s, {speed:.1f} MB/s), {value['skipped']} were there already.",
    ]
    if value["only"] in ("all", "best"):
        lines.append(f"Checkpoints: {checkpoints}. The run is {'' if value['is_finished'] else 'not '}finished.")
    if "mlflow" in value:
        there = value["mlflow"]
        lines.append(f"In MLflow at {there['tracking_uri']}: run {there['mlflow_run_id']} of {there['experiment']}.")
    return "\n".join(lines)

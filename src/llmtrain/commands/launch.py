"""llmtrain launch: the config as a job of a Kubernetes cluster."""

import json
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import ConfigOption, JsonOption, SetOption, show
from llmtrain.errors import UsageError


def command(
    config: ConfigOption = None,
    set_: SetOption = None,
    kind: Annotated[str | None, typer.Option(help="Short for launch.kind.", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(help="Short for launch.name: job and run id.", show_default=False)] = None,
    namespace: Annotated[str | None, typer.Option(help="Short for launch.namespace.", show_default=False)] = None,
    nodes: Annotated[str | None, typer.Option(help="Short for launch.nodes: N or MIN:MAX.", show_default=False)] = None,
    processes_per_node: Annotated[
        int | None, typer.Option(min=1, help="Short for launch.processes_per_node.", show_default=False)
    ] = None,
    image: Annotated[str | None, typer.Option(help="Short for launch.image.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifests; no cluster is asked.")] = False,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="With --dry-run: write files to this directory.", show_default=False),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Run a config on a Kubernetes cluster: `launch --dry-run | kubectl apply -f -`."""
    from llmtrain.config.load import load_config
    from llmtrain.launch.manifests import as_files, dump_manifests, render
    from llmtrain.launch.plan import plan_job

    if not dry_run:
        raise UsageError("Launching is not built yet: give --dry-run, and apply the output with kubectl.")
    given = {"kind": kind, "name": name, "namespace": namespace, "image": image}
    short = [f"launch.{field}={json.dumps(value)}" for field, value in given.items() if value is not None]
    short += [f"output.run_id={json.dumps(name)}"] if name is not None else []  # a job is named as its run
    short += [f"launch.nodes={nodes}"] if nodes is not None else []
    short += [f"launch.processes_per_node={processes_per_node}"] if processes_per_node is not None else []
    plan = plan_job(load_config(config, [*(set_ or []), *short]))
    manifests = render(plan)
    if output is None:
        show(json_, {"manifests": manifests}, dump_manifests(manifests).rstrip("\n"))
        return
    files = as_files(plan, manifests)
    folder = Path(output).expanduser()
    _write(folder, files)
    lines = [*(str(folder / file) for file in files), f"Apply them: kubectl apply -k {folder}"]
    show(json_, {"manifests": manifests, "files": [str(folder / file) for file in files]}, "\n".join(lines))


def _write(folder: Path, files: dict[str, str]) -> None:
    """Into a new or empty directory: files of an earlier dry run would be mixed with these."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty.", remedy="Name a new directory with -o.")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"{folder} cannot be written: {problem.strerror or problem}.") from None

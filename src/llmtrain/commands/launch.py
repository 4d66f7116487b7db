"""llmtrain launch: the config as a job of a Kubernetes cluster."""

import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, RecoverOption, connect
from llmtrain.commands.options import (
    ConfigOption,
    JsonOption,
    LocalOnlyOption,
    ModelDirOption,
    SetOption,
    TokenizerDirOption,
    shorthands,
    show,
)
from llmtrain.errors import UsageError
from llmtrain.terminal import say

if TYPE_CHECKING:
    from llmtrain.launch.plan import JobPlan
    from llmtrain.launch.work import Work

KindOption = Annotated[str | None, typer.Option(help="Short for launch.kind.", show_default=False)]
NodesOption = Annotated[str | None, typer.Option(help="Short for launch.nodes: N or MIN:MAX.", show_default=False)]
ProcessesOption = Annotated[
    int | None, typer.Option(min=1, help="Short for launch.processes_per_node.", show_default=False)
]
ImageOption = Annotated[str | None, typer.Option(help="Short for launch.image.", show_default=False)]
DetachOption = Annotated[bool, typer.Option("--detach", "-d", help="Do not watch the run, only start it.")]


def command(
    own_command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND ...]", help="Run this instead of training: any torch script of the image."),
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    kind: KindOption = None,
    name: Annotated[str | None, typer.Option(help="Short for output.run_id: job and run.", show_default=False)] = None,
    namespace: NamespaceOption = None,
    nodes: NodesOption = None,
    processes_per_node: ProcessesOption = None,
    image: ImageOption = None,
    model_local_dir: ModelDirOption = None,
    tokenizer_local_dir: TokenizerDirOption = None,
    local_files_only: LocalOnlyOption = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the manifests; no cluster is asked. --dry-run=server: it checks them."),
    ] = False,
    server: Annotated[bool, typer.Option("--dry-run-server", hidden=True)] = False,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="With --dry-run: write files to this directory.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run if it is there already.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Train a tiny classifier instead, on the same pods.")] = False,
    doctor: Annotated[bool, typer.Option("--doctor", help="Look for problems instead, on the same pods.")] = False,
    hold: Annotated[
        bool, typer.Option("--hold", help="Start the pods with nothing running, for `push` and `exec`.")
    ] = False,
    launcher: Annotated[
        str, typer.Option(help="What starts COMMAND: llmtrain, or torchrun for images without llmtrain.")
    ] = "llmtrain",
    detach: DetachOption = False,
    recover: RecoverOption = None,
    json_: JsonOption = False,
) -> None:
    """Run a config on a Kubernetes cluster, and watch it. Ctrl-C leaves it running."""
    from llmtrain.config.load import load_config
    from llmtrain.launch.plan import plan_job

    work = _work(own_command, smoke, doctor, hold, launcher)
    if output is not None and not dry_run:
        raise UsageError("-o is where --dry-run writes the manifests.", remedy="Add --dry-run, or leave -o out.")
    if own_command and (model_local_dir or tokenizer_local_dir or local_files_only):
        raise UsageError(
            "--model-local-dir, --tokenizer-local-dir and --local-files-only are for llmtrain's own trainer.",
            remedy="Give a command of yours its own options, behind it: -- python train.py ...",
        )
    overrides = shorthands(set_, model_local_dir, tokenizer_local_dir, local_files_only)
    overrides += short_options(kind, nodes, processes_per_node, image, namespace)
    if name is not None:  # a job is named as its run
        overrides += [f"output.run_id={json.dumps(name)}"]
    loaded = load_config(config, overrides, for_launch=True)
    if dry_run:
        _print_manifests(plan_job(loaded, work), output, json_)
        return

    from llmtrain.commands.stop import PodCount, warn_of_stuck_pods
    from llmtrain.commands.watch import check_ended, check_watching, follow_run
    from llmtrain.kubernetes.api_errors import AlreadyThere
    from llmtrain.launch import lifecycle as apply
    from llmtrain.launch.record import find_record

    check_watching(detach, recover)
    cluster = connect(kubeconfig, context)
    loaded = loaded.with_values("launch", namespace=loaded.launch.namespace or cluster.namespace)
    plan = plan_job(loaded, work, nonce=secrets.token_hex(3))
    warn_of(plan)
    if server:
        skipped = apply.check_on_server(cluster, plan)
        lines = [f"{cluster.name} accepts the manifests of run {plan.run_id}; nothing was made.", *skipped]
        show(json_, {"run_id": plan.run_id, "accepted": True, "skipped": skipped}, "\n".join(lines))
        return
    try:
        apply.submit(cluster, plan, keep_data=resume)
    except AlreadyThere:
        if not resume or cluster.get("v1", "ConfigMap", plan.config_map, plan.namespace) is None:
            raise
        record = find_record(cluster, plan.run_id, plan.namespace)
        check_ended(cluster, record)
        warn_of_stuck_pods(apply.resume(cluster, record, plan, PodCount()))
    follow_run(cluster, plan.run_id, plan.namespace, detach=detach, recover_after=recover, json_=json_)


def short_options(
    kind: str | None, nodes: str | None, processes_per_node: int | None, image: str | None, namespace: str | None
) -> list[str]:
    """The overrides that the short options stand for."""
    texts = {"kind": kind, "namespace": namespace, "image": image}
    short = [f"launch.{field}={json.dumps(value)}" for field, value in texts.items() if value is not None]
    short += [f"launch.nodes={nodes}"] if nodes is not None else []
    return short + ([f"launch.processes_per_node={processes_per_node}"] if processes_per_node is not None else [])


def warn_of(plan: "JobPlan") -> None:
    for warning in plan.warnings:
        say(f"warning: {warning}", sys.stderr)


def _work(own_command: list[str] | None, smoke: bool, doctor: bool, hold: bool, launcher: str) -> "Work":
    from llmtrain.launch.work import Work

    if sum((bool(own_command), doctor, smoke, hold)) > 1:
        raise UsageError("Give one of: a command, --doctor, --smoke, --hold.")
    if launcher not in ("llmtrain", "torchrun"):
        raise UsageError(f"--launcher '{launcher}' is unknown.", known=["llmtrain", "torchrun"])
    if launcher == "torchrun" and not own_command:
        raise UsageError("--launcher torchrun is for a command of your own.", remedy="Add it: -- python train.py")
    if own_command:
        from llmtrain.distributed.nested_launcher import check_own_command

        option = " --launcher torchrun" if launcher == "torchrun" else ""
        check_own_command(own_command, f"llmtrain launch{option}")
        return Work("command", tuple(own_command), "torchrun" if launcher == "torchrun" else "llmtrain")
    return Work("smoke" if smoke else "doctor" if doctor else "hold" if hold else "train")


def _print_manifests(plan: "JobPlan", output: str | None, json_: bool) -> None:
    from llmtrain.launch.manifests import as_files, dump_manifests, render

    warn_of(plan)
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

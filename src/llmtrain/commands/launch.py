"""llmtrain launch: run a config on a Kubernetes cluster."""

import json
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import (
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    RecoverOption,
    connect,
    suggestion,
)
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
    from llmtrain.code_bundle import CodeBundle
    from llmtrain.config.schema import Config
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.launch.plan import JobPlan
    from llmtrain.launch.work import Work

FORMATS = ("yaml", "json")
KindOption = Annotated[str | None, typer.Option(help="Short for launch.kind.", show_default=False)]
NodesOption = Annotated[str | None, typer.Option(help="Short for launch.nodes: N or MIN:MAX.", show_default=False)]
ProcessesOption = Annotated[
    int | None, typer.Option(min=1, help="Short for launch.processes_per_node.", show_default=False)
]
ImageOption = Annotated[str | None, typer.Option(help="Short for launch.image.", show_default=False)]
DetachOption = Annotated[bool, typer.Option("--detach", "-d", help="Start the run without watching it.")]


WithCodeOption = Annotated[
    str | None,
    typer.Option(help="Directory or package of your own code, mounted in every pod on PYTHONPATH.", show_default=False),
]
CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- COMMAND", help="Run this command of the image instead of training."),
]


def _check_name(name: str | None) -> str | None:
    from llmtrain.config.section import RUN_ID_PATTERN

    if name is None or re.fullmatch(RUN_ID_PATTERN, name):
        return name
    raise UsageError(
        f"--name '{name}' is not allowed: use 2 to 40 lowercase letters, digits and hyphens; begin with a letter.",
        remedy=suggestion(name, RUN_ID_PATTERN),
    )


NameOption = Annotated[
    str | None,
    typer.Option(
        help="Short for output.run_id: name of the run and of its job.", show_default=False, callback=_check_name
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the manifests without contacting a cluster. --dry-run=server: let the API server check them.",
    ),
]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="yaml|json|DIR/",
        help="With --dry-run: print YAML (the default) or a JSON List, or write files to a directory (with a slash).",
        show_default=False,
    ),
]
SmokeOption = Annotated[bool, typer.Option("--smoke", help="Train a tiny classifier on the same pods, as a test.")]
HoldOption = Annotated[bool, typer.Option("--hold", help="Start idle pods, for `push` and `exec`.")]
LauncherOption = Annotated[
    str, typer.Option(help="Launcher of COMMAND: llmtrain, or torchrun for images without llmtrain.")
]


def command(
    own_command: CommandArgument = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    kind: KindOption = None,
    name: NameOption = None,
    namespace: NamespaceOption = None,
    nodes: NodesOption = None,
    processes_per_node: ProcessesOption = None,
    image: ImageOption = None,
    with_code: WithCodeOption = None,
    model_local_dir: ModelDirOption = None,
    tokenizer_local_dir: TokenizerDirOption = None,
    local_files_only: LocalOnlyOption = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    dry_run: DryRunOption = False,
    server: Annotated[bool, typer.Option("--dry-run-server", hidden=True)] = False,
    output: OutputOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run if it exists.")] = False,
    smoke: SmokeOption = False,
    doctor: Annotated[bool, typer.Option("--doctor", help="Run `llmtrain doctor` on the same pods.")] = False,
    hold: HoldOption = False,
    launcher: LauncherOption = "llmtrain",
    detach: DetachOption = False,
    recover: RecoverOption = None,
    json_: JsonOption = False,
) -> None:
    """Run a config on a Kubernetes cluster and watch it. Ctrl-C stops watching, not the run."""
    from llmtrain.commands.watch import check_watching, follow_run
    from llmtrain.config.load import load_config
    from llmtrain.kubernetes.kubeconfig import default_context
    from llmtrain.launch.plan import plan_job

    work = _work(own_command, smoke, doctor, hold, launcher)
    _check_output(output, dry_run)
    _check_shorthands(bool(own_command), bool(model_local_dir or tokenizer_local_dir or local_files_only))
    overrides = shorthands(set_, model_local_dir, tokenizer_local_dir, local_files_only)
    overrides += short_options(kind, nodes, processes_per_node, image, namespace, name)
    loaded = load_config(config, overrides, for_launch=True)
    code = read_own_code(loaded, config, with_code)
    if dry_run:
        local_context, local_namespace = default_context(kubeconfig, context)
        loaded = loaded.with_values("launch", namespace=loaded.launch.namespace or local_namespace)
        plan = plan_job(loaded, work, code=code)
        warn_of(plan, local_context)
        _print_manifests(plan, output, json_)
        return
    check_watching(detach, recover)
    cluster = connect(kubeconfig, context)
    loaded = loaded.with_values("launch", namespace=loaded.launch.namespace or cluster.namespace)
    plan = plan_job(loaded, work, nonce=secrets.token_hex(3), code=code)
    warn_of(plan, cluster.name)
    if server:
        _check_on_server(cluster, plan, json_)
        return
    _start(cluster, plan, resume)
    follow_run(cluster, plan.run_id, plan.namespace, detach=detach, recover_after=recover, json_=json_)


def _check_shorthands(has_command: bool, are_given: bool) -> None:
    if has_command and are_given:
        raise UsageError(
            "--model-local-dir, --tokenizer-local-dir and --local-files-only only apply to llmtrain's trainer.",
            remedy="Pass options of your command after it: -- python train.py ...",
        )


def read_own_code(loaded: "Config", config: str | None, with_code: str | None) -> "CodeBundle | None":
    from llmtrain.launch.own_code import own_code

    code, warnings = own_code(loaded, config or "the config", with_code)
    for warning in warnings:
        say(f"warning: {warning}", sys.stderr)
    return code


def _check_on_server(cluster: "Cluster", plan: "JobPlan", json_: bool) -> None:
    from llmtrain.launch import lifecycle

    skipped = lifecycle.check_on_server(cluster, plan)
    lines = [f"{cluster.name} accepts the manifests of run {plan.run_id} (server dry run).", *skipped]
    show(json_, {"run_id": plan.run_id, "accepted": True, "skipped": skipped}, "\n".join(lines))


def _start(cluster: "Cluster", plan: "JobPlan", resume: bool) -> None:
    from llmtrain.commands.stop import PodCount, warn_of_stuck_pods
    from llmtrain.operate.start import start_run

    warn_of_stuck_pods(start_run(cluster, plan, resume, PodCount()))


def short_options(
    kind: str | None,
    nodes: str | None,
    processes_per_node: int | None,
    image: str | None,
    namespace: str | None = None,
    name: str | None = None,
) -> list[str]:
    """The overrides (--set) that the short options stand for."""
    texts = {"kind": kind, "namespace": namespace, "image": image}
    short = [f"launch.{field}={json.dumps(value)}" for field, value in texts.items() if value is not None]
    short += [f"launch.nodes={nodes}"] if nodes is not None else []
    if name is not None:  # the job has the name of its run
        short += [f"output.run_id={json.dumps(name)}"]
    return short + ([f"launch.processes_per_node={processes_per_node}"] if processes_per_node is not None else [])


def warn_of(plan: "JobPlan", context: str | None) -> None:
    """Print the warnings about a plan. `context`: the kubeconfig context, if known."""
    from llmtrain.launch.plan_warnings import image_warning

    image = image_warning(plan.launch, context)
    for warning in [*plan.warnings, *([image] if image else [])]:
        say(f"warning: {warning}", sys.stderr)


def _check_output(output: str | None, dry_run: bool) -> None:
    if output is None:
        return
    if not dry_run:
        raise UsageError("-o needs --dry-run.", remedy="Add --dry-run, or remove -o.")
    if output not in FORMATS and "/" not in output:
        raise UsageError(f"-o must be yaml, json or DIR/, got '{output}'.", remedy=f"For a directory: -o {output}/")


def _work(own_command: list[str] | None, smoke: bool, doctor: bool, hold: bool, launcher: str) -> "Work":
    from llmtrain.launch.work import Work

    if sum((bool(own_command), doctor, smoke, hold)) > 1:
        raise UsageError("A command, --doctor, --smoke and --hold exclude each other.", remedy="Pass one of them.")
    if launcher not in ("llmtrain", "torchrun"):
        raise UsageError(f"--launcher must be llmtrain or torchrun, got '{launcher}'.", known=["llmtrain", "torchrun"])
    if launcher == "torchrun" and not own_command:
        raise UsageError("--launcher torchrun needs a command.", remedy="Add it: -- python train.py")
    if own_command:
        from llmtrain.distributed.nested_launcher import check_own_command

        option = " --launcher torchrun" if launcher == "torchrun" else ""
        check_own_command(own_command, f"llmtrain launch{option}")
        return Work("command", tuple(own_command), "torchrun" if launcher == "torchrun" else "llmtrain")
    return Work("smoke" if smoke else "doctor" if doctor else "hold" if hold else "train")


def _print_manifests(plan: "JobPlan", output: str | None, json_: bool) -> None:
    """To standard output, or as files."""
    from llmtrain.launch.manifests import as_files, dump_manifests, render

    manifests = render(plan)
    if output in (None, *FORMATS):
        text = dump_manifests(manifests).rstrip("\n")
        if output == "json":
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}, indent=2)
        show(json_, {"manifests": manifests}, text)
        return
    files = as_files(plan, manifests)
    directory = Path(str(output)).expanduser()
    _write(directory, files)
    paths = [str(directory / file) for file in files]
    lines = [*paths, f"Apply them: kubectl apply -k {directory}"]
    show(json_, {"manifests": manifests, "files": paths}, "\n".join(lines))


def _write(directory: Path, files: dict[str, str]) -> None:
    """Only into a new or empty directory: manifests of an earlier dry run would be applied too."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"-o {directory}: the directory is not empty.", remedy="Use a new directory.")
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"-o {directory} is not writable: {problem.strerror or problem}.") from None

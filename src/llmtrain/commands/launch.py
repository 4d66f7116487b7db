"""llmtrain launch: run a config on a Kubernetes cluster."""

import json
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import RecoverOption, connect, suggestion
from llmtrain.commands.options import (
    CURRENT,
    ConfigOption,
    JsonOption,
    LocalOnlyOption,
    ModelDirOption,
    SetOption,
    TokenizerDirOption,
    given_options,
    print_warning,
    shorthands,
    show,
    with_option_groups,
)
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.terminal import say
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.config.schema import Config
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.launch.code_bundle import CodeBundle
    from llmtrain.launch.image_build import ImageBuild
    from llmtrain.launch.job import JobPlan
    from llmtrain.launch.pod_task import PodTask
    from llmtrain.operate.cluster_run import ClusterRun

FORMATS = ("yaml", "json")
KindOption = Annotated[str | None, typer.Option(help="Short for launch.kind.", show_default=False)]
NodesOption = Annotated[str | None, typer.Option(help="Short for launch.nodes: N or MIN:MAX.", show_default=False)]
ProcessesOption = Annotated[
    int | None, typer.Option(min=1, help="Short for launch.processes_per_node.", show_default=False)
]
ImageOption = Annotated[str | None, typer.Option(help="Short for launch.image.", show_default=False)]
BuildOption = Annotated[
    bool,
    typer.Option(
        "--build",
        help="Build the image from the clone with docker, podman or buildah; push it if --image names a registry.",
    ),
]
BuildArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--build-arg",
        metavar="NAME=VALUE",
        help="With --build: an argument of docker/Dockerfile. Repeatable.",
        show_default=False,
    ),
]
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


@with_option_groups
def command(
    ctx: typer.Context,
    own_command: CommandArgument = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    kind: KindOption = None,
    name: NameOption = None,
    nodes: NodesOption = None,
    processes_per_node: ProcessesOption = None,
    image: ImageOption = None,
    build: BuildOption = False,
    build_arg: BuildArgOption = None,
    with_code: WithCodeOption = None,
    model_local_dir: ModelDirOption = None,
    tokenizer_local_dir: TokenizerDirOption = None,
    local_files_only: LocalOnlyOption = False,
    place: ClusterPlace = CURRENT,
    dry_run: DryRunOption = False,
    server: Annotated[bool, typer.Option("--dry-run-server", hidden=True)] = False,
    output: OutputOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run if it exists.")] = False,
    smoke: SmokeOption = False,
    doctor: Annotated[bool, typer.Option("--doctor", help="Run `llmtrain doctor` on the same pods.")] = False,
    hold: HoldOption = False,
    launcher: LauncherOption = "llmtrain",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a run that does not fit in the memory of its GPUs or pods.")
    ] = False,
    detach: DetachOption = False,
    recover: RecoverOption = None,
    json_: JsonOption = False,
) -> None:
    """Run a config on a Kubernetes cluster and watch it. Ctrl-C stops watching, not the run."""
    from llmtrain.commands.watch import check_watching, follow_run
    from llmtrain.config.load import load_config
    from llmtrain.kubernetes.kubeconfig import default_context
    from llmtrain.launch.plan_job import plan_job

    task = _task(own_command, smoke, doctor, hold, launcher)
    _check_output(output, dry_run)
    _check_shorthands(bool(own_command), bool(model_local_dir or tokenizer_local_dir or local_files_only))
    overrides = shorthands(set_, model_local_dir, tokenizer_local_dir, local_files_only)
    overrides += short_options(kind, nodes, processes_per_node, image, place.namespace, name)
    loaded = load_config(config, overrides, for_launch=True)
    image_build = _plan_build(loaded.launch.image, build, build_arg)
    if image_build:
        loaded = loaded.with_values("launch", image=image_build.image)
    code = read_plugin_code(loaded, config, with_code)
    _check_command(own_command or [], given_options(ctx), code)
    if dry_run:
        local_context, local_namespace = default_context(place.kubeconfig, place.context)
        loaded = loaded.with_values("launch", namespace=loaded.launch.namespace or local_namespace)
        plan = plan_job(loaded, task, code=code)
        warn_of(plan, local_context)
        _check_memory(plan, config, strict)
        _print_manifests(plan, output, json_)
        return
    check_watching(detach, recover)
    cluster = connect(place.kubeconfig, place.context)
    loaded = loaded.with_values("launch", namespace=loaded.launch.namespace or cluster.namespace)
    plan = plan_job(loaded, task, nonce=secrets.token_hex(3), code=code)
    warn_of(plan, cluster.name)
    _check_memory(plan, config, strict)
    if server:
        _check_on_server(cluster, plan, json_)
        return
    if image_build:
        _build(image_build, cluster.name)
    run = _start(cluster, plan, resume)
    follow_run(run, detach=detach, recover_after=recover, json_=json_)


def _plan_build(image: str | None, build: bool, build_args: list[str] | None) -> "ImageBuild | None":
    from llmtrain.launch.image_build import plan_build

    if build:
        return plan_build(image, build_args or [])
    if build_args:
        raise UsageError("--build-arg needs --build.", remedy="Add --build, or remove --build-arg.")
    return None


def _build(build: "ImageBuild", context: str) -> None:
    """Build the image, and load it into the cluster if `llmtrain cluster up` created that."""
    from llmtrain.launch.image_build import build_image
    from llmtrain.local_cluster.kind_cluster import load_image, own_cluster_of

    name = own_cluster_of(context)  # before the build, which takes minutes
    say(f"Building image {build.image} from {build.clone}.", file=sys.stderr)
    engine = build_image(build)
    if name:
        load_image(name, build.local_name, engine)


def _check_shorthands(has_command: bool, are_given: bool) -> None:
    if has_command and are_given:
        raise UsageError(
            "--model-local-dir, --tokenizer-local-dir and --local-files-only only apply to llmtrain's trainer.",
            remedy="Pass options of your command after it: -- python train.py ...",
        )


def read_plugin_code(loaded: "Config", config: str | None, with_code: str | None) -> "CodeBundle | None":
    from llmtrain.launch.plugin_code import plugin_code

    code, warnings = plugin_code(loaded, config or "the config", with_code)
    for warning in warnings:
        print_warning(warning)
    return code


def _check_command(own_command: list[str], options: list[str], code: "CodeBundle | None") -> None:
    from llmtrain.distributed.nested_launcher import check_command
    from llmtrain.launch.plugin_code import script_reader

    if not own_command:
        return
    given = ["--dry-run=server" if option == "--dry-run-server" else option for option in options]
    for warning in check_command(own_command, "launch", given, script_reader(code)):
        print_warning(warning)


def _check_on_server(cluster: "Cluster", plan: "JobPlan", json_: bool) -> None:
    from llmtrain.launch import lifecycle

    skipped = lifecycle.check_on_server(cluster, plan)
    lines = [f"{cluster.name} accepts the manifests of run {plan.run_id} (server dry run).", *skipped]
    show(json_, {"run_id": plan.run_id, "accepted": True, "skipped": skipped}, "\n".join(lines))


def _start(cluster: "Cluster", plan: "JobPlan", resume: bool) -> "ClusterRun":
    from llmtrain.commands.stop import PodCount, warn_of_stuck_pods
    from llmtrain.operate.cluster_run import ClusterRun
    from llmtrain.operate.start import start_run

    warn_of_stuck_pods(start_run(cluster, plan, resume, PodCount()))
    return ClusterRun.find(cluster, plan.run_id, plan.namespace)


def short_options(
    kind: str | None,
    nodes: str | None,
    processes_per_node: int | None,
    image: str | None,
    namespace: str | None = None,
    name: str | None = None,
) -> list[str]:
    """The overrides (--set) that the short options stand for."""
    # As JSON, so that YAML does not read `on` or `1.10` as something other than text.
    texts = {
        "launch.kind": kind,
        "launch.namespace": namespace,
        "launch.image": image,
        "output.run_id": name,  # the job has the name of its run
    }
    short = [f"{field}={json.dumps(text)}" for field, text in texts.items() if text is not None]
    if nodes is not None:
        short.append(f"launch.nodes={nodes}")
    if processes_per_node is not None:
        short.append(f"launch.processes_per_node={processes_per_node}")
    return short


def warn_of(plan: "JobPlan", context: str | None) -> None:
    """Print the warnings about a plan. `context`: the kubeconfig context, if known."""
    from llmtrain.operate.start import plan_warnings

    for warning in plan_warnings(plan, context):
        print_warning(warning)


def _check_memory(plan: "JobPlan", config: str | None, strict: bool) -> None:
    """Warn of a run that does not fit, or refuse it."""
    from llmtrain.launch.pod_memory import check_memory
    from llmtrain.plan.plan import Verdict

    check = check_memory(plan, config or "CONFIG")
    if check is None or not check.text:
        return
    if check.verdict is not Verdict.DOES_NOT_FIT:
        if strict:
            print_warning(check.text)
    elif strict:
        raise UsageError(check.text, remedy=check.remedy)
    else:
        print_warning(f"{check.text} {check.remedy}")


def _check_output(output: str | None, dry_run: bool) -> None:
    if output is None:
        return
    if not dry_run:
        raise UsageError("-o needs --dry-run.", remedy="Add --dry-run, or remove -o.")
    if output not in FORMATS and "/" not in output:
        raise UsageError(f"-o must be yaml, json or DIR/, got '{output}'.", remedy=f"For a directory: -o {output}/")


def _task(own_command: list[str] | None, smoke: bool, doctor: bool, hold: bool, launcher: str) -> "PodTask":
    from llmtrain.launch.pod_task import PodTask

    if sum((bool(own_command), doctor, smoke, hold)) > 1:
        raise UsageError("A command, --doctor, --smoke and --hold exclude each other.", remedy="Pass one of them.")
    if launcher not in ("llmtrain", "torchrun"):
        raise UsageError(f"--launcher must be llmtrain or torchrun, got '{launcher}'.", known=["llmtrain", "torchrun"])
    if launcher == "torchrun" and not own_command:
        raise UsageError("--launcher torchrun needs a command.", remedy="Add it: -- python train.py")
    if own_command:
        return PodTask("command", tuple(own_command), "torchrun" if launcher == "torchrun" else "llmtrain")
    if smoke:
        return PodTask("smoke")
    if doctor:
        return PodTask("doctor")
    return PodTask("hold" if hold else "train")


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

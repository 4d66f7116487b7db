"""Situations whose output the docs show: each block ```console scene=NAME has the output of its commands.

PYTHONPATH=tests:tests/operate python tests/operate/console_blocks.py      rewrites the blocks
"""

import io
import re
import shlex
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from held_pods import held_pods
from kube_runs import STEP, FakeRun, launch, running, waiting
from why_runs import CRASH, NO_GPU, QUOTA, end, fail, say, unschedulable_pod

from kube_server import KubeServer, kube_server, now
from llmtrain.cli import main
from llmtrain.distributed.rendezvous import REMEDIES
from llmtrain.doctor.network import chosen_interfaces
from llmtrain.doctor.report import findings_table
from llmtrain.errors import Interrupted, JoinError, LlmtrainError, PeerLost, TrainingFailed, UsageError
from llmtrain.guard.manifests import LABELS, GuardPlan, render_guard
from llmtrain.operate.why import explain as why_module
from llmtrain.operate.why.snapshot import Stall
from llmtrain.runs.exit_report import ExitReport

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```(console|text) scene=([a-z-]+)\n(.*?)```", re.S)
PAGES = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")) if BLOCK.search(path.read_text())]
IMAGE = "registry.example.com/llmtrain:0.2.0"
# Fake names -> names shown in the docs.
NAMES = {
    "-00001": "-6b6tg",
    "-00002": "-ckxc6",
    "k8s-node0": "gpu-node1",  # of the same length, because of tables
    "k8s-node1": "gpu-node2",
    "amespace team": "amespace research",
}
# Values that change with each run.
TIMES = {
    r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ": "2026-11-15T14:25:31Z",
    r"\bfor 9\d s\b": "for 92 s",
    r"\b1m3\ds\b": "1m32s",
    r"\b5m\ds\b": "5m2s",
    r"\bprocess \d+\b": "process 41",
}
HELLO = """import os

print("node", os.environ["PET_NODE_RANK"], "of", os.environ["PET_NNODES"], "meets at", os.environ["PET_MASTER_ADDR"])
"""
GROUPS = ("guard", "secret")
LOST_PEER = PeerLost("Lost the connection to another process: Connection closed by peer [10.0.0.7]:40122")
PULL = (
    f'Back-off pulling image "{IMAGE}": ErrImagePull: rpc error: code = NotFound desc = failed to pull and unpack '
    f'image "{IMAGE}": {IMAGE}: not found'
)
SECURITY = (
    'Error creating: pods "demo-worker-1" is forbidden: violates PodSecurity "restricted:latest": '
    'allowPrivilegeEscalation != false (container "init-pytorch" must set securityContext.allowPrivilegeEscalation='
    "false)"
)


def of_demo(kube: KubeServer, *sets: str, kind: str = "indexed_job") -> FakeRun:
    kube.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs", "namespace": "team"}})
    kube.change("PersistentVolumeClaim", "runs", {"status": {"phase": "Bound"}})
    return launch(kube, kind, f"launch.image={IMAGE}", "launch.runs_volume.claim=runs", *sets)


def two_running(kube: KubeServer, *sets: str, kind: str = "indexed_job") -> FakeRun:
    run = of_demo(kube, *sets, kind=kind)
    run.pod(0)
    run.pod(1)
    return run


def exit_with(run: FakeRun, index: int, error: LlmtrainError) -> None:
    end(run, index, error.exit_code, report=ExitReport.of(error))


def fails(error: LlmtrainError) -> Callable[[KubeServer], None]:
    """Both pods exit with this error, and the job fails."""

    def make(kube: KubeServer) -> None:
        run = two_running(kube)
        for index in (0, 1):
            exit_with(run, index, error)
        fail(run)

    return make


def master_unreachable(kind: str, text: str) -> JoinError:
    what = f"The master demo-0.demo:29500 could not be reached within 600.0 s: {text}."
    return JoinError(what, remedy=REMEDIES[kind], reason="master_unreachable")


def no_name(kube: KubeServer) -> None:
    run = of_demo(kube)
    run.pod(0, waiting("ContainerCreating"))
    text = "the name demo-0.demo does not resolve: Name or service not known"
    exit_with(run, 1, master_unreachable("name", text))


def no_service(kube: KubeServer) -> None:
    no_name(kube)
    kube.remove("Service", "demo")


def refused(kube: KubeServer) -> None:
    run = two_running(kube)
    exit_with(run, 1, master_unreachable("refused", "connection refused by 10.0.0.7"))


def did_not_join(kube: KubeServer) -> None:
    what = "Rank 0 could not join the 2 processes at demo-0.demo:29500 after 1800 s (of 1800 s): 1 of 2 processes did "
    remedy = (
        "Check that every process was started with the same MASTER_ADDR and MASTER_PORT. `llmtrain doctor` checks the "
        "network."
    )
    error = JoinError(f"{what}not join: rank 1", remedy=remedy, reason="processes_missing")
    exit_with(two_running(kube), 0, error)


def image(kube: KubeServer) -> None:
    run = of_demo(kube)
    for index in (0, 1):
        run.pod(index, waiting("ImagePullBackOff", PULL))


def gpus(kube: KubeServer) -> None:
    run = of_demo(kube, "launch.resources.gpus=1")
    run.pod(0)
    unschedulable_pod(run, 1, NO_GPU)


def quota(kube: KubeServer) -> None:
    of_demo(kube).event("FailedCreate", QUOTA)


def claim(kube: KubeServer) -> None:
    run = of_demo(kube, "launch.data_volume.claim=corpus")
    for index in (0, 1):
        unschedulable_pod(run, index, '0/3 nodes are available: persistentvolumeclaim "corpus" not found.')


def security(kube: KubeServer) -> None:
    run = of_demo(kube, "launch.pytorch_master=true", kind="pytorch_job")
    run.pod(0, role="master")
    run.event("FailedCreatePod", SECURITY)


def secret(kube: KubeServer) -> None:
    run = of_demo(kube, "launch.hf_token_secret.name=hf-token")
    for index in (0, 1):
        run.pod(index, waiting("CreateContainerConfigError", 'secret "hf-token" not found'))


def memory(kube: KubeServer) -> None:
    run = two_running(kube)
    end(run, 1, 137, reason="OOMKilled")
    exit_with(run, 0, LOST_PEER)


def hung(kube: KubeServer) -> None:
    run = two_running(kube)
    error = PeerLost(
        "No progress for 300 s at step 7: rank 1 stopped sending heartbeats (pid 1 on demo-1, last seen at step 7).",
        reason="no_progress",
    )
    error.details = {"silent_ranks": [1]}
    kube.change("Pod", run.pods[1], {"status": {"containerStatuses": [_since(run, "2026-01-01T00:00:05Z")]}})
    exit_with(run, 0, error)


def _since(run: FakeRun, started_at: str) -> dict[str, object]:
    return {"name": run.plan.container, "state": {"running": {"startedAt": started_at}}, "restartCount": 0}


def silent(kube: KubeServer) -> None:
    say(two_running(kube), 0, STEP.format(7), ago_sec=300)


def lost(kube: KubeServer) -> None:
    run = two_running(kube)
    run.say(0, STEP.format(5))
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 90))
    ready = {"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": since}
    message = "Taint manager: deleting due to NoExecute taint"
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": message}
    run.set(1, running(), conditions=[ready, target], is_leaving=True)
    kube.change("ConfigMap", "demo-config", {"metadata": {"creationTimestamp": since}})


def deadline(kube: KubeServer) -> None:
    run = two_running(kube, "launch.active_deadline_sec=3600")
    for index in (0, 1):
        exit_with(run, index, Interrupted("Interrupted at step 5; checkpoint saved."))
    run.finish("Failed", reason="DeadlineExceeded", message="Job was active longer than specified deadline")


def crash(kube: KubeServer) -> None:
    run = two_running(kube)
    end(run, 1, 1, *CRASH)
    exit_with(run, 0, LOST_PEER)


def healthy(kube: KubeServer) -> None:
    run = two_running(kube)
    say(run, 0, STEP.format(5))
    say(run, 1)


def guarded(kube: KubeServer) -> None:
    plan = GuardPlan("team", IMAGE, "IfNotPresent", 60.0, now(), webhook="https://chat.example.com/hook")
    for manifest in render_guard(plan):
        kube.add(manifest)
    ready = {"observedGeneration": 1, "updatedReplicas": 1, "availableReplicas": 1}
    kube.change("Deployment", "llmtrain-guard", {"status": ready})
    meta = {"name": "llmtrain-guard-7d9f", "namespace": "team", "labels": LABELS}
    kube.add({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": {"phase": "Running"}})
    lines = [
        "watching namespace team: pods are replaced once their node has been NotReady for 60 s",
        "run first has finished",
    ]
    kube.say(meta["name"], *(f"[GUARD] {line}" for line in lines), container="guard")


def nothing(kube: KubeServer) -> None:
    pass


SCENES: dict[str, Callable[[KubeServer], None]] = {
    "no-name": no_name,
    "no-service": no_service,
    "refused": refused,
    "never-came": did_not_join,
    "image": image,
    "gpus": gpus,
    "quota": quota,
    "claim": claim,
    "security": security,
    "secret": secret,
    "memory": memory,
    "hung": hung,
    "silent": silent,
    "lost": lost,
    "deadline": deadline,
    "crash": crash,
    "healthy": healthy,
    "guard": guarded,
    "held": nothing,  # uses real processes as pods
    "nan": fails(
        TrainingFailed(
            "The loss of step 8 is nan; the step read samples 56 to 63 of epoch 0.",
            remedy="Lower trainer.lr or raise trainer.warmup_steps, then resume from the last checkpoint with "
            "--allow-config-change, or check those samples.",
            reason="not_finite",
        )
    ),
    "gpu-memory": fails(
        TrainingFailed(
            "Out of GPU memory in step 1 (samples 0 to 31 of epoch 0): CUDA out of memory. Tried to allocate 2.00 GiB. "
            "GPU 0 has a total capacity of 79.11 GiB.",
            remedy="In a new run, halve trainer.micro_batch_size and double trainer.grad_accum_steps.",
            reason="gpu_memory",
        )
    ),
    "disk-full": fails(
        TrainingFailed(
            "The checkpoint of step 30 could not be written: [Errno 28] No space left on device. Earlier checkpoints "
            "are intact.",
            remedy="Free some space, then resume with --resume.",
            reason="disk_full",
        )
    ),
    "permission": fails(
        UsageError(
            "Cannot write to /out/demo: Permission denied.",
            remedy="Set output.root_dir to a directory you may write to.",
            reason="not_writable",
        )
    ),
}


def tidy(text: str) -> str:
    for real, shown in NAMES.items():
        text = text.replace(real, shown)
    for pattern, shown in TIMES.items():
        text = re.sub(pattern, shown, text)
    # Lines of several pods come in any order.
    lines = text.splitlines()
    return "\n".join(sorted(lines) if all(line.startswith("[") for line in lines) else lines)


@contextmanager
def scene(name: str) -> Iterator[Callable[[str], str]]:
    """Yields a function that returns the output of a command in this scene."""
    with kube_server() as kube, tempfile.TemporaryDirectory() as directory, chdir(directory):
        SCENES[name](kube)
        config = kube.kubeconfig(Path(directory))
        Path("hello.py").write_text(HELLO)
        with held_pods(kube, Path(directory)) if name == "held" else nullcontext() as pods:
            if pods:
                pods.hold()
            yield lambda command: shown(command, str(config))


def shown(command: str, config: str) -> str:
    program, *words = shlex.split(command)
    assert program == "llmtrain"
    verbs = 2 if words[0] in GROUPS else 1
    output = io.StringIO()
    stall = Stall(300, [1], [], {0: 7, 1: 7})
    with (
        patch.object(why_module, "watch_heartbeats", lambda *_: stall),
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        code = _exit_code([*words[:verbs], "--kubeconfig", config, *words[verbs:]])
    assert code == 0, output.getvalue()
    return tidy(output.getvalue().replace(f" --kubeconfig {config}", ""))


def _exit_code(words: list[str]) -> object:
    try:
        main(words)
    except SystemExit as ended:
        return ended.code
    return 0


def interfaces() -> str:
    """A row of the doctor's table, with fake network interfaces."""
    with patch.object(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ens5")]):
        found = list(chosen_interfaces({"GLOO_SOCKET_IFNAME": "eth0"}))
    return findings_table(found, 1, is_terminal=False)


TEXTS = {"interface": interfaces}


def fill(block: "re.Match[str]") -> str:
    """The block with its current output."""
    language, name, text = block.groups()
    if language == "text":
        lines = TEXTS[name]().splitlines()
    else:
        commands = [line for line in text.splitlines() if line.startswith("$ ")]
        with scene(name) as show:
            lines = [line for command in commands for line in (command, *show(command[2:]).splitlines())]
    return "\n".join([f"```{language} scene={name}", *lines, "```"])


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(BLOCK.sub(fill, path.read_text()))

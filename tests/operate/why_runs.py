"""Failed runs for the tests of `why`: log lines of pods, and their exits under each kind."""

import time
from typing import Any

from kube_runs import STEP, FakeRun, ended, running, waiting

from llmtrain.distributed.platform_codes import IDLE_MARK, pytorchjob_code
from llmtrain.operate.observed_run import ObservedRun
from llmtrain.operate.why.explain import Why, explain
from llmtrain.runs.exit_report import ExitReport

Object = dict[str, Any]
KINDS = ["indexed_job", "stateful_set", "pytorch_job", "train_job", "job_set"]
FAILED = {
    "indexed_job": ("Failed", {"reason": "PodFailurePolicy", "message": "Container trainer failed with exit code 64"}),
    "pytorch_job": ("Failed", {"reason": "PyTorchJobFailed", "message": "PyTorchJob demo is failed because 1 Worker"}),
    "train_job": ("Failed", {"reason": "JobsFailed", "message": "jobset failed due to one or more job failures"}),
    "job_set": ("Failed", {"reason": "FailedJobs", "message": "jobset failed due to one or more job failures"}),
}
IDLE = "[DDP] " + IDLE_MARK + " {}; a StatefulSet would start this again, so the pod waits to be removed"
PULL = (
    'Back-off pulling image "me/train:1": ErrImagePull: rpc error: code = NotFound desc = failed to pull and unpack '
    'image "docker.io/me/train:1": docker.io/me/train:1: not found'
)
NO_GPU = (
    "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 "
    "Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 1 Preemption is not helpful for scheduling, 2 "
    "No preemption victims found for incoming pod."
)
QUOTA = (
    'Error creating: pods "demo-0-x7k2p" is forbidden: exceeded quota: compute, requested: requests.cpu=2, used: '
    "requests.cpu=7, limited: requests.cpu=8"
)
SECURITY = (
    'Error creating: pods "demo-0-x7k2p" is forbidden: violates PodSecurity "restricted:latest": '
    "allowPrivilegeEscalation != false"
)
# Log lines of images of the first version, which write no exit reports.
WATCHDOG = (
    "[DDP] No progress for 30 s at step 7: rank 1 has gone silent (pid 1 on demo-1, last seen at step 7). Look at that "
    "rank's log and machine. Start the run again: it goes on from the newest checkpoint."
)
GONE = [
    "stopped: Another process of the run is gone: Connection closed by peer [10.0.0.7]:40122",
    "  Its own log says why. Start the run again: it goes on from the newest checkpoint.",
]
JOIN = [
    "[DDP] waiting for the master demo-0.demo:29500: the name demo-0.demo does not resolve: Name or service not known "
    "(590 of 600 s)",
    "error: The master demo-0.demo:29500 could not be reached within 600.0 s: the name demo-0.demo does not resolve: "
    "Name or service not known.",
    "  Use pod 0's own name (<job>-0.<service>).",
]
CONFIG = ["error: /config/train.yaml: 1 problem", "  - model.name 'gtp' is unknown. Known: dummy_gpt, gpt."]
NAN = [
    STEP.format(7),
    "error: The loss of step 8 is nan; it saw samples 56 to 63 of epoch 0.",
    "  Lower trainer.lr or raise trainer.warmup_steps, then resume from the last checkpoint with "
    "--allow-config-change, or look at those samples.",
]
DATA = ["error: /data/train.jsonl, line 3: no field 'text'.", "  Name the column with data.text_field."]
CHECKPOINT = [
    "error: None of the 2 checkpoints in /out/demo/checkpoints is usable.",
    "  Restore one from a backup, or start a new run.",
]
GAVE_UP = [
    "error: Run 'demo' crashed 3 times in a row without a newer checkpoint than step 0.",
    "  Look at /out/demo/logs. When the cause is gone, `llmtrain resume demo` goes on.",
]
CRASH = [
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 3, in <module>',
    "    main()",
    "RuntimeError: expected scalar type Float but found BFloat16",
]


def why(run: FakeRun) -> Why:
    return explain(ObservedRun(run.cluster, run.record))


def shown(found: Why) -> str:
    return "\n".join([found.what, *found.evidence, found.remedy])


def at(state: Object, ago_sec: float = 0.0) -> Object:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago_sec))
    return {"terminated": {**state["terminated"], "finishedAt": stamp}}


def say(run: FakeRun, index: int, *lines: str, ago_sec: float = 0.0) -> None:
    """Log lines with a current time stamp, for tests of the log's age."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.5Z", time.gmtime(time.time() - ago_sec))
    run.say(index)
    log = run.kube.logs["team", run.pods[index], run.plan.container]
    log.lines.extend((stamp, line) for line in lines)


def end(
    run: FakeRun,
    index: int,
    code: int,
    *lines: str,
    reason: str = "",
    ago_sec: float = 0.0,
    report: ExitReport | None = None,
) -> None:
    """A pod exits as under its kind: a StatefulSet restarts the container in place, which waits after 64 and 65; a
    PyTorchJob sees codes with 128 added. Without a report it exits like images of the first version, which
    wait after 64 and 65 without a restart."""
    kind = run.plan.launch.kind
    if index not in run.pods:
        run.pod(index)
    run.say(index, *lines)
    message = report.as_termination_message() if report else ""
    if kind == "stateful_set" and code in (64, 65) and report is None:
        run.say(index, IDLE.format(code))
    elif kind == "stateful_set" and code in (64, 65):
        run.kube.restart_log(run.pods[index])
        last = at(ended(code, reason), ago_sec)
        last["terminated"]["message"] = message
        run.set(index, running(), restarts=1, last=last)
    elif kind == "stateful_set":
        run.kube.restart_log(run.pods[index])
        run.kube.say(run.pods[index])
        last = at(ended(code, reason), ago_sec)
        last["terminated"]["message"] = message
        run.set(index, waiting("CrashLoopBackOff", "back-off 10s restarting failed container"), restarts=1, last=last)
    else:
        run.kube.end_log(run.pods[index], container=run.plan.container)
        state = at(ended(pytorchjob_code(code) if kind == "pytorch_job" else code, reason), ago_sec)
        state["terminated"]["message"] = message
        run.set(index, state)


def fail(run: FakeRun) -> None:
    """The job gets its Failed condition, if its kind has one."""
    if run.plan.launch.kind in FAILED:
        condition, more = FAILED[run.plan.launch.kind]
        run.finish(condition, **more)


def unschedulable_pod(run: FakeRun, index: int, message: str) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    run.pod(index, {}, conditions=[condition])


def lose(run: FakeRun, index: int, sign: str) -> None:
    condition = {"type": "Ready", "status": "False"}
    target = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
        "message": "Taint manager",
    }
    name = run.pods[index]
    match sign:
        case "overdue":
            run.set(index, running(), conditions=[target, condition])
            run.kube.change("Pod", name, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
        case "terminating":
            run.set(index, running(), conditions=[target, {**condition, "reason": "NodeNotReady"}], is_leaving=True)
        case "not ready":
            run.set(index, running(), conditions=[condition, {"type": "ContainersReady", "status": "True"}])
        case "unknown":
            run.kube.change(
                "Pod", name, {"status": {"phase": "Unknown", "reason": "NodeLost", "containerStatuses": []}}
            )

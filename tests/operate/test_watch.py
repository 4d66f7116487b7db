"""Watching a run: each line and each change is shown once and in order."""

import io
import time

import pytest
from kube_runs import STEP, ended, launch, running, waiting
from watcher import Watcher, wait_for

from kube_server import KubeServer
from llmtrain.errors import ClusterError, UsageError
from llmtrain.launch.record import STOPPED_AT
from llmtrain.operate.status import display
from llmtrain.operate.status import watch as follow

pytestmark = pytest.mark.usefixtures("hurry")


def test_watch_from_launch_to_end(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, waiting("ContainerCreating"))
    run.pod(1, waiting("ContainerCreating"))
    watcher = Watcher(run)
    watcher.until("is pending")
    run.set(0, running())
    run.set(1, running())
    run.say(0, "[DDP] 2 processes")
    run.say(1, "[DDP] of another pod")
    watcher.until("is starting")
    run.say(0, STEP.format(5))
    watcher.until("is running")
    run.say(0, STEP.format(30), "[DONE] 30 steps, train loss 3.4, val loss 3.4, best 3.4", "", "speed  1,260 tokens/s")
    run.end(0)
    run.end(1)
    run.finish()
    status = watcher.end()
    assert (status.state, status.exit_code, status.step, status.loss) == ("finished", 0, 30, 5.1922)
    assert watcher.log == [
        "[DDP] 2 processes",
        STEP.format(5),
        STEP.format(30),
        "[DONE] 30 steps, train loss 3.4, val loss 3.4, best 3.4",
        "",
        "speed  1,260 tokens/s",
    ]
    first, second = run.pods[0], run.pods[1]
    changes = [line.removeprefix("[K8S] ") for line in watcher.lines if line.startswith("[K8S]")]
    assert changes[:3] == [
        f"pod 0 ({first}): Pending on k8s-node0",
        f"pod 1 ({second}): Pending on k8s-node1",
        "run demo (indexed_job in namespace team) is pending",
    ]
    assert f"pod 0 ({first}): Running on k8s-node0" in changes
    assert changes[-1] == "run demo is finished"
    assert len(changes) == len(set(changes)), "each change once"


def test_resumed_run_is_starting_until_its_first_step(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, "[TRAIN] resumed from /out/demo/checkpoints/step_5")
    watcher = Watcher(run)
    watcher.until("is starting")
    run.say(0, STEP.format(6))
    watcher.until("is running")
    run.end(0)
    run.end(1)
    run.finish()
    watcher.end()
    assert not any("restarting" in change for change in watcher.lines)


def test_replaced_pod(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    watcher = Watcher(run)
    watcher.until("is running")
    run.say(0, "[TRAIN] last words")
    run.end(0, 1)
    watcher.until("is restarting")
    old = run.pods[0]
    run.pod(0)
    run.say(0, "[TRAIN] resumed from /out/demo/checkpoints/step_5", STEP.format(6))
    watcher.until("is running", 2)
    run.end(0)
    run.end(1)
    run.finish()
    status = watcher.end()
    assert status.restarts == 1
    assert watcher.log == [
        STEP.format(5),
        "[TRAIN] last words",
        "[TRAIN] resumed from /out/demo/checkpoints/step_5",
        STEP.format(6),
    ]
    assert f"[K8S] pod 0 ({old}): Failed on k8s-node0, code 1" in watcher.lines
    assert f"[K8S] pod 0 ({run.pods[0]}): Running on k8s-node0, restarted after exit code 1" in watcher.lines


def test_pod_recreated_with_the_same_name(kube: KubeServer) -> None:
    run = launch(kube, "pytorch_job")
    name = run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    watcher = Watcher(run)
    watcher.until("is running")
    run.say(0, "[TRAIN] warning: SIGTERM: saving and stopping")
    kube.end_log(name, container="pytorch")
    run.set(0, running(), is_leaving=True)
    watcher.until("Terminating")
    kube.remove("Pod", name)
    assert run.pod(0) == name
    run.say(0, "[DDP] 2 processes", STEP.format(6))
    watcher.until(STEP.format(6))
    run.end(0)
    run.end(1)
    run.finish("Succeeded")
    status = watcher.end()
    assert status.restarts == 1, "the replacement was observed"
    assert watcher.log == [
        STEP.format(5),
        "[TRAIN] warning: SIGTERM: saving and stopping",
        "[DDP] 2 processes",
        STEP.format(6),
    ]


def test_container_restarted_in_place(kube: KubeServer) -> None:
    run = launch(kube, "stateful_set")
    name = run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    watcher = Watcher(run)
    watcher.until("is running")
    run.say(0, "last words")
    kube.restart_log(name)
    run.set(0, running(), restarts=1, last=ended(75))
    run.say(0, STEP.format(6))
    watcher.until(STEP.format(6))
    for index in (0, 1):
        run.say(index, "[DDP] ended with exit code 0; it waits to be removed")
    assert watcher.end().state == "finished"
    assert watcher.log == [
        STEP.format(5),
        "last words",
        STEP.format(6),
        "[DDP] ended with exit code 0; it waits to be removed",
    ]


def test_log_of_a_container_that_restarted_before_watching(kube: KubeServer) -> None:
    run = launch(kube, "stateful_set")
    name = run.pod(0)
    run.pod(1)
    run.say(0, "first container")
    kube.restart_log(name)
    run.set(0, running(), restarts=1, last=ended(1))
    run.say(0, STEP.format(6))
    watcher = Watcher(run)
    watcher.until(STEP.format(6))
    assert watcher.log == ["first container", STEP.format(6)]
    late = Watcher(run, tail=1)
    late.until(STEP.format(6))
    assert late.log == [STEP.format(6)]
    for index in (0, 1):
        run.say(index, "[DDP] ended with exit code 64; it waits to be removed")
    assert (watcher.end().exit_code, late.end().exit_code) == (64, 64)


def test_api_server_outage(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, *(STEP.format(step) for step in range(1, 6)))
    watcher = Watcher(run)
    watcher.until("is running")
    watcher.until(STEP.format(5))
    kube.is_away = True
    watcher.until("Unable to connect")
    run.say(0, STEP.format(6))
    time.sleep(0.3)
    kube.is_away = False
    watcher.until("reachable again")
    watcher.until(STEP.format(6))
    run.say(0, STEP.format(7))
    run.end(0)
    run.end(1)
    run.finish()
    assert watcher.end().state == "finished"
    assert watcher.log == [STEP.format(step) for step in range(1, 8)]
    assert watcher.out.getvalue().count("Unable to connect") == 1
    assert watcher.out.getvalue().count("reachable again") == 1


def test_container_restarted_during_an_outage(kube: KubeServer) -> None:
    run = launch(kube, "stateful_set")
    name = run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    watcher = Watcher(run)
    watcher.until(STEP.format(5))
    kube.is_away = True
    watcher.until("Unable to connect")
    run.say(0, "last words")
    kube.restart_log(name)
    run.set(0, running(), restarts=1, last=ended(1))
    run.say(0, STEP.format(6))
    kube.is_away = False
    watcher.until(STEP.format(6))
    for index in (0, 1):
        run.say(index, "[DDP] ended with exit code 0; it waits to be removed")
    watcher.end()
    assert watcher.log[:3] == [STEP.format(5), "last words", STEP.format(6)]


def test_long_outage_ends_watching(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "UNREACHABLE_LIMIT_SEC", 0.3)
    run = launch(kube)
    run.pod(0)
    watcher = Watcher(run)
    watcher.until("is starting")
    kube.is_away = True
    with pytest.raises(ClusterError, match="Unable to connect"):
        watcher.end()


def test_run_stopped_while_watching(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.say(0, STEP.format(5))
    watcher = Watcher(run)
    watcher.until(STEP.format(5))
    kube.remove("Job", "demo")
    run.set(0, running(), is_leaving=True)
    watcher.until("is stopping")
    kube.remove("Pod", run.pods[0])
    kube.change("ConfigMap", "demo-config", {"metadata": {"annotations": {STOPPED_AT: "2026-01-01T00:00:00Z"}}})
    assert watcher.end().state == "stopped"


def test_run_deleted_while_watching(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.event("SuccessfulCreate", "Created pod")
    watcher = Watcher(run)
    watcher.until("is starting")
    for kind, name in (("Job", "demo"), ("Pod", run.pods[0]), ("ConfigMap", "demo-config")):
        kube.remove(kind, name)
    assert watcher.end().state == "removed"


def test_start_failure_is_reported_once_after_a_delay(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(1, waiting("ContainerCreating"))
    run.pod(0, waiting("ContainerCreating"))
    errors: list[UsageError] = []

    def roll_back(error: UsageError) -> None:
        errors.append(error)
        raise error

    watcher = Watcher(run, on_never_started=roll_back)
    watcher.until("is pending")
    run.set(0, waiting("ErrImagePull", "not found"))
    watcher.until("ErrImagePull")
    run.set(0, waiting("ImagePullBackOff", "not found"))
    with pytest.raises(UsageError, match="me/train:1"):
        watcher.end()
    assert len(errors) == 1
    assert watcher.out.getvalue().count("Pull") == 1, "ErrImagePull and ImagePullBackOff are one change"


def test_temporary_image_pull_failure_is_not_reported(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, waiting("ErrImagePull", "i/o timeout"))
    run.pod(1)
    errors: list[UsageError] = []
    watcher = Watcher(run, on_never_started=errors.append)
    watcher.until("ErrImagePull")
    run.set(0, running())
    watcher.until("is starting")
    time.sleep(0.5)
    run.end(0)
    run.end(1)
    run.finish()
    watcher.end()
    assert errors == []


def test_unschedulable_pods_are_shown_and_waited_for(kube: KubeServer) -> None:
    run = launch(kube)
    unschedulable = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: no cpu"}
    ]
    run.pod(0, {}, conditions=unschedulable)
    errors: list[UsageError] = []
    watcher = Watcher(run, on_never_started=errors.append)
    watcher.until("unschedulable: 0/2 nodes: no cpu")
    time.sleep(0.5)
    assert errors == []
    run.finish("Failed")
    watcher.end()
    assert watcher.out.getvalue().count("Pending") == 1


def test_refused_pods_are_shown(kube: KubeServer) -> None:
    run = launch(kube)
    watcher = Watcher(run)
    watcher.until("is pending")
    run.event("FailedCreate", "pods is forbidden: exceeded quota: q, requested: pods=1")
    watcher.until("[K8S] pods are refused: q, requested: pods=1")
    run.finish("Failed")
    watcher.end()


def test_many_pods_share_one_line(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.nodes=8", "trainer.grad_accum_steps=8")
    for index in range(8):
        run.pod(index)
    watcher = Watcher(run)
    watcher.until("8 pods (0 to 7): Running")
    assert watcher.out.getvalue().count("Running") == 1
    run.finish("Failed")
    watcher.end()


def test_live_view(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    run = launch(kube, "indexed_job", "launch.processes_per_node=2")
    kube.metrics = {run.pod(0): {"cpu": "1500m", "memory": "3Gi"}}
    run.pod(1)
    run.say(0, STEP.format(15), "a line with \x1b[31mcolor\x07 [bold]and brackets")
    watcher = Watcher(run, is_terminal=True)
    watcher.until("3.0 GiB")
    watcher.until("brackets")
    run.end(0)
    run.end(1)
    run.finish()
    assert watcher.end().state == "finished"
    shown = watcher.out.getvalue()
    for text in ("step 15/30", "loss 5.1922", "27,610 tok/s", "0:00:09 left", "2 pods x 2 processes", "2-3", "1.50"):
        assert text in shown, text
    assert "a line with color\N{REPLACEMENT CHARACTER} [bold]and brackets" in shown
    assert "\x07" not in shown


def test_plain_lines_before_the_first_status() -> None:
    out = io.StringIO()
    with display.PlainLines(out) as plain:
        plain.connection(None)
    assert out.getvalue() == "[K8S] the cluster is reachable again\n"


def test_expired_credentials_are_retried(kube: KubeServer) -> None:
    """Tokens may expire and be renewed while a run takes days."""
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    watcher = Watcher(run)
    watcher.until(STEP.format(5))
    kube.gate = lambda method, path, headers: (401, '{"message": "Unauthorized"}')  # noqa: ARG005
    watcher.until("rejected the credentials")
    time.sleep(0.2)
    kube.gate = None
    watcher.until("reachable again")
    run.say(0, STEP.format(6))
    run.end(0)
    run.end(1)
    run.finish()
    assert watcher.end().state == "finished"
    assert watcher.log == [STEP.format(5), STEP.format(6)]
    assert watcher.out.getvalue().count("rejected the credentials") == 1


def test_credentials_expired_for_long_end_watching(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "UNREACHABLE_LIMIT_SEC", 0.2)
    run = launch(kube)
    watcher = Watcher(run)
    watcher.until("is pending")
    kube.gate = lambda method, path, headers: (401, '{"message": "Unauthorized"}')  # noqa: ARG005
    with pytest.raises(ClusterError, match="rejected the credentials") as caught:
        watcher.end()
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    ("nodes", "ran", "is_asked"),
    [
        ("2", 2, False),
        pytest.param("2", 1, True, marks=pytest.mark.slow),
        pytest.param("2:4", 2, False, marks=pytest.mark.slow),
        ("2:4", 1, True),
    ],
)
def test_launch_whose_pods_have_run_is_not_rolled_back(kube: KubeServer, nodes: str, ran: int, is_asked: bool) -> None:
    """Once enough pods have run there may be data, even if quota is exceeded later."""
    sets = (f"launch.nodes={nodes}", "trainer.grad_accum_steps=12", "distributed.reproducible_reduce=false")
    run = launch(kube, "indexed_job", *sets)
    for index in range(ran):
        run.pod(index)
    errors: list[UsageError] = []
    watcher = Watcher(run, on_never_started=errors.append)
    watcher.until("is starting")
    wait_for(lambda: kube.asked()["GET pods"] > 4)
    if ran > 1:
        kube.remove("Pod", run.pods[ran - 1])
    run.event("FailedCreate", "pods is forbidden: exceeded quota: q, requested: pods=1")
    if is_asked:
        wait_for(lambda: bool(errors))
    else:
        time.sleep(0.7)  # twice START_FAILURE_SEC
    assert len(errors) == is_asked
    run.finish("Failed")
    watcher.end()


@pytest.mark.parametrize(("last", "state"), [
    ("[DONE] 30 steps, train loss 3.4, val loss 3.4, best 3.4", "finished"),
    ("[DONE] run demo is finished already, at step 30", "finished"),
    (STEP.format(30), "removed"),
])  # fmt: skip
def test_job_removed_by_its_ttl(kube: KubeServer, last: str, state: str) -> None:
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.event("SuccessfulCreate", "Created pod")
    run.say(0, STEP.format(29), last)
    watcher = Watcher(run)
    watcher.until(last)
    kube.remove("Job", "demo")
    for index in (0, 1):
        kube.remove("Pod", run.pods[index])
    status = watcher.end()
    assert (status.state, status.exit_code) == (state, 0 if state == "finished" else None)

"""Watching a run: what is shown, once and in order, whatever happens meanwhile."""

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


def test_from_launch_to_end(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, waiting("ContainerCreating"))
    run.pod(1, waiting("ContainerCreating"))
    watcher = Watcher(run)
    watcher.until("is pending")
    run.set(0, running())
    run.set(1, running())
    run.say(0, "[DDP] 2 processes")
    run.say(1, "[DDP] of another node")
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
    told = [line.removeprefix("[K8S] ") for line in watcher.lines if line.startswith("[K8S]")]
    assert told[:3] == [
        f"node 0, pod {first}: Pending on machine-0",
        f"node 1, pod {second}: Pending on machine-1",
        "run demo (indexed_job in namespace team) is pending",
    ]
    assert f"node 0, pod {first}: Running on machine-0" in told
    assert told[-1] == "run demo is finished"
    assert len(told) == len(set(told)), "each change once"


def test_a_pod_that_is_replaced(kube: KubeServer) -> None:
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
    assert f"[K8S] node 0, pod {old}: Failed on machine-0, code 1" in watcher.lines
    again = f"[K8S] node 0, pod {run.pods[0]}: Running on machine-0, started again after exit code 1"
    assert again in watcher.lines


def test_a_pod_that_is_deleted_and_made_again_under_its_name(kube: KubeServer) -> None:
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
    assert status.restarts == 1, "it was seen to be replaced"
    assert watcher.log == [
        STEP.format(5),
        "[TRAIN] warning: SIGTERM: saving and stopping",
        "[DDP] 2 processes",
        STEP.format(6),
    ]


def test_a_container_that_is_started_again_in_place(kube: KubeServer) -> None:
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


def test_what_a_container_said_before_anybody_looked(kube: KubeServer) -> None:
    run = launch(kube, "stateful_set")
    name = run.pod(0)
    run.pod(1)
    run.say(0, "of the first")
    kube.restart_log(name)
    run.set(0, running(), restarts=1, last=ended(1))
    run.say(0, STEP.format(6))
    watcher = Watcher(run)
    watcher.until(STEP.format(6))
    assert watcher.log == ["of the first", STEP.format(6)]
    late = Watcher(run, tail=1)
    late.until(STEP.format(6))
    assert late.log == [STEP.format(6)], "only the end was asked for"
    for index in (0, 1):
        run.say(index, "[DDP] ended with exit code 64; it waits to be removed")
    assert (watcher.end().exit_code, late.end().exit_code) == (64, 64)


def test_the_cluster_is_away_for_a_while(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, *(STEP.format(step) for step in range(1, 6)))
    watcher = Watcher(run)
    watcher.until("is running")
    watcher.until(STEP.format(5))
    kube.is_away = True
    watcher.until("does not answer")
    run.say(0, STEP.format(6))
    time.sleep(0.3)
    kube.is_away = False
    watcher.until("answers again")
    watcher.until(STEP.format(6))
    run.say(0, STEP.format(7))
    run.end(0)
    run.end(1)
    run.finish()
    assert watcher.end().state == "finished"
    assert watcher.log == [STEP.format(step) for step in range(1, 8)]
    assert watcher.out.getvalue().count("does not answer") == 1
    assert watcher.out.getvalue().count("answers again") == 1


def test_a_container_that_is_started_again_while_the_cluster_is_away(kube: KubeServer) -> None:
    run = launch(kube, "stateful_set")
    name = run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    watcher = Watcher(run)
    watcher.until(STEP.format(5))
    kube.is_away = True
    watcher.until("does not answer")
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


def test_a_cluster_that_stays_away(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "AWAY_LIMIT_SEC", 0.3)
    run = launch(kube)
    run.pod(0)
    watcher = Watcher(run)
    watcher.until("is starting")
    kube.is_away = True
    with pytest.raises(ClusterError, match="does not answer"):
        watcher.end()


def test_somebody_stops_the_run(kube: KubeServer) -> None:
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


def test_somebody_deletes_the_run(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0)
    run.event("SuccessfulCreate", "Created pod")
    watcher = Watcher(run)
    watcher.until("is starting")
    for kind, name in (("Job", "demo"), ("Pod", run.pods[0]), ("ConfigMap", "demo-config")):
        kube.remove(kind, name)
    assert watcher.end().state == "removed"


def test_a_launch_that_never_starts_is_told_once_it_is_sure(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(1, waiting("ContainerCreating"))
    run.pod(0, waiting("ContainerCreating"))
    asked: list[UsageError] = []

    def take_back(error: UsageError) -> None:
        asked.append(error)
        raise error

    watcher = Watcher(run, on_never_started=take_back)
    watcher.until("is pending")
    run.set(0, waiting("ErrImagePull", "not found"))
    watcher.until("ErrImagePull")
    run.set(0, waiting("ImagePullBackOff", "not found"))
    with pytest.raises(UsageError, match="me/train:1 cannot be pulled"):
        watcher.end()
    assert len(asked) == 1
    assert watcher.out.getvalue().count("Pull") == 1, "the kubelet's two words for it are one change"


def test_an_image_that_comes_at_the_second_try(kube: KubeServer) -> None:
    run = launch(kube)
    run.pod(0, waiting("ErrImagePull", "i/o timeout"))
    run.pod(1)
    asked: list[UsageError] = []
    watcher = Watcher(run, on_never_started=asked.append)
    watcher.until("ErrImagePull")
    run.set(0, running())
    watcher.until("is starting")
    time.sleep(0.5)
    run.end(0)
    run.end(1)
    run.finish()
    watcher.end()
    assert asked == []


def test_no_room_is_told_and_waited_for(kube: KubeServer) -> None:
    run = launch(kube)
    no_room = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: no cpu"}]
    run.pod(0, {}, conditions=no_room)
    asked: list[UsageError] = []
    watcher = Watcher(run, on_never_started=asked.append)
    watcher.until("unschedulable: 0/2 nodes: no cpu")
    time.sleep(0.5)
    assert asked == []
    run.finish("Failed")
    watcher.end()
    assert watcher.out.getvalue().count("Pending") == 1


def test_refused_pods_are_told_where_there_are_none(kube: KubeServer) -> None:
    run = launch(kube)
    watcher = Watcher(run)
    watcher.until("is pending")
    run.event("FailedCreate", "pods is forbidden: exceeded quota: q, requested: pods=1")
    watcher.until("[K8S] pods are refused: q, requested: pods=1")
    run.finish("Failed")
    watcher.end()


def test_many_pods_are_told_in_one_line(kube: KubeServer) -> None:
    run = launch(kube, "indexed_job", "launch.nodes=8", "trainer.grad_accum_steps=8")
    for index in range(8):
        run.pod(index)
    watcher = Watcher(run)
    watcher.until("8 pods (node 0 to 7): Running")
    assert watcher.out.getvalue().count("Running") == 1
    run.finish("Failed")
    watcher.end()


def test_the_view_of_a_terminal(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    run = launch(kube, "indexed_job", "launch.processes_per_node=2")
    kube.metrics = {run.pod(0): {"cpu": "1500m", "memory": "3Gi"}}
    run.pod(1)
    run.say(0, STEP.format(15), "a line with \x1b[31mcolour\x07 [bold]and brackets")
    watcher = Watcher(run, is_terminal=True)
    watcher.until("3.0 GiB")
    watcher.until("brackets")
    run.end(0)
    run.end(1)
    run.finish()
    assert watcher.end().state == "finished"
    shown = watcher.out.getvalue()
    for text in ("step 15/30", "loss 5.1922", "27,610 tok/s", "0:00:09 left", "2 nodes x 2 processes", "2-3", "1.50"):
        assert text in shown, text
    assert "a line with colour\N{REPLACEMENT CHARACTER} [bold]and brackets" in shown
    assert "\x07" not in shown


def test_the_plain_lines_begin_with_nothing_known() -> None:
    out = io.StringIO()
    with display.PlainLines(out) as plain:
        plain.away(None)
    assert out.getvalue() == "[K8S] the cluster answers again\n"


def test_a_login_that_runs_out_is_borne_for_a_while(kube: KubeServer) -> None:
    """Tokens are renewed by whoever made them; a run takes days."""
    run = launch(kube)
    run.pod(0)
    run.pod(1)
    run.say(0, STEP.format(5))
    watcher = Watcher(run)
    watcher.until(STEP.format(5))
    kube.gate = lambda method, path, headers: (401, '{"message": "Unauthorized"}')  # noqa: ARG005
    watcher.until("does not accept your login")
    time.sleep(0.2)
    kube.gate = None
    watcher.until("answers again")
    run.say(0, STEP.format(6))
    run.end(0)
    run.end(1)
    run.finish()
    assert watcher.end().state == "finished"
    assert watcher.log == [STEP.format(5), STEP.format(6)]
    assert watcher.out.getvalue().count("does not accept your login") == 1


def test_a_login_that_stays_away(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "AWAY_LIMIT_SEC", 0.2)
    run = launch(kube)
    watcher = Watcher(run)
    watcher.until("is pending")
    kube.gate = lambda method, path, headers: (401, '{"message": "Unauthorized"}')  # noqa: ARG005
    with pytest.raises(ClusterError, match="does not accept your login") as caught:
        watcher.end()
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    ("nodes", "ran", "is_asked"), [("2", 2, False), ("2", 1, True), ("2:4", 2, False), ("2:4", 1, True)]
)
def test_a_launch_that_has_begun_is_not_taken_back(kube: KubeServer, nodes: str, ran: int, is_asked: bool) -> None:
    """Once as many nodes as it needs have run there may be data; quota that is short later is no reason."""
    sets = (f"launch.nodes={nodes}", "trainer.grad_accum_steps=12", "distributed.reproducible_reduce=false")
    run = launch(kube, "indexed_job", *sets)
    for index in range(ran):
        run.pod(index)
    asked: list[UsageError] = []
    watcher = Watcher(run, on_never_started=asked.append)
    watcher.until("is starting")
    wait_for(lambda: kube.asked()["GET pods"] > 4)
    if ran > 1:
        kube.remove("Pod", run.pods[ran - 1])
    run.event("FailedCreate", "pods is forbidden: exceeded quota: q, requested: pods=1")
    if is_asked:
        wait_for(lambda: bool(asked))
    else:
        time.sleep(0.7)  # SURE_SEC, twice
    assert len(asked) == is_asked
    run.finish("Failed")
    watcher.end()


@pytest.mark.parametrize(("last", "state"), [
    ("[DONE] 30 steps, train loss 3.4, val loss 3.4, best 3.4", "finished"),
    ("[DONE] run demo is finished already, at step 30", "finished"),
    (STEP.format(30), "removed"),
])  # fmt: skip
def test_a_job_whose_time_to_live_is_over(kube: KubeServer, last: str, state: str) -> None:
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

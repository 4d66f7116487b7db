"""Machines that are lost under a run, on every kind: it is named, given up, and the run goes on elsewhere to the same
end. Only on the test cluster, whose machines can be killed and unplugged."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster_faults import SAVE_EVERY, SAVE_STEP, Caught, broken, freeze, thaw, wait_for
from kube import TOOLS, Kube, finished_hash
from webhook import Webhook, webhook

pytestmark = pytest.mark.skipif(not (TOOLS / "cluster").exists(), reason="needs ../shared/kube: machines are killed")
slow = pytest.mark.slow
AFTER = "3"


@contextmanager
def by_command(kube: Kube, run: str) -> Iterator[None]:
    """llmtrain recover, as soon as it has something to do."""
    deadline = time.monotonic() + 90
    while not (done := kube.llmtrain("recover", run, "--after", AFTER, "--json").json)["recovered"]:
        assert time.monotonic() < deadline, done
        time.sleep(1)
    yield


@contextmanager
def by_view(kube: Kube, run: str) -> Iterator[None]:
    """Somebody watches."""
    watching = kube.start("status", run, "--watch", "--recover-lost-nodes", AFTER)
    try:
        yield
    finally:
        out, _ = watching.communicate(timeout=300)
    assert watching.returncode == 0, out
    assert f"[K8S] removed {run}" in out, out


@contextmanager
def by_guard(kube: Kube, run: str) -> Iterator[None]:
    """Nobody watches; the guard does, and says so."""
    with webhook(kube) as told:
        kube.llmtrain("guard", "install", "--image", kube.image, "--after", AFTER, "--webhook", told.url)
        try:
            yield
            wait_for(lambda: _events(told, run)[-1:] == ["finished"], 60, "the webhook to be told")
        finally:
            kube.llmtrain("guard", "remove")
    assert "recovered" in _events(told, run)
    assert _events(told, run).count("finished") == 1


def _events(told: Webhook, run: str) -> list[str]:
    return [row["event"] for row in told.rows if row["run"] == run]


WAYS = {
    "indexed_job": by_command,
    "job_set": by_guard,
    "pytorch_job": by_view,
    "stateful_set": by_guard,
    "train_job": by_command,
}


@slow
@pytest.mark.parametrize("kind", sorted(WAYS))
def test_killed_in_the_middle_of_a_save(kube: Kube, kind: str, reference: str) -> None:
    """The machine of rank 0, which was writing."""
    run = f"{kind.replace('_', '-')}-killed"
    caught = Caught(kube, kind, run)
    assert kube.llmtrain("why", run, "--json").json["cause"] == "healthy"
    with broken(caught.machine(0), "kill-node", "start-node") as began:
        caught.go_on()
        named = time_named(kube, run, began)
        with WAYS[kind](kube, run):
            given_up = time.monotonic() - began
            caught.trains_again(within=120)
            again = time.monotonic() - began
            kube.llmtrain("status", run, "--watch", timeout=400)
        ends_well(kube, caught, reference)
    print(f"{kind}, killed: named after {named:.0f} s, given up {given_up:.0f} s, trains again {again:.0f} s")
    kube.llmtrain("delete", run)


@slow
@pytest.mark.parametrize("kind", sorted(WAYS))
def test_unplugged_and_plugged_in_again(kube: Kube, kind: str, reference: str) -> None:
    """The old rank 0 is still alive, and would publish its checkpoint: a newer generation trains by then."""
    run = f"{kind.replace('_', '-')}-cut"
    caught = Caught(kube, kind, run)
    old = caught.of_rank_zero()
    assert old
    with broken(caught.machine(0), "cut-node", "heal-node") as began:
        freeze(old)
        caught.go_on()
        try:
            named = time_named(kube, run, began)
            with by_command(kube, run):
                caught.trains_again(within=120)
                again = time.monotonic() - began
        finally:
            thaw(old)  # it goes on where it was: to publish what it had written
    wait_for(lambda: not set(old) & set(caught.processes()), 120, "the old generation to end")
    kube.llmtrain("status", run, "--watch", timeout=400)
    ends_well(kube, caught, reference)
    print(f"{kind}, unplugged: named after {named:.0f} s, trains again {again:.0f} s")
    kube.llmtrain("delete", run)


def time_named(kube: Kube, run: str, began: float) -> float:
    """Seconds until `why` and `status` say it."""
    deadline = began + 90
    while (why := kube.llmtrain("why", run, "--json").json)["cause"] != "node_lost":
        assert time.monotonic() < deadline, why
        time.sleep(1)
    seconds = time.monotonic() - began
    status = kube.status(run)
    assert f"llmtrain recover {run}" in status["why_short"]
    assert "llmtrain recover" in why["remedy"]
    return seconds


def ends_well(kube: Kube, caught: Caught, reference: str) -> None:
    assert kube.status(caught.run)["state"] == "finished"
    assert finished_hash(kube, caught.run) == reference
    rows = caught.generations()
    assert [row["from_step"] for row in rows] == [0, SAVE_STEP - SAVE_EVERY]  # no more than the save interval, and once
    assert rows[0]["ended"] in (None, "superseded")  # it could say nothing
    assert not list(caught.folder.glob("checkpoints/.tmp-*"))
    steps = [json.loads(line)["step"] for line in (caught.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps), steps

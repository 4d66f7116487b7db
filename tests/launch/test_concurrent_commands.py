"""Commands that run at the same time: one wins, and no object remains without its record."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
from launched_runs import (
    FAILURES,
    Object,
    Response,
    add_pods,
    fresh,
    key_of,
    launch,
    make_plan,
    outcome,
    quiet,
    run_before,
    snapshot,
)

from kube_server import KubeServer
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.launch import lifecycle
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import render
from llmtrain.launch.record import Record, find_record
from slow_cases import some


class TestConcurrentResumes:
    def test_stale_record_after_a_resume_is_refused(self, kube: KubeServer) -> None:
        record = launch(kube, make_plan())
        lifecycle.resume(kube.cluster(), record, make_plan())
        before = snapshot(kube)
        with pytest.raises(UsageError) as caught:
            lifecycle.resume(kube.cluster(), record, make_plan())
        assert caught.value.exit_code == 64
        assert snapshot(kube) == before

    @pytest.mark.parametrize("change", ["stopped", "deleted"])
    def test_stale_record_after_another_command_is_refused(self, kube: KubeServer, change: str) -> None:
        record = launch(kube, make_plan())
        if change == "stopped":
            lifecycle.stop(kube.cluster(), record, quiet)
        else:
            lifecycle.delete(kube.cluster(), record, False, quiet)
        before = snapshot(kube)
        with pytest.raises(UsageError):
            lifecycle.resume(kube.cluster(), record, make_plan())
        assert snapshot(kube) == before

    @pytest.mark.parametrize("kind", ["indexed_job", pytest.param("train_job", marks=pytest.mark.slow)])
    def test_exactly_one_wins_at_any_interleaving(self, kube: KubeServer, kind: str) -> None:
        """The other command runs completely before the n-th request of this one."""
        plan = make_plan(kind)
        for number in itertools.count():
            kube.objects.clear()
            record = launch(kube, plan)
            old = snapshot(kube)
            asked, won = itertools.count(), []

            def other(record: Record = record, won: list[str] = won) -> None:
                with suppress(LlmtrainError):
                    lifecycle.resume(kube.cluster(), record, plan)
                    won.append("other")

            def gate(method: str, path: str, headers: Mapping[str, str], number: int = number) -> Response:  # noqa: ARG001
                if next(asked) == number:  # noqa: B023
                    kube.gate = None
                    other()
                return None

            kube.gate = gate
            with suppress(LlmtrainError):
                lifecycle.resume(kube.cluster(), record, plan)
                won.append("this")
            was_early, kube.gate = kube.gate is None, None
            assert len(won) == 1
            assert set(kube.objects) == {key_of(manifest) for manifest in render(plan)}
            assert find_record(kube.cluster(), "demo", "team").number == 2
            job = key_of(render(plan)[-1])
            assert kube.objects[job]["metadata"]["uid"] != old[job]["metadata"]["uid"]
            if not was_early:
                assert number > 10
                break

    def test_does_not_wait_for_pods_of_the_winner(self, kube: KubeServer) -> None:
        plan = make_plan()
        record = launch(kube, plan)
        add_pods(kube, plan, "demo-0-old")
        winners: list[Object] = []

        def waiting(pods: list[Object]) -> None:  # noqa: ARG001
            if not winners:
                kube.remove("Pod", "demo-0-old")
                lifecycle.resume(kube.cluster(), record, plan)
                add_pods(kube, plan, "demo-0-new")
                winners.append(snapshot(kube))

        with pytest.raises(UsageError):
            lifecycle.resume(kube.cluster(), record, plan, waiting)
        assert [snapshot(kube)] == winners

    def test_failed_resume_keeps_the_objects_of_another(self, kube: KubeServer) -> None:
        """A resume that fails late must not overwrite a newer record with the old one."""
        record = launch(kube, make_plan())

        def gate(method: str, path: str, headers: Mapping[str, str]) -> Response:  # noqa: ARG001
            if method == "POST" and path.partition("?")[0].endswith("/jobs"):
                kube.gate = None
                lifecycle.resume(kube.cluster(), find_record(kube.cluster(), "demo", "team"), make_plan())
                return FAILURES["quota"][0]
            return None

        kube.gate = gate
        with pytest.raises(UsageError):
            lifecycle.resume(kube.cluster(), record, make_plan())
        assert find_record(kube.cluster(), "demo", "team").number == 3
        assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan())}


COMMANDS: dict[str, Callable[[KubeServer, Record, JobPlan], object]] = {
    "stop": lambda kube, record, plan: lifecycle.stop(kube.cluster(), record, quiet),  # noqa: ARG005
    "delete": lambda kube, record, plan: lifecycle.delete(kube.cluster(), record, False, quiet),  # noqa: ARG005
    "delete --data": lambda kube, record, plan: lifecycle.delete(kube.cluster(), record, True, quiet),  # noqa: ARG005
    "resume": lambda kube, record, plan: lifecycle.resume(kube.cluster(), record, plan),
}
REMOVALS = ("stop", "delete", "delete --data")
REMAINING = {"stop": {"configmaps", "persistentvolumeclaims"}, "delete": {"persistentvolumeclaims"}}


@pytest.mark.parametrize("kind", ["indexed_job", pytest.param("train_job", marks=pytest.mark.slow)])
class TestConcurrentCommands:
    @pytest.mark.parametrize("first", some(REMOVALS, "delete"))
    def test_resume_during_stop_or_delete(self, kube: KubeServer, kind: str, first: str) -> None:
        plan, results = make_plan(kind), set()
        for number in itertools.count():
            kube.objects.clear()
            record = launch(kube, plan)
            add_pods(kube, plan, "old")
            seen: list[LlmtrainError | None] = []
            after: list[dict[Any, Object]] = []

            def resume(seen: list[LlmtrainError | None] = seen, after: list[dict[Any, Object]] = after) -> None:
                kube.objects.pop(("pods", "team", "old"), None)
                seen.append(outcome(lambda: COMMANDS["resume"](kube, fresh(kube), plan)))
                if seen == [None]:
                    add_pods(kube, plan, "new")
                after.append(snapshot(kube))

            def waiting(pods: list[Object]) -> None:
                assert [pod["metadata"]["name"] for pod in pods] == ["old"]
                kube.remove("Pod", "old")

            run_before(kube, number, resume)
            acts: dict[str, Callable[[Record], object]] = {
                "stop": lambda record: lifecycle.stop(kube.cluster(), record, waiting),
                "delete": lambda record: lifecycle.delete(kube.cluster(), record, False, waiting),
                "delete --data": lambda record: lifecycle.delete(kube.cluster(), record, True, waiting),
            }
            problem = outcome(lambda: acts[first](record))  # noqa: B023
            was_early, kube.gate = kube.gate is None, None
            if not was_early:
                assert problem is None
                assert number > 10
                break
            results.add(seen[0] is None)
            if seen[0] is None:
                assert problem is not None
                assert problem.exit_code == 64
                assert snapshot(kube) == after[0], "objects of the new launch are unchanged"
                assert set(kube.objects) >= {key_of(manifest) for manifest in render(plan)}
            else:
                assert problem is None
                assert {key[0] for key in kube.objects} == REMAINING.get(first, set())
        assert True in results

    @pytest.mark.parametrize("second", some(REMOVALS, "stop"))
    def test_stop_or_delete_during_resume(self, kube: KubeServer, kind: str, second: str) -> None:
        plan = make_plan(kind)
        for number in itertools.count():
            kube.objects.clear()
            record = launch(kube, plan)
            run_before(kube, number, lambda: COMMANDS[second](kube, fresh(kube), plan))
            problem = outcome(lambda: COMMANDS["resume"](kube, record, plan))  # noqa: B023
            was_early, kube.gate = kube.gate is None, None
            if not was_early:
                assert problem is None
                break
            assert problem is not None
            assert problem.exit_code == 64
            assert {key[0] for key in kube.objects} == REMAINING.get(second, set())
            if second == "stop":
                assert fresh(kube).stopped_at is not None

    @pytest.mark.parametrize("second", some([*REMOVALS, "resume"], "delete", "resume"))
    def test_any_command_during_submit(self, kube: KubeServer, kind: str, second: str) -> None:
        plan = make_plan(kind)
        for number in itertools.count():
            kube.objects.clear()
            seen: list[LlmtrainError | None] = []

            def other(seen: list[LlmtrainError | None] = seen) -> None:
                seen.append(outcome(lambda: COMMANDS[second](kube, fresh(kube), plan)))

            run_before(kube, number, other)
            problem = outcome(lambda: lifecycle.submit(kube.cluster(), plan))
            was_early, kube.gate = kube.gate is None, None
            whole = {key_of(manifest) for manifest in render(plan)}
            if not was_early or seen[0] is not None:  # there was no record yet
                assert problem is None
                assert set(kube.objects) == whole
            else:
                assert problem is not None
                assert problem.exit_code == 64
                job = whole if second == "resume" else set()
                assert {key for key in kube.objects if key[0] not in REMAINING["stop"]} == {
                    key for key in job if key[0] not in REMAINING["stop"]
                }
            if not was_early:
                break

    @pytest.mark.parametrize(
        ("first", "second"),
        [("stop", "stop"), pytest.param("delete --data", "stop", marks=pytest.mark.slow), ("stop", "delete")],
    )
    def test_stop_and_delete_at_once(self, kube: KubeServer, kind: str, first: str, second: str) -> None:
        plan = make_plan(kind)
        for number in itertools.count():
            kube.objects.clear()
            record = launch(kube, plan)
            run_before(kube, number, lambda: COMMANDS[second](kube, fresh(kube), plan))
            problem = outcome(lambda: COMMANDS[first](kube, record, plan))  # noqa: B023
            was_early, kube.gate = kube.gate is None, None
            if not was_early:
                break
            left = {key[0] for key in kube.objects}
            assert left <= REMAINING["stop"]
            assert problem is None or problem.exit_code == 64
            assert problem is None or (first, second) != ("stop", "stop"), "both succeed"
            assert problem is not None or left == REMAINING.get(first, set())


@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_annotation_does_not_change_the_record(kube: KubeServer, command: str) -> None:
    """A policy engine or a user may annotate objects at any time."""
    record = launch(kube, make_plan())
    kube.change("ConfigMap", "demo-config", {"metadata": {"annotations": {"example.com/note": "yes"}}})
    assert outcome(lambda: COMMANDS[command](kube, record, make_plan())) is None


@pytest.mark.parametrize("number", range(25))
def test_take_back_during_a_resume_keeps_its_objects(kube: KubeServer, number: int) -> None:
    record = launch(kube, make_plan())
    resumed: list[bool] = []

    def resume() -> None:
        resumed.append(outcome(lambda: lifecycle.resume(kube.cluster(), fresh(kube), make_plan())) is None)

    run_before(kube, number, resume)
    problem = outcome(lambda: lifecycle.take_back(kube.cluster(), record))
    if resumed == [True]:
        assert problem is not None
        assert problem.exit_code == 64
        assert set(kube.objects) == {key_of(manifest) for manifest in render(make_plan())}
    else:
        assert problem is None
        assert kube.objects == {}

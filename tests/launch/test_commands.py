"""launch, resume, stop and delete as they are typed, with an API server that does what a test says."""

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import yaml
from kube_runs import STEP, FakeRun, waiting

from kube_server import KubeServer, kube_server
from limits import limit, wait_until
from llmtrain.launch import lifecycle as apply
from llmtrain.launch.record import find_record

Cli = Callable[..., Any]
LAUNCH = ("launch", "--config", "ddp_smoke", "--name", "demo", "--image", "me/train:1")
NOT_PULLED = 'Back-off pulling image "me/train:1": ErrImagePull: manifest unknown'


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    from llmtrain.operate.logs import merged_logs as logs
    from llmtrain.operate.logs import pod_log
    from llmtrain.operate.status import watch as follow

    for module, name, value in (
        (apply, "POLL_SEC", 0.02),
        (follow, "POLL_SEC", 0.03),
        (follow, "START_FAILURE_SEC", 0.15),
        (follow, "REMOVED_SEC", 0.15),
        (follow, "DRAIN_SEC", 0.5),
        (follow, "USAGE_SEC", 0.0),
        (follow, "EVENTS_SEC", 0.0),
        (logs, "POLL_SEC", 0.03),
        (pod_log, "RETRY_SEC", 0.03),
    ):
        monkeypatch.setattr(module, name, value)
    with kube_server() as server:
        yield server


class Player(threading.Thread):
    """Plays the cluster as soon as the job is made, while the command under test watches it."""

    def __init__(self, kube: KubeServer, act: Callable[[FakeRun], None], number: int = 1) -> None:
        super().__init__(daemon=True)
        self._kube, self._act, self._number = kube, act, number
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            wait_until(lambda: ("jobs", "team", "demo") in self._kube.objects)
            record = find_record(self._kube.cluster(), "demo", "team")
            assert record.number == self._number
            self._act(FakeRun(self._kube, record.plan))
        except BaseException as error:
            self.error = error

    def done(self) -> None:
        self.join(limit(10))
        if self.error is not None:
            raise self.error


def finish(run: FakeRun) -> None:
    run.pod(0)
    run.say(0, STEP.format(30))
    run.end(0)
    run.finish()


def fail_with(code: int) -> Callable[[FakeRun], None]:
    def act(run: FakeRun) -> None:
        run.pod(0)
        run.say(0, "[TRAIN] error: no such data")
        run.end(0, code)
        run.finish("Failed", reason="PodFailurePolicy")

    return act


def never_pulled(run: FakeRun) -> None:
    run.pod(0, waiting("ImagePullBackOff", NOT_PULLED))


def stopped_by_somebody(run: FakeRun) -> None:
    run.pod(0)
    run.say(0, STEP.format(5))

    def end(pods: list[dict[str, Any]]) -> None:
        for pod in pods:
            run.end(0, 75)
            run.kube.remove("Pod", pod["metadata"]["name"])

    apply.stop(run.cluster, run.record, end)


def deleted_by_somebody(run: FakeRun) -> None:
    wait_until(lambda: "GET metrics" in run.kube.requests)  # it is watched
    run.event("SuccessfulCreate", "Created pod: demo-0-00001")
    apply.delete(run.cluster, run.record, False, lambda pods: None)  # noqa: ARG005


def ours(kube: KubeServer) -> list[str]:
    return sorted(f"{plural}/{name}" for plural, _, name in kube.objects if plural not in ("pods", "events"))


def snapshot(kube: KubeServer) -> dict[Any, Any]:
    return copy.deepcopy(kube.objects)


ALL = ["configmaps/demo-config", "jobs/demo", "networkpolicies/demo", "persistentvolumeclaims/demo-runs"]
ALL = [*ALL, "services/demo"]


class TestLaunch:
    def test_detach_returns_after_submit(self, call: Cli, kube: KubeServer) -> None:
        done = call(*LAUNCH, "--detach")
        assert done.code == 0, done.err
        assert done.out.startswith("Run demo launched. Watch it: llmtrain status demo --kubeconfig ")
        assert "llmtrain stop demo --kubeconfig " in done.out
        assert ours(kube) == ALL
        assert {namespace for _, namespace, _ in kube.objects} == {"team"}, "that of the context"

    def test_detach_prints_json(self, call: Cli) -> None:
        done = call(*LAUNCH, "--detach", "--json")
        assert (done.code, done.json["run_id"], done.json["state"]) == (0, "demo", "pending")

    @pytest.mark.parametrize(
        "words",
        [("-n", "lab"), ("--set", "launch.namespace=lab"), ("--context", "there")],
        ids=["-n", "set", "context"],
    )
    def test_namespace_option(self, call: Cli, kube: KubeServer, words: tuple[str, ...]) -> None:
        done = call(*LAUNCH, "-d", *words)
        assert {namespace for _, namespace, _ in kube.objects} == {"lab"}
        if words[0] != "--context":
            assert "llmtrain status demo -n lab --kubeconfig " in done.out

    def test_hints_contain_the_cluster_options(self, call: Cli) -> None:
        done = call(*LAUNCH, "-d", "--context", "there")
        assert "--context there" in done.out
        assert "--kubeconfig" in done.out

    @pytest.mark.parametrize(
        ("act", "code", "said"),
        [
            (finish, 0, "llmtrain fetch demo "),
            (fail_with(65), 65, "Run demo failed: exit code 65"),
            (fail_with(64), 64, "Run demo failed: exit code 64"),
            (fail_with(137), 137, "Run demo failed: exit code 137"),
            (stopped_by_somebody, 75, "Run demo is stopped"),
            (deleted_by_somebody, 75, "Run demo was deleted"),
        ],
        ids=["finished", "65", "64", "killed", "stopped", "deleted"],
    )
    def test_exits_with_the_code_of_the_run(
        self, call: Cli, kube: KubeServer, act: Callable[[FakeRun], None], code: int, said: str
    ) -> None:
        player = Player(kube, act)
        done = call(*LAUNCH)
        player.done()
        assert done.code == code, done.err
        assert said in done.out + done.err
        assert (done.err == "") is (code == 0)
        if act is stopped_by_somebody:
            assert "llmtrain resume demo " in done.err
            assert "llmtrain resume demo" in done.err

    def test_deleted_run_has_no_resume_hint(self, call: Cli, kube: KubeServer) -> None:
        player = Player(kube, deleted_by_somebody)
        done = call(*LAUNCH)
        player.done()
        assert done.code == 75
        assert call("resume", "demo").code == 64
        assert "llmtrain resume demo" not in done.err

    def test_finished_run_prints_json(self, call: Cli, kube: KubeServer) -> None:
        player = Player(kube, finish)
        done = call(*LAUNCH, "--json")
        player.done()
        assert (done.code, done.json["state"], done.json["step"]) == (0, "finished", 30)
        assert STEP.format(30) in done.err

    @pytest.mark.parametrize(
        ("act", "code"), [(fail_with(65), 65), (stopped_by_somebody, 75)], ids=["failed", "stopped"]
    )
    def test_failed_run_prints_one_json_object(
        self, call: Cli, kube: KubeServer, act: Callable[[FakeRun], None], code: int
    ) -> None:
        player = Player(kube, act)
        done = call(*LAUNCH, "--json")
        player.done()
        assert done.code == code
        assert done.json["exit_code"] == code
        assert done.json["status"]["run_id"] == "demo"

    def test_image_pull_error_deletes_the_launch(self, call: Cli, kube: KubeServer) -> None:
        player = Player(kube, never_pulled)
        done = call(*LAUNCH, "--json")
        player.done()
        assert done.code == 64
        assert "me/train:1" in done.json["what"]
        assert "manifest unknown" in done.json["what"]
        assert done.json["remedy"].endswith("rolled back.")
        assert ours(kube) == []

    def test_image_pull_error_keeps_a_resumed_run(self, call: Cli, kube: KubeServer) -> None:
        Player(kube, finish)
        assert call(*LAUNCH).code == 0
        kube.remove("Pod", "demo-0-00001")
        kube.remove("Job", "demo")
        player = Player(kube, never_pulled, number=2)
        done = call(*LAUNCH, "--resume")
        player.done()
        assert done.code == 64
        assert "me/train:1" in done.err
        assert "rolled back" not in done.err
        assert "persistentvolumeclaims/demo-runs" in ours(kube)
        assert "configmaps/demo-config" in ours(kube)

    def test_image_pull_error_keeps_existing_data(self, call: Cli, kube: KubeServer) -> None:
        assert call(*LAUNCH, "-d").code == 0
        assert call("delete", "demo").code == 0
        assert ours(kube) == ["persistentvolumeclaims/demo-runs"]
        player = Player(kube, never_pulled)
        assert call(*LAUNCH, "--resume").code == 64
        player.done()
        assert ours(kube) == ["persistentvolumeclaims/demo-runs"]

    def test_cause_is_reported_if_the_undo_fails(self, call: Cli, kube: KubeServer) -> None:
        def gate(method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:  # noqa: ARG001
            return (500, "not now") if method == "DELETE" and "/services/" in path else None

        kube.gate = gate

        def act(run: FakeRun) -> None:
            never_pulled(run)
            wait_until(lambda: ("jobs", "team", "demo") not in kube.objects)
            kube.remove("Pod", run.pods[0])

        player = Player(kube, act)
        done = call(*LAUNCH)
        player.done()
        assert done.code == 64
        assert "me/train:1" in done.err
        assert "only partly rolled back" in done.err

    def test_terminating_job_is_refused(self, call: Cli, kube: KubeServer) -> None:
        said = '{"message": "object is being deleted: jobs.batch \\"demo\\" already exists"}'
        kube.gate = lambda method, path, headers: (409, said) if method == "POST" and "/jobs" in path else None  # noqa: ARG005
        for words in ((), ("--resume",)):
            done = call(*LAUNCH, "-d", *words)
            assert done.code == 64
            assert "still being deleted" in done.err
            assert kube.objects == {}

    def test_ctrl_c_keeps_the_run(self, call: Cli, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        from llmtrain.operate.status import watch as follow

        def interrupted(*words: object, **more: object) -> None:  # noqa: ARG001
            raise KeyboardInterrupt

        monkeypatch.setattr(follow, "follow", interrupted)
        done = call(*LAUNCH)
        assert done.code == 0
        assert "Run demo keeps running." in done.err
        assert ours(kube) == ALL

    def test_second_launch_is_refused(self, call: Cli, kube: KubeServer) -> None:
        assert call(*LAUNCH, "-d").code == 0
        before = snapshot(kube)
        done = call(*LAUNCH, "-d", "--json")
        assert done.code == 64
        assert "'demo' already exists" in done.json["what"]
        assert "--resume" in done.json["remedy"]
        assert kube.objects == before

    def test_resume_creates_a_missing_run(self, call: Cli, kube: KubeServer) -> None:
        assert call(*LAUNCH, "-d", "--resume").code == 0
        assert ours(kube) == ALL

    def test_resume_continues_an_ended_run(self, call: Cli, kube: KubeServer) -> None:
        player = Player(kube, fail_with(65))
        assert call(*LAUNCH).code == 65
        player.done()
        kube.remove("Pod", "demo-0-00001")
        done = call(*LAUNCH, "-d", "--resume", "--set", "trainer.max_steps=40")
        assert done.code == 0, done.err
        record = find_record(kube.cluster(), "demo", "team")
        assert (record.number, record.config.trainer.max_steps) == (2, 40)
        assert ours(kube) == ALL

    @pytest.mark.parametrize("words", [(*LAUNCH, "--resume"), ("resume", "demo")], ids=["launch", "resume"])
    def test_running_run_is_refused(self, call: Cli, kube: KubeServer, words: tuple[str, ...]) -> None:
        call(*LAUNCH, "-d")
        FakeRun(kube, find_record(kube.cluster(), "demo", "team").plan).pod(0)
        before = snapshot(kube)
        done = call(*words)
        assert done.code == 64
        assert "Run 'demo' has not ended" in done.err
        assert "llmtrain stop demo" in done.err
        assert kube.objects == before

    @pytest.mark.parametrize("words", [("--smoke",), ("--launcher", "torchrun", "--", "python", "a.py", "--json")])
    def test_smoke_doctor_and_user_command(self, call: Cli, kube: KubeServer, words: tuple[str, ...]) -> None:
        done = call(*LAUNCH, "-d", *words)
        assert done.code == 0, done.err
        record = find_record(kube.cluster(), "demo", "team")
        assert record.task.mode == ("smoke" if words == ("--smoke",) else "command")
        assert kube.objects["jobs", "team", "demo"]["spec"] == record.manifests[-1]["spec"]
        assert done.out.startswith("Run demo launched.")


class TestTheCluster:
    def test_unreachable_exits_with_69(self, call: Cli, kube: KubeServer) -> None:
        kube.is_away = True
        for words in ((*LAUNCH, "-d"), ("resume", "demo"), ("stop", "demo"), ("delete", "demo"), ("status",)):
            done = call(*words, "--json")
            assert done.code == 69, words
            assert "Unable to connect" in done.json["what"]

    def test_missing_kubeconfig_exits_with_64(self, cli: Cli) -> None:
        for words in (LAUNCH, ("resume", "demo"), ("stop", "demo"), ("delete", "demo"), ("status",)):
            done = cli(*words, "--kubeconfig", "missing", "--json")
            assert (done.code, done.json["error"]) == (64, "UsageError")

    def test_missing_namespace_exits_with_64(self, call: Cli, kube: KubeServer) -> None:
        def gate(method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:  # noqa: ARG001
            said = json.dumps({"kind": "Status", "message": 'namespaces "team" not found'})
            return (404, said) if method == "POST" else None

        kube.gate = gate
        done = call(*LAUNCH, "-d")
        assert done.code == 64
        assert "Namespace team does not exist." in done.err
        assert kube.objects == {}

    def test_server_side_dry_run(self, call: Cli, kube: KubeServer) -> None:
        paths = []
        kube.gate = lambda method, path, headers: paths.append((method, path))  # noqa: ARG005
        done = call(*LAUNCH, "--dry-run=server")
        assert done.code == 0, done.err
        assert done.out == "here accepts the manifests of run demo (server dry run).\n"
        assert [method for method, path in paths if "dryRun=All" in path] == ["POST"] * (len(ALL) + 1)  # and a pod
        assert len([method for method, _ in paths if method == "POST"]) == len(ALL) + 1
        assert kube.objects == {}
        assert call(*LAUNCH, "--dry-run=server", "--json").json == {"run_id": "demo", "accepted": True, "skipped": []}
        kube.gate = lambda method, path, headers: (422, '{"message": "spec.x: Invalid"}')  # noqa: ARG005
        refused = call(*LAUNCH, "--dry-run=server")
        assert refused.code == 64
        assert "spec.x: Invalid" in refused.err

    def test_client_side_dry_run_sends_no_request(self, call: Cli, kube: KubeServer) -> None:
        for words in (("--dry-run",), ("--dry-run=client",)):
            assert call(*LAUNCH, *words).code == 0
        assert kube.requests == []


class TestResume:
    def test_resume_uses_the_recorded_config(self, call: Cli, kube: KubeServer) -> None:
        call(*LAUNCH, "-d", "--set", "trainer.max_steps=33", "--set", "launch.runs_volume.access_mode=ReadWriteMany")
        assert call("stop", "demo").code == 0
        done = call("resume", "demo", "-d", "--nodes", "2", "--image", "me/train:2", "--kind", "stateful_set")
        assert done.code == 0, done.err
        record = find_record(kube.cluster(), "demo", "team")
        launch = record.config.launch
        assert (record.config.trainer.max_steps, record.number, record.stopped_at) == (33, 2, None)
        assert (launch.nodes, launch.image, launch.kind) == (2, "me/train:2", "stateful_set")
        assert kube.objects["statefulsets", "team", "demo"]["spec"]["replicas"] == 2
        assert "jobs/demo" not in ours(kube)

    def test_invalid_resume_changes_nothing(self, call: Cli, kube: KubeServer) -> None:
        call(*LAUNCH, "-d", "--set", "tracking.mlflow.tracking_uri=http://mlflow:5000")
        call("stop", "demo")
        before = snapshot(kube)
        for words in (
            ("--nodes", "3"),
            ("--set", "trainer.max_stepz=3"),
            ("--kind", "jobs"),
            ("--image", "A B"),
            ("--set", "output.run_id=x"),
            ("--set", "launch.runs_volume.size=99Gi"),
            ("--set", "output.root_dir=elsewhere"),
            ("--set", "distributed.master_addr=10.0.0.1"),
            ("--set", "launch.tracking_uri=http://other:5000"),
        ):
            assert call("resume", "demo", *words).code == 64, words
        assert call("resume", "demp").code == 64
        assert kube.objects == before
        other = ("--set", "tracking.mlflow.tracking_uri=http://other:5000")
        assert call("resume", "demo", "-d", *other).code == 0
        assert find_record(kube.cluster(), "demo", "team").config.tracking.mlflow.tracking_uri == "http://other:5000"

    @pytest.mark.parametrize(
        "sets",
        [("launch.namespace=lab",), ("output.run_id=other",)],
        ids=["namespace", "name"],
    )
    def test_resume_keeps_name_and_namespace(self, call: Cli, kube: KubeServer, sets: tuple[str, ...]) -> None:
        call(*LAUNCH, "-d")
        call("stop", "demo")
        before = snapshot(kube)
        done = call("resume", "demo", "-d", *(word for text in sets for word in ("--set", text)))
        assert done.code == 64
        assert kube.objects == before


class TestStopAndDelete:
    def test_stop(self, call: Cli, kube: KubeServer) -> None:
        call(*LAUNCH, "-d")
        run = FakeRun(kube, find_record(kube.cluster(), "demo", "team").plan)
        run.pod(0)

        def act() -> None:
            wait_until(lambda: ("jobs", "team", "demo") not in kube.objects)
            wait_until(lambda: "GET log" in kube.requests)
            time.sleep(0.2)  # only what comes from now on is shown
            run.say(0, "[SAVE] step_12")
            time.sleep(0.2)
            run.end(0, 75)
            time.sleep(0.1)
            kube.remove("Pod", run.pods[0])

        player = threading.Thread(target=act, daemon=True)
        player.start()
        done = call("stop", "demo")
        player.join(limit(10))
        assert done.code == 0
        assert "llmtrain resume demo " in done.out
        assert "waiting for 1 pod " in done.err
        assert "[SAVE] step_12" in done.err
        assert ours(kube) == ["configmaps/demo-config", "persistentvolumeclaims/demo-runs"]
        again = call("stop", "demo", "--json")
        assert (again.code, again.json["state"], again.json["lost_pods"]) == (0, "stopped", [])
        assert call("status", "demo", "--json").json["state"] == "stopped"

    def test_delete(self, call: Cli, kube: KubeServer) -> None:
        call(*LAUNCH, "-d")
        done = call("delete", "demo")
        assert done.code == 0
        assert done.out == "Run demo deleted.\nData kept on claim demo-runs.\n"
        assert ours(kube) == ["persistentvolumeclaims/demo-runs"]
        assert call("delete", "demo").code == 64

    @pytest.mark.parametrize("command", ["stop", "delete"])
    def test_resume_during_stop_or_delete_wins(self, call: Cli, kube: KubeServer, command: str) -> None:
        call(*LAUNCH, "-d")
        record = find_record(kube.cluster(), "demo", "team")
        run = FakeRun(kube, record.plan)
        run.pod(0)
        after: list[dict[Any, Any]] = []

        def gate(method: str, path: str, headers: Mapping[str, str]) -> None:  # noqa: ARG001
            if method == "GET" and "/pods?" in path and ("jobs", "team", "demo") not in kube.objects:
                kube.gate = None
                kube.remove("Pod", run.pods[0])
                apply.resume(kube.cluster(), find_record(kube.cluster(), "demo", "team"), record.plan)
                run.pod(0)
                after.append(snapshot(kube))

        kube.gate = gate
        done = call(command, "demo")
        assert done.code == 64
        assert done.out == ""
        assert "llmtrain status demo --kubeconfig " in done.err
        assert [snapshot(kube)] == after

    @pytest.mark.parametrize("words", [("demo", "--data"), ("--all",), ("--all", "--data")], ids=" ".join)
    def test_confirmation_needs_a_terminal(self, call: Cli, kube: KubeServer, words: tuple[str, ...]) -> None:
        call(*LAUNCH, "-d")
        before = snapshot(kube)
        done = call("delete", *words)
        assert done.code == 64
        assert "Delete demo" in done.err
        assert "--yes" in done.err
        assert kube.objects == before
        done = call("delete", *words, "--yes", "--json")
        assert (done.code, done.json["deleted"]) == (0, ["demo"])
        has_data = "--data" in words
        assert done.json["kept_claims"] == ([] if has_data else ["demo-runs"])
        assert ours(kube) == ([] if has_data else ["persistentvolumeclaims/demo-runs"])

    def test_delete_all_runs_of_a_namespace(self, call: Cli, kube: KubeServer) -> None:
        for words in (("--name", "demo"), ("--name", "demo-2"), ("--name", "demo-3", "-n", "lab")):
            assert call(*LAUNCH, "-d", *words).code == 0
        done = call("delete", "--all", "--yes", "--data", "--json")
        assert sorted(done.json["deleted"]) == ["demo", "demo-2"]
        assert {namespace for _, namespace, _ in kube.objects} == {"lab"}
        assert call("delete", "--all").out == "No runs in namespace team.\n"

    def test_delete_needs_a_run_or_all(self, call: Cli, kube: KubeServer) -> None:
        for words in ((), ("demo", "--all")):
            assert call("delete", *words, "--yes").code == 64
        assert kube.requests == []

    def test_existing_claim_is_kept(self, call: Cli, kube: KubeServer) -> None:
        kube.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": {}})
        assert call(*LAUNCH, "-d", "--set", "launch.runs_volume.claim=shared").code == 0
        done = call("delete", "demo", "--data", "--yes")
        assert "Data kept on claim shared." in done.out
        assert ours(kube) == ["persistentvolumeclaims/shared"]


class TestHints:
    @pytest.mark.parametrize("words", [("--smoke",), ("--doctor",)])
    def test_no_fetch_hint_without_training(self, call: Cli, kube: KubeServer, words: tuple[str, ...]) -> None:
        Player(kube, finish)
        done = call(*LAUNCH, *words)
        assert done.code == 0, done.err
        assert "llmtrain delete demo" in done.out
        assert "llmtrain fetch" not in done.out
        assert "llmtrain fetch" not in done.out

    def test_fetch_hint_after_training(self, call: Cli, kube: KubeServer) -> None:
        Player(kube, finish)
        assert "llmtrain fetch demo " in call(*LAUNCH).out

    @pytest.mark.parametrize("words", [("--smoke",), ("--doctor",)])
    def test_no_fetch_hint_after_stop_without_training(self, call: Cli, words: tuple[str, ...]) -> None:
        assert call(*LAUNCH, *words, "-d").code == 0
        done = call("stop", "demo")
        assert done.code == 0, done.err
        assert "llmtrain fetch" not in done.out

    def test_no_fetch_hint_without_volume(self, call: Cli, kube: KubeServer) -> None:
        player = Player(kube, finish)
        done = call(*LAUNCH, "--set", "launch.runs_volume=null", "--", "python", "x.py")
        player.done()
        assert done.code == 0, done.err
        assert "llmtrain fetch" not in done.out + call("why", "demo").out

    def test_run_without_volume_has_no_files(self, call: Cli, kube: KubeServer) -> None:
        words = (*LAUNCH, "--nodes", "2", "--set", "launch.runs_volume=null")
        assert call(*words, "-d", "--", "python", "x.py").code == 0
        assert not [name for name in ours(kube) if name.startswith("persistentvolumeclaims")]
        assert call("status", "demo", "--json").json["has_files"] is False
        assert "files      none" in call("status", "demo").out
        fetched = call("fetch", "demo", "--json")
        assert fetched.code == 64
        assert "llmtrain logs demo" in fetched.json["remedy"]
        assert "llmtrain fetch" not in call("stop", "demo").out
        logs = call("logs", "demo")
        assert logs.code == 64
        assert "launch.runs_volume is null" in logs.err
        assert call("delete", "demo", "--json").json["kept_claims"] == []

    def test_delete_names_the_kept_claims(self, call: Cli, kube: KubeServer) -> None:
        def act(run: FakeRun) -> None:
            run.pod(0)
            run.event("FailedCreate", "pods is forbidden: exceeded quota: q, requested: pods=1")

        player = Player(kube, act)
        done = call(*LAUNCH, "--nodes", "2")
        player.done()
        assert done.code == 64
        assert "quota" in done.err
        assert ours(kube) == ["persistentvolumeclaims/demo-runs"], "the pod that was let in may have written"
        assert "was kept" in done.err


def test_ended_pods_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    from llmtrain.commands.stop import PodCount

    count = PodCount()
    for phases in (
        ["Running", "Running", "Failed"],
        ["Running", "Succeeded"],
        ["Running"],
        ["Succeeded"],
        [],
        ["Pending"],
    ):
        count([{"status": {"phase": phase}} for phase in phases])
    said = [f"waiting for {text} to save and exit" for text in ("2 pods", "1 pod", "1 pod")]
    assert capsys.readouterr().err.splitlines() == said


def test_rejected_credentials_exit_with_69(call: Cli, kube: KubeServer) -> None:
    kube.gate = lambda method, path, headers: (401, '{"message": "Unauthorized"}')  # noqa: ARG005
    for words in (("status",), ("status", "demo"), ("stop", "demo"), (*LAUNCH, "-d")):
        done = call(*words)
        assert done.code == 69, words
        assert "rejected the credentials" in done.err


class TestAnotherVersion:
    """A run that was launched by a newer llmtrain."""

    def newer(self, kube: KubeServer, *fields: str) -> None:
        data = kube.objects["configmaps", "team", "demo-config"]["data"]
        values = yaml.safe_load(data["train.yaml"])
        for field in fields:
            *path, name = field.split(".")
            inner = values
            for part in path:
                inner[part] = inner.get(part) or {}
                inner = inner[part]
            inner[name] = {"deep": 1}
        job = {**json.loads(data["job.json"]), "colour": "blue"}
        change = {"train.yaml": yaml.safe_dump(values), "job.json": json.dumps(job)}
        kube.change("ConfigMap", "demo-config", {"data": change})

    @pytest.mark.parametrize(
        "fields",
        [
            ("launch.sparkle",),
            ("launch.runs_volume.colour",),
            ("sparkle",),
            ("launch.resources.tpu", "launch.sparkle", "run.mood", "zebra"),
            ("model.lora.flavour",),
        ],
        ids=lambda fields: fields[-1],
    )
    def test_newer_run_can_be_listed_and_stopped(self, call: Cli, kube: KubeServer, fields: tuple[str, ...]) -> None:
        if fields[0].startswith("model.lora"):
            hub = ("model.name=hf_causal_lm", "model.path=somebody/tiny", "model.lora={}")
            assert call(*LAUNCH, "-d", *(word for text in hub for word in ("--set", text))).code == 0
        else:
            assert call(*LAUNCH, "-d").code == 0
        plain = find_record(kube.cluster(), "demo", "team")
        assert plain.unknown == ()
        self.newer(kube, *fields)
        newer = find_record(kube.cluster(), "demo", "team")
        assert sorted(newer.unknown) == sorted(fields)
        assert (newer.config, newer.task, newer.number) == (plain.config, plain.task, plain.number)
        assert call("status", "--json").json["runs"][0]["run_id"] == "demo"
        assert call("status", "demo", "--json").json["state"] == "pending"
        assert call("stop", "demo").code == 0
        assert call("status", "demo", "--json").json["state"] == "stopped"
        before = snapshot(kube)
        refused = call("resume", "demo", "--json")
        assert refused.code == 64
        for field in fields:
            assert field in refused.json["what"]
        assert snapshot(kube) == before
        assert call("delete", "demo", "--data", "--yes").code == 0
        assert kube.objects == {}

    def test_run_of_this_version_can_be_resumed(self, call: Cli, kube: KubeServer) -> None:
        assert call(*LAUNCH, "-d").code == 0
        self.newer(kube)
        assert call("stop", "demo").code == 0
        done = call("resume", "demo", "-d")
        assert done.code == 0, done.err

"""push and exec: file bundles, and their effect in pods that are real directories and processes."""

import io
import os
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from held_pods import HeldPods, held_pods
from kube_runs import launch, waiting

from kube_server import KubeServer
from limits import wait_until
from llmtrain.errors import ClusterError, UsageError
from llmtrain.launch.pod_task import HELD_COMMAND
from llmtrain.operate.exec.run_in_pods import CommandResult, bundle_files, kill_in_all, run_in_all, start_in_all
from llmtrain.operate.observed_run import ObservedRun

Cli = Callable[..., Any]


@pytest.fixture
def pods(kube: KubeServer, tmp_path: Path) -> Iterator[HeldPods]:
    with held_pods(kube, tmp_path) as made:
        yield made


def make(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)


class TestBundleFiles:
    @pytest.fixture(autouse=True)
    def _inside(self, workdir: Path) -> None:
        """Names are relative to the current directory."""

    def test_files_and_directories(self, workdir: Path) -> None:
        make(workdir, "train.py", "deep/er/data.txt", "src/a.py", "src/b/c.py", "src/b/empty/.keep")
        (workdir / "train.py").chmod(0o750)
        os.utime(workdir / "train.py", (0, 1_700_000_000))
        (workdir / "src" / "nothing").mkdir()
        bundle = bundle_files(["train.py", "deep/er/data.txt", "src"])
        assert bundle.names == ["train.py", "data.txt", "src/a.py", "src/b/c.py", "src/b/empty/.keep"]
        assert bundle.skipped == []
        with tarfile.open(fileobj=io.BytesIO(bundle.data)) as archive:
            rows = archive.getmembers()
            contents = [archive.extractfile(row).read().decode() for row in rows]  # type: ignore[union-attr]
        assert [row.name for row in rows] == bundle.names
        assert contents == ["train.py", "deep/er/data.txt", "src/a.py", "src/b/c.py", "src/b/empty/.keep"]
        assert bundle.size == sum(map(len, contents))
        assert (rows[0].mode, rows[0].mtime, rows[0].uid, rows[0].uname) == (0o750, 1_700_000_000, 0, "")

    def test_current_directory_keeps_its_name(self, workdir: Path) -> None:
        make(workdir, "a.py", "b/c.py")
        assert bundle_files(["."]).names == ["work/a.py", "work/b/c.py"]
        assert bundle_files(["b/.."]).names == ["work/a.py", "work/b/c.py"]
        assert bundle_files([str(workdir)]).names == ["work/a.py", "work/b/c.py"]

    def test_skipped_files_are_listed(self, workdir: Path) -> None:
        make(workdir, "src/a.py", "src/.git/HEAD", "src/b/__pycache__/a.pyc", "src/.venv/x", "src/.env", "secret")
        (workdir / "src" / "link.py").symlink_to(workdir / "secret")
        (workdir / "src" / "gone.py").symlink_to("nowhere")
        (workdir / "src" / "folder").symlink_to(workdir)
        os.mkfifo(workdir / "src" / "pipe")
        bundle = bundle_files(["src"])
        assert bundle.names == ["src/a.py"]
        assert sorted(bundle.skipped) == [
            "src/.env",
            "src/.git/HEAD",
            "src/.venv/x",
            "src/b/__pycache__/a.pyc",
            "src/folder",
            "src/gone.py",
            "src/link.py",
            "src/pipe",
        ]

    def test_secrets_in_directories_are_skipped(self, workdir: Path) -> None:
        secret = [".env.local", ".env.prod", ".netrc", "id_rsa", "id_ed25519", "tls.pem", "certs/key.pem"]
        make(workdir, *(f"src/{name}" for name in [*secret, "a.py", ".envrc", "id_rsa.pub"]))
        bundle = bundle_files(["src"])
        assert sorted(bundle.names) == ["src/.envrc", "src/a.py", "src/id_rsa.pub"]
        assert sorted(bundle.skipped) == sorted(f"src/{name}" for name in secret)

    @pytest.mark.parametrize("path", ["", " "])
    def test_empty_path_is_refused(self, workdir: Path, path: str) -> None:
        make(workdir, "a.py")
        with pytest.raises(UsageError) as refused:
            bundle_files([path])
        assert refused.value.exit_code == 64

    def test_duplicate_paths_are_bundled_once(self, workdir: Path) -> None:
        make(workdir, "src/a.py", "src/.env", "b.py")
        bundle = bundle_files(["src", "src", "./src", "b.py", str(workdir / "b.py")])
        assert (bundle.names, bundle.skipped) == (["src/a.py", "b.py"], ["src/.env"])

    def test_explicit_paths_are_not_skipped(self, workdir: Path) -> None:
        """Also .env; a symbolic link is bundled as its target under its own name."""
        make(workdir, ".env", "versions/train_v2.py", "versions/data/a.txt", ".git/HEAD")
        (workdir / "train.py").symlink_to("versions/train_v2.py")
        (workdir / "data").symlink_to("versions/data")
        assert bundle_files([".env"]).names == [".env"]
        assert bundle_files([".git"]).names == [".git/HEAD"]
        assert bundle_files(["train.py", "data"]).names == ["train.py", "data/a.txt"]

    def test_two_files_with_the_same_name_are_refused(self, workdir: Path) -> None:
        make(workdir, "a/train.py", "b/train.py")
        with pytest.raises(UsageError, match=r"a/train.py and .*b/train.py .*/work"):
            bundle_files(["a/train.py", "b/train.py"])

    def test_nothing_to_push(self, workdir: Path) -> None:
        (workdir / "empty").mkdir()
        make(workdir, "venv/.venv/x")
        (workdir / "dangling").symlink_to("nowhere")
        for name in (
            "missing.py",
            "dangling",
            "empty",
            "venv",
        ):
            with pytest.raises(UsageError, match=name) as caught:
                bundle_files([name])
            assert caught.value.exit_code == 64

    def test_unreadable_file(self) -> None:
        with pytest.raises(UsageError, match=r"/mem .*: Input/output error"):
            bundle_files(["/proc/self/mem"])  # not readable by root either

    def test_too_many_bytes_are_refused_before_reading(self, workdir: Path) -> None:
        make(workdir, "src/a.py", "src/huge.bin")
        with (workdir / "src" / "huge.bin").open("wb") as file:
            file.truncate(2**40)  # a sparse file
        with pytest.raises(UsageError) as caught:
            bundle_files(["src"])
        assert caught.value.exit_code == 64
        assert "src/huge.bin" in caught.value.what

    def test_unusual_file_names(self, workdir: Path) -> None:
        names = ["ü ö.py", "a\nb.py", "x" * 120 + ".py"]
        make(workdir, *(f"src/{name}" for name in names))
        bundle = bundle_files(["src"])
        with tarfile.open(fileobj=io.BytesIO(bundle.data)) as archive:
            assert archive.getnames() == bundle.names == sorted(f"src/{name}" for name in names)


class TestPush:
    def test_push_copies_files_to_every_pod(self, pods: HeldPods, call: Cli, workdir: Path) -> None:
        data = os.urandom(300_000)
        make(workdir, "src/train.py", "src/.git/HEAD", "tool.sh")
        (workdir / "src" / "data.bin").write_bytes(data)
        (workdir / "tool.sh").chmod(0o755)
        done = call("push", "demo", "src", "tool.sh")
        assert done.code == 0, done.err
        assert done.out == "Copied 3 files (300,019 bytes) to /work in 2 pods.\n"
        assert done.err == "warning: skipped src/.git/HEAD\n"
        for index in (0, 1):
            work = pods.work(index)
            assert (work / "src" / "data.bin").read_bytes() == data
            assert (work / "src" / "train.py").read_text() == "src/train.py"
            assert (work / "tool.sh").stat().st_mode & 0o777 == 0o755
            assert not (work / "src" / ".git").exists()
        assert sorted(name for name, _, _ in pods.asked) == pods.names
        assert all(words[: len(HELD_COMMAND)] == HELD_COMMAND and stdin for _, words, stdin in pods.asked)

    def test_push_again_replaces_files(self, pods: HeldPods, call: Cli, workdir: Path) -> None:
        make(workdir, "train.py")
        assert call("push", "demo", "train.py").code == 0
        (workdir / "train.py").write_text("new")
        done = call("push", "demo", "train.py", "--json")
        assert done.json == {"run_id": "demo", "files": ["train.py"], "left_out": [], "pods": pods.names}
        assert [(pods.work(index) / "train.py").read_text() for index in (0, 1)] == ["new", "new"]

    def test_push_error_names_the_pod(self, pods: HeldPods, call: Cli, workdir: Path) -> None:
        make(workdir, "a/train.py")
        (pods.work(1) / "a").write_text("a file")
        done = call("push", "demo", "a")
        assert done.code == 69
        assert f"In {pods.names[1]}: " in done.err
        assert "FileExistsError" in done.err
        assert (pods.work(0) / "a" / "train.py").exists(), "the other pod has it"
        for index in (0, 1):
            pods.work(index).chmod(0o777)
        make(workdir, "b/train.py")
        for index in (0, 1):
            (pods.work(index) / "b").write_text("a file")
        assert "(and in 1 other pod)" in call("push", "demo", "b").err

    def test_all_pods_must_run(self, kube: KubeServer, pods: HeldPods, call: Cli, workdir: Path) -> None:
        make(workdir, "train.py")
        pods.run.set(1, waiting("ContainerCreating"))
        for verb in (("push", "demo", "train.py"), ("exec", "demo", "--", "true"), ("exec", "demo", "--kill")):
            done = call(verb[0], "--json", *verb[1:])
            assert done.code == 64
            assert "1 of 2 pods" in done.json["what"]
            assert "llmtrain why demo" in done.json["remedy"]
        kube.remove("Pod", pods.names[0])
        kube.remove("Pod", pods.names[1])
        assert "0 of 2 pods" in call("push", "demo", "train.py", "--json").json["what"]
        assert pods.asked == []

    def test_run_without_hold_is_refused(self, kube: KubeServer, call: Cli, workdir: Path) -> None:
        run = launch(kube)
        run.pod(0)
        run.pod(1)
        make(workdir, "train.py")
        for words, command in (
            (("push", "demo", "train.py"), "push"),
            (("exec", "demo", "-d", "--", "true"), "exec --detach"),
            (("exec", "demo", "--kill"), "exec --kill"),
        ):
            done = call(*words)
            assert done.code == 64
            assert f"{command} needs" in done.err
            assert "llmtrain launch --hold --name NAME --image me/train:1" in done.err

    def test_missing_file_is_refused_before_any_request(self, kube: KubeServer, call: Cli) -> None:
        assert call("push", "demo", "missing.py").code == 64
        assert kube.requests == []
        assert call("push", "demo").code == 64


class TestExec:
    def test_lines_start_with_the_node_rank(self, pods: HeldPods, call: Cli) -> None:
        done = call("exec", "demo", "--", "sh", "-c", 'echo "a$NODE"; echo "no end" >&2; printf "b$NODE"')
        assert done.code == 0
        assert sorted(done.out.splitlines()) == ["[0] a0", "[0] b0", "[1] a1", "[1] b1"]
        assert sorted(done.err.splitlines()) == ["[0] no end", "[1] no end"]
        assert done.out.index("[1] a1") < done.out.index("[1] b1")
        assert sorted(name for name, _, _ in pods.asked) == pods.names

    def test_torchrun_variables_are_set(self, kube: KubeServer, tmp_path: Path, call: Cli) -> None:
        sets = ("launch.processes_per_node=4", "distributed.master_port=29511")
        with held_pods(kube, tmp_path, "hold", 2, *sets) as pods:
            done = call("exec", "demo", "--", "sh", "-c", "env | grep ^PET_ | sort; pwd; echo $LLMTRAIN_RUN_DIR")
        for index in (0, 1):
            assert [line[4:] for line in done.out.splitlines() if line.startswith(f"[{index}]")] == [
                "PET_MASTER_ADDR=demo-0.demo",
                "PET_MASTER_PORT=29511",
                "PET_NNODES=2",
                f"PET_NODE_RANK={index}",
                "PET_NPROC_PER_NODE=4",
                str(pods.work(index)),
                "/out/demo",
            ]

    def test_commands_run_concurrently(self, pods: HeldPods, call: Cli) -> None:
        """They may wait for each other."""
        meet = "touch ../here-$NODE; until [ -e ../here-0 -a -e ../here-1 ]; do sleep 0.02; done; echo met"
        done = call("exec", "demo", "--", "sh", "-c", meet)
        assert sorted(done.out.splitlines()) == ["[0] met", "[1] met"]
        assert len(pods.asked) == 2

    @pytest.mark.usefixtures("pods")
    def test_exit_code_is_that_of_the_first_failed_pod(self, call: Cli) -> None:
        done = call("exec", "demo", "--json", "--", "sh", "-c", "echo hi; exit $((NODE * 7))")
        assert done.code == 7
        rows = [(row["node"], row["exit_code"]) for row in done.json["nodes"]]
        assert rows == [(0, 0), (1, 7)]
        assert sorted(done.err.splitlines()) == ["[0] hi", "[1] exited with code 7.", "[1] hi"]
        assert call("exec", "demo", "--", "sh", "-c", "exit $((5 - NODE))").code == 5
        assert call("exec", "demo", "--", "no-such-program").code == 127
        assert call("exec", "demo", "--", "sh", "-c", "kill -9 $$").code == 137

    def test_broken_connection(self, pods: HeldPods, call: Cli) -> None:
        pods.broken.add(pods.names[1])
        done = call("exec", "demo", "--json", "--", "sh", "-c", "echo hi; sleep 0.3")
        assert done.code == 69
        assert [row["exit_code"] for row in done.json["nodes"]] == [0, None]
        assert "[1] " in done.err
        assert "[0] hi" in done.err

    def test_exec_in_pods_without_hold_runs_the_bare_command(self, kube: KubeServer, tmp_path: Path, call: Cli) -> None:
        """The image may have no python3."""
        with held_pods(kube, tmp_path, "train") as pods:
            done = call("exec", "demo", "--", "sh", "-c", "echo $NODE; exit 3")
            assert done.code == 3
            assert sorted(done.out.splitlines()) == ["[0] 0", "[1] 1"]
            assert all(words[0] == "sh" and not stdin for _, words, stdin in pods.asked)
            done = call("exec", "demo", "--json", "--", "no-such-program")
            assert done.code == 69
            assert [row["exit_code"] for row in done.json["nodes"]] == [None, None]
            assert "No such file" in done.err

    @pytest.mark.parametrize("words", [(), ("--detach",), ("--kill", "--", "ls"), ("--kill", "--detach")])
    def test_conflicting_options_are_refused(self, kube: KubeServer, call: Cli, words: tuple[str, ...]) -> None:
        done = call("exec", "demo", *words)
        assert done.code == 64
        assert "--kill" in done.err
        assert kube.requests == []

    def test_unknown_run_is_refused(self, call: Cli) -> None:
        assert call("exec", "demo", "--", "ls").code == 64

    def test_command_arguments_are_passed_unchanged(self, pods: HeldPods, call: Cli) -> None:
        words = ["printf", "%s|", "--json", "-d", "a b", "", "$HOME", "ü"]
        done = call("exec", "demo", "--", *words)
        assert done.out.splitlines()[0][4:] == "--json|-d|a b||$HOME|ü|"
        assert pods.asked[0][1][-len(words) :] == words

    def test_ctrl_c_stops_a_silent_command_in_all_pods(self, pods: HeldPods, call: Cli) -> None:
        interrupt_once_up(pods)
        silent = "trap 'touch stopped; exit' TERM; touch up; sleep 2 & wait; touch late"
        done = call("exec", "demo", "--", "sh", "-c", silent)
        assert done.code == 130
        for index in (0, 1):
            wait_until((pods.work(index) / "stopped").exists, 1.5, "no SIGTERM")
            assert not (pods.work(index) / "late").exists()

    def test_ctrl_c_stops_a_printing_command_in_all_pods(self, pods: HeldPods, call: Cli) -> None:
        interrupt_once_up(pods)
        talk = "trap 'touch stopped; exit' TERM; touch up; for i in $(seq 99); do echo $i; sleep 0.1; done; touch late"
        done = call("exec", "demo", "--", "sh", "-c", talk)
        assert done.code == 130
        assert "may still be running" not in done.err
        for index in (0, 1):
            wait_until((pods.work(index) / "stopped").exists, what="no SIGTERM")
            assert not (pods.work(index) / "late").exists()

    def test_ctrl_c_in_pods_without_hold_warns(self, kube: KubeServer, tmp_path: Path, call: Cli) -> None:
        with held_pods(kube, tmp_path, "train") as pods:
            interrupt_once_up(pods)
            talk = f"touch {tmp_path}/work-$NODE/up; for i in $(seq 20); do echo $i; sleep 0.1; done"
            done = call("exec", "demo", "--", "sh", "-c", talk)
        assert done.code == 130
        assert "may still be running" in done.err


class TestDetach:
    def test_detached_command_keeps_running_and_logs_to_the_volume(
        self, kube: KubeServer, tmp_path: Path, call: Cli
    ) -> None:
        with held_pods(kube, tmp_path, "hold", 2, "launch.processes_per_node=4") as pods:
            pods.hold()
            demo = f"demo --kubeconfig {tmp_path}/kubeconfig"
            talk = "echo node $PET_NODE_RANK of $PET_NNODES in $PWD; sleep 60"
            done = call("exec", "demo", "-d", "--", "sh", "-c", talk)
            assert done.code == 0, done.err
            assert f"llmtrain logs {demo} -f" in done.out
            assert f"llmtrain exec {demo} --kill" in done.out
            for index, rank in ((0, 0), (1, 4)):  # the first rank of each pod
                log = pods.log(rank)
                wait_until(lambda log=log: log.exists() and log.read_text())  # type: ignore[misc]
                assert log.read_text() == f"node {index} of 2 in {pods.work(index)}\n"
            again = call("exec", "demo", "--detach", "--json", "--", "touch", "ran")
            assert again.code == 64
            assert again.json["what"].startswith(f"In {pods.names[0]}: ")
            assert "already running (process " in again.json["what"]
            assert "(and in 1 other pod)" in again.json["what"]
            assert f"llmtrain exec {demo} --kill" in again.json["remedy"]
            ended = call("exec", "demo", "--kill")
            assert (ended.code, ended.out) == (0, f"Stopped in {pods.names[0]}, {pods.names[1]}.\n")
            assert not any((pods.work(index) / "ran").exists() for index in (0, 1))
            assert call("exec", "demo", "--kill").out == "No command was running.\n"
            assert call("exec", "demo", "--kill", "--json").json == {"run_id": "demo", "ended": []}
            assert call("exec", "demo", "-d", "--json", "--", "true").json == {"run_id": "demo", "started": pods.names}

    def test_detached_command_starts_in_all_pods_or_none(self, pods: HeldPods, call: Cli) -> None:
        pods.hold()
        cluster, record = pods.run.cluster, pods.run.record
        (pods.work(0) / "tool").write_text("#!/bin/sh\necho $$ > number\nsleep 60\n")
        (pods.work(0) / "tool").chmod(0o755)
        with pytest.raises(ClusterError, match=f"In {pods.names[1]}: .*./tool.*: No such file") as caught:
            start_in_all(ObservedRun(cluster, record), ["./tool"])
        assert caught.value.exit_code == 64
        assert kill_in_all(ObservedRun(cluster, record)) == [], "it was stopped where it had started"
        assert (
            call("exec", "demo", "--", "sh", "-c", "! kill -0 $(cat number 2> /dev/null || echo 999999999)").code == 0
        )

    def test_main_process_that_does_not_respond(self, pods: HeldPods, monkeypatch: pytest.MonkeyPatch) -> None:
        import held_pods as helper

        monkeypatch.setattr(
            helper, "FASTER", {"GRACE_SEC = 10.0": "GRACE_SEC = 0.1", "ANSWER_SEC = 20.0": "ANSWER_SEC = 0"}
        )
        with pytest.raises(ClusterError, match="main process"):
            kill_in_all(ObservedRun(pods.run.cluster, pods.run.record))


class TestPod:
    """The option --pod."""

    def test_push_to_one_pod(self, pods: HeldPods, call: Cli, workdir: Path) -> None:
        make(workdir, "model_train_lora.py")
        done = call("push", "demo", "--pod", "1", "model_train_lora.py", "--json")
        assert (done.code, done.json["pods"]) == (0, [pods.names[1]])
        assert [(pods.work(index) / "model_train_lora.py").exists() for index in (0, 1)] == [False, True]

    def test_exec_in_one_pod_keeps_its_node_rank(self, pods: HeldPods, call: Cli) -> None:
        words = ("--", "sh", "-c", "echo $PET_NODE_RANK of $PET_NNODES; exit 3")
        done = call("exec", "demo", "--pod", "1", "--json", *words)
        assert (done.code, done.json["nodes"]) == (3, [{"node": 1, "pod": pods.names[1], "exit_code": 3}])
        assert "[1] 1 of 2" in done.err.splitlines()
        by_name = call("exec", "demo", "--pod", pods.names[0], *words)
        assert by_name.out == "[0] 0 of 2\n"
        both = call("exec", "demo", "--pod", "1", "--pod", pods.names[0], "--pod", "1", *words)
        assert sorted(both.out.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]

    def test_detach_and_kill_pod_by_pod(self, pods: HeldPods, call: Cli) -> None:
        """For example the master first, then the worker."""
        pods.hold()
        start = ("--", "sh", "-c", "touch up; sleep 60")
        for index in ("0", "1"):
            done = call("exec", "demo", "--detach", "--pod", index, "--json", *start)
            assert done.json["started"] == [pods.names[int(index)]]
        assert call("exec", "demo", "--detach", "--pod", "1", *start).code == 64, "a command is running there"
        assert call("exec", "demo", "--kill", "--pod", "0", "--json").json["ended"] == [pods.names[0]]
        assert call("exec", "demo", "--kill", "--json").json["ended"] == [pods.names[1]]

    @pytest.mark.parametrize("words", [("--", "true"), ("-d", "--", "true"), ("--kill",), ("push",)])
    def test_unknown_pod_is_refused(self, pods: HeldPods, call: Cli, workdir: Path, words: tuple[str, ...]) -> None:
        make(workdir, "train.py")
        for name in ("2", "-1", "01", "demo-7", ""):
            selected = ("--pod", "0", f"--pod={name}", "--json")
            done = (
                call("push", "demo", "train.py", *selected)
                if words[0] == "push"
                else call("exec", *selected, "demo", *words)
            )
            assert (done.code, done.json["known"]) == (64, ["0", "1"])
        assert pods.asked == []

    def test_only_selected_pods_must_run(self, pods: HeldPods, call: Cli) -> None:
        pods.run.set(1, waiting("ContainerCreating"))
        assert call("exec", "demo", "--pod", "0", "--", "true").code == 0
        assert call("exec", "demo", "--pod", "1", "--", "true").code == 64
        assert [name for name, _, _ in pods.asked] == [pods.names[0]]


def test_one_failed_pod_of_many(kube: KubeServer, tmp_path: Path) -> None:
    """Output of the others is kept, and results are in the order of node ranks."""
    lines: list[tuple[int, int, str]] = []
    with held_pods(kube, tmp_path, "command", 8) as pods:
        kube.remove("Pod", pods.names[3])
        pods.run.pods[3] = pods.names[3]
        with pytest.raises(UsageError, match="7 of 8 pods"):
            run_in_all(ObservedRun(pods.run.cluster, pods.run.record), ["true"], lambda *_: None)
        pods.names[3] = pods.run.pod(3)
        words = ["sh", "-c", 'echo "$NODE"; [ "$NODE" != 3 ]']
        exits = run_in_all(ObservedRun(pods.run.cluster, pods.run.record), words, lambda *row: lines.append(row))
    assert exits == [CommandResult(index, pods.names[index], int(index == 3)) for index in range(8)]
    assert sorted(lines) == [(index, 1, str(index)) for index in range(8)]


def interrupt_once_up(pods: HeldPods) -> None:
    """Send SIGINT as soon as the command runs in all pods."""

    def later() -> None:
        wait_until(lambda: all((pods.work(index) / "up").exists() for index in (0, 1)))
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=later, daemon=True).start()

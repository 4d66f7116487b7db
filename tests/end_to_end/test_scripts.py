"""What pods can run besides training: a script of the user, the smoke test, the doctor. And volumes made for a run."""

import pytest
from kube import Kube

from llmtrain.registry import KINDS

SCRIPT = (
    "import os, torch, torch.distributed as d; d.init_process_group('gloo'); x = torch.ones(1) * (d.get_rank() + 1); "
    # In one write: two processes of a pod share its log.
    "d.all_reduce(x); os.write(1, f'rank {d.get_rank()} of {d.get_world_size()} sum {int(x)}\\n'.encode()); "
    "d.destroy_process_group()"
)


def run_script(kube: Kube, kind: str, launcher: str) -> None:
    run = f"own-{kind.replace('_', '-')}-{launcher[:5]}"
    words = kube.launch_words(kind, run, "--processes-per-node", "2", "--launcher", launcher)
    kube.llmtrain(*words, "--", "python", "-c", SCRIPT, expect=None if kind == "stateful_set" else 0)
    logs = kube.llmtrain("logs", run).out
    for rank in range(4):
        assert f"rank {rank} of 4 sum 10" in logs
    kube.llmtrain("delete", run)


def test_user_script(kube: Kube) -> None:
    run_script(kube, "indexed_job", "llmtrain")


@pytest.mark.slow
def test_user_script_by_torchrun(kube: Kube) -> None:
    run_script(kube, "pytorch_job", "torchrun")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["llmtrain", "torchrun"])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"stateful_set"}))
def test_user_script_on_every_kind(kube: Kube, kind: str, launcher: str) -> None:
    run_script(kube, kind, launcher)


def test_user_script_that_fails(kube: Kube) -> None:
    words = kube.launch_words("indexed_job", "own-failed", "--set", "launch.max_restarts=0")
    done = kube.llmtrain(*words, "--", "python", "-c", "import sys; sys.exit(64)", expect=64)
    assert "own-failed" in done.err
    kube.llmtrain("delete", "own-failed")


@pytest.mark.parametrize("what", ["smoke", "doctor"])
def test_checks_on_the_same_pods(kube: Kube, what: str) -> None:
    run = f"check-{what}"
    kube.llmtrain(*kube.launch_words("indexed_job", run, f"--{what}"))
    assert kube.status(run)["mode"] == what
    kube.llmtrain("delete", run)


@pytest.mark.slow
def test_run_on_its_own_volume(kube: Kube) -> None:
    run = "own-volume"
    words = kube.launch_words("indexed_job", run, claim=None)
    kube.llmtrain(*words)
    kube.llmtrain("delete", run)
    assert [c["metadata"]["name"] for c in kube.objects("pvc")] == ["own-volume-runs", "runs"]
    again = kube.llmtrain(*words, expect=64)
    assert "kubectl delete pvc own-volume-runs" in again.err
    kube.llmtrain("fetch", run, "--only", "metrics")  # the record is gone, the claim is found by its label
    assert (kube.folder / "runs" / run / "metrics.jsonl").read_text().count("\n") >= 6
    finished = kube.llmtrain(*words, "--resume")  # finished: nothing to do
    assert "[TRAIN] step" not in finished.out
    kube.llmtrain("delete", run, "--data", "--yes")
    assert [c["metadata"]["name"] for c in kube.objects("pvc")] == ["runs"]

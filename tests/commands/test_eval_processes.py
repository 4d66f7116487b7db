"""llmtrain eval on several processes: one result, with the bits of one process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_harness import free_port
from rank_harness import Cli, end_clis, start_cli
from task_models import choice_items, write_items

from llmtrain.training.tasks import likelihoods

PROMPTS = [{"prompt": f"{number} + 1 =", "answer": "4", "until": list("abcdefghijklmnop ")} for number in range(5)]


@pytest.fixture
def items(workdir: Path) -> str:
    write_items(workdir / "prompts.jsonl", PROMPTS)
    write_items(workdir / "items.jsonl", [item for item in choice_items(30) if len(item["question"]) < 40][:13])
    return "items.jsonl,prompts.jsonl:1"


@pytest.fixture
def run(train, items: str) -> str:  # noqa: ARG001 (its files are in the same directory)
    model = ["model.name=gpt", "model.n_layers=1", "model.n_heads=2", "model.block_size=320"]
    done = train("output.run_id=first", *model)
    assert done.code == 0, done.err
    return "first"


@pytest.fixture(autouse=True)
def _end_processes() -> Iterator[None]:
    yield
    end_clis()


def start(count: int, *arguments: str, before: Callable[[], None] | None = None) -> list[Cli]:
    """`llmtrain eval` in `count` processes, as torchrun starts them."""
    port = str(free_port())
    started = []
    for rank in range(count):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(start_cli("eval", *arguments, env=env if count > 1 else {}, before=before))
    return started


def ended(processes: list[Cli]) -> list[int]:
    return [process.wait() for process in processes]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_have_the_bits_of_one_and_rank_0_prints_them(
    run: str, items: str, text: Path, workdir: Path, count: int
) -> None:
    options = [run, "--tasks", items, "--file", str(text), "--baseline", run, "--batch-size", "4", "--json"]
    record = workdir / "runs" / run / "tasks" / "step_4.json"
    (alone,) = start(1, *options)
    assert alone.wait() == 0, alone.err
    recorded = record.read_bytes()
    record.unlink()
    processes = start(count, *options)
    assert ended(processes) == [0] * count, "\n".join(process.err for process in processes)
    assert [process.out for process in processes] == [alone.out] + [""] * (count - 1)
    assert record.read_bytes() == recorded
    assert json.loads(alone.out)["tasks"]["prompts"]["items"] == 5


@pytest.mark.parametrize("options", [["--tasks", "nothere.jsonl"], ["--tasks", "items.jsonl", "--baseline", "nobody"]])
def test_a_mistake_ends_all_processes(run: str, options: list[str]) -> None:
    assert ended(start(2, run, *options)) == [64, 64]


def test_a_signal_to_one_process_stops_all(run: str, workdir: Path) -> None:
    write_items(workdir / "many.jsonl", [{**item, "question": "x" * 30} for item in choice_items(2000)])
    is_scoring = workdir / "is-scoring"

    def mark() -> None:
        batches = likelihoods._batches

        def marked(*arguments: object, **options: object) -> object:
            is_scoring.touch()
            return batches(*arguments, **options)

        likelihoods._batches = marked

    processes = start(2, run, "--tasks", "many.jsonl", "--batch-size", "1", before=mark)
    processes[1].wait_for(is_scoring.exists)
    processes[1].send(signal.SIGTERM)
    assert ended(processes) == [75, 75], processes[0].err
    assert "Traceback" not in processes[0].err
    assert not (workdir / "runs" / run / "tasks").exists()


def test_the_variables_of_a_pod_alone_do_not_make_it_wait_for_others(run: str, items: str) -> None:
    """A command that is typed in a pod of a PyTorchJob has no peers."""
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NNODES": "2"}
    alone = start_cli("eval", run, "--tasks", items, "--json", env=env)
    assert alone.wait() == 0, alone.err
    assert json.loads(alone.out)["run"] == run


@pytest.mark.slow
def test_processes_of_this_machine(run: str, items: str) -> None:
    """One result, and one error."""
    options = ["eval", run, "--tasks", items, "--no-chat-template", "--json"]
    done = [start_cli(*options), start_cli(*options, "--processes", "2")]
    assert [each.wait() for each in done] == [0, 0], done[1].err
    assert done[0].out == done[1].out
    missing = start_cli("eval", run, "--tasks", "nothere", "--processes", "2")
    assert missing.wait() == 64
    assert missing.err.count("nothere") == 1


@pytest.mark.slow
def test_torchrun(run: str, items: str, workdir: Path) -> None:
    words = ["-m", "llmtrain", "eval", run, "--tasks", items, "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    outputs = []
    for command in ([sys.executable], torchrun):
        done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=workdir, env=env)
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1]
    missing = subprocess.run(
        [*torchrun, *words[:-2], "nothere", "--json"], capture_output=True, text=True, cwd=workdir, env=env
    )
    assert json.loads(missing.stdout)["exit_code"] == 64

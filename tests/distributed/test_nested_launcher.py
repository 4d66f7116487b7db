"""torchrun as the command of `node` or `launch` would start one run per process: it is refused, with a replacement."""

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from llmtrain.distributed.nested_launcher import check_own_command, launcher_name, process_command
from llmtrain.errors import UsageError

# Command lines from popular guides.
LINES = {
    "torchrun /app/main.py": "-- python /app/main.py",
    "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=a:29500 train.py --lr 1": (
        "--nodes 2 --processes-per-node 4 -- python train.py --lr 1"
    ),
    "torchrun --standalone --nproc-per-node gpu -m pkg.train": "--processes-per-node gpu -- python -m pkg.train",
    "/usr/bin/torchrun --no-python ./run.sh": "-- ./run.sh",
    "env A=1 torchrun train.py": "-- env A=1 python train.py",
    "env -u A torchrun train.py": "-- env -u A python train.py",
    "timeout -k 5 60 torchrun train.py": "-- timeout -k 5 60 python train.py",
    "uv run --with x torchrun train.py": "-- uv run --with x python train.py",
    "nice -n 5 timeout 60 torchrun train.py": "-- nice -n 5 timeout 60 python train.py",
    "python -u -m torch.distributed.run --nnodes 2 train.py": "--nodes 2 -- python train.py",
    "python3.11 -m torch.distributed.launch --use_env train.py": "-- python train.py",
    "accelerate launch --multi_gpu --num_machines 2 --num_processes 8 train.py": "--nodes 2 -- python train.py",
    "deepspeed --num_gpus 8 --num_nodes 2 train.py --deepspeed ds.json": (
        "--nodes 2 --processes-per-node 8 -- python train.py --deepspeed ds.json"
    ),
    "torchrun": "-- python train.py",
    "python -W ignore -mtorch.distributed.run x.py": "-- python x.py",
}
SCRIPTS = {
    "bash -c 'torchrun --nproc_per_node 2 train.py'": (
        "In the script, use: python train.py, and pass --processes-per-node 2 to llmtrain node"
    ),
    "sh -c 'pip install x && cd /app && exec torchrun main.py --lr 1'": "In the script, use: python main.py --lr 1",
    "bash -lc 'set -e\nA=1 accelerate launch train.py'": "In the script, use: python train.py",
    "bash -euo pipefail -c 'torchrun x.py'": "In the script, use: python x.py",
    "bash -c '# start\ntorchrun \\\n  --nproc_per_node=4 \\\n  train.py --lr 1'": (
        "In the script, use: python train.py --lr 1, and pass --processes-per-node 4 to llmtrain node"
    ),
    "bash -c 'ulimit -n 9 ; { torchrun x.py; }'": "In the script, use: python x.py",
    "bash -c 'torchrun x.py > log 2>&1 || true'": "In the script, use: python x.py",
    "bash -c 'torchrun --node_rank=$(hostname) x.py'": "In the script, use: python x.py",
    "bash -c 'bash -c \"torchrun x.py\"'": "In the script, use: python x.py",
    "bash -c 'timeout 60 torchrun \"a b.py\"'": "In the script, use: python 'a b.py'",
    "/bin/bash -ec 'if true; then deepspeed x.py; fi'": "In the script, use: python x.py",
}
FINE = [
    "bash -c 'echo torchrun train.py'",
    "bash -c 'echo then torchrun train.py'",
    "bash -c 'echo \"a; torchrun x.py\"'",
    "bash -c 'python x.py # torchrun x.py'",
    "timeout 60",
    "uv pip install torchrun",
    "bash -c 'python train.py --with torchrun'",
    "bash run.sh -c torchrun",
    "bash -c 'echo \"'",
    "bash -c",
    "sh",
    "python train.py",
    "python train.py -m torch.distributed.run",
    "python -m pkg.train",
    "python -m torch.distributed.runner",
    "./torchrun.sh",
    "accelerate test",
    "env",
    "my-deepspeed train.py",
]


@pytest.mark.parametrize(("line", "instead"), LINES.items())
def test_launcher_is_refused_with_replacement(line: str, instead: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_own_command(shlex.split(line), "llmtrain node")
    assert refused.value.remedy == f"Run: llmtrain node {instead}"


@pytest.mark.parametrize(("line", "remedy"), SCRIPTS.items())
def test_launcher_in_shell_script_is_refused(line: str, remedy: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_own_command(shlex.split(line), "llmtrain node")
    assert refused.value.remedy == remedy


@pytest.mark.parametrize("line", ["''", "' '"])
def test_empty_command_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        check_own_command(shlex.split(line), "llmtrain node")


@pytest.mark.parametrize("line", FINE)
def test_other_commands_are_accepted(line: str) -> None:
    check_own_command(shlex.split(line), "llmtrain node")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nnodes 2 train.py --launcher torchrun", ("torchrun", "train.py --launcher torchrun")),
        ("torchrun --no-python accelerate launch x.py", ("torchrun", "accelerate launch x.py")),
        ("python -m torch.distributed.run -m pkg.train", ("torchrun", "python -m pkg.train")),
        ("llmtrain node --nodes 2 -- torchrun x.py", ("llmtrain node", "torchrun x.py")),
        ("env A=1 python3 -m llmtrain node -- python x.py", ("llmtrain node", "python x.py")),
        ("llmtrain node --config a.yaml", None),
        ("llmtrain exec demo -- torchrun x.py", None),
        ("python train.py", None),
        ("python", None),
        ("", None),
    ],
)
def test_process_command(line: str, expected: tuple[str, str] | None) -> None:
    found = process_command(shlex.split(line))
    assert found == (expected and (expected[0], shlex.split(expected[1])))


def test_launcher_name() -> None:
    assert [launcher_name(shlex.split(line)) for line in ("torchrun x", "accelerate launch x", "deepspeed", "x")] == [
        "torchrun",
        "accelerate launch",
        "deepspeed",
        None,
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("node", "--processes-per-node", "2"),
        ("launch", "--dry-run", "--image", "x"),
        ("launch", "--dry-run", "--image", "x", "--launcher", "torchrun"),
    ],
)
def test_node_and_launch_refuse_torchrun(cli: Callable[..., Any], words: tuple[str, ...]) -> None:
    done = cli(*words, "--", "torchrun", "who.py")
    assert done.code == 64
    assert "-- python who.py" in done.err

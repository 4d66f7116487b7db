"""torchrun as the command of `node` or `launch` would start one run per process: it is refused, with a replacement."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.distributed.nested_launcher import check_command, launcher_name, process_command
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
    "accelerate launch --multi_gpu --num_machines 2 --num_processes 8 train.py": (
        "--nodes 2 --processes-per-node 4 -- python train.py"
    ),
    "deepspeed --num_gpus 8 --num_nodes 2 train.py --deepspeed ds.json": (
        "--nodes 2 --processes-per-node 8 -- python train.py --deepspeed ds.json"
    ),
    "torchrun": "-- python train.py",
    "colossalai run --nproc_per_node 8 --num_nodes 4 --hostfile h train.py --lr 1": (
        "--nodes 4 --processes-per-node 8 -- python train.py --lr 1"
    ),
    "python -m colossalai.cli run --nproc_per_node 8 train.py": "--processes-per-node 8 -- python train.py",
    "mpirun -np 4 --allow-run-as-root --mca btl self,tcp -x NCCL_DEBUG=INFO python train.py --lr 1": (
        "--processes-per-node 4 -- python train.py --lr 1"
    ),
    "mpirun -np 16 -H a:8,b:8 python train.py": "-- python train.py",
    "mpiexec -n 2 -genv A 1 python train.py": "--processes-per-node 2 -- python train.py",
    "srun -N2 --ntasks-per-node=8 -l torchrun --nproc_per_node 8 train.py": (
        "--nodes 2 --processes-per-node 8 -- python train.py"
    ),
    "horovodrun -np 4 -H localhost:4 python train.py": "-- python train.py",
    "composer -n 8 train.py": "--processes-per-node 8 -- python train.py",
    "mpirun -n 1 torchrun train.py": "-- python train.py",
    "python /usr/local/bin/torchrun train.py": "-- python train.py",
    "python /x/torch/distributed/launch.py --nproc_per_node=2 train.py": "--processes-per-node 2 -- python train.py",
    "torchrun --nnodes=$NNODES --nproc_per_node=x train.py": "-- python train.py",
    "sudo -u me tini -- torchrun train.py": "-- sudo -u me tini -- python train.py",
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
    "mpirun -n 1 python train.py",
    "srun --ntasks=1 python train.py",
    "torchrun --help",
    "mpirun --version",
    "accelerate env",
    "bash -c 'command -v torchrun'",
    "bash -c 'llmtrain train --config torchrun'",
]
CERTAIN = {
    "exec torchrun who.py": 1,
    "#!/bin/bash\nset -e\n\nexport A=1\ntorchrun --nproc_per_node 2 who.py": 5,
    "cd /app && nohup uv run torchrun who.py > log 2>&1 &": 1,
    "time mpirun -np 2 python who.py": 1,
    "colossalai run --nproc_per_node 8 who.py": 1,
    "python -m torch.distributed.run who.py | tee log": 1,
    'if [ "$GPUS" -gt 1 ]; then\n  torchrun who.py\nelse\n  python who.py\nfi': 2,
    'if [ "$WORLD_SIZE" -gt 1 ]; then\n  torchrun --nnodes 2 who.py\nelse\n  torchrun who.py\nfi': 2,
    "case $1 in\n  a) torchrun a.py ;;\n  b) torchrun b.py ;;\nesac": 2,
    '[ "$RANK" = 0 ] && echo first\ntorchrun who.py': 2,
    'LAUNCHER="torchrun --nproc_per_node 2"\n$LAUNCHER who.py': 2,
    'CMD="torchrun who.py"\nCMD="$CMD --lr 1"\nCMD+=" --steps 2"\necho $CMD\neval $CMD': 5,
    'CMD="accelerate launch who.py"\nbash -c "$CMD"': 2,
    'CMD=(torchrun --standalone\n  who.py)\n"${CMD[@]}"': 3,
    "cat <<EOF > x\nit's a test\nEOF\ntorchrun who.py": 4,
    "bash <<'EOF'\ntorchrun who.py\nEOF": 1,
    "main() {\n  torchrun who.py\n}\nmain": 2,
    "for i in 1 2; do torchrun who.py; done": 1,
    "echo $((1 << 3))\ntorchrun who.py": 2,
    'cd "$(cd "$(dirname "$0")" && pwd)"\ntorchrun who.py': 2,
}
UNCERTAIN = [
    'if [ -n "$WORLD_SIZE" ]; then python who.py; else torchrun who.py; fi',
    'if [ -z "${RANK:-}" ]; then exec torchrun "$0"; fi\npython who.py',
    "case $MODE in torchrun) torchrun who.py ;; *) python who.py ;; esac",
    "${LAUNCHER:-torchrun} who.py",
    'if [ "$A" ]; then L=torchrun; else L=python; fi\n$L who.py',
    "echo 'open\ntorchrun who.py",
]
HARMLESS = [
    "# torchrun who.py\npython who.py",
    "echo torchrun who.py; python who.py",
    "LAUNCHER=torchrun\necho $LAUNCHER\npython who.py",
    "cat > next.sh <<EOF\ntorchrun who.py\nEOF\npython who.py",
    "cat > next.sh <<-'EOF'\n\ttorchrun who.py\n\tEOF\npython who.py",
    "case $LAUNCHER in\n  torchrun) python a.py ;;\n  torchrun | mpirun) python b.py ;;\nesac",
    "which torchrun && torchrun --version\npython who.py",
    "llmtrain train --config example",
    "mpirun -np 1 python who.py",
    "args=(torchrun)\npython who.py",
    "source missing/activate\npython who.py",
    "$CMD who.py",
    "",
]


@pytest.mark.parametrize(("line", "instead"), LINES.items())
def test_launcher_is_refused_with_replacement(line: str, instead: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_command(shlex.split(line), "node")
    assert refused.value.remedy == f"Run: llmtrain node {instead}"


@pytest.mark.parametrize(("line", "remedy"), SCRIPTS.items())
def test_launcher_in_shell_script_is_refused(line: str, remedy: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_command(shlex.split(line), "node")
    assert refused.value.remedy == remedy


@pytest.mark.parametrize("command", ["bash run.sh", "sh -e ./run.sh a b", "env A=1 bash -x run.sh", "./run.sh"])
def test_launcher_in_script_file_is_refused(command: str, workdir: Path) -> None:
    (workdir / "run.sh").write_text("#!/usr/bin/env bash\ntorchrun --nproc_per_node 2 who.py --lr 1\n")
    with pytest.raises(UsageError) as refused:
        check_command(shlex.split(command), "node")
    assert "run.sh, line 2, runs torchrun" in refused.value.what
    assert str(refused.value.remedy).endswith(
        "run.sh, use: python who.py --lr 1, and pass --processes-per-node 2 to llmtrain node"
    )


@pytest.mark.parametrize(("script", "line"), CERTAIN.items())
def test_certain_launcher_in_script_is_refused(script: str, line: int, workdir: Path) -> None:
    (workdir / "run.sh").write_text(script)
    with pytest.raises(UsageError) as refused:
        check_command(["bash", "run.sh"], "node")
    assert f"run.sh, line {line}, runs" in refused.value.what


@pytest.mark.parametrize("script", UNCERTAIN)
def test_possible_launcher_in_script_is_a_warning(script: str, workdir: Path) -> None:
    (workdir / "run.sh").write_text(script)
    warnings = check_command(["bash", "run.sh"], "node")
    assert len(warnings) == 1
    assert "may run torchrun" in warnings[0]


@pytest.mark.parametrize("script", HARMLESS)
def test_script_without_launcher_is_accepted(script: str, workdir: Path) -> None:
    (workdir / "run.sh").write_text(script)
    assert check_command(["bash", "run.sh"], "node") == []


def test_scripts_of_scripts_and_arguments_are_followed(workdir: Path) -> None:
    (workdir / "bin").mkdir()
    (workdir / "bin/outer.sh").write_text('DIR="$(cd "$(dirname "$0")" && pwd)"\nbash "$DIR/inner.sh" a\n')
    (workdir / "bin/inner.sh").write_text("mpirun python who.py\n")
    (workdir / "entrypoint.sh").write_text('set -e\nexec "$@"\n')
    (workdir / "loop.sh").write_text("bash loop.sh\n")
    with pytest.raises(UsageError, match=r"bin/inner\.sh, line 1, runs mpirun"):
        check_command(["bash", "bin/outer.sh"], "node")
    with pytest.raises(UsageError, match="runs torchrun"):
        check_command(["bash", "entrypoint.sh", "torchrun", "who.py"], "node")
    assert check_command(["bash", "entrypoint.sh", "python", "who.py"], "node") == []
    assert check_command(["bash", "loop.sh"], "node") == []


@pytest.mark.parametrize("command", ["bash /app/run.sh", "/app/run.sh", "bash -e run.sh", "bash -c 'sh /app/run.sh x'"])
def test_script_that_cannot_be_read_is_a_warning(command: str, workdir: Path) -> None:  # noqa: ARG001 (empty)
    warnings = check_command(shlex.split(command), "launch")
    assert len(warnings) == 1
    assert "run.sh cannot be read here" in warnings[0]


@pytest.mark.parametrize("command", ["/opt/conda/bin/python x.py", "/app/train x.py", "python /app/x.py"])
def test_program_that_cannot_be_read_is_accepted(command: str) -> None:
    assert check_command(shlex.split(command), "launch") == []


def test_binary_file_is_not_a_script(workdir: Path) -> None:
    (workdir / "run.sh").write_bytes(b"\0torchrun x\n")
    assert check_command(["bash", "run.sh"], "node") == []


@pytest.mark.parametrize("line", ["''", "' '"])
def test_empty_command_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        check_command(shlex.split(line), "node")


@pytest.mark.parametrize("line", FINE)
def test_other_commands_are_accepted(line: str) -> None:
    check_command(shlex.split(line), "node")


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
    ("words", "suggested"),
    [
        ("node --processes-per-node 2 --", "node --processes-per-node 2 -- python who.py"),
        ("node --nproc_per_node 2 --nnodes=1 --", "node --nodes 1 --processes-per-node 2 -- python who.py"),
        (
            "launch --dry-run --image x --launcher torchrun --set run.notes=DB_PASS=hunter2 --",
            "launch --set 'run.notes=DB_PASS=***' --nodes 2 --processes-per-node 4 --image x --dry-run "
            "--launcher torchrun",
        ),
        (
            "launch -c o.yaml --name ab --nodes=3 --dry-run=server --",
            "launch --config o.yaml --name ab --nodes 3 --dry-run=server --processes-per-node 4 -- python who.py",
        ),
    ],
)
def test_suggested_line_keeps_options(cli: Callable[..., Any], words: str, suggested: str, workdir: Path) -> None:
    (workdir / "o.yaml").write_text("launch: {image: x}\n")
    done = cli(*words.split(), "torchrun", "--nnodes=2", "--nproc_per_node", "4", "who.py")
    assert done.code == 64
    assert set(suggested.split()) <= set(done.err.split())
    assert "hunter2" not in done.err


def test_launch_refuses_launcher_in_shipped_script(cli: Callable[..., Any], workdir: Path) -> None:
    (workdir / "code").mkdir()
    (workdir / "code/model.py").write_text("")
    (workdir / "code/run.sh").write_text("torchrun who.py\n")
    launch = ("launch", "--dry-run", "--image", "x/y:1", "--with-code", "code", "--")
    shipped = cli(*launch, "bash", "/code/run.sh")
    assert shipped.code == 64
    assert "In /code/run.sh, use: python who.py" in shipped.err
    local = cli(*launch, "bash", "code/run.sh")
    assert local.code == 64
    missing = cli(*launch, "bash", "/code/other.sh")
    assert missing.code == 0
    assert "/code/other.sh cannot be read here" in missing.err


def test_node_refuses_script_with_launcher_and_runs_one_without(workdir: Path) -> None:
    """The N5 of the audit: this printed `RANK 0 of 1` twice and exited with 0."""
    (workdir / "who.py").write_text("import os\nprint('RANK', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    (workdir / "run.sh").write_text("exec torchrun who.py\n")
    node = [sys.executable, "-m", "llmtrain", "node"]
    done = subprocess.run([*node, "--processes-per-node", "2", "--", "bash", "run.sh"], capture_output=True, text=True)
    assert done.returncode == 64
    assert "RANK" not in done.stdout
    (workdir / "run.sh").write_text("exec ${LAUNCHER:-torchrun} who.py\n")
    environment = {**os.environ, "LAUNCHER": sys.executable}
    done = subprocess.run([*node, "--", "bash", "run.sh"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "RANK 0 of 1\n")
    assert "[DDP] warning: run.sh, line 1, may run torchrun" in done.stderr

"""What a launch does about memory: the check of plan/, and launch.resources.memory `auto`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import load_config
from llmtrain.errors import UsageError
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_memory import check_memory
from llmtrain.launch.pod_task import PodTask
from llmtrain.plan.launch_target import launch_target
from llmtrain.plan.plan import Verdict

Cli = Callable[..., Any]
T4 = "launch.node_selector={nvidia.com/gpu.product: Tesla-T4}"
AUTO = "launch.resources.memory=auto"


def make(preset: str, *sets: str, task: PodTask = PodTask()) -> JobPlan:  # noqa: B008 (frozen)
    return plan_job(
        load_config(preset, ["output.run_id=demo", "launch.image=me/train:1", *sets], for_launch=True), task
    )


def verdict(plan: JobPlan) -> Verdict | None:
    check = check_memory(plan)
    return None if check is None else check.verdict


@pytest.mark.parametrize(
    ("labels", "gpu"),
    [
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "h100-80g"),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-NVL"}, "h100-94g"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}, "a100-40g"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}, "a100-80g"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, None),
        ({"nvidia.com/gpu.product": "NVIDIA-L4-SHARED"}, None),
        ({"nvidia.com/gpu.product": "NVIDIA-X1"}, None),
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}, "t4-16g"),
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, "a100-40g"),
        ({"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}, "h100-80g"),
        ({"karpenter.k8s.aws/instance-gpu-name": "l40s"}, "l40s-48g"),
        ({"karpenter.k8s.aws/instance-gpu-name": "a100"}, None),
        ({"gpu.nvidia.com/class": "H100_NVLINK_80GB"}, "h100-80g"),
        ({"node.kubernetes.io/instance-type": "p5.48xlarge"}, "h100-80g"),
        ({"node.kubernetes.io/instance-type": "p5en.48xlarge"}, "h200-141g"),
        ({"node.kubernetes.io/instance-type": "g6e.xlarge"}, "l40s-48g"),
        ({"node.kubernetes.io/instance-type": "Standard_NV36ads_A10_v5"}, None),
        ({"node.kubernetes.io/instance-type": "m5.large"}, None),
        ({}, None),
    ],
)
def test_gpu_of_the_node_selector(labels: dict[str, str], gpu: str | None) -> None:
    config = load_config("gpt2_124m", [f"launch.node_selector={json.dumps(labels)}"], for_launch=True)
    found = launch_target(config).gpu
    assert (found.name if found else None) == gpu


def test_part_of_a_gpu_is_not_the_gpu() -> None:
    config = load_config("gpt2_124m", [T4, "launch.resources.gpu_resource=nvidia.com/mig-1g.5gb"], for_launch=True)
    assert launch_target(config).memory_bytes is None


def test_verdict_of_a_launch() -> None:
    h100 = "launch.node_selector={nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}"
    assert verdict(make("gpt2_124m", T4)) is Verdict.DOES_NOT_FIT
    assert verdict(make("gpt2_124m", h100)) is Verdict.FITS
    assert verdict(make("gpt2_124m")) is Verdict.UNKNOWN
    assert verdict(make("gpt_stdlib")) is Verdict.FITS
    assert verdict(make("gpt_wikitext", "launch.resources={memory: 1Gi, shm_size: 64Mi}")) is Verdict.DOES_NOT_FIT


@pytest.mark.parametrize("mode", ["smoke", "doctor", "hold", "command"])
def test_only_training_is_checked(mode: Any) -> None:
    command = ("python", "x.py") if mode == "command" else ()
    assert verdict(make("gpt2_124m", T4, task=PodTask(mode, command))) is None


def test_launch_warns_and_strict_refuses(cli: Cli) -> None:
    launch = ("launch", "--config", "gpt2_124m", "--image", "me/train:1", "--dry-run")
    done = cli(*launch, "--set", T4)
    assert done.code == 0
    assert "--gpu t4-16g --find" in done.err
    assert cli(*launch, "--set", T4, "--strict").code == 64
    plain, strict = cli(*launch), cli(*launch, "--strict")
    assert (plain.code, strict.code) == (0, 0)
    assert plain.err != strict.err  # that it is not known is only said then


def memory_of(plan: JobPlan) -> str:
    (job,) = [each for each in render(plan) if each["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    resources = container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    return str(resources["limits"]["memory"])


def test_memory_auto_is_a_number_everywhere() -> None:
    plan = make("gpt2_124m", AUTO)
    memory = memory_of(plan)
    assert memory == "19Gi"  # a process: libraries and a copy of the checkpoint; and 16 Gi of shared memory
    assert plan.launch.resources.memory == plan.config.launch.resources.memory == memory
    assert "memory: auto" not in plan.config_text


def test_memory_auto_counts_processes_and_workers() -> None:
    eight = ["launch.processes_per_node=8", "launch.resources.gpus=8"]
    assert memory_of(make("gpt2_124m", AUTO, *eight)) == "39Gi"
    assert memory_of(make("gpt2_124m", AUTO, *eight, "data.num_workers=4")) == "54Gi"


def test_memory_auto_on_a_cpu_is_the_peak_with_a_margin() -> None:
    plan = make("gpt_wikitext", AUTO)
    assert memory_of(plan) == "3Gi"  # 1.4 Gi and a quarter, and 1 Gi of shared memory
    assert verdict(plan) is Verdict.FITS


@pytest.mark.parametrize(
    ("preset", "sets", "task"),
    [
        ("gpt_smoke", ("data.tokenizer=/nowhere",), PodTask()),
        ("gpt_smoke", ("trainer.micro_batch_size=2000000000",), PodTask()),
        ("lora_llama_1b", ("model.path=/models/on-the-cluster",), PodTask()),
        ("gpt2_124m", (), PodTask("command", ("python", "x.py"))),
    ],
)
def test_memory_auto_that_is_not_known_is_refused(preset: str, sets: tuple[str, ...], task: PodTask) -> None:
    with pytest.raises(UsageError, match=r"launch\.resources\.memory"):
        make(preset, AUTO, *sets, task=task)


SCRIPT = """
import contextlib, io, sys
from llmtrain.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    try:
        main(sys.argv[1:])
    except SystemExit as ended:
        assert ended.code == 0
assert "torch" not in sys.modules
"""


def test_check_does_not_import_torch(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--config", "lora_llama_1b", "--image", "me/train:1", "--set", f"model.path={tmp_path}", "--set", AUTO]
    command = [sys.executable, "-c", SCRIPT, "launch", "--dry-run", "--strict", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

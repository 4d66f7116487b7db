"""Where a planned run would train."""

import pytest
from tests.plan.plan_cases import GPT2, make_config

from llmtrain.config.schema import Config
from llmtrain.core.gpus import find_gpu
from llmtrain.errors import UsageError
from llmtrain.plan.choose_target import choose_target, parse_size

CONFIG = make_config(GPT2)
ON_CPU = make_config(GPT2, run={"device": "cpu"})
ON_GPU = make_config(GPT2, run={"device": "cuda"})
IN_PODS = make_config(GPT2, launch={"nodes": 2, "processes_per_node": 4, "resources": {"gpus": 4}})


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24 gb", 24 * 10**9),
        ("80Gi", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("1.5T", 15 * 10**11),
        ("512m", 512 * 10**6),
        ("1000000", 10**6),
    ],
)
def test_sizes_are_decimal_or_binary(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "0GB", "-1GB", "many", "24 XB", "1e9", "GB", "24GBGB", "iB", "nan", "24i", "9" * 400]
)
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_named_gpu_has_its_memory() -> None:
    gpu = find_gpu("h100-80g")
    target = choose_target(CONFIG, gpu=gpu.name)
    assert (target.device, target.gpu, target.memory_bytes) == ("cuda", gpu, gpu.memory_bytes)
    assert choose_target(CONFIG, gpu="h100-80g", memory="40GB").memory_bytes == 40 * 10**9


@pytest.mark.parametrize("name", ["h900", "h100", ""])
def test_unknown_gpu_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        choose_target(CONFIG, gpu=name)
    assert "h100-80g" in str(refused.value.remedy)


def test_memory_alone_is_that_of_a_gpu_that_is_not_known() -> None:
    target = choose_target(CONFIG, memory="24GB")
    assert (target.device, target.gpu, target.memory_bytes) == ("cuda", None, 24 * 10**9)


def test_cpu_has_the_memory_of_the_machine_or_the_given_one() -> None:
    assert choose_target(ON_CPU, memory="4GB").memory_bytes == 4 * 10**9
    here = choose_target(ON_CPU)
    assert here.device == "cpu"
    assert here.memory_bytes is not None
    assert choose_target(CONFIG).device == "cpu"  # auto, without a GPU


@pytest.mark.parametrize("config", [ON_GPU, IN_PODS])
def test_gpu_that_is_not_here_is_not_known(config: Config) -> None:
    target = choose_target(config)
    assert (target.device, target.gpu, target.memory_bytes) == ("cuda", None, None)


def test_processes_are_those_of_the_config_or_the_options() -> None:
    assert choose_target(IN_PODS).world_size == 8
    assert choose_target(IN_PODS, nodes=1, processes_per_node=2).world_size == 2

"""What the API server or the kubelet would refuse is refused before a run is submitted, with the accepted form."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from llmtrain.config.document import Document
from llmtrain.config.load import build_config, load_config
from llmtrain.errors import ConfigError

DIGEST = "sha256:" + "0123456789abcdef" * 4
REFUSED: list[tuple[str, object, str]] = [
    ("image", "a\nb", "[REGISTRY/]NAME"),
    ("image", "Llmtrain:1", "[REGISTRY/]NAME"),
    ("image", "registry.example.com/Team/x", "[REGISTRY/]NAME"),
    ("image", "a b", "[REGISTRY/]NAME"),
    ("image", " llmtrain", "[REGISTRY/]NAME"),
    ("image", "llmtrain:", "[REGISTRY/]NAME"),
    ("image", "llmtrain:1:2", "[REGISTRY/]NAME"),
    ("image", "https://registry.example.com/x", "[REGISTRY/]NAME"),
    ("image", "llmtrain@sha256:123", "[REGISTRY/]NAME"),
    ("image", "llmtrain\n", "[REGISTRY/]NAME"),
    ("node_selector", {"disk": "a b"}, "at most 63"),
    ("node_selector", {"disk": "x" * 64}, "at most 63"),
    ("node_selector", {"disk": "ssd\n"}, "at most 63"),
    ("node_selector", {"a b": "x"}, "example.com/disk"),
    ("node_selector", {"A.com/x": "x"}, "example.com/disk"),
    ("node_selector", {"a..b/x": "x"}, "example.com/disk"),
    ("resources.gpu_resource", "gpu", "DOMAIN/NAME"),
    ("resources.gpu_resource", "nvidia.com/gpu;x", "DOMAIN/NAME"),
    ("resources.extra", {"efa": "1"}, "DOMAIN/NAME"),
    ("resources.extra", {"rdma/ib": "500m"}, "whole number"),
    ("tolerations", [{"key": "a b", "operator": "Exists"}], "example.com/disk"),
    ("tolerations", [{"key": "gpu", "operator": "exists"}], "Exists"),
    ("tolerations", [{"key": "gpu", "operator": "Exists", "value": "x"}], "Equal"),
    ("tolerations", [{"key": "gpu", "value": "a b"}], "at most 63"),
    ("tolerations", [{"key": "gpu", "value": True}], "text"),
    ("tolerations", [{"key": "gpu", "operator": "Exists", "effect": "NoRun"}], "NoSchedule"),
    ("tolerations", [{"value": "x"}], "Exists"),
    ("tolerations", [{"key": "gpu", "tolerationSeconds": 5}], "NoExecute"),
    ("tolerations", [{"key": "gpu", "efect": "NoSchedule"}], "effect"),
    ("affinity", {"nodeAfinity": {}}, "nodeAffinity"),
    ("labels", {"a..b/x": "y"}, "example.com/disk"),
    ("annotations", {"a..b/x": "y"}, "example.com/disk"),
    ("priority_class", "a..b", "lowercase"),
    ("service_account", "a.-b", "lowercase"),
    ("runs_volume.claim", "a..b", "lowercase"),
    ("data_volume", {"claim": "x" * 64}, "lowercase"),
    ("image_pull_secrets", ["A_b"], "lowercase"),
    ("env_secrets", ["a b"], "lowercase"),
    ("hf_token_secret", {"name": "x", "key": ".."}, "token"),
    ("queue", "a." * 40 + "b", "63"),
    ("namespace", "a.b", "lowercase"),
]
ACCEPTED: list[tuple[str, object]] = [
    ("image", "llmtrain"),
    ("image", "llmtrain:latest"),
    ("image", "localhost:5000/a/b_c/d--e:V1.0_x"),
    ("image", f"registry.example.com:443/team/llmtrain:1.0@{DIGEST}"),
    ("image", f"llmtrain@{DIGEST}"),
    ("image", "[2001:db8::1]:5000/x:1"),
    ("image", "nvcr.io/nvidia/pytorch:25.01-py3"),
    ("image", "123456789012.dkr.ecr.eu-west-1.amazonaws.com/a:1"),
    ("node_selector", {"disk": "", "kubernetes.io/arch": "arm64", "a_B.c": "X-1"}),
    ("resources.gpu_resource", "nvidia.com/mig-1g.10gb"),
    ("resources.gpu_resource", "gpu.intel.com/i915"),
    ("resources.extra", {"rdma/ib": 1, "hugepages-2Mi": "512Mi", "vpc.amazonaws.com/efa": "4"}),
    ("tolerations", [{"operator": "Exists"}]),
    ("tolerations", [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]),
    ("tolerations", [{"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 60}]),
    ("affinity", {"podAntiAffinity": {}}),
    ("labels", {"example.com/team": "Research_1", "team": ""}),
    ("annotations", {"example.com/owner": "any text\nat all"}),
    ("env_secrets", ["s3-login", "a.b"]),
]


@pytest.mark.parametrize(("field", "value", "accepted"), REFUSED)
def test_what_kubernetes_refuses_is_refused(field: str, value: object, accepted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [f"launch.{field}={json.dumps(value)}"])
    assert re.search(rf"launch\.{field}", str(refused.value))
    assert accepted in str(refused.value)


@pytest.mark.parametrize(("field", "value"), ACCEPTED)
def test_what_kubernetes_accepts_is_accepted(field: str, value: object) -> None:
    load_config(None, [f"launch.{field}={json.dumps(value)}"])


def test_recorded_config_stays_readable() -> None:
    document = Document("the config of demo", {"launch": {"image": "a\nb"}})
    assert build_config(document, is_launched=True).launch.image == "a\nb"
    assert build_config(document, is_recorded=True).launch.image == "a\nb"


@pytest.mark.parametrize("words", ["launch --dry-run", "guard install", "fetch demo --claim runs"])
def test_image_option_is_checked(cli: Callable[..., Any], words: str) -> None:
    done = cli(*words.split(), "--image", "A B")
    assert done.code == 64
    assert "[REGISTRY/]NAME" in done.err

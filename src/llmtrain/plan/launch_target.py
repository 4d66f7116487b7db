"""The target of a plan for a launch: what the pods of the config have. Without torch, and whatever this machine has."""

import re

from llmtrain.config.kubernetes_types import AUTO, amount
from llmtrain.config.launch import LaunchSection
from llmtrain.config.schema import Config
from llmtrain.core.gpus import Gpu, find_gpu, gpu_of_device
from llmtrain.plan.cost import node_type_of
from llmtrain.plan.target import Target

WORKER_BYTES = 500 * 10**6
"""A process that reads data."""
PRODUCT_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/class",
)
"""Node labels with the name of the GPU: of NVIDIA's feature discovery, GKE, Karpenter and CoreWeave."""
PLAIN_A100 = ("nvidia-tesla-a100", "a100")
"""GKE's name of the A100 with 40 GB, and a name that does not say which of the two it is."""
INSTANCE_TYPES = (
    (r"p4d\.|a2-(high|mega)gpu-", "a100-40g"),
    (r"p4de\.|a2-ultragpu-|Standard_NC\d+ads_A100_|Standard_ND96amsr_A100_", "a100-80g"),
    (r"Standard_NC\d+ads_H100_|Standard_NC80adis_H100_", "h100-94g"),
    (r"p5\.|a3-(high|mega|edge)gpu-|Standard_ND96isr_H100_", "h100-80g"),
    (r"p5en?\.|a3-ultragpu-|Standard_ND96isr_H200_", "h200-141g"),
    (r"p6-b200\.|a4-highgpu-", "b200-180g"),
    (r"g4dn\.|Standard_NC\d+as_T4_", "t4-16g"),
    (r"g5\.", "a10-24g"),
    (r"g6\.|g2-standard-", "l4-24g"),
    (r"g6e\.", "l40s-48g"),
)
"""Instance types of AWS, Google Cloud and Azure with whole GPUs. The first that matches counts."""


def launch_target(config: Config) -> Target:
    launch = config.launch
    nodes = launch.node_range[1]
    if not uses_gpu(config):
        memory = launch.resources.memory
        limit = None if memory == AUTO else int(amount(memory)) - worker_bytes(config)
        return Target("cpu", limit, None, nodes, launch.processes_per_node)
    gpu = gpu_of_launch(launch)
    memory_bytes = gpu.memory_bytes if gpu else None
    return Target("cuda", memory_bytes, gpu, nodes, launch.processes_per_node)


def uses_gpu(config: Config) -> bool:
    """Whether the pods train on GPUs."""
    return config.run.device == "cuda" or (config.run.device == "auto" and config.launch.resources.gpus > 0)


def worker_bytes(config: Config) -> int:
    """Of all processes of a pod."""
    return WORKER_BYTES * config.data.num_workers * config.launch.processes_per_node


def gpu_of_launch(launch: LaunchSection) -> Gpu | None:
    """The GPU of the nodes that launch.node_selector selects; None if it is not known, or shared."""
    if launch.resources.gpu_resource != "nvidia.com/gpu":  # a part of a GPU, or of another vendor
        return None
    for label in PRODUCT_LABELS:
        product = launch.node_selector.get(label)
        if product is None:
            continue
        if product.lower() in PLAIN_A100:
            return find_gpu("a100-40g") if product.startswith("nvidia") else None
        name = re.sub(r"[-_]", " ", product.upper())
        if re.search(r"\b(MIG|SHARED)\b", name):
            return None
        return gpu_of_device(name)
    node_type = node_type_of(launch.node_selector) or ""
    for pattern, gpu_name in INSTANCE_TYPES:
        if re.match(pattern, node_type):
            return find_gpu(gpu_name)
    return None

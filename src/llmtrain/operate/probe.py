"""`llmtrain plan --probe --in-pod`: a few real steps in one pod, fetched so that plans use them like a local run."""

import secrets
from pathlib import Path
from typing import Any, TextIO

from llmtrain.config.launch import LaunchSection
from llmtrain.config.schema import Config
from llmtrain.core.gpus import gpu_of_device
from llmtrain.core.terminal import say
from llmtrain.errors import UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.code_bundle import CodeBundle
from llmtrain.launch.plan_job import plan_job
from llmtrain.operate.cluster_run import ClusterRun
from llmtrain.operate.start import start_run
from llmtrain.plan.history import PastRun, read_past_run
from llmtrain.plan.launch_target import launch_target
from llmtrain.plan.probe import NAME, probe_config
from llmtrain.plan.target import Target
from llmtrain.runs.directory import RunDirectory, new_run_id
from llmtrain.runs.state import RunState


def on_one_pod(launch: LaunchSection, processes_per_node: int | None, namespace: str) -> LaunchSection:
    """`namespace`: where the section names none."""
    values: dict[str, Any] = {"nodes": 1, "namespace": launch.namespace or namespace}
    if processes_per_node is not None:
        values["processes_per_node"] = processes_per_node
    return launch.model_copy(update=values)


def probe_in_pod(cluster: Cluster, config: Config, code: CodeBundle | None, out: TextIO) -> Target:
    """Train, fetch the result to output.root_dir, and remove the run from the cluster. Returns what it ran on."""
    if config.launch.runs_volume is None:
        raise UsageError(
            "--in-pod reads the results from the volume of the run, and launch.runs_volume is null.",
            remedy="Set launch.runs_volume, for example --set 'launch.runs_volume={size: 20Gi}'.",
        )
    probe = probe_config(config).with_values("output", run_id=new_run_id(NAME))
    plan = plan_job(probe, nonce=secrets.token_hex(3), code=code)
    start_run(cluster, plan, resume=False)
    run = ClusterRun.find(cluster, plan.run_id, plan.namespace)
    try:
        status = run.follow_launch(out, is_terminal=False)
    except KeyboardInterrupt:
        say(f"Run {plan.run_id} keeps running. Delete it: llmtrain delete {run.in_commands}", out)
        raise
    if status.state != RunState.FINISHED:
        raise run.end_error(status)
    fetched = run.fetch(config.output.root_dir, only="metrics")
    run.delete(data=True)
    return _device_of(read_past_run(RunDirectory(Path(fetched.path))), launch_target(config))


def _device_of(run: PastRun | None, target: Target) -> Target:
    """The target with the device of a probe, if the run says what it was."""
    if run is None:
        return target
    if not run.is_gpu:
        return Target("cpu", target.memory_bytes, None, 1, run.world_size, (run.device_name, run.threads))
    gpu = gpu_of_device(run.device_name)
    return Target("cuda", gpu.memory_bytes if gpu else target.memory_bytes, gpu, 1, run.world_size)

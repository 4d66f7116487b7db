"""The launch section: validation."""

import pytest

from llmtrain.config.document import parse_document
from llmtrain.config.kubernetes_types import amount
from llmtrain.config.load import build_config
from llmtrain.config.schema import Config, may_change
from llmtrain.errors import ConfigError


def load(*sets: str, text: str = "") -> Config:
    return build_config(parse_document(text, "test.yaml"), [f"launch.{line}" for line in sets])


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["kind=cron_job"], "Known: indexed_job, job_set, pytorch_job, stateful_set, train_job"),
        (["nodes=0"], "launch.nodes"),
        (["nodes=true"], "launch.nodes"),
        (["nodes=-2"], "launch.nodes"),
        (["nodes=4:2"], "MIN <= MAX"),
        (["nodes=0:2"], "launch.nodes"),
        (["namespace=Not_one"], "launch.namespace"),
        (["resources.cpu=many"], "launch.resources.cpu must be a quantity"),
        (["resources.cpu=-1"], "launch.resources.cpu must be a quantity"),
        (["resources.cpu=0"], "launch.resources.cpu"),
        (["resources.memory=4GB"], "launch.resources.memory must be a quantity"),
        (["resources.memory=1Gi", "resources.shm_size=1024Mi"], "launch.resources.shm_size"),
        (["resources.gpus=8"], "launch.processes_per_node"),
        (["resources.cores=8"], "Known: cpu, ephemeral_storage, extra, gpu_resource, gpus, memory"),
        (["nodes=2", "runs_volume.access_mode=ReadWriteOnce"], "launch.nodes is 2"),
        (["nodes=1:3", "runs_volume.access_mode=ReadWriteOncePod"], "launch.nodes is 1:3"),
        (["runs_volume.access_mode=ReadOnlyMany"], "ReadOnlyMany"),
        (["runs_volume.size=null"], "neither claim nor size"),
        (["data_volume.size=5Gi"], "launch.data_volume.read_only"),
        (["data_volume.claim=a", "data_volume.mount_path=/tmp"], "by /tmp"),
        (["data_volume.claim=a", "data_volume.mount_path=relative"], "launch.data_volume.mount_path"),
        (["data_volume.claim=a", "models_volume.claim=a", "models_volume.mount_path=/data/x"], "launch.data_volume"),
        (["env.HF_TOKEN=x"], "looks like a secret"),
        (["env.WANDB_API_KEY=x"], "looks like a secret"),
        (["env.PASS=hunter2"], "looks like a secret"),
        (["env.MYPASS=hunter2"], "looks like a secret"),
        (["env.DBPWD=hunter2"], "looks like a secret"),
        (["env.AUTH=hunter2"], "looks like a secret"),
        (["env.HOOK=https://hooks.slack.com/services/T0000/B0000/abcdefgh"], "looks like a secret"),
        (["env.NOTE=hf_abcdefghijklmnopqrstuv"], "looks like a secret"),
        (["env.MIRROR=https://me:secret@host"], "looks like a secret"),
        (["kind=stateful_set", "ttl_sec=5"], "launch.ttl_sec"),
        (["kind=stateful_set", "active_deadline_sec=5"], "launch.active_deadline_sec"),
        (["image.tag=1"], "launch.image is not a section"),
        (["kind=job"], "Did you mean 'indexed_job'?"),
        (["kind=PyTorchJob"], "Did you mean 'pytorch_job'?"),
        (["labels={app: mine}"], "launch.labels.app"),
        (["labels={llmtrain.dev/run: other}"], "launch.labels.llmtrain.dev/run"),
        (["labels={team: two words}"], "launch.labels: values must have"),
        (["labels={-team: x}"], "launch.labels: keys must be"),
        (["annotations={llmtrain/guard-told: x}"], "launch.annotations"),
        (["run_as_user=0"], "launch.security"),
        (["capabilities=[ipc_lock]"], "launch.capabilities"),
        (["topology_spread=[{maxSkew: 1}]"], "launch.topology_spread"),
        (["resources.extra={memory: 5Gi}"], "launch.resources.extra.memory"),
        (["resources.extra={rdma/ib: some}"], "must be a quantity"),
        (["extra_volumes=[{name: a, emptyDir: {}}]"], "not in launch.extra_mounts"),
        (["extra_mounts=[{name: a, mountPath: /a}]"], "not one of launch.extra_volumes"),
        (["pod_patch={containers: []}"], "Known: metadata, spec"),
        (["pod_patch={metadata: {annotations: {since: 2026-11-17}}}"], "launch.pod_patch.metadata.annotations.since"),
        (["pod_patch={spec: {tolerations: [{value: !!binary aGk=}]}}"], "launch.pod_patch.spec.tolerations[0].value"),
        (["pod_patch={spec: {nodeSelector: !!set {a}}}"], "launch.pod_patch.spec.nodeSelector"),
        (["pod_patch={spec: {priority: .nan}}"], "launch.pod_patch.spec.priority"),
        (["pod_patch={spec: {priority: -.inf}}"], "launch.pod_patch.spec.priority"),
        (["pod_patch={spec: {nodeSelector: {3: x}}}"], "launch.pod_patch.spec.nodeSelector"),
        (["pod_patch={spec: {containers: [{name: trainer, env: [{name: MY_TOKEN, value: q8Zr4Lw2}]}]}}"], "secret"),
    ],
)
def test_invalid_launch_section_is_refused(sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*sets)
    assert len(caught.value.problems) == 1, caught.value
    assert words in caught.value.problems[0]


def test_overrides_of_subsections_and_mappings() -> None:
    launch = load("resources.cpu=2", "runs_volume.claim=x", "env.NCCL_DEBUG=INFO", "env.N=3", "nodes=2:4").launch
    assert launch.runs_volume
    assert (launch.resources.cpu, launch.runs_volume.claim, launch.node_range) == ("2", "x", (2, 4))
    assert launch.env == {"NCCL_DEBUG": "INFO", "N": "3"}
    assert load("env.TOKENIZERS_PARALLELISM=x").launch.env
    plain = ("TOKEN_DIM=64", "NUM_PASS=2", "ANSWER_KEY=best_answer", "BATCH_KEY=b1", "MODEL_KEY=m1", "EVAL_KEY=e1")
    assert len(load(*(f"env.{each}" for each in plain)).launch.env) == len(plain)


def test_document_with_subsections_and_mappings() -> None:
    text = "launch:\n  nodes: '2:4'\n  resources: {cpu: 0.5, memory: 8Gi}\n  tolerations: [{operator: Exists}]\n"
    launch = load(text=text).launch
    assert (launch.node_range, launch.resources.cpu, launch.tolerations) == ((2, 4), "0.5", [{"operator": "Exists"}])


def test_problem_in_a_subsection_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load(text="launch:\n  resources:\n    cpu: many\n")
    assert caught.value.problems[0].startswith("line 3: launch.resources.cpu")


def test_one_pod_may_use_any_access_mode() -> None:
    assert load("runs_volume.access_mode=ReadWriteOnce").launch.volumes.keys() == {"runs"}


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2), ("500m", 0.5), ("1.5Gi", 1.5 * 2**30), ("3k", 3000), ("1Ti", 2**40)]
)
def test_amount_of_a_quantity(text: str, value: float) -> None:
    assert float(amount(text)) == value


def test_launch_section_may_change_on_resume() -> None:
    assert may_change("launch.nodes")
    assert may_change("launch")  # a run of an earlier version has no such section


@pytest.mark.parametrize("volume", ["{name: runs, emptyDir: {}}", "{name: A, emptyDir: {}}", "{name: a}", "{nfs: {}}"])
def test_invalid_extra_volume_is_refused(volume: str) -> None:
    with pytest.raises(ConfigError, match="extra_volumes"):
        load(f"extra_volumes=[{volume}]", "extra_mounts=[{name: a, mountPath: /a}]")


@pytest.mark.parametrize("path", ["/config", "/config/x", "/tmp", "/cache/", "/dev/shm", "relative", "null"])
def test_extra_mount_on_a_used_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="extra_mounts"):
        load("extra_volumes=[{name: a, emptyDir: {}}]", f"extra_mounts=[{{name: a, mountPath: {path}}}]")

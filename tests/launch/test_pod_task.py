"""What pods run, what they are given for it, and that the cluster's record of a run is the whole run."""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from llmtrain import registry
from llmtrain.config.load import load_config
from llmtrain.errors import UsageError
from llmtrain.hub.needs import HubNeeds, hub_needs, needed_datasets
from llmtrain.kubernetes.labels import belongs_to_run
from llmtrain.launch.job import JobPlan
from llmtrain.launch.kinds.base import find_kind
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import PodTask
from llmtrain.launch.record import list_records, read_record
from llmtrain.tracking import train_job

Cli = Callable[..., Any]
Object = dict[str, Any]
KINDS = sorted(registry.KINDS)
INDEX = {
    "indexed_job": "JOB_COMPLETION_INDEX",
    "job_set": "JOB_COMPLETION_INDEX",
    "pytorch_job": "POD_INDEX",
    "stateful_set": "POD_INDEX",
    "train_job": "PET_NODE_RANK",
}
# What the platform itself writes into a pod's list of variables (kubernetes-facts).
BY_PLATFORM = {
    "indexed_job": {"JOB_COMPLETION_INDEX"},
    "job_set": {"JOB_COMPLETION_INDEX"},
    "pytorch_job": {"PET_NNODES", "PET_NPROC_PER_NODE"},
    "pytorch_job with master": {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK"},
    "stateful_set": set(),
    "train_job": {"JOB_COMPLETION_INDEX", "PET_NODE_RANK"},
}
OWN = ("python", "train.py", "--lr", "1e-3", "a b", "")
HUB_MODEL = ("model.name=hf_causal_lm", "model.path=somebody/tiny")


@lru_cache
def make(kind: str, *sets: str, task: PodTask | None = None, preset: str = "ddp_smoke") -> JobPlan:
    base = ["output.run_id=demo", "launch.namespace=team", f"launch.kind={kind}", "trainer.grad_accum_steps=8"]
    base += ["launch.image=me/train:1"]
    return plan_job(load_config(preset, [*base, *sets]), task or PodTask())


def pod(plan: JobPlan) -> Object:
    """The spec of the run's pods; all templates of a kind have the same containers."""
    found: list[Object] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if "containers" in value:
                found.append(value)
            for inner in value.values():
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(render(plan))
    assert found
    assert all(spec["containers"] == found[0]["containers"] for spec in found)
    return found[0]


def env(container: Object) -> dict[str, Any]:
    names = [row["name"] for row in container["env"]]
    assert len(names) == len(set(names)), "the last of two would win, or the first"
    return {row["name"]: row.get("value", row.get("valueFrom")) for row in container["env"]}


def expand(word: str, variables: dict[str, str]) -> str:
    """As the kubelet does with a command: $$ is a dollar, $(NAME) a variable where there is one of that name."""

    def put(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", put, word)


def refuse_torchrun(kind: str) -> None:
    """A StatefulSet would restart it forever, so launch refuses it."""
    if kind == "stateful_set":
        with pytest.raises(UsageError, match="StatefulSet"):
            make(kind, task=PodTask("command", OWN, "torchrun"))
        pytest.skip("launch refuses it")


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    @pytest.mark.parametrize("mode", ["smoke", "doctor"])
    def test_smoke_and_doctor_use_the_same_pods(self, kind: str, mode: str) -> None:
        train, other = make(kind, "launch.nodes=2"), make(kind, "launch.nodes=2", task=PodTask(mode))
        assert other.command == [*train.command[:6], f"--{mode}", *train.command[6:]]
        (container,), (trained,) = pod(other)["containers"], pod(train)["containers"]
        assert container["command"] == other.command
        assert {**container, "command": 0} == {**trained, "command": 0}

    def test_user_command(self, kind: str) -> None:
        plan = make(kind, "launch.nodes=2", "launch.processes_per_node=2", task=PodTask("command", OWN))
        assert plan.command[:4] == ["python", "-m", "llmtrain", "node"]
        assert plan.command[-len(OWN) - 1 :] == ["--", *OWN]
        assert "--config" not in plan.command
        assert plan.command[plan.command.index("--nodes") + 1] == "2"
        assert plan.egress_ports == [443], "its connections are unknown"
        assert "initContainers" not in pod(plan)

    @pytest.mark.parametrize(
        "task", [PodTask("command", OWN), PodTask("smoke"), PodTask("doctor")], ids=lambda task: task.mode
    )
    def test_pods_without_runs_volume(self, kind: str, task: PodTask) -> None:
        plan = make(kind, "launch.nodes=2", "launch.runs_volume=null", task=task)
        manifests = render(plan)
        assert "PersistentVolumeClaim" not in [manifest["kind"] for manifest in manifests]
        assert "runs" not in [volume["name"] for volume in pod(plan)["volumes"]]
        (container,) = pod(plan)["containers"]
        assert "/out" not in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert not {"LLMTRAIN_RUN_DIR", "LLMTRAIN_TOKEN_CACHE"} & env(container).keys()
        assert not any("ReadWriteMany" in warning for warning in plan.warnings)
        is_unlimited = kind in ("pytorch_job", "stateful_set") and task.mode == "command"
        assert any("without limit" in warning for warning in plan.warnings) == is_unlimited
        record = read_record({**manifests[0], "metadata": {**manifests[0]["metadata"], "creationTimestamp": ""}})
        assert (record.runs_claim, record.has_files) == (None, False)
        assert record.manifests == manifests

    @pytest.mark.parametrize(("mode", "lost"), [("train", "checkpoints"), ("hold", "files")])
    @pytest.mark.parametrize("nodes", [1, 2])
    def test_refusal_without_runs_volume_says_what_is_lost(self, kind: str, mode: Any, lost: str, nodes: int) -> None:
        with pytest.raises(UsageError, match=rf"launch\.runs_volume is null, but .*{lost}"):
            make(kind, f"launch.nodes={nodes}", "launch.runs_volume=null", task=PodTask(mode))

    def test_user_command_allows_any_number_of_processes(self, kind: str) -> None:
        sets = ("launch.nodes=3", "distributed.strategy=none", "distributed.reproducible_reduce=false")
        with pytest.raises(UsageError):
            make(kind, *sets)
        for task in (PodTask("command", OWN), PodTask("smoke"), PodTask("doctor")):
            assert make(kind, *sets, task=task).nodes == 3

    def test_torchrun_command(self, kind: str) -> None:
        refuse_torchrun(kind)
        sets = ("launch.nodes=2", "launch.processes_per_node=4")
        plan = make(kind, *sets, task=PodTask("command", OWN, "torchrun"))
        assert plan.command == [
            "torchrun",
            "--nnodes=2",
            "--nproc-per-node=4",
            f"--node-rank=$({INDEX[kind]})",
            f"--master-addr={plan.master_addr}",
            "--master-port=29500",
            "--no-python",
            *OWN,
        ]
        (container,) = pod(plan)["containers"]
        assert container["command"] == plan.command

    @pytest.mark.parametrize("has_master", [False, True])
    def test_index_variable_is_set_in_the_container(self, kind: str, has_master: bool) -> None:
        """Kubernetes puts in only variables that the container's own list has."""
        refuse_torchrun(kind)
        sets = ("launch.nodes=2", f"launch.pytorch_master={str(has_master).lower()}")
        plan = make(kind, *sets, task=PodTask("command", OWN, "torchrun"))
        (container,) = pod(plan)["containers"]
        name = find_kind(plan.launch).index_variable
        is_with_master = kind == "pytorch_job" and has_master
        by_platform = BY_PLATFORM["pytorch_job with master" if is_with_master else kind]
        assert name in set(env(container)) | by_platform
        words = [expand(word, {name: "1"}) for word in container["command"]]
        assert "--node-rank=1" in words

    def test_elastic_torchrun_uses_c10d(self, kind: str) -> None:
        refuse_torchrun(kind)
        plan = make(kind, "launch.nodes=1:2", task=PodTask("command", OWN, "torchrun"))
        assert "--nnodes=1:2" in plan.command
        assert "--rdzv-backend=c10d" in plan.command
        assert f"--rdzv-endpoint={plan.master_addr}:29500" in plan.command
        assert "--rdzv-id=demo" in plan.command
        assert "$(" not in " ".join(plan.command)

    @pytest.mark.parametrize(
        ("sets", "task"),
        [
            ((), PodTask()),
            (("launch.nodes=2", "launch.processes_per_node=2", "launch.pod_disruption_budget=true"), PodTask()),
            (("launch.nodes=1:2", "launch.runs_volume.claim=old", "launch.queue=team-a"), PodTask()),
            (("launch.nodes=2",), PodTask("smoke")),
            (("launch.nodes=2",), PodTask("doctor")),
            (("launch.nodes=1:4",), PodTask("command", (*OWN, "größe 学", "$(X) 'q' \"p\"\n"))),
            (("launch.nodes=3",), PodTask("command", OWN, "torchrun")),
            (("tracking.mlflow.enabled=true", "tracking.mlflow.tracking_uri=http://mlflow.tools:5000"), PodTask()),
            ((*HUB_MODEL, "launch.models_volume.size=5Gi", "launch.models_volume.read_only=false"), PodTask()),
            (
                ('launch.env={A: "1e3", B: "", C: "yes: no"}', "launch.tolerations=[{key: x, operator: Exists}]"),
                PodTask(),
            ),
        ],
        ids=["one", "four", "elastic", "smoke", "doctor", "own", "torchrun", "mlflow", "hub", "env"],
    )
    def test_record_restores_the_plan(self, kind: str, sets: tuple[str, ...], task: PodTask) -> None:
        number = 3
        if task.launcher == "torchrun":
            refuse_torchrun(kind)
        made = make(kind, *sets, task=task)
        plan = plan_job(load_again(made), task, number)
        assert plan.config_text == made.config_text
        manifests = render(plan)
        meta = {**manifests[0]["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}
        record = read_record({**manifests[0], "metadata": meta})
        assert (record.run_id, record.namespace, record.task, record.number) == ("demo", "team", task, number)
        assert (record.launched_at, record.stopped_at) == ("2026-01-01T00:00:00Z", None)
        assert record.plan == plan
        assert render(record.plan) == manifests
        assert type(record.kind) is type(find_kind(plan.launch))
        assert record.runs_claim == plan.claim("runs")
        assert record.selector == plan.selector

    def test_launch_id_is_in_the_environment(self, kind: str) -> None:
        plan = plan_job(load_again(make(kind)), PodTask(), 7)
        assert env(pod(plan)["containers"][0])["LLMTRAIN_LAUNCH"] == "7"
        with pytest.raises(UsageError, match="LLMTRAIN_LAUNCH"):
            make(kind, "launch.env={LLMTRAIN_LAUNCH: 2}")


@pytest.mark.parametrize("launcher", ["llmtrain", "torchrun"])
@pytest.mark.parametrize(
    "word",
    [
        "plain",
        "echo $$",
        "$(HOME)/x",
        "$(date) $HOME ${HOME}",
    ],
)
def test_arguments_of_a_user_command_are_unchanged(word: str, launcher: Any) -> None:
    plan = make("indexed_job", task=PodTask("command", ("bash", "-c", word), launcher))
    (container,) = pod(plan)["containers"]
    given = {name: value for name, value in env(container).items() if isinstance(value, str)}
    assert [expand(part, given) for part in container["command"]][-3:] == ["bash", "-c", word]


def test_stateful_set_user_command_idles_at_the_end() -> None:
    """Only `llmtrain node` waits there when all is done: with torchrun it is to be refused, or at least said."""
    try:
        plan = make("stateful_set", task=PodTask("command", OWN, "torchrun"))
    except UsageError:
        return
    assert plan.warnings


def load_again(plan: JobPlan) -> Any:
    from llmtrain.config.document import parse_document
    from llmtrain.config.load import build_config

    return build_config(parse_document(plan.config_text, "again"))


def test_output_run_id_names_the_run() -> None:
    plan = plan_job(
        load_config("ddp_smoke", ["output.run_id=mine", "launch.namespace=team", "launch.image=me/train:1"])
    )
    manifests = render(plan)
    assert render(read_record(manifests[0]).plan) == manifests


@pytest.mark.parametrize("launcher", ["llmtrain", "torchrun"])
def test_restart_policy_of_a_pytorch_job(launcher: Any) -> None:
    """torchrun ends with 1 whatever its processes ended with; `llmtrain node` says which codes are worth a retry."""
    for task in (PodTask("command", OWN, launcher), PodTask()):
        for master in ("true", "false"):
            plan = make("pytorch_job", "launch.nodes=2", f"launch.pytorch_master={master}", task=task)
            roles = render(plan)[-1]["spec"]["pytorchReplicaSpecs"]
            policies = {spec["restartPolicy"] for spec in roles.values()}
            assert policies == {"OnFailure" if task.launcher == "torchrun" else "ExitCode"}


class TestOptions:
    DEMO = ("launch", "--dry-run", "--config", "ddp_smoke", "--name", "demo", "--image", "me/train:1", "--json")

    def command(self, cli: Cli, *words: str) -> list[str]:
        done = cli(*self.DEMO, *words)
        assert done.code == 0, done.err
        containers = done.json["manifests"][-1]["spec"]["template"]["spec"]["containers"]
        return list(containers[0]["command"])

    def test_each_mode_has_its_command(self, cli: Cli) -> None:
        assert "--smoke" in self.command(cli, "--smoke")
        assert "--doctor" in self.command(cli, "--doctor")
        assert self.command(cli, "--", *OWN)[-len(OWN) :] == list(OWN)
        torchrun = self.command(cli, "--nodes", "2", "--launcher", "torchrun", "--", "python", "--nodes", "9")
        assert torchrun[:2] == ["torchrun", "--nnodes=2"]
        assert torchrun[-3:] == ["python", "--nodes", "9"]

    @pytest.mark.parametrize(
        "word", ["--json", "--help", "--smoke", "-o", "--name=x", "--dry-run", "--dry-run=server", "--dry-run=client"]
    )
    def test_options_after_the_command_belong_to_it(self, cli: Cli, word: str) -> None:
        assert self.command(cli, "--", "python", "train.py", word)[-3:] == ["python", "train.py", word]

    @pytest.mark.parametrize(
        ("words", "option"),
        [
            (("--smoke", "--doctor"), "--doctor"),
            (("--smoke", "--", "python"), "--smoke"),
            (("--doctor", "--", "python"), "--doctor"),
            (("--launcher", "torchrun"), "--launcher torchrun"),
            (("--launcher", "torchrun", "--smoke"), "--launcher torchrun"),
            (("--launcher", "mpirun", "--", "python"), "'mpirun'"),
        ],
    )
    def test_conflicting_options_are_refused(self, cli: Cli, words: tuple[str, ...], option: str) -> None:
        done = cli("launch", "--dry-run", "--name", "demo", *words)
        assert done.code == 64
        assert option in done.err
        assert done.out == ""

    def test_output_needs_dry_run(self, cli: Cli) -> None:
        for words in (("-o", "x"), ("-o", "x", "--dry-run=server")):
            done = cli("launch", "--name", "demo", *words)
            assert done.code == 64
            assert "--dry-run" in done.err

    def test_user_command_needs_no_config(self, cli: Cli) -> None:
        done = cli("launch", "--dry-run", "--nodes", "2", "--image", "me/train:1", "--json", "--", "python", "train.py")
        assert done.code == 0, done.err
        (container,) = done.json["manifests"][-1]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "me/train:1"


NOTHING_TO_FETCH = {
    "made-up data": (),
    "a path": (*HUB_MODEL[:1], "model.path=/models/tiny"),
    "local files only": (*HUB_MODEL, "model.local_files_only=true"),
    "offline": (*HUB_MODEL, "launch.env={HF_HUB_OFFLINE: 1}"),
    "data of a volume": ("data.name=hf_text", "data.dataset_name=/data/wiki", "data.tokenizer=byte"),
}
TO_FETCH = {
    "model": HUB_MODEL,
    "tokenizer": (HUB_MODEL[0], "model.path=/models/tiny", "model.tokenizer_path=somebody/words"),
    "dataset": ("data.name=hf_text", "data.dataset_name=wikitext"),
    "gpt2": ("data.tokenizer=gpt2",),
    "not offline": (*HUB_MODEL, "launch.env={HF_HUB_OFFLINE: 0}"),
}


class TestPrefetch:
    @pytest.mark.parametrize("name", TO_FETCH)
    @pytest.mark.parametrize("kind", KINDS)
    def test_init_container_downloads(self, kind: str, name: str) -> None:
        plan = make(kind, *TO_FETCH[name], "launch.hf_token_secret.name=hub")
        (first,) = pod(plan)["initContainers"]
        (trainer,) = pod(plan)["containers"]
        assert first["name"] == "prefetch"
        words = ["--config", "/config/train.yaml", "--report", "/cache/prefetch.json"]
        assert first["command"] == ["python", "-m", "llmtrain", "prefetch", *words]
        for same in ("image", "securityContext", "volumeMounts", "resources"):
            assert first[same] == trainer[same]
        assert env(first)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert "HF_TOKEN" not in env(trainer), "what trains needs no token"
        if name != "not offline":
            assert env(first).get("HF_HUB_OFFLINE") is None
            assert env(trainer)["HF_HUB_OFFLINE"] == "1"
        for cache in ("HF_HOME", "HOME", "TIKTOKEN_CACHE_DIR"):
            assert env(first)[cache] == env(trainer)[cache], "else it would not find what was fetched"
        assert plan.egress_ports == [443, *([train_job.PORT] if kind == "train_job" else [])]

    @pytest.mark.parametrize("name", NOTHING_TO_FETCH)
    def test_no_init_container_without_downloads(self, name: str) -> None:
        plan = make("indexed_job", *NOTHING_TO_FETCH[name])
        assert "initContainers" not in pod(plan)
        assert plan.egress_ports == []

    @pytest.mark.parametrize("mode", ["smoke", "doctor", "command"])
    def test_only_training_downloads(self, mode: Any) -> None:
        plan = make("indexed_job", *HUB_MODEL, task=PodTask(mode, OWN if mode == "command" else ()))
        assert "initContainers" not in pod(plan)

    @pytest.mark.parametrize("value", ["false", "no", "off"])
    def test_offline_variable_is_read_from_launch_env(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from llmtrain.hub.token import is_offline

        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        plan = make("indexed_job", *HUB_MODEL, f'launch.env={{HF_HUB_OFFLINE: "{value}"}}')
        assert plan.is_fetching is not is_offline()

    def test_transformers_offline_counts_too(self) -> None:
        assert not make("indexed_job", *HUB_MODEL, "launch.env={TRANSFORMERS_OFFLINE: 1}").is_fetching

    def test_writable_models_volume_is_the_cache(self) -> None:
        def home(*sets: str) -> str:
            return str(env(pod(make("indexed_job", *HUB_MODEL, *sets))["initContainers"][0])["HF_HOME"])

        assert home() == "/cache/huggingface"
        assert home("launch.models_volume.claim=weights") == "/cache/huggingface", "it is read-only"
        on_volume = ("launch.models_volume.claim=weights", "launch.models_volume.read_only=false")
        assert home(*on_volume) == "/models/huggingface"
        assert home(*on_volume, "launch.models_volume.mount_path=/weights") == "/weights/huggingface"
        assert home(*on_volume, "launch.env={HF_HOME: /mine}") == "/mine"

    def test_hub_needs_of_configs(self) -> None:
        def needs(*sets: str) -> HubNeeds:
            config = load_config("ddp_smoke", list(sets))
            return hub_needs(config.model, config.data)

        assert needs() == HubNeeds()
        assert not needs().any
        assert needs(*HUB_MODEL) == HubNeeds(model=True)
        assert needs(*HUB_MODEL, "model.tokenizer_path=a/b") == HubNeeds(model=True, tokenizer=True)
        for path in ("./x", "../x", "~/x", "/x", "a/b/c", "x/"):
            assert needs(HUB_MODEL[0], f"model.path={path}") == HubNeeds(), path

    def test_datasets_of_a_mixture_are_needed(self) -> None:
        sources = [{"name": "hf_text", "dataset_name": f"me/{name}", "weight": 1} for name in "ab"]
        sources.append({"name": "text_files", "files": ["/data/*.txt"], "weight": 1})
        config = load_config("ddp_smoke", ["data.name=mixture", f"data.sources={json.dumps(sources)}"])
        assert hub_needs(config.model, config.data) == HubNeeds(dataset=True)
        assert [section.dataset_name for section in needed_datasets(config.data)] == ["me/a", "me/b"]

    @pytest.mark.parametrize(
        "sets",
        [("data.name=dummy_text",), ("data.name=hf_text", "data.files=/data/*.txt", "data.dataset_name=wikitext")],
        ids=["dummy", "files"],
    )
    def test_unused_references_are_not_needed(self, sets: tuple[str, ...]) -> None:
        config = load_config("ddp_smoke", list(sets))
        assert not hub_needs(config.model, config.data).dataset


def test_token_is_only_set_where_the_hub_is_used() -> None:
    for task in (PodTask("command", OWN), PodTask("command", OWN, "torchrun")):
        plan = make("indexed_job", "launch.hf_token_secret.name=hub", task=task)
        assert "HF_TOKEN" in env(pod(plan)["containers"][0])
    for sets in ((), ("launch.hf_token_secret.name=hub",)):
        assert "HF_TOKEN" not in env(pod(make("indexed_job", *sets))["containers"][0])


class TestWarnings:
    VOLUMES = ("launch.data_volume.claim=corpora", "launch.models_volume.claim=weights")

    @pytest.mark.parametrize(
        ("sets", "field"),
        [
            (("data.name=text_files", "data.files=/here/a.txt"), "data.files /here/a.txt"),
            (("data.name=text_files", "data.files=/database/a.txt"), "data.files /database/a.txt"),
            (("data.name=text_files", "data.files=a.txt"), "data.files a.txt"),
            (("data.name=text_files", "data.files=[/data/a, /b]", "data.val_files=/c"), "data.val_files /c"),
            (("data.name=instruct_jsonl", "data.train_file=rows.jsonl", HUB_MODEL[0], HUB_MODEL[1]), "data.train_file"),
            ((HUB_MODEL[0], "model.path=./llama"), "model.path ./llama"),
            (("data.name=hf_text", "data.dataset_name=~/wiki"), "data.dataset_name ~/wiki"),
            (("data.tokenizer=tok.json",), "data.tokenizer tok.json"),
        ],
    )
    def test_local_path_warns(self, sets: tuple[str, ...], field: str) -> None:
        warnings = make("indexed_job", *self.VOLUMES, *sets).warnings
        assert any(line.startswith(f"{field}") for line in warnings), warnings
        assert all("/data (data_volume)" in line and "/models (models_volume)" in line for line in warnings)
        assert make("indexed_job", *self.VOLUMES, *sets, task=PodTask("smoke")).warnings == []

    @pytest.mark.parametrize(
        "sets",
        [
            (),
            ("data.name=text_files", "data.files=/data/a.txt", "data.val_files=/out/v.txt"),
            (HUB_MODEL[0], "model.path=/models/tiny"),
            HUB_MODEL,
            ("data.tokenizer=gpt2",),
        ],
    )
    def test_path_on_a_volume_does_not_warn(self, sets: tuple[str, ...]) -> None:
        assert make("indexed_job", *self.VOLUMES, *sets).warnings == []

    O2 = "/mnt/filesystem-o2/mlruns"  # where document 1 tracks

    @pytest.mark.parametrize("uri", [O2, f"file:{O2}", f"file://{O2}", f"sqlite:///{O2}/mlflow.db", "/data/mlruns"])
    @pytest.mark.parametrize("field", ["tracking.mlflow.tracking_uri", "launch.env.MLFLOW_TRACKING_URI"])
    def test_tracking_store_in_the_pod_warns(self, field: str, uri: str) -> None:
        sets = (*self.VOLUMES, f"{field}={uri}")
        (warning,) = make("indexed_job", *sets, "tracking.mlflow.enabled=true").warnings
        assert warning.startswith(f"{field} {uri} ")
        assert "/out (runs_volume)" in warning
        assert "/data (" not in warning, "pods only read it"
        assert make("indexed_job", *sets, "tracking.mlflow.enabled=false").warnings == []
        for task in (PodTask("command", OWN), PodTask("hold")):  # they get it as MLFLOW_TRACKING_URI
            warnings = make("indexed_job", *sets, task=task).warnings
            assert [line.startswith(f"{field} {uri} ") for line in warnings] == [True]

    @pytest.mark.parametrize(
        "sets",
        [
            ("tracking.mlflow.tracking_uri=/out/mlruns",),
            (f"launch.env.MLFLOW_TRACKING_URI={O2}", "output.root_dir=/mnt/filesystem-o2"),
            ("tracking.mlflow.tracking_uri=file:/models/mlruns", "launch.models_volume.read_only=false"),
            ("launch.env.MLFLOW_TRACKING_URI=http://mlflow:5000",),
        ],
    )
    def test_tracking_store_on_a_volume_does_not_warn(self, sets: tuple[str, ...]) -> None:
        assert make("indexed_job", *self.VOLUMES, "tracking.mlflow.enabled=true", *sets).warnings == []

    def test_one_warning_about_the_tracking_uri_that_is_not_used(self) -> None:
        in_env = "launch.env.MLFLOW_TRACKING_URI=http://elsewhere:5000"
        both = (*self.VOLUMES, in_env, "tracking.mlflow.tracking_uri=http://mlflow:5000")

        def unused(*more: str, task: PodTask = PodTask()) -> list[str]:  # noqa: B008
            return [line.partition(" ")[0] for line in make("indexed_job", *both, *more, task=task).warnings]

        assert unused("tracking.mlflow.enabled=true") == ["launch.env.MLFLOW_TRACKING_URI"]
        assert unused("tracking.mlflow.enabled=true", "tracking.mlflow.tracking_uri=http://elsewhere:5000") == []
        assert unused("tracking.mlflow.enabled=false") == []
        assert unused(task=PodTask("command", OWN)) == ["tracking.mlflow.tracking_uri"]
        assert unused(task=PodTask("hold")) == []

    def test_read_only_cache_warns(self) -> None:
        assert make("indexed_job", "data.cache_dir=/var/llmtrain").warnings

    def test_warnings_go_to_stderr(self, cli: Cli) -> None:
        sets = ("--set", "data.name=text_files", "--set", "data.files=/here/a.txt")
        done = cli(
            "launch", "--dry-run", "--config", "ddp_smoke", "--name", "demo", "--image", "me/train:1", *sets, "--json"
        )
        assert done.json["manifests"]
        assert done.err.startswith("warning: data.files /here/a.txt is not on a volume")


ETCD = ("distributed.rendezvous.backend=etcd-v2", "distributed.rendezvous.endpoint=etcd.kube:2379", "launch.nodes=2")


def option(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


class TestRendezvous:
    """distributed.rendezvous, in the options of `llmtrain node`."""

    @pytest.mark.parametrize("task", [PodTask(), PodTask("smoke"), PodTask("doctor"), PodTask("command", OWN)])
    @pytest.mark.parametrize("kind", KINDS)
    def test_etcd_endpoint(self, kind: str, task: PodTask) -> None:
        plan = make(kind, *ETCD, task=task)
        command = pod(plan)["containers"][0]["command"]
        assert option(command, "--rdzv-backend") == "etcd-v2"
        assert option(command, "--rdzv-endpoint") == "etcd.kube:2379"
        assert "--master-addr" not in command, "nobody meets at pod 0"
        assert 2379 in plan.egress_ports
        (policy,) = [m for m in render(plan) if m["kind"] == "NetworkPolicy"]
        assert 2379 in [row["port"] for rule in policy["spec"]["egress"] for row in rule.get("ports", [])]

    def test_etcd_ids_of_launches_differ(self) -> None:
        config = load_config("ddp_smoke", [*ETCD, "output.run_id=demo", "launch.image=me/train:1"])
        elsewhere = load_config(
            "ddp_smoke", [*ETCD, "output.run_id=demo", "launch.image=me/train:1", "launch.namespace=team"]
        )
        plans = [plan_job(config), plan_job(config, number=2), plan_job(config, nonce="abc"), plan_job(elsewhere)]
        assert len({option(plan.command, "--rdzv-id") for plan in plans}) == 4

    @pytest.mark.parametrize("kind", KINDS)
    def test_pod_0_is_the_default_endpoint(self, kind: str) -> None:
        plain = make(kind, "launch.nodes=2")
        assert "--rdzv-backend" not in plain.command
        for backend in ("c10d", "static"):
            sets = (f"distributed.rendezvous.backend={backend}", "launch.nodes=2")
            plan = make(kind, *sets)
            assert option(plan.command, "--rdzv-backend") == backend
            assert {*plan.command} - {*plain.command} == {"--rdzv-backend", backend}
            assert plan.egress_ports == plain.egress_ports
            pod_0 = f"distributed.rendezvous.endpoint={plan.master_addr}:29500"
            assert make(kind, *sets, pod_0).command == plan.command
            with pytest.raises(UsageError):
                make(kind, *sets, "distributed.rendezvous.endpoint=elsewhere:29500")

    def test_torchrun_refuses_etcd(self) -> None:
        task = PodTask("command", OWN, "torchrun")
        with pytest.raises(UsageError):
            make("indexed_job", *ETCD, task=task)
        c10d = make("indexed_job", "distributed.rendezvous.backend=c10d", "launch.nodes=2", task=task).command
        assert {"--rdzv-backend=c10d", "--rdzv-endpoint=demo-0.demo:29500"} < {*c10d}
        static = make("indexed_job", "distributed.rendezvous.backend=static", "launch.nodes=2", task=task).command
        assert static == make("indexed_job", "launch.nodes=2", task=task).command

    def test_static_refuses_an_elastic_run(self, cli: Cli) -> None:
        words = ("launch", "--dry-run", "--config", "ddp_smoke", "--name", "demo", "--nodes", "1:2")
        words += ("--image", "me/train:1")
        words += ("--set", "distributed.reproducible_reduce=false", "--set", "distributed.rendezvous.backend=static")
        assert cli(*words).code == 64
        assert cli(*words, "--set", "distributed.rendezvous.backend=c10d").code == 0


class TestPorts:
    @pytest.mark.parametrize(
        ("sets", "ports"),
        [
            ((), []),
            (("tracking.mlflow.enabled=true", "tracking.mlflow.tracking_uri=http://mlflow"), [80]),
            (("tracking.mlflow.enabled=true", "tracking.mlflow.tracking_uri=https://mlflow"), [443]),
            (("tracking.mlflow.enabled=true", "tracking.mlflow.tracking_uri=http://mlflow:5000"), [5000]),
            (("tracking.mlflow.enabled=true", "launch.env.MLFLOW_TRACKING_URI=http://mlflow:5000"), [5000]),
            (("tracking.mlflow.enabled=false", "tracking.mlflow.tracking_uri=http://mlflow:5000"), []),
            (("tracking.mlflow.enabled=true", "tracking.mlflow.tracking_uri=sqlite:////out/mlflow.db"), []),
            (
                ("tracking.mlflow.enabled=true", "tracking.mlflow.tracking_uri=http://mlflow:5000", *HUB_MODEL),
                [443, 5000],
            ),
            (("output.sync_uri=s3://bucket/runs",), [443]),
        ],
    )
    def test_egress_ports(self, sets: tuple[str, ...], ports: list[int]) -> None:
        plan = make("indexed_job", *sets)
        assert plan.egress_ports == ports
        (policy,) = [m for m in render(plan) if m["kind"] == "NetworkPolicy"]
        rules = policy["spec"]["egress"][2:]
        assert [row["port"] for rule in rules for row in rule["ports"]] == ports
        assert all(row["protocol"] == "TCP" for rule in rules for row in rule["ports"])

    @pytest.mark.parametrize(
        ("sets", "variable"),
        [
            (("output.sync_uri=s3://bucket/runs",), "AWS_ENDPOINT_URL_S3"),
            (("output.sync_uri=s3://bucket/runs",), "AWS_ENDPOINT_URL"),
            (HUB_MODEL, "HF_ENDPOINT"),
            (HUB_MODEL, "HTTPS_PROXY"),
        ],
    )
    def test_endpoint_variable_adds_a_port(self, sets: tuple[str, ...], variable: str) -> None:
        plan = make("indexed_job", *sets, f"launch.env={{{variable}: 'http://store.tools:9000'}}")
        assert 9000 in plan.egress_ports


@pytest.mark.parametrize(
    "text",
    [
        "output.sync_uri=s3://key:secret@bucket/x",
        "tracking.mlflow.tracking_uri=http://me:secret@mlflow",
        "launch.env={A: 'http://me:secret@x'}",
    ],
)
def test_credentials_in_the_config_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        make("indexed_job", text)
    assert ":secret@" not in str(caught.value)


def test_refused_command_hides_the_value() -> None:
    command = ("bash", "-c", 'export DB_PASS="hunter2hunter2"; python x.py')
    with pytest.raises(UsageError) as caught:
        make("indexed_job", task=PodTask("command", command))
    assert "DB_PASS" in str(caught.value)
    assert "hunter2" not in str(caught.value)


class TestRecords:
    def test_lists_runs_of_a_namespace(self) -> None:
        plan = plan_job(load_config("ddp_smoke", ["output.run_id=demo", "launch.image=me/train:1"]))
        assert plan.namespace == "default"
        config_map = render(plan)[0]
        moved = {**config_map, "metadata": {**config_map["metadata"], "namespace": "lab"}}
        assert read_record(moved).plan.namespace == "lab", "kubectl apply -n lab"

    @pytest.mark.parametrize(
        "data",
        [
            None,
            {},
            {"train.yaml": "a: 1"},
            {"train.yaml": "schema_version: 2", "job.json": "{}"},
            {"train.yaml": "schema_version: 2", "job.json": "[]"},
            {"train.yaml": "schema_version: 2", "job.json": "null"},
            {"train.yaml": "schema_version: 2", "job.json": '{"work": [], "number": 1}'},
            {"train.yaml": "schema_version: 2", "job.json": '{"work": {"mode": "train"}, "number": 1}'},
            {"train.yaml": "schema_version: 2", "job.json": "{"},
            {"train.yaml": ": [", "job.json": '{"work": {"mode": "train", "command": [], "launcher": "llmtrain"}, '
             '"number": 1}'},
        ],
    )  # fmt: skip
    def test_unreadable_records_are_skipped(self, data: dict[str, str] | None) -> None:
        good = render(make("indexed_job"))[0]
        bad = {**good, "data": data}
        with pytest.raises(UsageError):
            read_record(bad)

        class Cluster:
            def find(self, *_: Any) -> list[Object]:
                return [bad, good]

        assert [record.run_id for record in list_records(Cluster(), "team")] == ["demo"]  # type: ignore[arg-type]

    def test_belongs_to_run_reads_the_labels(self) -> None:
        good = render(make("indexed_job"))[0]
        assert belongs_to_run(good, "demo")
        assert not belongs_to_run(good, "demo-2")
        for labels in (
            None,
            {},
            {"app": "llmtrain"},
            {"llmtrain.dev/run": "demo"},
            {"app": "x", "llmtrain.dev/run": "demo"},
        ):
            assert not belongs_to_run({"metadata": {"labels": labels}}, "demo")
        assert not belongs_to_run({"metadata": {}}, "demo")

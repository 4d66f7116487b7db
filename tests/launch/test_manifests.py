"""What must hold for every kind, whatever the values."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from llmtrain import registry
from llmtrain.cli import load_command
from llmtrain.config.distributed import DistributedSection
from llmtrain.config.document import parse_document
from llmtrain.config.load import build_config, load_config
from llmtrain.distributed.node_info import NodeOptions
from llmtrain.distributed.process_info import find_node_info
from llmtrain.errors import UsageError
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import dump_manifests, render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import PodTask

KINDS = sorted(registry.KINDS)
BASE = ["output.run_id=demo", "launch.image=me/train:1", "trainer.grad_accum_steps=64"]
Manifests = list[dict[str, Any]]


def make(kind: str, *sets: str) -> tuple[JobPlan, Manifests]:
    plan = plan_job(load_config("ddp_smoke", [*BASE, f"launch.kind={kind}", *sets]))
    return plan, render(plan)


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in rows:
        yield from walk(inner, (*path, key))


def templates(manifests: Manifests) -> list[dict[str, Any]]:
    """Every pod template, wherever a kind keeps it."""
    return [value for _, value in walk(manifests) if isinstance(value, dict) and "containers" in value.get("spec", {})]


def restricted_violations(spec: dict[str, Any]) -> list[str]:
    """Pod Security `restricted`, by its published list."""
    wrong = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    wrong += [f"volume {v['name']}" for v in spec.get("volumes", []) if not set(v) - {"name"} <= allowed]
    pod = spec.get("securityContext", {})
    wrong += ["sysctls"] if pod.get("sysctls") else []
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        both = {**pod, **own}
        checks = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": both.get("runAsUser") != 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "drop": own.get("capabilities", {}).get("drop") == ["ALL"],
            "add": set(own.get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"},
            "procMount": own.get("procMount", "Default") == "Default",
            "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
        }
        wrong += [f"{container['name']}: {name}" for name, is_right in checks.items() if not is_right]
    return wrong


def test_pod_security_check_detects_violations() -> None:
    bad = {"containers": [{"name": "x"}], "hostNetwork": True, "volumes": [{"name": "v", "hostPath": {"path": "/"}}]}
    expected = ["hostNetwork", "volume v"]
    expected += [f"x: {name}" for name in ("allowPrivilegeEscalation", "runAsNonRoot", "seccompProfile", "drop")]
    assert restricted_violations(bad) == expected


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_pods_pass_restricted(self, kind: str) -> None:
        plan, manifests = make(kind, "launch.nodes=2", "launch.grace_period_sec=300")
        assert templates(manifests)
        for template in templates(manifests):
            spec = template["spec"]
            (container,) = spec["containers"]
            assert restricted_violations(spec) == []
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
            assert spec["terminationGracePeriodSeconds"] > 300
            assert set(container["resources"]["requests"]) >= {"cpu", "memory"}
            assert container["resources"]["requests"] == container["resources"]["limits"]
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts == {"/config", "/tmp", "/cache", "/dev/shm", "/out"}
            assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
            assert container["command"] == plan.command
            assert plan.labels.items() <= template["metadata"]["labels"].items()

    @pytest.mark.parametrize("security", ["baseline", "none"])
    @pytest.mark.parametrize("mode", ["train", "hold", "command", "doctor"])
    def test_lower_security_uses_the_user_of_the_image(self, kind: str, security: str, mode: str) -> None:
        """Foreign images: root, and a writable root filesystem. The init container that fetches has the same image."""
        sets = ["model.name=hf_causal_lm", "model.path=somebody/tiny", *BASE, f"launch.kind={kind}"]
        task = PodTask(mode, ("python", "/app/main.py") if mode == "command" else ())  # type: ignore[arg-type]
        manifests = render(plan_job(load_config("ddp_smoke", [*sets, f"launch.security={security}"]), task))
        assert templates(manifests)
        for template in templates(manifests):
            spec = template["spec"]
            containers = [*spec["containers"], *spec.get("initContainers", [])]
            assert len(containers) == (2 if mode in ("train", "hold") else 1)
            assert not any("securityContext" in container for container in containers)
            wrong = {row.rpartition(" ")[2] for row in restricted_violations(spec)}
            refused = {"allowPrivilegeEscalation", "runAsNonRoot", "drop"}  # by a namespace that enforces `restricted`
            if security == "baseline":
                assert wrong == refused
                assert spec["securityContext"]["fsGroup"] == 1000
            else:
                assert wrong == {*refused, "seccompProfile"}
                assert "securityContext" not in spec
            assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)

    def test_pods_have_no_service_account_token(self, kind: str) -> None:
        kinds = {manifest["kind"] for manifest in make(kind)[1]}
        assert not kinds & {"Role", "RoleBinding", "ServiceAccount", "ClusterRole", "Secret"}

    @pytest.mark.parametrize("nodes", [1, 2, 4, 64])
    def test_number_of_pods_is_consistent(self, kind: str, nodes: int) -> None:
        plan, manifests = make(kind, f"launch.nodes={nodes}", "launch.pod_disruption_budget=true")
        counts = ("completions", "parallelism", "replicas", "numNodes", "minAvailable")
        # A JobSet has one Job; its pods are the Job's.
        found = [v for p, v in walk(manifests) if p and p[-1] in counts and "replicatedJobs" not in p[-3:-1]]
        assert set(found) == {nodes}
        assert len(found) >= 2
        assert plan.command[plan.command.index("--nodes") + 1] == str(nodes)
        assert plan.world_size == nodes
        modes = [v for p, v in walk(manifests) if p and p[-1] == "accessModes"]
        assert modes == [["ReadWriteMany" if nodes > 1 else "ReadWriteOnce"]]

    def test_master_counts_as_a_pod(self, kind: str) -> None:
        if kind == "pytorch_job":
            for nodes, expected in ((1, {"Master": 1}), (4, {"Master": 1, "Worker": 3})):
                _, manifests = make(kind, f"launch.nodes={nodes}", "launch.pytorch_master=true")
                replicas = manifests[-1]["spec"]["pytorchReplicaSpecs"]
                assert {role: spec["replicas"] for role, spec in replicas.items()} == expected

    def test_names_fit_and_objects_are_labeled(self, kind: str) -> None:
        plan, manifests = make(kind, "launch.nodes=64", f"output.run_id={'x' * 40}")
        names = [manifest["metadata"]["name"] for manifest in manifests]
        names += [f"{name}-worker-63" for name in names]
        assert all(len(name) <= 63 for name in (*names, plan.master_addr.partition(".")[0]))
        assert all(plan.labels.items() <= manifest["metadata"]["labels"].items() for manifest in manifests)
        assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"default"}
        assert len({(m["kind"], m["metadata"]["name"]) for m in manifests}) == len(manifests)

    def test_yaml_round_trip(self, kind: str) -> None:
        _, manifests = make(kind, "launch.nodes=1:2", 'launch.env={A: "1e3", B: "yes", C: "0x1f", D: "2:4", E: ""}')
        text = dump_manifests(manifests)
        assert list(yaml.safe_load_all(text)) == manifests
        assert 'value: "1e3"' in text

    def test_config_in_the_pod_is_resolved(self, kind: str) -> None:
        sets = ["launch.nodes=2", "distributed.rank=1", "distributed.world_size=9", "distributed.master_addr=here"]
        plan, manifests = make(kind, *sets)
        loaded = build_config(parse_document(manifests[0]["data"]["train.yaml"], "pod"))
        assert (loaded.output.run_id, loaded.output.root_dir) == ("demo", "/out")
        assert loaded.distributed == DistributedSection(reproducible_reduce=True)
        assert plan_job(loaded) == plan_job(build_config(parse_document(plan.config_text, "again")))
        assert plan_job(loaded).config_text == plan.config_text

    def test_secrets_are_only_referenced(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_thisIsNotForAnybody")
        sets = ["launch.hf_token_secret.name=hub", "launch.hf_token_secret.key=t"]
        hub = ["model.name=hf_causal_lm", "model.path=somebody/tiny"]
        _, manifests = make(kind, *sets, *hub)
        for template in templates(manifests):
            rows = {row["name"]: row for row in template["spec"]["initContainers"][0]["env"]}
            assert rows["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}}
        assert "hf_this" not in dump_manifests(manifests)

    def test_only_containers_that_download_have_the_hub_token(self, kind: str) -> None:
        def containers_with_token(*more: str, task: PodTask = PodTask()) -> set[str]:  # noqa: B008
            sets = [*BASE, f"launch.kind={kind}", "launch.hf_token_secret.name=hub", *more]
            found = templates(render(plan_job(load_config("ddp_smoke", sets), task)))
            rows = [each for t in found for key in ("initContainers", "containers") for each in t["spec"].get(key, [])]
            return {each["name"] for each in rows if "HF_TOKEN" in [row["name"] for row in each["env"]]}

        trainer = make(kind)[0].container
        assert containers_with_token() == set()
        assert containers_with_token("model.name=hf_causal_lm", "model.path=somebody/tiny") == {"prefetch"}
        assert containers_with_token(task=PodTask("smoke")) == set()
        assert containers_with_token(task=PodTask("command", ("python", "train.py"))) == {trainer}
        assert containers_with_token(task=PodTask("hold")) == {trainer}

    def test_token_variable_of_a_users_program_can_be_named(self, kind: str) -> None:
        sets = [*BASE, f"launch.kind={kind}", "launch.hf_token_secret={name: hub, variable: HUGGINGFACE_HUB_TOKEN}"]
        sets += ["model.name=hf_causal_lm", "model.path=somebody/tiny"]

        def variables(task: PodTask, containers: str) -> set[str]:
            found = templates(render(plan_job(load_config("ddp_smoke", sets), task)))
            rows = [row for template in found for each in template["spec"][containers] for row in each["env"]]
            return {row["name"] for row in rows if "secretKeyRef" in row.get("valueFrom", {})}

        own = PodTask("command", ("python", "train.py"))
        assert variables(own, "containers") == {"HUGGINGFACE_HUB_TOKEN"}
        assert variables(PodTask("hold"), "containers") == {"HUGGINGFACE_HUB_TOKEN"}
        assert variables(PodTask("train"), "initContainers") == {"HF_TOKEN"}

    def test_pod_reads_its_node_rank(self, kind: str) -> None:
        """The command and what the platform adds to it, as `llmtrain node` reads them."""
        plan, _ = make(kind, "launch.nodes=4", "launch.processes_per_node=2")
        verb = load_command("node")
        options = verb.make_context("node", list(plan.command[4:])).params
        assert (options["config"], options["grace_sec"]) == ("/config/train.yaml", 600)
        given = NodeOptions(**{name: options[name] for name in NodeOptions.__dataclass_fields__})
        place = find_node_info(PLATFORM[kind], given, HOSTNAME[kind], DistributedSection())
        assert (place.node_rank, place.nodes, place.world_size) == (3, 4, 8)
        assert (place.master_addr, place.master_port) == (plan.master_addr, 29500)
        assert plan.master_addr != plan.service

    def test_queue_label_for_kueue(self, kind: str) -> None:
        _, manifests = make(kind, "launch.queue=team")
        queued = [m["kind"] for m in manifests if "kueue.x-k8s.io/queue-name" in m["metadata"]["labels"]]
        assert queued == [manifests[-1]["kind"]]
        _, manifests = make(kind, "launch.queue=team", "launch.queue_priority=urgent")
        found = [
            m["kind"] for m in manifests if m["metadata"]["labels"].get("kueue.x-k8s.io/priority-class") == "urgent"
        ]
        assert found == queued


# What each platform tells pod 3 of 4, with 2 processes a pod (kubernetes-facts, tried).
PET = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "2"}
PLATFORM = {
    "indexed_job": {"JOB_COMPLETION_INDEX": "3"},
    "stateful_set": {"POD_INDEX": "3"},
    "pytorch_job": {**PET, "POD_INDEX": "3"},
    "train_job": {
        **PET,
        "JOB_COMPLETION_INDEX": "3",
        "PET_NODE_RANK": "3",
        "PET_MASTER_ADDR": "demo-node-0-0.demo",
        "PET_MASTER_PORT": "29500",
    },
    "job_set": {"JOB_COMPLETION_INDEX": "3"},
}
HOSTNAME = {
    "indexed_job": "demo-3",
    "stateful_set": "demo-3",
    "pytorch_job": "demo-worker-3",
    "train_job": "demo-node-0-3",
    "job_set": "demo-node-0-3",
}


@pytest.mark.parametrize("kind", ["indexed_job", "job_set", "train_job"])
def test_pod_failure_policy_of_jobs(kind: str) -> None:
    _, manifests = make(kind, "launch.max_restarts=7")
    (spec,) = [value for _, value in walk(manifests) if isinstance(value, dict) and "podFailurePolicy" in value]
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (7, "Failed")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    fail, disrupted, resume = spec["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [64, 65])
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert (resume["action"], resume["onExitCodes"]["values"]) == ("Ignore", [75])


@pytest.mark.parametrize("kind", ["indexed_job", "stateful_set"])
def test_service_publishes_unready_pods(kind: str) -> None:
    plan, manifests = make(kind)
    (service,) = [m for m in manifests if m["kind"] == "Service"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == ("demo", "None")
    assert service["spec"]["publishNotReadyAddresses"] is True
    (template,) = templates(manifests)
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert plan.master_addr == f"demo-0.{service['metadata']['name']}"


@pytest.mark.parametrize("kind", ["pytorch_job", "train_job", "job_set"])
def test_operator_creates_the_service(kind: str) -> None:
    assert not [m for m in make(kind)[1] if m["kind"] == "Service"]


def test_existing_claims_are_not_created() -> None:
    _, manifests = make("indexed_job", "launch.runs_volume.claim=old", "launch.models_volume.claim=weights")
    assert not [m for m in manifests if m["kind"] == "PersistentVolumeClaim"]
    (template,) = templates(manifests)
    mounts = {mount["name"]: mount for mount in template["spec"]["containers"][0]["volumeMounts"]}
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in template["spec"]["volumes"][4:]]
    assert claims == ["old", "weights"]


class TestNetworkPolicy:
    def ports(self, *sets: str) -> list[int]:
        (policy,) = [m for m in make("indexed_job", *sets)[1] if m["kind"] == "NetworkPolicy"]
        peers, _dns, *outside = policy["spec"]["egress"]
        assert [peers["to"]] == [rule["from"] for rule in policy["spec"]["ingress"]]
        return [port["port"] for rule in outside for port in rule["ports"]]

    def test_only_ports_of_the_config_are_open(self) -> None:
        assert self.ports() == []
        assert self.ports("data.name=hf_text", "data.dataset_name=wikitext") == [443]
        assert self.ports("data.name=hf_text", "data.dataset_name=/data/wikitext") == []
        assert self.ports("tracking.mlflow.enabled=true", "tracking.mlflow.tracking_uri=http://mlflow.tools:5000") == [
            5000
        ]

    def test_can_be_disabled(self) -> None:
        kinds = [m["kind"] for m in make("indexed_job", "launch.network_policy=false")[1]]
        assert "NetworkPolicy" not in kinds


@pytest.mark.parametrize(
    ("sets", "fact"),
    [
        (["launch.nodes=3"], "reproducible_reduce"),
        (["launch.nodes=2:4"], "got 3"),
        (["launch.nodes=2", "distributed.strategy=none", "distributed.reproducible_reduce=false"], "strategy is none"),
        (["output.root_dir=/tmp/runs"], "output.root_dir"),
        (["output.root_dir=/with space"], "output.root_dir"),
        (["launch.data_volume.claim=a", "launch.data_volume.mount_path=/out/x"], "launch.data_volume.mount_path"),
        (["distributed.master_port=80"], "distributed.master_port"),
        (["launch.env={WORLD_SIZE: 4}"], "WORLD_SIZE"),
        (["tracking.prometheus.port=80"], "tracking.prometheus.port"),
        (["tracking.prometheus.port=29500"], "tracking.prometheus.port"),
        (["launch.pod_monitor=true"], "launch.pod_monitor"),
        (["launch.image_schema=2", "tracking.wandb.enabled=true"], "tracking.wandb"),
        (["launch.image_schema=2", "tracking.prometheus.port=9400"], "tracking.prometheus"),
        (["tracking.mlflow.tracking_uri=https://me:secret@mlflow.example.com"], "credentials"),
    ],
)
def test_impossible_plans_are_refused(sets: list[str], fact: str) -> None:
    with pytest.raises(UsageError, match=fact) as caught:
        make("indexed_job", *sets)
    assert ":secret@" not in str(caught.value)


def test_three_pods_share_four_micro_batches() -> None:
    plan, _ = make("stateful_set", "launch.nodes=3", "distributed.reproducible_reduce=false")
    assert plan.nodes == 3


def test_missing_run_id_is_generated() -> None:
    plan = plan_job(load_config("ddp_smoke", ["launch.image=me/train:1"]))
    assert plan.run_id.startswith("ddp-smoke-")
    assert f"run_id: {plan.run_id}" in plan.config_text
    assert plan_job(load_config("ddp_smoke", ["output.run_id=mine", "launch.image=me/train:1"])).run_id == "mine"


JOBS = ["indexed_job", "job_set", "train_job"]


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize(("nodes", "ends_with_pod_0"), [("1", False), ("4", False), ("4:4", False), ("1:2", True)])
def test_only_an_elastic_run_ends_with_pod_0(kind: str, nodes: str, ends_with_pod_0: bool) -> None:
    """Some of its pods may never be scheduled. With a fixed number all must succeed."""
    _, manifests = make(kind, f"launch.nodes={nodes}")
    found = [
        value["successPolicy"] for _, value in walk(manifests) if isinstance(value, dict) and "successPolicy" in value
    ]
    assert found == ([{"rules": [{"succeededIndexes": "0"}]}] if ends_with_pod_0 else [])


@pytest.mark.parametrize("kind", JOBS)
def test_pod_failure_policy_covers_our_containers_and_no_others(kind: str) -> None:
    plan, manifests = make(kind, "model.name=hf_causal_lm", "model.path=somebody/tiny")
    rules = [value["onExitCodes"] for _, value in walk(manifests) if isinstance(value, dict) and "onExitCodes" in value]
    own = (plan.container, "prefetch")
    assert rules == [
        {"containerName": name, "operator": "In", "values": codes} for codes in ([64, 65], [75]) for name in own
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_prefetch_has_the_secrets(kind: str) -> None:
    hub = ("model.name=hf_causal_lm", "model.path=somebody/tiny")
    for template in templates(make(kind, *hub, "launch.env_secrets=[mirror, tracker]")[1]):
        wanted = [{"secretRef": {"name": "mirror"}}, {"secretRef": {"name": "tracker"}}]
        (first,), (trainer,) = template["spec"]["initContainers"], template["spec"]["containers"]
        assert first["envFrom"] == trainer["envFrom"] == wanted
    for template in templates(make(kind, *hub)[1]):
        assert "envFrom" not in str(template)


HUB_TOKEN = "hf_" + "canaryCanaryCanary"


@pytest.mark.parametrize(
    "word",
    [
        HUB_TOKEN,
        f"--token={HUB_TOKEN}",
        f"HF_TOKEN='{HUB_TOKEN}' python train.py",
        "python train.py --password=canaryWord",
        "DB_PASS=canaryWord python train.py",
        "https://me:canaryWord@mlflow.example.com",
        "https://canaryToken@git.example.com/a.git",
        "--tracking-uri=https://me:canaryWord@mlflow.example.com",
        "git clone https://canaryToken@git.example.com/a.git",
        pytest.param("postgresql+psycopg2://me:canaryWord@db/x --verbose; DB=mysql://a:b@c true"),
    ],
)
@pytest.mark.parametrize("launcher", ["llmtrain", "torchrun"])
def test_credentials_in_a_user_command_are_refused(word: str, launcher: Any) -> None:
    task = PodTask("command", ("sh", "-c", word), launcher)
    with pytest.raises(UsageError, match="looks like a secret") as caught:
        plan_job(load_config("ddp_smoke", BASE), task)
    assert "canary" not in str(caught.value).lower()
    assert "launch.env_secrets" in str(caught.value.remedy)


@pytest.mark.parametrize(
    "word",
    ["hf_hub_download", "--repo=hf_internal/x", "https://example.com/a@b", "git@github.com:a/b.git", "s3://bucket/a@1"],
)
def test_harmless_arguments_are_accepted(word: str) -> None:
    assert plan_job(load_config("ddp_smoke", BASE), PodTask("command", ("sh", "-c", word))).command[-1] == word


@pytest.mark.parametrize("field", ["run.notes", "run.name", "data.dataset_name", "tracking.mlflow.run_name"])
def test_tokens_in_the_config_are_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        plan_job(load_config("ddp_smoke", [*BASE, f"{field}=see {HUB_TOKEN}"]))
    assert field in caught.value.what
    assert HUB_TOKEN not in str(caught.value)
    monkeypatch.setenv("MY_SERVICE_PASS", "canary-of-the-environment")
    with pytest.raises(UsageError):
        plan_job(load_config("ddp_smoke", [*BASE, f"{field}=canary-of-the-environment"]))


@pytest.mark.parametrize(
    "name", ["DB_PASS", "MYSQL_PWD", "OPENAI_KEY", "GITHUB_PAT", "AZURE_STORAGE_KEY", "MY_TOKEN_2", "SECRETS"]
)
def test_secrets_in_launch_env_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        load_config("ddp_smoke", [*BASE, f"launch.env.{name}=q8Zr4Lw2Np7v"])


def test_launched_run_with_a_secret_can_be_planned() -> None:
    """By an earlier version, which did not see it."""
    document = parse_document(f"launch: {{env: {{DB_PASS: x}}}}\nrun: {{notes: {HUB_TOKEN}}}\n", "record")
    config = build_config(document, is_launched=True)
    assert plan_job(config, PodTask("command", ("x", "--password=y")), is_launched=True).launch.env == {"DB_PASS": "x"}


@pytest.mark.parametrize("kind", KINDS)
def test_prometheus_finds_pod_0(kind: str) -> None:
    plan, manifests = make(kind, "launch.nodes=2", "tracking.prometheus.port=9400", "launch.pod_monitor=true")
    [monitor] = [each for each in manifests if each["kind"] == "PodMonitor"]
    [policy] = [each for each in manifests if each["kind"] == "NetworkPolicy"]
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert plan.selector.items() < selected.items()
    assert "0" in selected.values()
    assert {"ports": [{"protocol": "TCP", "port": 9400}]} in policy["spec"]["ingress"]
    for template in templates(manifests):
        annotations = template["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == "9400"
        [port] = [port for port in template["spec"]["containers"][0]["ports"] if port["containerPort"] == 9400]
        assert port["name"] == monitor["spec"]["podMetricsEndpoints"][0]["port"]


def test_pod_monitor_of_a_pytorch_job_selects_the_master() -> None:
    sets = ["launch.pytorch_master=true", "tracking.prometheus.port=9400", "launch.pod_monitor=true"]
    [monitor] = [each for each in make("pytorch_job", *sets)[1] if each["kind"] == "PodMonitor"]
    assert monitor["spec"]["selector"]["matchLabels"]["training.kubeflow.org/replica-type"] == "master"


def test_nothing_is_opened_without_a_metrics_port() -> None:
    _, manifests = make("indexed_job")
    [policy] = [each for each in manifests if each["kind"] == "NetworkPolicy"]
    assert len(policy["spec"]["ingress"]) == 1
    assert "PodMonitor" not in [each["kind"] for each in manifests]


@pytest.mark.parametrize(
    ("sets", "ports"),
    [
        (["tracking.wandb.enabled=true"], [443]),
        (["tracking.wandb.enabled=true", "tracking.wandb.offline=true"], []),
        (["tracking.wandb.enabled=true", "launch.env={WANDB_BASE_URL: 'http://wandb.team:8080'}"], [8080]),
        (["launch.kind=train_job"], [10443]),
    ],
)
def test_tracking_servers_are_reachable(sets: list[str], ports: list[int]) -> None:
    plan, _ = make("indexed_job", *sets)
    assert plan.egress_ports == ports


def test_missing_wandb_key_is_a_warning() -> None:
    warned = [
        text for text in make("indexed_job", "tracking.wandb.enabled=true")[0].warnings if "WANDB_API_KEY" in text
    ]
    assert len(warned) == 1
    plan, _ = make("indexed_job", "tracking.wandb.enabled=true", "launch.env_secrets=[wandb]")
    assert [text for text in plan.warnings if "WANDB_API_KEY" in text] == []

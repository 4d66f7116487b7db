"""The pod template that a config shapes: fields, launch.pod_patch, and what llmtrain refuses to give away."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden_cases import CASES
from kube_server import KubeServer, kube_server
from llmtrain import registry
from llmtrain.config.document import parse_document
from llmtrain.config.load import build_config, load_config
from llmtrain.errors import UsageError
from llmtrain.launch import lifecycle
from llmtrain.launch.job import JobPlan
from llmtrain.launch.job_warnings import image_warning, unused_capabilities
from llmtrain.launch.manifests import dump_manifests, render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod import pod_template
from llmtrain.launch.pod_task import PodTask
from llmtrain.launch.record import find_record, read_record
from llmtrain.lint.check_manifests import lint
from llmtrain.lint.source import Sources
from llmtrain.lint.yaml_nodes import parse

ROOT = Path(__file__).resolve().parents[2]
KINDS = sorted(registry.KINDS)
HUB = ("model.name=hf_causal_lm", "model.path=somebody/tiny")
Cli = Callable[..., Any]


def make(*sets: str, patch: object = None, task: PodTask = PodTask()) -> JobPlan:  # noqa: B008
    patches = [f"launch.pod_patch={json.dumps(patch)}"] if patch is not None else []
    return plan_job(load_config("ddp_smoke", ["output.run_id=demo", "launch.image=me/train:1", *sets, *patches]), task)


def patched(patch: object, *sets: str) -> dict[str, Any]:
    return pod_template(make(*sets, patch=patch), "Never")


def templates(value: Any) -> list[dict[str, Any]]:
    """Every pod template in manifests, wherever a kind has it."""
    if isinstance(value, dict):
        inner = [found for item in value.values() for found in templates(item)]
        return [value, *inner] if "containers" in (value.get("spec") or {}) else inner
    return [found for item in value for found in templates(item)] if isinstance(value, list) else []


def unknown_fields(value: Any, kind: str, path: str = "") -> list[str]:
    """Fields that the API type does not have, by the types of the Kubernetes client."""
    from kubernetes import client

    if kind.lower().startswith("list["):
        return [name for item in value for name in unknown_fields(item, kind[5:-1], path)]
    if kind.startswith("dict(") or not hasattr(client, kind):
        return []
    types, names = getattr(client, kind).openapi_types, getattr(client, kind).attribute_map
    by_name = {name: types[attribute] for attribute, name in names.items()}
    return [
        name
        for key, item in value.items()
        for name in (unknown_fields(item, by_name[key], f"{path}.{key}") if key in by_name else [f"{path}.{key}"])
    ]


def test_unknown_fields_are_detected() -> None:
    template = {"spec": {"containers": [{"name": "x", "envv": []}], "runtimeClass": "nvidia"}}
    assert unknown_fields(template, "V1PodTemplateSpec") == [".spec.containers.envv", ".spec.runtimeClass"]


@pytest.mark.parametrize("case", CASES)
def test_manifests_have_only_fields_of_the_api(case: str) -> None:
    preset, sets = CASES[case]
    manifests = render(plan_job(load_config(preset, sets)))
    pods = templates(manifests)
    assert pods
    assert [name for pod in pods for name in unknown_fields(pod, "V1PodTemplateSpec")] == []
    types = {"Job": "V1Job", "StatefulSet": "V1StatefulSet", "Service": "V1Service", "NetworkPolicy": "V1NetworkPolicy"}
    for manifest in manifests:
        assert unknown_fields(manifest, types.get(manifest["kind"], "")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_patch_reaches_every_pod_template(kind: str) -> None:
    patch = {"spec": {"containers": [{"name": "trainer", "stdin": True}], "hostAliases": [{"ip": "10.0.0.1"}]}}
    plan = make(
        f"launch.kind={kind}", "launch.nodes=2", *(["launch.pytorch_master=true"] * ("py" in kind)), patch=patch
    )
    found = templates(render(plan))
    assert len(found) == (2 if kind == "pytorch_job" else 1)
    for template in found:
        (container,) = template["spec"]["containers"]
        assert (container["name"], container["stdin"]) == (plan.container, True)
        assert template["spec"]["hostAliases"] == [{"ip": "10.0.0.1"}]


class TestMerge:
    def test_maps_are_merged_and_null_deletes(self) -> None:
        template = patched({"metadata": {"labels": {"team": "x"}}, "spec": {"enableServiceLinks": None}})
        assert template["metadata"]["labels"].items() >= {"team": "x", "llmtrain.dev/run": "demo"}.items()
        assert "enableServiceLinks" not in template["spec"]
        assert template["spec"]["automountServiceAccountToken"] is False

    def test_lists_with_a_merge_key_are_merged(self) -> None:
        env = [{"name": "USER", "value": "me"}, {"name": "TMPDIR", "$patch": "delete"}, {"name": "NEW", "value": "1"}]
        mounts = [{"name": "tmp", "mountPath": "/tmp", "readOnly": True}]
        template = patched({"spec": {"containers": [{"name": "trainer", "env": env, "volumeMounts": mounts}]}})
        (container,) = template["spec"]["containers"]
        variables = {row["name"]: row.get("value") for row in container["env"]}
        assert (variables["USER"], variables["NEW"], variables["HOME"]) == ("me", "1", "/cache")
        assert "TMPDIR" not in variables
        by_path = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert by_path["/tmp"] == mounts[0]
        assert by_path["/cache"] == {"name": "cache", "mountPath": "/cache"}

    def test_other_lists_are_replaced(self) -> None:
        """As in Kubernetes, where tolerations have no merge key."""
        own, new = "launch.tolerations=[{key: a, operator: Exists}]", [{"key": "b", "operator": "Exists"}]
        assert patched({"spec": {"tolerations": new}}, own)["spec"]["tolerations"] == new

    def test_new_source_of_a_volume_replaces_the_old_one(self) -> None:
        disk = {"name": "cache", "hostPath": {"path": "/mnt"}}
        template = patched({"spec": {"volumes": [disk, {"name": "shm", "emptyDir": {"sizeLimit": "2Gi"}}]}})
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes["cache"] == disk
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}

    def test_patch_directives(self) -> None:
        security = {"$patch": "replace", "runAsUser": 5}
        assert patched({"spec": {"securityContext": security}})["spec"]["securityContext"] == {"runAsUser": 5}
        removed = patched({"spec": {"securityContext": {"$patch": "delete"}}})
        assert "securityContext" not in removed["spec"]
        secrets = [{"$patch": "replace"}, {"name": "new"}]
        template = patched({"spec": {"imagePullSecrets": secrets}}, "launch.image_pull_secrets=[old]")
        assert template["spec"]["imagePullSecrets"] == [{"name": "new"}]
        assert "$patch" not in json.dumps([removed, template])

    def test_config_is_not_changed(self) -> None:
        plan = make(patch={"spec": {"containers": [{"name": "trainer", "env": [{"name": "A", "value": "1"}]}]}})
        assert pod_template(plan, "Never") == pod_template(plan, "Never")
        assert plan.launch.pod_patch["spec"]["containers"][0]["name"] == "trainer"


def container(**fields: object) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


@pytest.mark.parametrize(
    ("patch", "what"),
    [
        ({"metadata": {"labels": {"app": "x"}}}, "label app"),
        ({"metadata": {"labels": {"llmtrain.dev/run": None}}}, "label llmtrain.dev/run"),
        ({"metadata": {"labels": None}}, "label llmtrain.dev/run"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"spec": None}, "container trainer"),
        ({"spec": {"restartPolicy": "OnFailure"}}, "spec.restartPolicy"),
        ({"spec": {"terminationGracePeriodSeconds": 5}}, "launch.grace_period_sec"),
        ({"spec": {"volumes": [{"name": "config", "emptyDir": {}}]}}, "volume config"),
        ({"spec": {"volumes": [{"name": "runs", "$patch": "delete"}]}}, "volume runs"),
        ({"spec": {"volumes": [{"$patch": "replace"}]}}, "volume config"),
        ({"spec": {"containers": [{"$patch": "replace"}, {"name": "a", "image": "b"}]}}, "container trainer"),
        ({"spec": {"containers": [{"name": "main", "env": []}]}}, "needs an image"),
        ({"spec": {"initContainers": [{"name": "prefetch", "$patch": "delete"}]}}, "container prefetch"),
        (container(command=["sh"]), "command of container trainer"),
        (container(args=["x"]), "args of container trainer"),
        (container(image="x"), "launch.image"),
        (container(env=[{"name": "RANK", "value": "0"}]), "variable RANK"),
        (container(env=[{"name": "LLMTRAIN_TOKEN_CACHE", "value": "/x"}]), "variable LLMTRAIN_TOKEN_CACHE"),
        ({"spec": {"volumes": [{"name": "code", "emptyDir": {}}]}}, "volume code"),
        (container(env=[{"name": "LLMTRAIN_LAUNCH", "$patch": "delete"}]), "variable LLMTRAIN_LAUNCH"),
        (container(volumeMounts=[{"name": "tmp", "mountPath": "/out"}]), "mount /out"),
        (container(volumeMounts=[{"$patch": "replace"}]), "mount /config"),
        ({"spec": {"$retainKeys": ["containers"]}}, r"\$retainKeys"),
        ({"spec": {"securityContext": {"$patch": "remove"}}}, r"\$patch: remove"),
        ({"spec": {"containers": {"name": "trainer"}}}, "must be a list"),
        ({"spec": {"securityContext": "none"}}, "must be a map"),
        ({"spec": {"containers": [{"image": "x"}]}}, "need the field 'name'"),
    ],
)
def test_patch_of_what_llmtrain_needs_is_refused(patch: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        pod_template(make(*HUB, patch=patch), "Never")


def test_new_container_without_an_image_is_to_get_one() -> None:
    with pytest.raises(UsageError) as caught:
        pod_template(make(*HUB, patch={"spec": {"containers": [{"name": "main"}]}}), "Never")
    assert "Add an image" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (["launch.capabilities=[IPC_LOCK]"], 1),
        (["launch.capabilities=[IPC_LOCK]", "launch.security=baseline", "launch.run_as_user=1000"], 1),
        (["launch.capabilities=[IPC_LOCK]", "launch.security=baseline", "launch.run_as_user=0"], 0),
        ([], 0),
    ],
)
def test_capabilities_of_a_user_who_is_not_root_give_a_warning(overrides: list[str], count: int) -> None:
    warnings = unused_capabilities(load_config("ddp_smoke", overrides, for_launch=True).launch)
    assert len(warnings) == count


def test_run_with_a_refused_patch_can_be_removed() -> None:
    """Launched by a version that accepted the patch."""
    config = render(make())[0]
    text = config["data"]["train.yaml"].replace("pod_patch: {}", "pod_patch: {spec: {restartPolicy: Always}}")
    record = read_record({**config, "data": {**config["data"], "train.yaml": text}})
    assert record.config.launch.pod_patch
    assert record.manifests[-1]["kind"] == "Job"


def test_security_fields_apply_to_every_level() -> None:
    ids = ("launch.run_as_user=7", "launch.run_as_group=8", "launch.fs_group=9", "launch.capabilities=[IPC_LOCK]")
    for level in ("restricted", "baseline", "none"):
        spec = pod_template(make(*HUB, f"launch.security={level}", *ids), "Never")["spec"]
        context = spec["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (7, 8, 9)
        assert spec["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert "IPC_LOCK" not in json.dumps(spec["initContainers"])


@pytest.mark.parametrize(
    "field", ["labels={team: x}", "pod_patch={spec: {affinity: null}}", "resources.ephemeral_storage=1Gi"]
)
def test_older_image_schema_refuses_fields_that_it_cannot_record(field: str) -> None:
    with pytest.raises(UsageError, match="image_schema"):
        make("launch.image_schema=2", f"launch.{field}")
    assert "pod_patch" not in make("launch.image_schema=2").config_text


@pytest.mark.parametrize("path", ["/out", "/out/", "/data", "/work"])
def test_extra_mount_on_a_volume_of_the_run_is_refused(path: str) -> None:
    sets = ("launch.data_volume.claim=d", "launch.extra_volumes=[{name: a, emptyDir: {}}]")
    with pytest.raises(UsageError, match="extra_mounts"):
        make(*sets, f"launch.extra_mounts=[{{name: a, mountPath: {path}}}]")
    make(*sets, "launch.extra_mounts=[{name: a, mountPath: /out/below}]")


def test_tokens_are_kept_on_the_runs_volume() -> None:
    for root, expected in (("runs", "/out/.cache/llmtrain"), ("/mnt/runs", "/mnt/runs/.cache/llmtrain")):
        spec = pod_template(make(*HUB, f"output.root_dir={root}"), "Never")["spec"]
        for each in [*spec["initContainers"], *spec["containers"]]:
            assert {"name": "LLMTRAIN_TOKEN_CACHE", "value": expected} in each["env"]


class TestWarnings:
    def test_claim_of_the_default_storage_class(self) -> None:
        def claims(*sets: str) -> int:
            return sum("ReadWriteMany" in warning for warning in make(*sets).warnings)

        assert claims() == 0
        assert claims("launch.nodes=2") == 1
        assert claims("launch.runs_volume.access_mode=ReadWriteMany") == 1
        assert claims("launch.nodes=2", "launch.runs_volume.storage_class=nfs") == 0
        assert claims("launch.nodes=2", "launch.runs_volume.claim=runs") == 0

    @pytest.mark.parametrize(
        ("image", "context", "is_warned"),
        [
            ("llmtrain:latest", None, True),
            ("llmtrain:latest", "production", True),
            (f"llmtrain@sha256:{64 * 'a'}", "production", True),
            ("llmtrain:latest", "kind-llmtrain", False),
            ("me/llmtrain:1", "production", False),
            ("localhost:5000/llmtrain:1", "production", False),
        ],
    )
    def test_image_without_a_registry(self, image: str, context: str | None, is_warned: bool) -> None:
        launch = make(f"launch.image={json.dumps(image)}").launch
        assert bool(image_warning(launch, context)) == is_warned
        assert (
            image_warning(make("launch.image=llmtrain:1", "launch.image_pull_policy=Never").launch, "production")
            is None
        )

    def test_pods_that_pod_security_rejects(self) -> None:
        volume = (
            "launch.extra_volumes=[{name: a, hostPath: {path: /}}]",
            "launch.extra_mounts=[{name: a, mountPath: /a}]",
        )
        for sets in (["launch.host_network=true"], ["launch.capabilities=[IPC_LOCK]"], volume):
            assert any("privileged" in warning for warning in make(*sets).warnings)
        assert make().warnings == []

    def test_files_on_an_extra_volume_are_not_missing(self) -> None:
        volume = "launch.extra_volumes=[{name: nas, nfs: {server: nas, path: /}}]"
        mount = "launch.extra_mounts=[{name: nas, mountPath: /nas}]"
        data = ("data.name=text_files", "data.files=[/nas/a.txt]", "data.cache_dir=/nas/cache")
        assert make(volume, mount, *data).warnings == []
        assert len(make(*data).warnings) == 2


class TestGpus:
    @pytest.mark.parametrize("preset", ["lora_llama_1b", "gpt2_124m", "k8s_gpu_4x1", "k8s_gpu_64x8"])
    def test_cuda_presets_request_gpus(self, preset: str) -> None:
        plan = plan_job(load_config(preset, ["launch.image=me/train:1"]))
        assert plan.config.run.device == "cuda"
        (container,) = pod_template(plan, "Never")["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(plan.processes_per_node)

    def test_cuda_without_gpus_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"launch\.resources\.gpus"):
            make("run.device=cuda")
        make("run.device=cuda", patch={"spec": {"resourceClaims": [{"name": "gpu"}]}})
        make("run.device=cuda", "launch.resources.extra={nvidia.com/mig-1g.5gb: 1}")
        make("run.device=cuda", task=PodTask("command", ("python",)))

    def test_launched_run_without_gpus_can_be_removed(self) -> None:
        config = build_config(parse_document("run: {device: cuda}\n", "record"))
        assert plan_job(config, is_launched=True).nodes == 1

    def test_gpus_on_cpu_warn(self) -> None:
        assert any("idle" in warning for warning in make("run.device=cpu", "launch.resources.gpus=1").warnings)


@pytest.mark.parametrize("kind", KINDS)
def test_resume_keeps_the_pod_template(kind: str) -> None:
    with kube_server() as kube:
        cluster: Any = kube.cluster()
        sets = [*CASES[f"shaped_{kind}"][1], "launch.namespace=team"]
        plan = plan_job(load_config("ddp_smoke", sets))
        lifecycle.submit(cluster, plan)
        before = templates(list(kube.objects.values()))
        record = find_record(cluster, "ddp-demo", "team")
        lifecycle.resume(cluster, record, plan_job(record.config, record.task))
        after = templates(list(kube.objects.values()))
        assert before
        assert [without_launch(each) for each in after] == [without_launch(each) for each in before]


def without_launch(template: dict[str, Any]) -> str:
    """The template without the number of its launch, which a resume increments."""
    return json.dumps([row for row in _rows(template) if row[0] != "LLMTRAIN_LAUNCH"])


def _rows(template: dict[str, Any]) -> list[Any]:
    spec = {key: value for key, value in template["spec"].items() if key != "containers"}
    env = [(row["name"], row) for each in template["spec"]["containers"] for row in each.get("env", [])]
    rest = [{**each, "env": None} for each in template["spec"]["containers"]]
    return [*env, ("rest", [template["metadata"], spec, rest])]


def test_server_dry_run_checks_the_patched_pod() -> None:
    with kube_server() as kube:
        sent: list[dict[str, Any]] = []
        cluster = kube.cluster()
        create = cluster.create
        cluster.create = lambda manifest, dry_run=False: (sent.append(manifest), create(manifest, dry_run))[1]  # type: ignore[method-assign]
        lifecycle.check_on_server(cluster, make("launch.namespace=team", patch={"spec": {"hostPID": True}}))
        assert [each["spec"]["hostPID"] for each in sent if each["kind"] == "Pod"] == [True]
        assert kube.objects == {}


class TestOutput:
    DEMO = ("launch", "--dry-run", "--config", "ddp_smoke", "--name", "demo", "--image", "me/llmtrain:1")

    def test_formats_follow_kubectl(self, cli: Cli) -> None:
        plain, as_yaml, as_json = (cli(*self.DEMO, *option) for option in ((), ("-o", "yaml"), ("-o", "json")))
        assert plain.out == as_yaml.out
        manifests = list(yaml.safe_load_all(plain.out))
        assert as_json.json == {"apiVersion": "v1", "kind": "List", "items": manifests}

    def test_namespace_is_that_of_the_context(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = str(KubeServer().kubeconfig(tmp_path))
        monkeypatch.setenv("KUBECONFIG", path)

        def namespaces(*options: str) -> set[str]:
            done = cli(*self.DEMO, "--json", *options)
            assert done.code == 0, done.err
            return {manifest["metadata"]["namespace"] for manifest in done.json["manifests"]}

        assert namespaces() == {"team"}
        assert namespaces("--context", "there") == {"lab"}
        assert namespaces("--context", "there", "--namespace", "mine") == {"mine"}
        assert namespaces("--set", "launch.namespace=config") == {"config"}
        monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
        assert namespaces() == {"default"}
        assert namespaces("--kubeconfig", path) == {"team"}
        assert cli(*self.DEMO, "--context", "there").code == 64


def test_local_run_is_named(cli: Cli, workdir: Path) -> None:
    run = workdir / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    for words in (("resume", "first"), ("status", "first"), ("stop", "first"), ("logs", "first")):
        done = cli(*words, "--json")
        assert done.code == 64
        assert "llmtrain train --resume first" in done.json["remedy"]
    assert "--resume" not in cli("resume", "second", "--json").json["remedy"]
    with kube_server() as kube:
        path = str(kube.kubeconfig(workdir))
        assert "--resume first" in cli("resume", "first", "--kubeconfig", path, "--json").json["remedy"]


def documented(heading: str) -> list[dict[str, Any]]:
    """The YAML of a section of docs/pods.md."""
    page = (ROOT / "docs" / "pods.md").read_text()
    section = page.partition(f"\n### {heading}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", section, re.S)]


@pytest.mark.parametrize("kind", KINDS)
class TestDocumentedPatches:
    @staticmethod
    def manifests(kind: str, document: dict[str, Any]) -> list[dict[str, Any]]:
        patch = document["launch"]["pod_patch"]
        return list(
            render(
                make(f"launch.kind={kind}", "launch.nodes=2", "launch.image=example.org/llmtrain:1", *HUB, patch=patch)
            )
        )

    @staticmethod
    def findings(manifests: list[dict[str, Any]]) -> list[str]:
        return [found.name for found in lint(Sources(parse(dump_manifests(manifests), "a"), ["a"], [])).findings]

    def test_native_sidecar(self, kind: str) -> None:
        (example,) = documented("Sidecars")
        manifests = self.manifests(kind, example)
        for template in templates(manifests):
            *_, sidecar = template["spec"]["initContainers"]
            assert (sidecar["name"], sidecar["restartPolicy"]) == ("log-shipper", "Always")
        assert self.findings(manifests) == []
        assert "log-shipper" not in str(make(f"launch.kind={kind}", patch=example["launch"]["pod_patch"]).warnings)

    def test_openshift(self, kind: str) -> None:
        example, policy = documented("OpenShift")
        manifests = self.manifests(kind, example)
        for template in templates(manifests):
            assert set(template["spec"]["securityContext"]) == {
                "runAsNonRoot",
                "fsGroupChangePolicy",
                "seccompProfile",
            }
            labels = template["metadata"]["labels"]
            assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
            for container in template["spec"]["containers"]:
                assert "runAsUser" not in container["securityContext"]
        assert self.findings(manifests) == []
        assert unknown_fields(policy["spec"], "V1NetworkPolicySpec") == []


def test_further_container_of_the_patch_is_warned_of() -> None:
    patch = "launch.pod_patch={spec: {containers: [{name: log, image: x}, {name: trainer, tty: true}]}}"
    (warning,) = [
        text
        for text in plan_job(load_config("ddp_smoke", ["launch.image=me/train:1", patch])).warnings
        if "container" in text
    ]
    assert "adds container log" in warning

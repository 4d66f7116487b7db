"""launch --with-code: which files are shipped, how they reach every pod, and what resume and delete do with them."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kube_server import KubeServer
from llmtrain import registry
from llmtrain.config.load import load_config
from llmtrain.core.env import CODE_DIR, CODE_HASH
from llmtrain.errors import ConfigError, UsageError
from llmtrain.kubernetes.labels import CODE_LABEL, has_labels
from llmtrain.launch import lifecycle
from llmtrain.launch.code_bundle import MAX_BYTES, check_mounted_code, read_bundle
from llmtrain.launch.job import JobPlan
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.plugin_code import plugin_code
from llmtrain.launch.pod_task import CODE_PATH
from llmtrain.launch.record import all_records, find_record

Cli = Callable[..., Any]
Object = dict[str, Any]
TRACKER = "from llmtrain.tracking.base import Tracker\n\n\nclass Own(Tracker):\n    pass\n"
CUSTOM = "tracking.custom=[{name: own_shipped:Own}]"


def write(directory: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


@pytest.fixture
def code(tmp_path: Path) -> Path:
    files: dict[str, str | bytes] = {
        "own_shipped.py": TRACKER,
        "package/__init__.py": "",
        "package/deep/more.py": "x = 1\n",
    }
    return write(tmp_path / "code", files)


def make_plan(code: Path | None, kind: str = "indexed_job") -> JobPlan:
    sets = [f"launch.kind={kind}", "output.run_id=demo", "launch.namespace=team", "launch.env={PYTHONPATH: /opt/lib}"]
    sets += ["launch.image=me/train:1"]
    return plan_job(load_config("ddp_smoke", sets), code=read_bundle(str(code)) if code else None)


def find_specs(value: Any) -> Iterator[Object]:
    """Every pod spec in a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for item in value.values():
            yield from find_specs(item)
    elif isinstance(value, list):
        for item in value:
            yield from find_specs(item)


def mount(manifests: list[Object], directory: Path) -> Path:
    """What the kubelet writes for the volume: files below a hidden directory, and links to them."""
    code_map = next(each for each in manifests if has_labels(each, CODE_LABEL))
    (spec, *_) = find_specs(manifests)
    (volume,) = (each["configMap"] for each in spec["volumes"] if each["name"] == "code")
    assert volume["name"] == code_map["metadata"]["name"]
    data = directory / "..2026_01_01"
    for item in volume["items"]:
        path = data / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code_map["data"][item["key"]])
    (directory / "..data").symlink_to(data.name)
    for path in data.iterdir():
        (directory / path.name).symlink_to(f"..data/{path.name}")
    return directory


@pytest.mark.parametrize("kind", sorted(registry.KINDS))
def test_every_pod_has_the_code_on_its_path(kind: str, code: Path, tmp_path: Path) -> None:
    plan = make_plan(code, kind)
    assert plan.code
    manifests = render(plan)
    (spec,) = find_specs(manifests)
    (container,) = spec["containers"]
    env = {row["name"]: row.get("value") for row in container["env"]}
    assert env["PYTHONPATH"] == f"{CODE_PATH}:/opt/lib"
    assert (env[CODE_DIR], env[CODE_HASH]) == (CODE_PATH, plan.code.sha256)
    assert {"name": "code", "mountPath": CODE_PATH, "readOnly": True} in container["volumeMounts"]
    mounted = mount(manifests, tmp_path / "mounted")
    assert (mounted / "package/deep/more.py").read_text() == "x = 1\n"
    assert json.loads(manifests[0]["data"]["job.json"])["code"]["sha256"] == plan.code.sha256


def test_pod_refuses_other_code(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    plan = make_plan(code)
    assert plan.code
    mounted = mount(render(plan), tmp_path / "mounted")
    monkeypatch.setenv(CODE_DIR, str(mounted))
    monkeypatch.setenv(CODE_HASH, plan.code.sha256)
    (mounted / "package" / "__pycache__").mkdir()
    (mounted / "package" / "__pycache__" / "more.pyc").write_bytes(b"\0")
    check_mounted_code()
    (mounted / "..2026_01_01/package/deep/more.py").write_text("x = 2\n")
    with pytest.raises(UsageError):
        check_mounted_code()
    assert cli("node", "--nodes", "1", "--", "true").code == 64


def test_run_records_the_hash_of_the_code(train: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CODE_HASH, "0" * 64)
    assert train("output.run_id=coded", "trainer.max_steps=1").code == 0
    assert json.loads((workdir / "runs/coded/meta.json").read_text())["code_sha256"] == "0" * 64


# Which files.


def test_package_is_shipped_with_its_name(code: Path) -> None:
    assert read_bundle(str(code / "package")).paths == ("package/__init__.py", "package/deep/more.py")


def test_caches_hidden_files_and_runs_are_left_out(code: Path) -> None:
    kept = read_bundle(str(code))
    for name in (
        ".env",
        ".git/config",
        "__pycache__/a.pyc",
        "mine.egg-info/PKG-INFO",
        "runs/x/metrics.jsonl",
        "id_rsa",
    ):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("secret")
    assert read_bundle(str(code)) == kept


def test_files_that_git_ignores_are_left_out(code: Path) -> None:
    import subprocess

    kept = read_bundle(str(code))
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    (code / ".gitignore").write_text("data/\n*.bin\n")
    write(code, {"data/big.py": "x", "a.bin": "b", "weights": "w"})
    assert set(read_bundle(str(code)).paths) == {*kept.paths, "weights"}


def test_hash_depends_on_names_and_contents(code: Path) -> None:
    hashes = [read_bundle(str(code)).sha256]
    (code / "own_shipped.py").rename(code / "renamed.py")
    hashes.append(read_bundle(str(code)).sha256)
    (code / "renamed.py").write_text("")
    hashes.append(read_bundle(str(code)).sha256)
    assert len(set(hashes)) == 3


def test_code_beyond_a_config_map_is_refused(code: Path) -> None:
    (code / "table.txt").write_bytes(b"x" * MAX_BYTES)
    with pytest.raises(UsageError) as error:
        read_bundle(str(code))
    assert "table.txt" in error.value.what
    assert "launch.image" in str(error.value.remedy)


def test_code_with_a_token_is_refused(code: Path) -> None:
    (code / "own_shipped.py").write_text(f"TOKEN = 'hf_{'a1B2' * 9}'\n")
    with pytest.raises(UsageError) as error:
        read_bundle(str(code))
    assert "a1B2" not in str(error.value)


@pytest.mark.parametrize("target", ["../outside.py", "../outside", "package", "nowhere", "link.py"])
def test_links_that_leave_the_directory_are_refused(code: Path, target: str) -> None:
    write(code.parent, {"outside.py": "", "outside/a.py": ""})
    (code / "link.py").symlink_to(target)
    with pytest.raises(UsageError):
        read_bundle(str(code))


def test_name_that_is_not_utf8_is_refused(code: Path) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    (code / name).write_text("")
    with pytest.raises(UsageError) as error:
        read_bundle(str(code))
    assert "caf\\xe9.py" in error.value.what


def test_empty_directory_name_is_refused() -> None:
    with pytest.raises(UsageError):
        plugin_code(load_config("ddp_smoke"), "the config", "")


def test_link_inside_the_directory_is_shipped_as_a_file(code: Path) -> None:
    (code / "link.py").symlink_to("own_shipped.py")
    assert read_bundle(str(code)).contents["link.py"] == TRACKER.encode()


@pytest.mark.parametrize("name", ["nowhere", "code/own_shipped.py", "empty"])
def test_directory_without_code_is_refused(code: Path, name: str) -> None:
    (code.parent / "empty").mkdir()
    with pytest.raises(UsageError):
        read_bundle(str(code.parent / name))


def test_binary_files_and_equal_keys_keep_their_content(code: Path) -> None:
    write(code, {"a/b.py": "one", "a.b.py": "two", "vocabulary": b"\xff\0"})
    code_map, spec = render(make_plan(code))[1], next(find_specs(render(make_plan(code))))
    (volume,) = (each["configMap"] for each in spec["volumes"] if each["name"] == "code")
    keys = {item["path"]: item["key"] for item in volume["items"]}
    assert (code_map["data"][keys["a/b.py"]], code_map["data"][keys["a.b.py"]]) == ("one", "two")
    assert code_map["binaryData"][keys["vocabulary"]] == "/wA="


# Checks before anything is sent.


def test_shipped_class_is_checked_here(code: Path) -> None:
    config = load_config("ddp_smoke", [CUSTOM], for_launch=True)
    assert plugin_code(config, "c.yaml", str(code))[1] == []
    wrong = load_config("ddp_smoke", ["tracking.custom=[{name: own_shipped:Own, options: {a: 1}}]"], for_launch=True)
    with pytest.raises(ConfigError):
        plugin_code(wrong, "c.yaml", str(code))


def test_class_that_is_not_shipped_gets_a_warning(code: Path) -> None:
    config = load_config("ddp_smoke", [CUSTOM], for_launch=True)
    for with_code in (None, str(code / "package")):
        (warning,) = plugin_code(config, "c.yaml", with_code)[1]
        assert "own_shipped:Own" in warning


def test_class_whose_package_is_only_in_the_image_is_not_checked(code: Path) -> None:
    (code / "own_shipped.py").write_text(f"import only_in_the_image\n{TRACKER}")
    config = load_config("ddp_smoke", [CUSTOM], for_launch=True)
    (warning,) = plugin_code(config, "c.yaml", str(code))[1]
    assert "only_in_the_image" in warning


@pytest.mark.parametrize(
    "sets", [[CUSTOM, "launch.image_schema=2"], ["launch.data_volume={claim: c, mount_path: /code}"]]
)
def test_launch_that_cannot_work_is_refused(code: Path, sets: list[str]) -> None:
    with pytest.raises(UsageError):
        plan_job(
            load_config("ddp_smoke", ["launch.image=me/train:1", *sets], for_launch=True), code=read_bundle(str(code))
        )


# On the cluster.


def code_maps(kube: KubeServer) -> list[str]:
    return sorted(name for (plural, _, name) in kube.objects if plural == "configmaps" and "-code-" in name)


def test_resume_keeps_the_code_and_delete_removes_it(kube: KubeServer, code: Path) -> None:
    cluster, plan = kube.cluster(), make_plan(code)
    lifecycle.submit(cluster, plan)
    record = find_record(cluster, "demo", "team")
    assert record.code == plan.code
    assert len(all_records(cluster, "team")) == 1
    lifecycle.stop(cluster, record, lambda _: None)
    assert code_maps(kube) == [plan.code_map]
    record = find_record(cluster, "demo", "team")
    lifecycle.resume(cluster, record, plan_job(record.config, record.task, code=record.code))
    record = find_record(cluster, "demo", "team")
    (spec,) = find_specs(kube.objects["jobs", "team", "demo"])
    assert any(volume.get("configMap", {}).get("name") == plan.code_map for volume in spec["volumes"])
    assert kube.objects["configmaps", "team", plan.code_map]["data"]["own_shipped.py"] == TRACKER
    lifecycle.delete(cluster, record, data=False, on_wait=lambda _: None)
    assert code_maps(kube) == []


def test_resume_with_new_code_replaces_it(kube: KubeServer, code: Path) -> None:
    cluster, plan = kube.cluster(), make_plan(code)
    lifecycle.submit(cluster, plan)
    record = find_record(cluster, "demo", "team")
    (code / "own_shipped.py").write_text("")
    changed = make_plan(code)
    lifecycle.resume(cluster, record, changed)
    assert code_maps(kube) == [changed.code_map] != [plan.code_map]
    assert find_record(cluster, "demo", "team").code == changed.code


def test_resume_is_refused_if_the_code_is_gone(kube: KubeServer, code: Path) -> None:
    cluster, plan = kube.cluster(), make_plan(code)
    lifecycle.submit(cluster, plan)
    record = find_record(cluster, "demo", "team")
    del kube.objects["configmaps", "team", plan.code_map]
    with pytest.raises(UsageError):
        lifecycle.resume(cluster, record, plan_job(record.config, record.task, code=record.code))
    assert ("jobs", "team", "demo") in kube.objects

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain import registry

Cli = Callable[..., Any]

DEMO = ("launch", "--dry-run", "--config", "ddp_smoke", "--name", "demo", "--image", "me/train:1")


def test_text_and_json_have_the_same_manifests(cli: Cli) -> None:
    text, value = cli(*DEMO), cli(*DEMO, "--json").json
    assert list(yaml.safe_load_all(text.out)) == value["manifests"]


def test_short_options_set_fields(cli: Cli) -> None:
    flags = (
        "--kind",
        "job_set",
        "--namespace",
        "lab",
        "--nodes",
        "1:2",
        "--processes-per-node",
        "2",
        "--image",
        "me:1",
    )
    job = cli(
        *DEMO, *flags, "--set", "launch.image=loses:1", "--set", "distributed.reproducible_reduce=false", "--json"
    )
    assert job.code == 0, job.err
    (made,) = [m for m in job.json["manifests"] if m["kind"] == "JobSet"]
    assert made["metadata"]["namespace"] == "lab"
    spec = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["completions"] == 2
    (container,) = spec["template"]["spec"]["containers"]
    assert container["image"] == "me:1"
    assert container["command"][6:10] == ["--nodes", "1:2", "--processes-per-node", "2"]


def test_name_sets_the_run_id(cli: Cli) -> None:
    done = cli(*DEMO, "--set", "output.run_id=older", "--json")
    config = yaml.safe_load(done.json["manifests"][0]["data"]["train.yaml"])
    assert config["output"]["run_id"] == "demo"


def test_output_writes_files_and_a_kustomization(cli: Cli, workdir: Path) -> None:
    done = cli(*DEMO, "-o", "out/demo")
    assert done.code == 0, done.err
    folder = workdir / "out" / "demo"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*listed, "kustomization.yaml"])
    printed = cli(*DEMO, "--json").json["manifests"]
    assert [yaml.safe_load((folder / name).read_text()) for name in listed] == printed
    again = cli(*DEMO, "-o", "out/demo")
    assert again.code == 64
    assert "not empty" in again.err


def test_unwritable_output_exits_with_64(cli: Cli, workdir: Path) -> None:
    (workdir / "file").write_text("")
    assert cli(*DEMO, "-o", "file/inside").code == 64


def test_user_errors_exit_with_64(cli: Cli) -> None:
    for flags, words in (
        (("--kind", "indexed_jobs"), "Did you mean 'indexed_job'?"),
        (("--nodes", "none"), "launch.nodes"),
        (("--nodes", "0"), "launch.nodes"),
        (("--name", "Not_A_Name"), "--name 'Not_A_Name'"),
        (("--name", "Not_A_Name"), "Try 'not-a-name'"),
        (("--name", "1"), "Try 'run-1'"),
        (("--name", "A" * 50), f"Try '{'a' * 40}'"),
        (("--namespace", "Bad_NS"), "--namespace 'Bad_NS'"),
        (("--kind", "job"), "Did you mean 'indexed_job'?"),
        (("--dry-run=maybe",), "--dry-run=server"),
        (("-o", "yml"), "-o yml/"),
    ):
        done = cli(*DEMO, *flags)
        assert done.code == 64
        assert words in done.err


IMAGE = ("--image", "registry.example.com/llmtrain:0.1.0")
LOCAL = ("--model-local-dir", "/models/llama", "--tokenizer-local-dir", "/models/words", "--local-files-only")
VOLUMES = (
    *("--set", "launch.models_volume.claim=models-pvc", "--set", "launch.data_volume.claim=datasets-pvc"),
    *("--set", "data.train_file=/data/train.jsonl", "--set", "data.val_file=/data/val.jsonl"),
)


@pytest.mark.parametrize("kind", sorted(registry.KINDS))
def test_model_on_a_volume_does_not_warn(cli: Cli, kind: str) -> None:
    """The offline options of document 1, as `train` takes them: nothing is fetched, and nothing may ask the hub."""
    demo = ("launch", "--dry-run", "--config", "lora_instruct", "--name", "train-llm", "--kind", kind, *IMAGE)
    done = cli(*demo, *LOCAL, *VOLUMES, "--set", "model.path=somebody/loses", "--json")
    assert done.code == 0, done.err
    assert done.err == "", "everything is on a volume"
    model = yaml.safe_load(done.json["manifests"][0]["data"]["train.yaml"])["model"]
    assert (model["path"], model["tokenizer_path"]) == ("/models/llama", "/models/words")
    assert model["local_files_only"] is True
    assert '"initContainers"' not in done.out
    (policy,) = [m for m in done.json["manifests"] if m["kind"] == "NetworkPolicy"]
    assert 443 not in [port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])]
    hub = cli(*demo, *VOLUMES, "--set", "model.path=somebody/tiny", "--json")
    assert '"initContainers"' in hub.out
    assert '"initContainers"' not in cli(*demo, *VOLUMES, "--set", "model.path=somebody/tiny", LOCAL[-1], "--json").out


@pytest.mark.parametrize("folder", ["/srv/llama", "models/llama", "llama"])
def test_local_model_warns(cli: Cli, folder: str) -> None:
    words = ("launch", "--dry-run", "--config", "lora_instruct", "--name", "demo", *IMAGE, *VOLUMES)
    done = cli(*words, "--model-local-dir", folder, "--json")
    assert done.code == 0, done.err
    assert done.err.startswith(f"warning: model.path {folder} is not on a volume")
    done = cli(*words, "--model-local-dir", "/models/llama", "--tokenizer-local-dir", folder, "--json")
    assert done.err.startswith(f"warning: model.tokenizer_path {folder} is not on a volume")


@pytest.mark.parametrize("option", [LOCAL[:2], LOCAL[2:4], LOCAL[4:]])
def test_trainer_options_are_refused_for_a_user_command(cli: Cli, option: tuple[str, ...]) -> None:
    done = cli("launch", "--dry-run", "--name", "demo", *option, "--", "python", "train.py")
    assert done.code == 64
    assert done.out == ""
    assert cli("launch", "--dry-run", "--name", "demo", *IMAGE, "--", "python", "train.py", *LOCAL).code == 0

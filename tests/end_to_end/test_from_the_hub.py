"""A LoRA run whose model and data the job fetches by itself, in the init container `prefetch`, from a hub that wants a
token. The hub is the stand-in of the other tests, served inside the cluster."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kube import ROOT, Kube
from services import FILES, start_service

from tiny_llama import make_examples, make_model

pytestmark = pytest.mark.slow  # needs an image with the extra hf

TOKEN = "hf_" + "e2eHubToken" * 3
PORT = 8000
SERVER = f"""
import base64, json, os, sys, time
sys.path.insert(0, "{FILES}")
from hub_server import Repo, serve
token = os.environ["HF_TOKEN"]
with serve("0.0.0.0", {PORT}) as hub:
    for name, repo in json.load(open("{FILES}/repos.json")).items():
        files = {{file: base64.b64decode(data) for file, data in repo["files"].items()}}
        hub.repos[name] = Repo(files, kind=repo["kind"], token=token)
    shown = 0
    while True:
        while shown < len(hub.requests):
            request = hub.requests[shown]
            print(json.dumps({{"path": request.path, "is_allowed": request.token == token}}), flush=True)
            shown += 1
        time.sleep(0.1)
"""
CONFIG = """
schema_version: 3
run: {name: lora, threads: 1}
model: {name: hf_causal_lm, path: MODEL, block_size: 64, lora: {rank: 4}}
data: {name: instruct_jsonl, dataset_name: DATA, val_split: null, val_fraction: 0.2}
trainer: {max_steps: 4, micro_batch_size: 2, grad_accum_steps: 2, lr: 1.0e-3, log_every_steps: 1, eval_batches: 2}
distributed: {strategy: ddp, reproducible_reduce: true}
"""
IN_CLUSTER = f"""
launch:
  hf_token_secret: {{name: hf-token}}
  env: {{HF_ENDPOINT: "http://hub:{PORT}"}}
"""


@pytest.fixture(scope="module")
def reference(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hub runs, and holds what the config names; the hash that the same files give on this machine."""
    folder = tmp_path_factory.mktemp("hub")
    model = make_model(folder / "tiny")
    data = make_examples(folder / "rows" / "train.jsonl", 40).parent
    repos = {"acme/tiny": content(model, "model"), "acme/rows": content(data, "dataset")}
    (kube.folder / ".env").write_text(f"HF_TOKEN={TOKEN}\n")
    kube.llmtrain("secret", "hf-token", "--from-env-file", ".env")
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}}
    scripts = {name: (ROOT / "tests" / name).read_text() for name in ("hub_server.py", "limits.py")}
    files = {**scripts, "repos.json": json.dumps(repos)}
    start_service(kube, "hub", ["python", "-c", SERVER], PORT, files, [token])
    (kube.folder / "here.yaml").write_text(CONFIG.replace("MODEL", str(model)).replace("DATA", str(data)))
    there = CONFIG.replace("MODEL", "acme/tiny").replace("DATA", "acme/rows")
    (kube.folder / "there.yaml").write_text(there + IN_CLUSTER)
    result = kube.local("train", "--config", "here.yaml", "--processes", "2", "--json").json
    shutil.rmtree(folder)
    return str(result["state_sha256"])


def content(folder: Path, kind: str) -> dict[str, Any]:
    files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in folder.iterdir()}
    return {"kind": kind, "files": files}


def asked(kube: Kube) -> list[dict[str, Any]]:
    return [json.loads(line) for line in kube.kubectl("logs", "hub").splitlines() if line.startswith("{")]


@pytest.mark.parametrize("kind", ["pytorch_job", "indexed_job"])
def test_job_downloads_model_and_data(kube: Kube, kind: str, reference: str) -> None:
    run = f"hub-{kind.replace('_', '-')}"
    before = len(asked(kube))
    kube.llmtrain(*kube.launch_words(kind, run, config="there.yaml"), "--detach")
    kube.llmtrain("status", run, "--watch")
    for pod in kube.objects("pods", "-l", f"llmtrain.dev/run={run}"):
        [prefetch] = pod["status"]["initContainerStatuses"]
        assert (prefetch["name"], prefetch["state"]["terminated"]["exitCode"]) == ("prefetch", 0)
        # Only the container that asks the hub has the token.
        [trainer] = pod["spec"]["containers"]
        names = {row["name"]: row.get("value") for row in trainer["env"]}
        assert "HF_TOKEN" not in names
        assert names["HF_HUB_OFFLINE"] == "1"
    rows = [row for row in asked(kube)[before:] if "acme/" in row["path"]]  # the library asks for other things, too
    assert rows
    assert [row["path"] for row in rows if not row["is_allowed"]] == []
    assert {"model.safetensors", "train.jsonl"} <= {row["path"].rpartition("/")[2] for row in rows}
    [policy] = kube.objects("networkpolicies", "-l", f"llmtrain.dev/run={run}")
    ports = [row["port"] for rule in policy["spec"]["egress"] for row in rule.get("ports", [])]
    assert PORT in ports
    kube.llmtrain("delete", run)
    kube.llmtrain("fetch", run, "--claim", "runs", "--image", kube.image)
    fetched = kube.folder / "runs" / run
    assert json.loads((fetched / "finished.json").read_text())["state_sha256"] == reference
    assert (fetched / "adapter" / "adapter_model.safetensors").is_file()
    written = [path for path in fetched.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert written == []


@pytest.mark.usefixtures("reference")
def test_without_the_token(kube: Kube) -> None:
    run = "hub-no-token"
    words = kube.launch_words("indexed_job", run, "--set", "launch.hf_token_secret.name=null", config="there.yaml")
    kube.llmtrain(*words, expect=64)
    why = kube.llmtrain("why", run, "--json").json
    assert "acme/tiny" in json.dumps(why)
    assert why["cause"] == "prefetch_failed"
    assert "launch.hf_token_secret" in why["remedy"]
    kube.llmtrain("delete", run)

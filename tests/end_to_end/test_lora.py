"""LoRA fine-tuning of a real model on the cluster, offline, from volumes. Only on the test cluster, whose volumes are
directories of this machine."""

import json
import shutil
from pathlib import Path

import pytest
from kube import ROOT, Kube

from real_model import smollm2

pytestmark = pytest.mark.slow

CONFIG = """
schema_version: 3
run: {name: lora, threads: 1}
model:
  name: hf_causal_lm
  path: MODELS/smol
  local_files_only: true
  block_size: 128
  lora: {rank: 8, dropout: 0.05}
data: {name: instruct_jsonl, train_file: DATA/train.jsonl, val_file: DATA/val.jsonl}
trainer: {max_steps: 6, micro_batch_size: 1, grad_accum_steps: 4, lr: 5.0e-4, log_every_steps: 1, eval_batches: 4,
  save_every_steps: 2, eval_every_steps: 3}
distributed: {strategy: ddp, reproducible_reduce: true}
launch:
  processes_per_node: 2
  data_volume: {claim: data}
  models_volume: {claim: models}
  env: {HF_HUB_OFFLINE: "1"}
"""


@pytest.fixture(scope="module")
def reference(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> str:
    model = smollm2(tmp_path_factory.mktemp("model"))
    data = ROOT.parent / "shared" / "data" / "instruct"
    for name in ("models", "data"):
        kube.claim(name)
    kube.kubectl("wait", "--for=jsonpath={.status.phase}=Bound", "pvc/models", "pvc/data", "--timeout=30s")
    shutil.copytree(model, kube.volume("models") / "smol", dirs_exist_ok=True)
    (kube.volume("models") / "smol/model.safetensors").chmod(0o644)  # safetensors writes 0600, and pods are not root
    for source, lines in (("train.jsonl", 200), ("val.jsonl", 40)):
        text = "".join((data / source).read_text().splitlines(keepends=True)[:lines])
        (kube.volume("data") / source).write_text(text)
    here = CONFIG.replace("MODELS", str(kube.volume("models"))).replace("DATA", str(kube.volume("data")))
    (kube.folder / "here.yaml").write_text(here)
    (kube.folder / "there.yaml").write_text(CONFIG.replace("MODELS", "/models").replace("DATA", "/data"))
    result = kube.local("train", "--config", "here.yaml", "--processes", "4", "--json", timeout=600).json
    return str(result["state_sha256"])


@pytest.mark.parametrize("kind", ["indexed_job", "pytorch_job"])
def test_lora(kube: Kube, kind: str, reference: str) -> None:
    run = f"lora-{kind.replace('_', '-')}"
    words = kube.launch_words(kind, run, "--set", "launch.resources.memory=4Gi", config="there.yaml")
    kube.llmtrain(*words, timeout=600)
    kube.llmtrain("delete", run)
    kube.llmtrain("fetch", run, "--claim", "runs", "--image", kube.image)
    fetched = Path(kube.folder) / "runs" / run
    assert json.loads((fetched / "finished.json").read_text())["state_sha256"] == reference
    assert (fetched / "adapter" / "adapter_model.safetensors").is_file()
    model = str(kube.volume("models") / "smol")
    words = ["generate", "--run", run, "--model", model, "--prompt", "What is the capital of France?"]
    assert kube.local(*words, "--max-new-tokens", "8", "--json").json["text"]

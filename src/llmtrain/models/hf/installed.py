"""Whether the packages of the extra `hf` and `qlora` are installed; without torch, so that commands can ask early."""

import importlib.util

from llmtrain.core.install import install_command
from llmtrain.errors import UsageError


def check_installed() -> None:
    missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"model.name hf_causal_lm requires {' and '.join(missing)}.", remedy=install_command("hf"))


def check_quantization_installed() -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("model.lora.quantize requires bitsandbytes.", remedy=install_command("qlora"))

"""llmtrain: trains GPTs and fine-tunes Hugging Face models from one typed config.

    import llmtrain

    config = llmtrain.load_config("gpt_smoke", {"trainer.max_steps": 20, "output.run_id": "first"})
    result = llmtrain.train(config)
    print(result.final_val_loss, llmtrain.generate("first", "The "))

On this machine: load_config, train, load_model, generate, evaluate, export, metrics.
On a Kubernetes cluster: submit, status, why, fetch.
Errors are subclasses of LlmtrainError; llmtrain/errors.py has the tree. docs/python-api.md is the guide.

Each name is imported on first use: `import llmtrain` imports neither torch nor the Kubernetes client.
"""

import importlib
from typing import TYPE_CHECKING, Any

from llmtrain.version import __version__

if TYPE_CHECKING:
    from llmtrain.api import (
        FetchResult,
        TrainResult,
        evaluate,
        export,
        fetch,
        generate,
        load_config,
        load_model,
        metrics,
        status,
        submit,
        train,
        why,
    )
    from llmtrain.config.schema import Config
    from llmtrain.errors import (
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        Interrupted,
        JoinError,
        LlmtrainError,
        PeerLost,
        Superseded,
        TrainingFailed,
        UsageError,
    )
    from llmtrain.inference.model import Evaluation, ExportResult, Model
    from llmtrain.operate.status.run_status import RunStatus
    from llmtrain.operate.why.explain import Why

_MODULES = {
    "llmtrain.api": (
        *("load_config", "train", "load_model", "generate", "evaluate", "export", "metrics"),
        *("submit", "status", "why", "fetch"),
        *("TrainResult", "FetchResult"),
    ),
    "llmtrain.config.schema": ("Config",),
    "llmtrain.errors": (
        *("LlmtrainError", "UsageError", "ConfigError", "DataError", "CheckpointError", "TrainingFailed"),
        *("JoinError", "ClusterError", "Interrupted", "PeerLost", "Superseded"),
    ),
    "llmtrain.inference.model": ("Model", "Evaluation", "ExportResult"),
    "llmtrain.operate.status.run_status": ("RunStatus",),
    "llmtrain.operate.why.explain": ("Why",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CheckpointError",
    "ClusterError",
    "Config",
    "ConfigError",
    "DataError",
    "Evaluation",
    "ExportResult",
    "FetchResult",
    "Interrupted",
    "JoinError",
    "LlmtrainError",
    "Model",
    "PeerLost",
    "RunStatus",
    "Superseded",
    "TrainResult",
    "TrainingFailed",
    "UsageError",
    "Why",
    "__version__",
    "evaluate",
    "export",
    "fetch",
    "generate",
    "load_config",
    "load_model",
    "metrics",
    "status",
    "submit",
    "train",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'llmtrain' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

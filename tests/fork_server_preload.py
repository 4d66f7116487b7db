"""Imported by the fork server of the tests, and by nobody else: what a child would import again, and no computation."""

import contextlib
import gc
import importlib
import os
from pathlib import Path

REQUIRED = (
    "llmtrain.cli",
    "llmtrain.training.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch._dynamo",  # what torch.use_deterministic_algorithms imports
)
EXTRAS = (
    "mlflow",
    "peft",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)

threads_at_fork = 0
"""Threads of the process that forked this one, at that moment. 0: the server did not import this module."""


def _count_threads() -> None:
    global threads_at_fork
    threads_at_fork = len(list(Path("/proc/self/task").iterdir()))


os.register_at_fork(before=_count_threads)
for name in REQUIRED:
    importlib.import_module(name)
for name in EXTRAS:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

from llmtrain.config.load import load_config  # noqa: E402
from llmtrain.runs.metadata import versions  # noqa: E402

# What is put off until its first use, and takes a sixth of the time of a tiny run.
load_config("gpt_smoke").as_dict()  # builds the schema of the config
versions()  # reads the metadata of all packages
with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # compiles the names of the weights of all models
gc.collect()
gc.freeze()  # else every child pays 0.4 s for a look through all that was imported

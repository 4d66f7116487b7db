"""Names in configs, and the class of each as "module:Class", imported on use.

A new model or dataset of llmtrain needs one module, one row here, one config section, one preset and one test. What a
tracker needs: tracking/__init__.py. A launch kind is a subclass of launch.kinds.base.Kind, which answers every
question about it.

Users name plugins `package.module:Class`, or register names by entry points: see plugins.py.
"""

import importlib
from typing import Any

from llmtrain.errors import UsageError, nearest
from llmtrain.plugins import PluginKind, load_plugin

MODELS = {
    "gpt": "llmtrain.models.gpt.adapter:GPTAdapter",
    "dummy_gpt": "llmtrain.models.dummy_gpt:DummyGPTAdapter",
    "hf_causal_lm": "llmtrain.models.hf.causal_lm:HFCausalLMAdapter",
}

DATA = {
    "dummy_text": "llmtrain.data.text.dummy_text:DummyText",
    "python_stdlib": "llmtrain.data.text.python_stdlib:PythonStdlib",
    "text_files": "llmtrain.data.text.text_files:TextFiles",
    "hf_text": "llmtrain.data.text.hf_text:HFText",
    "instruct_jsonl": "llmtrain.data.examples.instruct_jsonl:InstructJsonl",
    "chat_jsonl": "llmtrain.data.examples.chat_jsonl:ChatJsonl",
    "preference_jsonl": "llmtrain.data.preferences.preference_jsonl:PreferenceJsonl",
    "mixture": "llmtrain.data.mixture.prepare:Mixture",
}

OBJECTIVES = {
    "next_token": "llmtrain.training.objectives.next_token:NextToken",
    "dpo": "llmtrain.training.objectives.dpo:Dpo",
    "ipo": "llmtrain.training.objectives.ipo:Ipo",
    "orpo": "llmtrain.training.objectives.orpo:Orpo",
    "simpo": "llmtrain.training.objectives.simpo:Simpo",
}
"""Values of trainer.objective.name."""

TRACKERS = {
    "console": "llmtrain.tracking.console:ConsoleTracker",
    "jsonl": "llmtrain.tracking.jsonl:JsonlTracker",
    "mlflow": "llmtrain.tracking.mlflow:MlflowTracker",
    "notebook": "llmtrain.tracking.notebook:NotebookTracker",
    "tensorboard": "llmtrain.tracking.tensorboard:TensorboardTracker",
    "wandb": "llmtrain.tracking.wandb:WandbTracker",
    "prometheus": "llmtrain.tracking.prometheus:PrometheusTracker",
    "train_job": "llmtrain.tracking.train_job:TrainJobTracker",
}

REPORTS = {"html": "llmtrain.page.report:write_report"}
"""What a finished run writes about itself. `page` is above `training`, so it is named here."""

KINDS = {
    "indexed_job": "llmtrain.launch.kinds.indexed_job:IndexedJob",
    "stateful_set": "llmtrain.launch.kinds.stateful_set:StatefulSet",
    "job_set": "llmtrain.launch.kinds.job_set:JobSet",
    "pytorch_job": "llmtrain.launch.kinds.pytorch_job:PyTorchJob",
    "train_job": "llmtrain.launch.kinds.train_job:TrainJob",
}
"""Values of launch.kind. Those that need no operator come first."""

PLUGINS = {
    kind.field: kind
    for kind in (
        PluginKind("model.name", "llmtrain.models", "llmtrain.models.base:ModelAdapter"),
        PluginKind("data.name", "llmtrain.data", "llmtrain.data.base:DataModule"),
        PluginKind("trainer.objective", "llmtrain.objectives", "llmtrain.training.objectives.base:Objective"),
        PluginKind("tracking.custom", "llmtrain.trackers", "llmtrain.tracking.base:Tracker"),
    )
}


# Names that Kubernetes has for kinds, in lower case and without separators.
ALIASES = {"job": "indexed_job", "batchjob": "indexed_job", "sts": "stateful_set"}


def check_name(field: str, name: str, table: dict[str, str]) -> str | None:
    """The problem with a name, or None if the table has it."""
    if name in table:
        return None
    plain = name.lower().replace("-", "").replace("_", "")
    alias = ALIASES.get(plain) or next((known for known in table if known.replace("_", "") == plain), None)
    hint = f" Did you mean '{alias}'?" if alias in table else nearest(name, table)
    return f"{field} '{name}' is unknown.{hint} Known: {', '.join(sorted(table))}."


def resolve(field: str, name: str, table: dict[str, str]) -> Any:
    """Import the class with this name: of the table, else a plugin where the field accepts one."""
    if name not in table and field in PLUGINS:
        return load_plugin(PLUGINS[field], name)
    problem = check_name(field, name, table)
    if problem:
        raise UsageError(problem)
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def all_kinds() -> list[Any]:
    """The class of every launch kind, also for packages below `launch`."""
    return [resolve("launch.kind", name, KINDS) for name in KINDS]

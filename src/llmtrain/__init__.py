"""llmtrain: trains GPTs and fine-tunes Hugging Face models from one typed config.

    import llmtrain

    config = llmtrain.load_config("gpt_smoke", {"trainer.max_steps": 20, "output.run_id": "first"})
    result = llmtrain.train(config)
    print(result.final_val_loss, llmtrain.generate("first", "The "))

On this machine: load_config, train, load_model, generate, evaluate, export.
Runs of this machine: metrics, list_runs, compare_runs, run_sweep.
On a Kubernetes cluster: submit, status, why, fetch.
Errors are subclasses of LlmtrainError; llmtrain/errors.py has the tree. docs/python-api.md is the guide.

The public names are declared in __init__.pyi. Each is imported on first use: `import llmtrain` imports neither torch
nor the Kubernetes client.
"""

import importlib

_module_of: dict[str, str] = {}
"""Public name -> the module that defines it. Filled on first use: commands do not need it, and a Ctrl-C during imports
prints a traceback until the command line handles it."""


def _declared_names() -> dict[str, str]:
    """_module_of, as __init__.pyi imports the names."""
    if not _module_of:
        import ast
        import pkgutil

        stub = pkgutil.get_data("llmtrain", "__init__.pyi")
        found = {}
        for statement in ast.parse(stub or b"").body:
            if isinstance(statement, ast.ImportFrom):
                found.update({alias.name: str(statement.module) for alias in statement.names})
        _module_of.update(found)  # at once, for other threads
    return _module_of


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted(_declared_names())
    module = _declared_names().get(name)
    if module is None:
        raise AttributeError(f"module 'llmtrain' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(_declared_names())

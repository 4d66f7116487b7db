"""Where tokenized data is stored, and the data of tasks."""

import os
from pathlib import Path

from llmtrain.config.data import DataSection
from llmtrain.core.env import TOKEN_CACHE
from llmtrain.core.files import is_there


def token_cache_dir(config: DataSection) -> Path:
    """data.cache_dir. In pods its default is replaced by a directory on the runs volume, if this user may write there:
    tokens then outlive the pod."""
    shared = os.environ.get(TOKEN_CACHE)
    if shared and config.cache_dir == DataSection.model_fields["cache_dir"].default and _is_writable(Path(shared)):
        return Path(shared)
    return Path(config.cache_dir).expanduser()


def task_data_dir(config: DataSection, directory: str | None) -> Path:
    """Where the data of tasks is: trainer.eval_tasks.dir, else beside the tokens."""
    return Path(directory).expanduser() if directory else token_cache_dir(config) / "tasks"


def _is_writable(directory: Path) -> bool:
    # Stores are created in tokens/, which another user may own.
    tokens = directory / "tokens"
    existing = next(path for path in (tokens, *tokens.absolute().parents) if is_there(path))
    return os.access(existing, os.W_OK | os.X_OK)

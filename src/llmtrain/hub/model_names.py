"""The name and revision of a model on the hub, found in its directory: what others need to get the same model."""

import re
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import UsageError
from llmtrain.hub.download import fetched_model
from llmtrain.hub.find import check_id, is_id

_REVISION = re.compile(r"\w[\w./-]*", re.ASCII)
_CACHED = "models--"
"""Begins the name of a model's directory in the cache of the hub: models--owner--name/snapshots/COMMIT."""


@dataclass(frozen=True)
class HubModel:
    name: str
    revision: str | None = None
    """A commit, if llmtrain or the hub library has downloaded the model."""

    def __str__(self) -> str:
        if not self.revision:
            return self.name
        return f"{self.name}@{self.revision}"


def parse_hub_model(text: str, field: str) -> HubModel:
    """From NAME or NAME@REVISION."""
    name, at, revision = text.partition("@")
    check_id(name, f"{field} '{text}' is not a valid name on the hub.")
    if at and not _REVISION.fullmatch(revision):
        raise UsageError(
            f"{field} '{text}' does not have a valid revision.",
            remedy="Write NAME or NAME@REVISION; a revision is a branch, a tag or a commit.",
        )
    return HubModel(name, revision or None)


def hub_model_of(directory: Path) -> HubModel | None:
    """What `llmtrain fetch-model` or the hub library recorded when it downloaded this directory; None for others."""
    fetched = fetched_model(directory)
    if fetched is not None:
        name, commit = fetched
    else:
        snapshot = directory.absolute()
        folder = snapshot.parent.parent.name
        if snapshot.parent.name != "snapshots" or not folder.startswith(_CACHED):
            return None
        name = folder.removeprefix(_CACHED).replace("--", "/")
        commit = snapshot.name
    if not is_id(name) or not _REVISION.fullmatch(commit):  # the record may be from an untrusted source
        return None
    return HubModel(name, commit)

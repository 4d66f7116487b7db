"""The hub token, and whether the hub may be contacted. Tokens never appear in messages."""

import os
import re
from collections.abc import Mapping

from llmtrain.errors import UsageError
from llmtrain.redact import redact

# In order of precedence. The hub library reads the first two; Helm charts and users also set the third.
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")
_TOKEN = re.compile(r"[\x21-\x7e]+")


def hub_token() -> str | None:
    """The token from the environment; None if unset, then the library may find a login file."""
    return first_token(os.environ)


def first_token(variables: Mapping[str, str | None]) -> str | None:
    """The token from the first variable that is set. Raises UsageError, without its value, if it is invalid."""
    for name, token in tokens(variables):
        if not _TOKEN.fullmatch(token):
            raise UsageError(
                f"{name} is not a valid token: it contains a space, a line break or a non-ASCII character.",
                remedy="Set it again; check for a line break in a pasted secret.",
            )
        return token
    return None


def tokens(variables: Mapping[str, str | None] = os.environ) -> list[tuple[str, str]]:
    """(variable, stripped value) of each variable that is set."""
    values = [(name, (variables.get(name) or "").strip()) for name in TOKEN_VARIABLES]
    return [(name, value) for name, value in values if value]


def is_offline(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment forbids contacting the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(environment.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in names)


def redact_tokens(text: str) -> str:
    """The text without secrets, including tokens whose variable has surrounding whitespace, which redact misses."""
    for _, token in tokens():
        if len(token) >= 8:
            text = text.replace(token, "***")
    return redact(text)

"""The hub token, and whether the hub may be contacted. Tokens never appear in messages."""

import os
import re
from collections.abc import Mapping

from llmtrain.core.redact import redact
from llmtrain.errors import UsageError

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
    found = []
    for name in TOKEN_VARIABLES:
        token = (variables.get(name) or "").strip()
        if token:
            found.append((name, token))
    return found


def is_offline(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment forbids contacting the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(environment.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in names)


def redact_tokens(text: str) -> str:
    """The text without secrets, including tokens whose variable has surrounding whitespace, which redact misses."""
    for _, token in tokens():
        if len(token) >= 8:  # a shorter one is a mistake, and may be part of a word
            text = text.replace(token, "***")
    return redact(text)

"""Who asks the hub, and whether it may be asked at all. Tokens stay out of everything that is said."""

import os
import re
from collections.abc import Mapping

from llmtrain.errors import UsageError
from llmtrain.redact import redact

# In this order. The hub library knows the first two; people and charts set the third as well.
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")
_TOKEN = re.compile(r"[\x21-\x7e]+")


def hub_token() -> str | None:
    """The token of the environment. None leaves it to the library, which may find a login file."""
    return first_token(os.environ)


def first_token(variables: Mapping[str, str | None]) -> str | None:
    """The token among variables, by the first of its names that is set; an error, without its value, where that is
    none."""
    for name, token in tokens(variables):
        if not _TOKEN.fullmatch(token):
            raise UsageError(
                f"{name} is no token: it has a space, a line break or another character inside that none has.",
                remedy="Set it again; a secret pasted with two lines does this.",
            )
        return token
    return None


def tokens(variables: Mapping[str, str | None] = os.environ) -> list[tuple[str, str]]:
    """(variable, stripped value) of each that is set."""
    values = [(name, (variables.get(name) or "").strip()) for name in TOKEN_VARIABLES]
    return [(name, value) for name, value in values if value]


def is_offline(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment forbids asking the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(environment.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in names)


def clean(text: str) -> str:
    """Without secrets: also not a token whose variable has white space around it, which redact does not know."""
    for _, token in tokens():
        if len(token) >= 8:
            text = text.replace(token, "***")
    return redact(text)

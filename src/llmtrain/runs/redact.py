"""Secrets stay out of everything that is written down."""

import os
import re
from typing import Any

# Words between underscores; HF_TOKEN is a secret, TIKTOKEN_CACHE_DIR and HF_TOKEN_PATH are not.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRETS?|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)(?:_|$)(?!.*(?:DIR|PATH|FILE|URL)$)",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s]+@")
# Tokens as they look: of the hub, of a request, of a service account.
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}|(?<=Bearer )[^\s\"']+|\beyJ[\w-]{8,}\.[\w-]+\.?[\w-]*")

# Environment variables worth knowing later, none of which holds a secret.
ENVIRONMENT_ALLOWED = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "HF_HUB_OFFLINE",
    "HOSTNAME",
    "JOB_COMPLETION_INDEX",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "SLURM_JOB_ID",
    "TOKENIZERS_PARALLELISM",
    "WORLD_SIZE",
)


def redact(text: str) -> str:
    """The text without logins in URLs, tokens, and the value of any secret-looking environment variable."""
    text = _TOKEN.sub("***", _URL_LOGIN.sub("***@", text))
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return text


def redact_values(value: Any) -> Any:
    """As redact, for every text inside lists and dictionaries."""
    if isinstance(value, dict):
        return {key: redact_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact_values(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def allowed_environment() -> dict[str, str]:
    return {name: redact(os.environ[name]) for name in ENVIRONMENT_ALLOWED if name in os.environ}

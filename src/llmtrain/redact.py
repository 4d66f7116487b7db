"""What looks like a secret, by its name or by itself, and texts without it. The one rule, for everything that is
written down or sent to a cluster."""

import os
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

SHORTEST_VALUE = 8
"""Of an environment variable that is searched for in texts: a shorter one would hide ordinary words."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names are read word by word: HF_TOKEN_READ and dbPassword are secrets, TOKENIZERS_PARALLELISM and MAX_TOKENS are not.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = _words(
    "TOKEN SECRET SECRETS PASSWORD PASSWORDS PASSWD PASSPHRASE CREDENTIAL CREDENTIALS APIKEY APITOKEN AUTHTOKEN "
    "ACCESSKEY SECRETKEY PRIVATEKEY"
)
_SECRET_ENDINGS = ("PASSWORD", "PASSWD", "APIKEY")  # PGPASSWORD
_SECRET_LAST = _words("PASS PWD PAT AUTHORIZATION")  # DB_PASS, but neither PWD nor PASS_RATE
# A key is a secret where the word before it says so, and in capitals (OPENAI_KEY) unless that word says otherwise.
_SECRET_KEYS = _words(
    "ACCESS ACCOUNT API AUTH DEPLOY ENCRYPTION LICENSE MASTER PRIVATE SECRET SERVICE SIGNING SSH STORAGE WANDB"
)
_PLAIN_KEYS = _words(
    "CACHE COLUMN CONFIG DATA DATASET DICT FEATURE FIELD FOREIGN GROUP HASH HOT ID IMAGE INDEX INPUT JSON LABEL MAP "
    "METRIC NAME OUTPUT PARTITION PRIMARY PROMPT PUBLIC QUERY REWARD ROUTING SHARD SORT SOURCE TARGET TEXT"
)
# What stands before makes it a token of a text; what stands behind makes it something about the secret.
_PLAIN_TOKENS = _words("BOS CLS END EOS FIRST IMAGE LAST MASK MAX MIN NEW NEXT NUM PAD PER SEP SPECIAL START STOP UNK")
_ABOUT = _words(
    "BUDGET COUNT DIR ENDPOINT EXPIRES FILE FILES FORMAT HEADER ID IDS INDEX LEN LENGTH LIMIT MODE NAME PATH RATE REF "
    "SIZE SOCK TTL TYPE URI URL"
)
_NO_VALUE = {"", "true", "false", "yes", "no", "on", "off", "none", "null", "0", "1", "***"}
_PATH = re.compile(r"(?:~|\.{1,2})?(?:/[\w.-]{1,30})+/?")  # longer parts may well be a secret in base64

HIDDEN_LOGIN = "***@"
"""What redact leaves of a login in a URL."""
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@$]+:[^/\s@$]+@")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s]+@")
# Tokens as they look: Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Stripe, Slack, AWS, Google, Docker, npm; of a
# service account; and keys themselves.
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|(?<![\w-])sk-(?:(?:proj|ant|svcacct|admin|or|live|test)[-_][\w-]{20,}|[A-Za-z0-9]{20,})"
    r"|\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|\bxox[abeprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{35}|\bdckr_pat_[\w-]{16,}|\bnpm_[A-Za-z0-9]{36}|\beyJ[\w-]{8,2000}\.[\w-]+\.?[\w-]*"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]*"
)
_BEARER = re.compile(r"(?<=: Bearer )[^\s\"']+|(?<=Bearer )(?=\S{0,200}\d)[^\s\"']{8,}")
# NAME=value and --name=value; --name value.
_ASSIGNED = re.compile(r"(?<![\w.$-])(-{0,2}[A-Za-z_][\w.-]{0,200})(=)([^\s\"',;&|]+)")
_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w-]{0,200})(\s+)(?!-)([^\s\"',;&|]+)")

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


def is_secret_name(name: str) -> bool:
    """Whether a variable, a field or an option of this name holds a secret."""
    words = [word.upper() for word in _WORD.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if not words or (words[-1] in _ABOUT and words[-3:] != ["ACCESS", "KEY", "ID"]):
        return False
    for position, word in enumerate(words):
        before = words[position - 1] if position else ""
        if word == "TOKEN" and before in _PLAIN_TOKENS:
            continue
        if word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS):
            return True
        if word == "KEY" and before in _SECRET_KEYS:
            return True
    if len(words) == 1:
        return False
    is_key = words[-1] == "KEY" and name.isupper() and words[-2] not in _PLAIN_KEYS
    return is_key or words[-1] in _SECRET_LAST


def is_secret_setting(name: str, value: str) -> bool:
    """Whether a name and its value give a secret away: no switch, no list, no reference to another variable, no path
    of a file that holds it."""
    if value.strip().lower() in _NO_VALUE or value.startswith(("$", "[", "<")) or not is_secret_name(name):
        return False
    return _PATH.fullmatch(value) is None


def has_token(text: str) -> bool:
    """Whether a text has a token or a password in it, told by its looks alone: whoever reads it has another
    environment. A variable instead of the password is fine."""
    return bool(_TOKEN.search(text) or _URL_PASSWORD.search(text))


def has_secret(text: str) -> bool:
    """Whether redact would take something out."""
    return redact(text) != text


def secret_words(words: Iterable[str]) -> bool:
    """Whether a command has a secret in it, also one behind its option."""
    known = list(words)
    return any(has_secret(word) for word in known) or any(
        name.startswith("-") and not value.startswith("-") and is_secret_setting(name, value)
        for name, value in pairwise(known)
    )


def redact(text: str) -> str:
    """The text without logins in URLs, tokens, values behind secret names, and the value of any environment variable
    that has such a name."""
    text = _BEARER.sub("***", _TOKEN.sub("***", _URL_LOGIN.sub(HIDDEN_LOGIN, text)))
    text = _OPTION.sub(_hide_value, _ASSIGNED.sub(_hide_value, text))
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_VALUE and is_secret_name(name):
            text = text.replace(value, "***")
    return text


def _hide_value(match: re.Match[str]) -> str:
    name, between, value = match.groups()
    return f"{name}{between}***" if is_secret_setting(name, value) else match[0]


def redact_values(value: Any) -> Any:
    """As redact, for every text inside lists and dictionaries, where the keys are names too."""
    if isinstance(value, dict):
        return {
            key: "***" if isinstance(item, str) and is_secret_setting(str(key), item) else redact_values(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact_values(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def redact_words(words: Iterable[str]) -> list[str]:
    """A command without its secrets, also those behind an option."""
    shown: list[str] = []
    before = ""
    for word in words:
        is_value = before.startswith("-") and not word.startswith("-") and is_secret_setting(before, word)
        shown.append("***" if is_value else redact(word))
        before = word
    return shown


def allowed_environment() -> dict[str, str]:
    return {name: redact(os.environ[name]) for name in ENVIRONMENT_ALLOWED if name in os.environ}

"""Removes secrets from text. What llmtrain records or sends to a cluster passes through here, and so does every warning
and error that it logs."""

import os
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from llmtrain.core.text import one_line

SHORTEST_VALUE = 8
"""Minimum length of a variable's value that is searched for in texts: a shorter one would hide ordinary words."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names are split into words: HF_TOKEN_READ and dbPassword are secrets, TOKENIZERS_PARALLELISM and MAX_TOKENS are not.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = _words(
    "TOKEN SECRET SECRETS PASSWORD PASSWORDS PASSWD PASSPHRASE PASSCODE CREDENTIAL CREDENTIALS CRED CREDS NETRC APIKEY "
    "APITOKEN AUTHTOKEN AUTHKEY ACCESSTOKEN HFTOKEN ACCESSKEY SECRETKEY PRIVATEKEY"
)
_SECRET_ENDINGS = ("PASSWORD", "PASSWD", "APIKEY", "SECRET")  # PGPASSWORD, appsecret
# DB_PASS, but neither PWD nor PASS_RATE
_SECRET_LAST = _words("AUTH AUTHORIZATION BEARER COOKIE COOKIES JWT PASS PWD")
_SECRET_LAST_ENDINGS = ("PASS", "PWD")  # MYPASS
_PLAIN_LAST = _words("ALLPASS BANDPASS BYPASS COMPASS ENCOMPASS HIGHPASS LOWPASS MULTIPASS OLDPWD OVERPASS SURPASS")
_SECRET_PATS = _words("AZURE GITHUB GITLAB")  # elsewhere `pat` is a pattern, unless in capitals
# A key is a secret after one of these words, and in upper case (OPENAI_KEY) unless after one of _PLAIN_KEYS.
_SECRET_KEYS = _words(
    "ACCESS ACCOUNT API AUTH DEPLOY ENCRYPTION LICENSE MASTER PRIVATE SECRET SERVICE SIGNING SSH STORAGE WANDB"
)
_SECRET_PLURALS = _words("ACCESS API AUTH BEARER REFRESH")  # API_TOKENS, but not MAX_TOKENS
_SECRET_TOKENS = _words("BEARER FACE GH GITHUB GITLAB HF HUB ID REFRESH SESSION SLACK")
_PLAIN_KEYS = _words(
    "ANSWER ATTENTION BATCH CACHE CHOSEN COLUMN COMPLETION CONFIG CONTENT DATA DATASET DICT EVAL EXAMPLE FEATURE FIELD "
    "FILE FILTER FOREIGN GROUP HASH HOT ID IMAGE INDEX INPUT JSON LABEL LOOKUP LOSS MAP MESSAGE MESSAGES METRIC MODEL "
    "NAME OBJECT OUTPUT PARAM PARTITION PRIMARY PROMPT PUBLIC QUERY QUESTION RECORD REJECTED RESPONSE RESULT REWARD "
    "ROUTING ROW SAMPLE SCORE SEARCH SHARD SORT SOURCE STATE STEP TARGET TASK TEST TEXT TRAIN VAL VALIDATION VALUE "
    "WEIGHT"
)
# A word before TOKEN that makes it a token of text; words after a secret that make it a property of the secret.
_PLAIN_TOKENS = _words(
    "AUDIO BOI BOS CLASS CLS END EOI EOS EOT FIRST IMAGE LAST MASK MAX MIN NEW NEXT NUM PAD PATCH PER REGISTER SEP SOS "
    "SPECIAL START STOP THINK UNK VIDEO VISION"
)
_ABOUT = _words(
    "BUDGET COUNT DIM DIR DROP DROPOUT EMBED EMBEDDING ENDPOINT ENV EXPIRES FILE FILES FORMAT HEADER ID IDS INDEX LEN "
    "LENGTH LEVEL LIMIT LOSS MASK MERGING MIXER MIXING MODE NAME PATH POOLING RATE REF SHIFT SIZE SOCK TTL TYPE TYPES "
    "URI URL"
)
# Values that are not secrets: a switch, a reference to a variable, a list, a template, a call, the name of a variable
# or field that holds the secret, and the path of a file that does.
_NO_VALUE = {"", "true", "false", "yes", "no", "on", "off", "none", "null", "empty", "0", "1", "***"}
_REFERENCE = re.compile(r"[$`\[<{%]|[A-Za-z_.]+[(\[]|[A-Z]+(?:_[A-Z]+)+$|[a-z_]+(?:\.[a-z_]+)+$")
_PATH = re.compile(r"(?:~|\.{1,2})?(?:/[\w.-]{1,30})+/?|\.[a-z]{1,12}")  # longer parts may be a secret in base64
# Names of addresses, whose value may contain user:password without a scheme, and of logins.
_ADDRESS_LAST = _words("ADDR ADDRESS BROKER DSN ENDPOINT HOST PROXY SERVER URI URL")
_ADDRESS_LOGIN = re.compile(r"[^\s:/@$]+:[^\s/@$]+@[\w.(-]")
_USER_PASSWORD = re.compile(r"[^\s:/@$]+:(?!\d{1,5}$)[^\s:/@$]+")
# Words with other meanings: after them a short number is not a secret, nor, after the first three, a short word.
_AMBIGUOUS = ("TOKEN", "KEY", "AUTH", "PASS", "PWD", "PAT")
_SHORT_NUMBER = re.compile(r"[-+]?[\d.]{1,6}")
_SHORT_WORD = re.compile(rf"[A-Za-z]{{1,{SHORTEST_VALUE - 1}}}|\W+(?:\s.*)?", re.DOTALL)

HIDDEN_LOGIN = "***@"
"""Replaces a login in a URL."""
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@$]+:[^/\s@$]+@")
_URL_LOGIN = re.compile(r"\b([A-Za-z][\w+.-]{0,30})://([^/\s]+)@")
# With a slash in the password, which may not be a port and a path.
_URL_LOGIN_SLASH = re.compile(r"(?<=://)[^/\s:@$\[\"']{1,200}:(?!\d{1,5}/)[^\s@$/\"']{0,200}/[^\s$\"']{0,200}@")
# Tokens as they look: Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Stripe, Slack, AWS, Google, Docker, npm,
# PyPI, NVIDIA, Groq, Databricks, W&B, Vault, Tailscale; of a service account; signatures in URLs of S3 and Azure;
# webhooks of Slack, Discord and Teams; and keys themselves, also in base64.
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|(?<![\w-])sk-(?:(?:proj|ant|svcacct|admin|or|live|test)[-_][\w-]{20,}|[A-Za-z0-9]{20,})"
    r"|\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|\bxox[abeprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{35}|\bdckr_pat_[\w-]{16,}|\bnpm_[A-Za-z0-9]{36}|\beyJ[\w-]{8,2000}\.[\w-]+\.?[\w-]*"
    r"|\bpypi-AgEI[\w-]{20,}|\bnvapi-[\w-]{20,}|\bgsk_[A-Za-z0-9]{20,}|\bdapi[0-9a-f]{32}|\bwandb_v1_\w{20,}"
    r"|\bhvs\.[\w-]{20,}|\btskey-[\w-]{16,}|\bya29\.[\w-]{20,}"
    r"|(?<=[?&]sig=)[\w%+/=-]{16,}|(?<=[?&]X-Amz-Signature=)[0-9a-f]{32,}"
    r"|(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/+-]{8,}"
    r"|(?<=/api/webhooks/)\d+/[\w-]{16,}|(?<=\.webhook\.office\.com/)[\w@/-]{16,}"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]*"
    r"|\bLS0tLS1CRUdJTi(?:BQUklW|BSU0EgUFJJV|BFQyBQUklW|BPUEVOU1NI)[A-Za-z0-9+/=]*"
)
_BEARER = re.compile(r"(?<=: Bearer )(?!\$)[^\s\"']+|(?<=Bearer )(?=\S{0,200}\d)(?!\$)[^\s\"']{8,}")
_HEADER = re.compile(r"(?i)(authorization\W{1,6}(?:basic|token|apikey|digest)\s+)(?!\$|\*\*\*)[^\s\"'\\]+")
_CURL_LOGIN = re.compile(r"(\bcurl\b[^\n|;]{0,2000}?\s(?:-u|--user)[ =]?)((?!\$)[^\s\"'$:]*:)(?!\*\*\*)[^\s\"'$]+")
_NETRC = re.compile(
    r"(\b(?:machine\s+\S{1,255}|default)\s+(?:(?:login|account)\s+\S{1,255}\s+){0,2}password\s+)(?!\$|\*\*\*)\S+"
)
# NAME=value and --name=value, {"name": "value"}, x['name'] = 'value', name: value; --name value. A value in quotes ends
# with them.
_VALUE = re.compile(
    r"\\?\"[^\"\n]{0,5000}\"?|\\?'[^'\n]{0,5000}'?"
    r"|[^\s\"';&|]{1,20000}(?:\"[^\"\s,]{1,5000}\"|'[^'\s,]{1,5000}'){0,20}"
)
_ASSIGNED = re.compile(
    r"(?<![\w.$-])(-{0,2}[A-Za-z_][\w.-]{0,200})"
    r"(\\?[\"']?\]?[ \t]{0,3}(?:=(?!=)|:(?=[ \t\"'])(?!=))[ \t]{0,3})"
)
_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w-]{0,200})(\s+)(?!-)")
_PROSE = re.compile(r"[^\d]{0,12}")
"""After a colon and without quotes: text about a password, not a password."""

# Environment variables recorded in meta.json; none of them holds a secret.
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
    """Whether a variable, a field or an option with this name holds a secret."""
    return _secret_word(name) is not None


def _secret_word(name: str) -> str | None:
    """The word that makes this the name of a secret; None if it is not."""
    words: list[str] = [word.upper() for word in _WORD.findall(name)]
    while words and words[-1].isdigit():  # API_KEY_2
        words.pop()
    return _secret_inside(name, words) or _secret_at_end(name, words)


def _secret_inside(name: str, words: list[str]) -> str | None:
    """The first word that marks a secret wherever it is in a name, as in HF_TOKEN_READ."""
    for position, word in enumerate(words):
        before = words[position - 1] if position else ""
        behind = words[position + 1 :]
        # TOKEN_FILE is a property of a secret; the id of an AWS access key is a secret itself.
        is_access_key_id = [before, word, *behind] == ["ACCESS", "KEY", "ID"]
        is_property = any(other in _ABOUT for other in behind) and not is_access_key_id
        is_first_of_phrase = not before and bool(behind) and not name.isupper()  # token-level, but not TOKEN_READ
        is_text_token = word == "TOKEN" and (before in _PLAIN_TOKENS or is_first_of_phrase)
        if is_property or is_text_token:
            continue
        is_key = word in ("KEY", "KEYS") and before in _SECRET_KEYS
        is_plural = word == "TOKENS" and before in _SECRET_PLURALS
        if word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) or is_key or is_plural:
            is_unambiguous = before in _SECRET_KEYS | _SECRET_TOKENS  # API_KEY, HF_TOKEN
            return f"{before}_{word}" if is_unambiguous else word
    return None


def _secret_at_end(name: str, words: list[str]) -> str | None:
    """The last word, if it marks a secret only at the end of a name, as in DB_PASS."""
    if not words:
        return None
    last = words[-1]
    before = words[-2] if len(words) > 1 else ""
    is_key = last == "KEY" and before != "" and name.isupper() and before not in _PLAIN_KEYS
    is_access_token = last == "PAT" and before != "" and (name.isupper() or before in _SECRET_PATS)
    is_working_directory = last == "PWD" and not before
    has_ending = last.endswith(_SECRET_LAST_ENDINGS) and last not in _PLAIN_LAST
    is_password = (last in _SECRET_LAST or has_ending) and not is_working_directory
    return last if is_key or is_access_token or is_password else None


def is_secret_setting(name: str, value: str) -> bool:
    """Whether a name and its value reveal a secret: the name is that of a secret, and the value is neither a reference
    nor, after an ambiguous word, a short number or word; or the name is that of an address, and the value a login."""
    word, value = _secret_word(name), value.strip()
    last = "".join(_WORD.findall(name)[-1:]).upper()
    if last in _ADDRESS_LAST and _ADDRESS_LOGIN.match(value):
        return True
    if last == "LOGIN" and _USER_PASSWORD.fullmatch(value):
        return True
    if word is None or value.lower() in _NO_VALUE or value == name:
        return False
    if _REFERENCE.match(value) or _PATH.fullmatch(value):
        return False
    is_number = word in _AMBIGUOUS and _SHORT_NUMBER.fullmatch(value)
    return not is_number and not (word in _AMBIGUOUS[:3] and _SHORT_WORD.fullmatch(value))


def has_token(text: str) -> bool:
    """Whether a text contains a token or a password, by its format alone, without the environment of this process. A
    variable in place of the password is accepted."""
    return bool(_TOKEN.search(text) or _URL_PASSWORD.search(text) or _URL_LOGIN_SLASH.search(text))


def has_secret(text: str) -> bool:
    """Whether redact would change the text."""
    return redact(text) != text


def secrets_in(words: Iterable[str]) -> list[str]:
    """The names of the secrets in a command, including values of options; never their values."""
    names: list[str] = []
    _redact_words(list(words), names)
    return list(dict.fromkeys(names))


def redact(text: str) -> str:
    """The text without logins in URLs, tokens, values of secret names, and values of environment variables with such
    names."""
    return _redact(text, [])


def _redact(text: str, names: list[str]) -> str:
    """Like redact; the names of removed secrets are added to `names`."""
    # Values of variables first, the longest first: a part of one could not be found later.
    variables = [(name, os.environ.get(name, "")) for name in os.environ]  # not items(): other threads may remove some
    for name, value in sorted(variables, key=lambda item: -len(item[1])):
        if len(value) >= SHORTEST_VALUE and value in text and is_secret_name(name):
            text = text.replace(value, "***")
            names.append(f"the value of ${name}")

    def hide(pattern: re.Pattern[str], by: str, what: str, text: str) -> str:
        hidden = pattern.sub(by, text)
        names.extend([what] if hidden != text else [])
        return hidden

    def hide_login(match: re.Match[str]) -> str:
        if match[1].endswith(("ssh", "sftp")) and ":" not in match[2]:  # a user name without a password
            return match[0]
        names.extend(["a login in a URL"] if match[2] != "***" else [])
        return f"{match[1]}://{HIDDEN_LOGIN}"

    def hide_values(pattern: re.Pattern[str], text: str) -> str:
        shown, position = [], 0
        while match := pattern.search(text, position):
            value = _VALUE.match(text, match.end()) if is_secret_name(match[1]) else None
            hidden = hide_value(match[1], match[2], value[0]) if value else ""
            shown += [text[position : match.end()], hidden]
            # The value of another name may contain such a setting: run.notes=TOKEN=...
            position = value.end() if value and hidden else match.end()
        return "".join([*shown, text[position:]])

    def hide_value(name: str, between: str, value: str) -> str:
        """The replacement of the value; empty if it is not a secret."""
        quote = re.match(r"\\?[\"']", value)
        if quote:
            inner = value[len(quote[0]) :].removesuffix(quote[0])
            is_secret = inner.strip(" ,:;") != "" and is_secret_setting(name, inner)
            hidden = f"{quote[0]}***{quote[0]}"
        else:
            first = value.partition(",")[0].rstrip(")]}.:")
            is_prose = ":" in between and '"' not in between and "'" not in between and _PROSE.fullmatch(first)
            is_secret, hidden = not is_prose and is_secret_setting(name, first), "***"
        names.extend([name] if is_secret else [])
        return hidden if is_secret else ""

    text = _URL_LOGIN.sub(hide_login, text)
    text = hide(_URL_LOGIN_SLASH, HIDDEN_LOGIN, "a login in a URL", text)
    text = hide(_TOKEN, "***", "a token", text)
    text = hide(_BEARER, "***", "a bearer token", text)
    text = hide(_HEADER, r"\1***", "Authorization", text)
    text = hide(_NETRC, r"\1***", "a password for a machine", text)
    text = hide(_CURL_LOGIN, r"\1\2***", "curl --user", text)
    return hide_values(_OPTION, hide_values(_ASSIGNED, text))


def redacted_line(value: object, limit: int = 500) -> str:
    """The text of a value without secrets, on one line; secrets are removed before it is cut."""
    return redact(one_line(value))[:limit]


def redact_values(value: Any) -> Any:
    """Like redact, for all texts in lists and dictionaries, whose keys count as names."""
    if isinstance(value, dict):
        return {
            key: "***" if isinstance(item, str) and is_secret_setting(str(key), item) else redact_values(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact_values(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def redact_words(words: Iterable[str]) -> list[str]:
    """A command without its secrets, including values of options."""
    return _redact_words(list(words), [])


def _redact_words(words: list[str], names: list[str]) -> list[str]:
    shown: list[str] = []
    for before, word in pairwise(["", *words]):
        is_value = before.startswith("-") and not word.startswith("-") and is_secret_setting(before, word)
        is_login = before in ("-u", "--user") and _CURL_LOGIN.search(f"{' '.join(words[: len(shown)])} {word}")
        if is_value or is_login:
            shown.append("***")
            names.append("curl --user" if is_login else before)
        else:
            shown.append(_redact(word, names))
    return shown


def allowed_environment() -> dict[str, str]:
    return {name: redact(os.environ[name]) for name in ENVIRONMENT_ALLOWED if name in os.environ}

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.load import dump_config, load_config
from llmtrain.config.logging import LoggingSection
from llmtrain.config.schema import Config
from llmtrain.core.logs import close_logging, setup_logging, warn
from llmtrain.core.redact import (
    ENVIRONMENT_ALLOWED,
    allowed_environment,
    has_secret,
    has_token,
    is_secret_name,
    is_secret_setting,
    redact,
    redact_values,
    redact_words,
    secrets_in,
)
from llmtrain.errors import UsageError
from llmtrain.runs.metadata import collect_metadata

CANARY = "canary-5f3a91c07e"


SECRET_NAMES = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "DB_PASS",
    "MYSQL_PWD",
    "OPENAI_KEY",
    "GITHUB_PAT",
    "AZURE_STORAGE_KEY",
    "MY_TOKEN_2",
    "MY_TOKEN2",
    "SECRETS",
    "HF_TOKEN_READ",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "DB_PASSWORD",
    "my_api_key",
    "OPENAI_APIKEY",
    "GOOGLE_CREDENTIALS",
    "PGPASSWORD",
    "dbPassword",
    "apiKey",
    "WANDB_API_KEY",
    "SSH_KEY",
    "SECRET_KEY_BASE",
    "MLFLOW_TRACKING_PASSWORD",
    "CLIENT_SECRET",
    "--password",
    "--hf-token",
    "--api-key",
    "PASSWORD",
    "TOKEN",
    "launch.env.DB_PASS",
    "PASS",
    "MYPASS",
    "DBPWD",
    "AUTH",
    "X-Api-Key",
    "SharedAccessKey",
    "--github-pat",
    "CREDS",
    "DB_CREDS",
    "aws_creds",
    "NETRC",
    "KUBE_BEARER",
    "SESSION_COOKIE",
    "MY_JWT",
    "DOCKER_AUTH",
    "API_KEYS",
    "API_TOKENS",
    "TS_AUTHKEY",
    "clientsecret",
    "HTPASSWD",
    "PRIVATE_KEY",
    "SSH_PRIVATE_KEY",
]
PLAIN_NAMES = [
    "TOKENIZERS_PARALLELISM",
    "NCCL_DEBUG",
    "NCCL_IB_HCA",
    "MAX_TOKENS",
    "NUM_TOKENS",
    "TOKENS_PER_STEP",
    "KEYBOARD",
    "PWD",
    "OLDPWD",
    "PATH",
    "TIKTOKEN_CACHE_DIR",
    "HF_TOKEN_PATH",
    "PAD_TOKEN",
    "EOS_TOKEN_ID",
    "MAX_TOKEN_LENGTH",
    "SORT_KEY",
    "PRIMARY_KEY",
    "INPUT_KEY",
    "input_key",
    "--prompt-key",
    "KEY",
    "MONKEY_PATCH",
    "PASS_RATE",
    "COMPASS",
    "BYPASS_CACHE",
    "PATTERN",
    "AUTHOR",
    "TOKEN_LIMIT",
    "SECRET_NAME",
    "TOKENIZER",
    "launch.hf_token_secret.name",
    "AWS_SHARED_CREDENTIALS_FILE",
    "SSH_AUTH_SOCK",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "PUBLIC_KEY",
    "KEYCLOAK_URL",
    "--tokenizer",
    "--eos-token",
    "--max-new-tokens",
    "data.tokenizer",
    "trainer.max_steps",
    "PASSES",
    "TURKEY",
    "OMP_NUM_THREADS",
    "TOKEN_DIM",
    "--token-dim",
    "--token-dropout",
    "--token-mixing",
    "--token-level-loss",
    "token_embed_dim",
    "--vision-token",
    "--audio-token",
    "--sos-token",
    "--include-pat",
    "--api-key-env",
    "ANSWER_KEY",
    "BATCH_KEY",
    "MODEL_KEY",
    "EVAL_KEY",
    "--lowpass",
    "MONKEY",
    "HOTKEYS",
    "CREDIT",
    "CREDIT_SCORE",
    "SECRETARY",
    "AUTHORITY",
    "AUTH_MODE",
    "COOKIECUTTER_CONFIG",
    "COOKIE_DOMAIN",
    "DESKTOP_SESSION",
    "SESSION_NAME",
    "BEARER_FORMAT",
    "JWT_ALGORITHM",
    "MIN_TOKENS",
    "TOKENS",
    "CREDENTIALS_FILE",
    "CREDS_PATH",
    "NETRC_FILE",
    "NO_PROXY",
    "SENTRY_DSN",
    "MLFLOW_TRACKING_URI",
    "LOGIN",
    "WANDB_RUN_ID",
    "AWS_REGION",
    "HF_HUB_ENABLE_HF_TRANSFER",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_SOCKET_IFNAME",
    "PATIENCE",
]
# Variables as people write them into launch.env, by name and value.
SECRET_SETTINGS = [
    ("CREDS", "user:pass12345"),
    ("NETRC", "machine h.example.com login me password hunter2"),
    ("OTHER", "machine h.example.com\nlogin me\npassword hunter2"),
    ("KUBE_BEARER", "abcdef123456"),
    ("HTTP_PROXY", "me:hunter2@proxy.example.com:3128"),
    ("HTTPS_PROXY", "http://me:hunter2@proxy.example.com:3128"),
    ("DSN", "root:hunter2@tcp(127.0.0.1:3306)/db"),
    ("SENTRY_DSN", "https://hunter2hunter2@o1.ingest.example.com/1"),
    ("DATABASE_URL", "postgres://me:hunter2@db/x"),
    ("DB", "host=db user=me password=hunter2"),
    ("STORAGE", "AccountName=a;AccountKey=hunter2hunter2=="),
    ("DOCKER_LOGIN", "me:hunter2"),
    ("HEADERS", "Authorization: Bearer hunter2hunter2"),
    ("CHECKPOINT", "https://a.blob.example.com/c?sv=2022&sig=hunter2hunter2hunter2%3D"),
    ("KUBECONFIG_DATA", "LS0tLS1CRUdJTiBQUklWQVRFIEtFWS0tLS0t"),
    ("NGC", "nvapi-" + "hunter2-" * 4),
]
PLAIN_SETTINGS = [
    ("NETRC", "/etc/netrc"),
    ("NETRC", ".netrc"),
    ("XAUTHORITY", "/etc/X11/authority"),
    ("COOKIE_SECURE", "true"),
    ("AUTH", "none"),
    ("USE_JWT", "false"),
    ("HTTPS_PROXY", "http://proxy.example.com:3128"),
    ("NO_PROXY", "localhost,127.0.0.1,10.0.0.0/8"),
    ("ETCD_HOST", "etcd.default:2379"),
    ("REPO_URL", "git@github.com:owner/repo.git"),
    ("IMAGE", "registry.example.com/llmtrain:1.0@sha256:0123456789abcdef"),
    ("LOGIN", "me"),
    ("SSH_LOGIN", "host:22"),
    ("DSN", "host=db dbname=x"),
    ("NOTES", "the machine needs a password"),
    ("MASTER_ADDR", "demo-0.demo:29500"),
    ("CA_DATA", "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0t"),
    ("LD_LIBRARY_PATH", "/usr/lib:/opt/lib"),
]
# Resemble tokens, but are not.
TOKENS = [
    "hf_" + "Abcdefgh" * 4,
    "ghp_" + "a1B2c3D4" * 4,
    "github_pat_" + "11ABCDEFG0" * 3,
    "sk-" + "abcd1234" * 4,
    "sk-proj-" + "ab-cd_34" * 4,
    "AKIA" + "ABCDEFGH12345678",
    "glpat-" + "abcdefgh12345678",
    "xoxb-" + "1234567890-abc",
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2ln",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
]
WEBHOOKS = [
    "https://hooks.slack.com/services/T00000000/B00000000/" + "XyZ123" * 4,
    "https://discord.com/api/webhooks/123456789/" + "XyZ123" * 4,
]
PLAIN_TEXTS = [
    "sk-learn-experiments-with-trees-2024-11-11",
    "Bearer of bad news",
    "tokens=512 max_tokens=5 lr=1e-3",
    "key=value",
    "the secret is out: use a password manager",
    "hf_transfer and hf_home",
    "train.py --pad-token <pad> --tokenizer bpe --max-new-tokens 5",
    "--token $HF_TOKEN --password=$PASS",
    "GOOGLE_APPLICATION_CREDENTIALS=/secrets/key.json",
    "commit 3f786850e387550fdab836ed7e6dc881de23001b",
    "meta-llama/Llama-3.2-1B@main",
    "s3://bucket/runs",
    "train.py --token-dim 64 --token-dropout=0.1 --token-mixing mlp --token-level-loss mean token_embed_dim=64",
    "train.py --vision-token 512 --audio-token=128 --sos-token SOS --think-token THINK --other-token XYZ",
    "train.py --num-pass 2 --second-pass=3 --include-pat '*.py' --api-key-env OPENAI_API_KEY --api-key EMPTY",
    "TOKEN_DIM=64 NUM_PASS=2 ANSWER_KEY=the_long_answer BATCH_KEY=b MODEL_KEY=m EVAL_KEY=e",
    'python -c "token=next(it)"',
    "token = next(it); password=getpass.getpass(); login(password=args.password, token=token)",
    'password=os.environ["DB_PASSWORD"]',
    "git clone ssh://git@github.com/a/b",
    "pip install git+ssh://git@github.com/a/b.git@v1",
    "each token=4 bytes",
    "export TOKEN=`cat /run/token`",
    "--user-token '<|user|>' --sep-token '###' --bot-token '### Bot'",
    'curl -H "Authorization: Bearer $TOKEN" -H "X-Api-Key: ${KEY}" -u "$USER:$PASS" https://host:8080/x@y',
    "password: required, unexpected token: expected ]",
    "docker run --user 1000:1000 image:v1",
    "http://[::1]:8080/a@b",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)
    assert is_secret_setting(name, "hunter2")


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_plain_names(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(("name", "value"), SECRET_SETTINGS)
def test_secret_settings_are_refused_in_launch_env(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"launch\.env\.{name} looks like a secret") as refused:
        load_config(None, [f"launch.env.{name}={json.dumps(value)}"])
    assert "hunter2" not in str(refused.value)


def test_plain_settings_are_accepted_in_launch_env() -> None:
    for name, value in PLAIN_SETTINGS:
        assert not is_secret_setting(name, value), name
        assert not has_secret(value), value
    load_config(None, [f"launch.env.{name}={json.dumps(value)}" for name, value in PLAIN_SETTINGS])


@pytest.mark.parametrize("value", ["", "true", "0", "none", "$(OTHER)", "${OTHER}", "/run/secrets/token", "***", "[a]"])
def test_plain_values(value: str) -> None:
    assert not is_secret_setting("HF_TOKEN", value)


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_are_detected_by_format(token: str) -> None:
    assert has_token(token)
    assert redact(f"my token is {token}\n").startswith("my token is ***")
    assert secrets_in(["train.py", f"x={token}"])


@pytest.mark.parametrize("url", WEBHOOKS)
def test_webhook_urls_are_secrets(url: str) -> None:
    assert has_token(url)
    assert "XyZ123" not in redact(url)


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_plain_texts_are_unchanged(text: str) -> None:
    assert not has_secret(text)
    assert not secrets_in(shlex.split(text))


@pytest.mark.parametrize(
    "words",
    [
        ["python", "train.py", "--password=hunter2"],
        ["python", "train.py", "--password", "hunter2"],
        ["bash", "-c", "export DB_PASS=hunter2; python train.py"],
        ["bash", "-c", "python train.py --api-key hunter2"],
        ["curl", "https://host/?token=hunter2&x=1"],
        ["llmtrain", "launch", "--set", "launch.env.DB_PASS=hunter2"],
        ["bash", "-c", 'export DB_PASS="hunter2hunter2"; python x.py'],
        ["bash", "-c", "API_KEY='hunter2 hunter2' python x.py"],
        ["bash", "-c", 'python x.py --password="hunter2" --x'],
        ["bash", "-c", "python x.py --token 'hunter2'"],
        ["bash", "-c", "python x.py --password abc'hunter2'"],
        ["llmtrain", "launch", "--set", 'run.notes=API_KEY="hunter2"'],
        ["python", "-c", "import os; os.environ['HF_TOKEN']='hunter2'"],
        ["python", "-c", 'import os; os.environ["HF_TOKEN"] = "hunter2"'],
        ["x", '{"password": "hunter2"}'],
        ["x", '{\\"password\\": \\"hunter2\\"}'],
        ["x", "password: hunter2"],
        ["curl", "-H", "X-Api-Key: hunter2", "https://host"],
        ["bash", "-c", "curl -H 'X-Api-Key: hunter2' https://host"],
        ["curl", "-H", "Authorization: Basic hunter2", "https://host"],
        ["curl", "-u", "me:hunter2", "https://host"],
        ["bash", "-c", "curl -s -u me:hunter2 https://host"],
        ["x", "--password=letters,hunter2"],
    ],
)
def test_secrets_in_commands(words: list[str]) -> None:
    names = secrets_in(words)
    assert names
    assert "hunter2" not in " ".join(names)
    assert not secrets_in(redact_words(words))
    assert "hunter2" not in " ".join(redact_words(words))
    assert len(redact_words(words)) == len(words)


def test_values_are_hidden_by_their_keys() -> None:
    given = {"env": {"DB_PASS": "x", "NCCL_DEBUG": "INFO"}, "hf_token_secret": {"name": "a", "key": "token"}}
    assert redact_values(given) == {**given, "env": {"DB_PASS": "***", "NCCL_DEBUG": "INFO"}}
    assert redact_values(Config().as_dict()) == Config().as_dict()


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "DB_PASS",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "my_api_key",
        "OPENAI_APIKEY",
        "GOOGLE_CREDENTIALS",
    ],
)
def test_values_of_secret_variables_are_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, CANARY)
    assert redact(f"--set run.notes={CANARY} and {CANARY}") == "--set run.notes=*** and ***"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefghIJKLSECRETTAIL"}, "abcdefghIJKLSECRETTAIL"),
        ({"HF_TOKEN": "hf_abcdefghijklmnopqrst.TAILSECRET888"}, "hf_abcdefghijklmnopqrst.TAILSECRET888"),
        ({"DB_PASSWORD": "x1=y2;SharedAccessKey=zzz9;TAIL777"}, "x1=y2;SharedAccessKey=zzz9;TAIL777"),
    ],
)
def test_no_part_of_a_variable_survives(
    environment: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert redact(f"got {text} here") == "got *** here"


def test_other_variables_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "some-editor-name")
    monkeypatch.setenv("SHORT_TOKEN", "cpu")  # too short to be one, and it would hide ordinary words
    assert redact("some-editor-name on cpu") == "some-editor-name on cpu"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://user:pass@host/x", "https://***@host/x"),
        ("postgresql://me@db:5432/x", "postgresql://***@db:5432/x"),
        ("https://host/x@y", "https://host/x@y"),
        ("me@example.org", "me@example.org"),
        ("http://a:b@h1 http://c:d@h2", "http://***@h1 http://***@h2"),
        ("https://user:p@ss@host/x", "https://***@host/x"),
        ("https://user:pa/ss9secret@host", "https://***@host"),
        ("https://host:8080/x@y", "https://host:8080/x@y"),
        ("ssh://me:word@host", "ssh://***@host"),
    ],
)
def test_logins_in_urls_are_hidden(text: str, hidden: str) -> None:
    assert redact(text) == hidden


def test_only_allowed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("SOMETHING_ELSE", "x")
    found = allowed_environment()
    assert found["OMP_NUM_THREADS"] == "3"
    assert set(found) <= set(ENVIRONMENT_ALLOWED)


def test_metadata_is_complete_and_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("HOSTNAME", f"pod-{CANARY}")
    monkeypatch.setattr("sys.argv", ["llmtrain", "train", "--set", f"run.notes={CANARY}"])
    meta = collect_metadata("one", f"name {CANARY}", "cpu")
    assert {"run_id", "argv", "git", "versions", "machine", "environment", "started_at"} <= set(meta)
    assert meta["versions"].keys() >= {"llmtrain", "python", "torch"}
    assert CANARY not in json.dumps(meta)


def test_redacted_config_still_loads(
    train: Callable[..., object], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement of a secret must be valid YAML, or the run cannot be resumed by its id."""
    monkeypatch.setenv("HF_TOKEN", CANARY)
    prompts = f"trainer.eval_prompts=[who is {CANARY}]"
    train(f"run.notes={CANARY}", "output.run_id=one", "tracking.mlflow.tracking_uri=https://me:word@host", prompts)
    samples = list((workdir / "runs" / "one" / "samples").glob("*.json"))
    assert samples
    assert all(CANARY not in path.read_text() for path in samples)
    text = (workdir / "runs" / "one" / "config.yaml").read_text()
    assert CANARY not in text
    assert load_config(workdir / "runs" / "one" / "config.yaml").run.name == "gpt-smoke"


def test_text_without_secret_is_unchanged() -> None:
    text = dump_config(Config())
    assert redact(text) == text


@pytest.mark.parametrize("as_json", [False, True])
def test_error_of_a_command_is_redacted(cli: Callable[..., Any], as_json: bool) -> None:
    missing = "https://me:CanaryPassword@127.0.0.1/train.txt"
    words = ["--set", "data.name=text_files", "--set", f"data.files=[{missing!r}]"]
    done = cli("train", "--config", "gpt_smoke", *words, *(["--json"] if as_json else []))
    assert done.code in (64, 65)
    assert "***@127.0.0.1" in done.err
    assert "Canary" not in done.out + done.err


def test_colored_token_in_a_warning_is_redacted(tmp_path: Path) -> None:
    """A color would hide where the token begins."""
    setup_logging(LoggingSection(), tmp_path / "log")
    try:
        warn("TRAIN", f"refused \x1b[31m{'hf_' + 'A1b2' * 5}\x1b[0m")
    finally:
        close_logging()
    assert "refused ***" in (tmp_path / "log").read_text()

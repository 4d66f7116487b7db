"""Uploads to the hub, simulated by a local server. The library reads its settings on import; here they are replaced."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from hub_server import FakeHub, Repo, serve
from llmtrain.errors import HubError, UsageError
from llmtrain.hub import token as tokens
from llmtrain.hub.upload import check_upload, upload_model

TOKEN = "hf_CanaryUploadToken7c1"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", *tokens.TOKEN_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("NO_PROXY", "127.0.0.1"), ("no_proxy", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with serve() as server:
        server.accounts[TOKEN] = "me"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        close_session()  # one made by another test is bound to its settings
        yield server
    close_session()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "README.md").write_text("---\nlibrary_name: transformers\n---\n# Mine\n")
    (directory / "model.safetensors").write_bytes(b"weights" * 1000)
    return directory


def test_upload_creates_a_private_repository(hub: FakeHub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_upload("me/mine")
    url = upload_model(model, "me/mine", private=True, message="first at step 4")
    assert url == f"{hub.url}/me/mine"
    assert hub.repos["me/mine"].files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert hub.visibility == {"me/mine": "private"}
    assert hub.commit_messages == ["first at step 4"]
    assert {request.token for request in hub.requests if request.method == "POST"} == {TOKEN}


def test_upload_into_an_existing_repository_keeps_its_other_files(
    hub: FakeHub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", TOKEN)
    hub.repos["me/mine"] = Repo({"LICENSE": b"mine", "config.json": b"old"})
    upload_model(model, "me/mine", private=False, message="again")
    assert hub.repos["me/mine"].files["LICENSE"] == b"mine"
    assert hub.repos["me/mine"].files["config.json"] == b"{}"
    assert hub.visibility == {}


def test_name_without_owner_goes_to_the_account_of_the_token(
    hub: FakeHub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_upload("mine")
    assert upload_model(model, "mine", private=False, message="x") == f"{hub.url}/me/mine"
    assert hub.visibility == {"me/mine": "public"}


def refused_token(hub: FakeHub) -> str:
    hub.refused_tokens.add(TOKEN)
    return "me/mine"


def another_account(hub: FakeHub) -> str:
    hub.repos["them/theirs"] = Repo({})
    return "them/theirs"


def missing_repository_of_another_account(hub: FakeHub) -> str:  # noqa: ARG001
    return "them/new"


@pytest.mark.parametrize(
    ("prepare", "kind", "code"),
    [
        (refused_token, UsageError, 64),
        (another_account, HubError, 69),
        (missing_repository_of_another_account, HubError, 69),
    ],
)
def test_refused_upload(
    hub: FakeHub,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[FakeHub], str],
    kind: type[Exception],
    code: int,
) -> None:
    """The token is in no message, even where the hub returns it."""
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    name = prepare(hub)
    with pytest.raises(kind) as caught:
        upload_model(model, name, private=True, message="x")
    assert (type(caught.value), caught.value.exit_code) == (kind, code)  # type: ignore[attr-defined]
    assert TOKEN not in str(caught.value)
    assert caught.value.remedy  # type: ignore[attr-defined]


def test_unreachable_hub(hub: FakeHub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(HubError) as caught:
            upload_model(model, "me/mine", private=True, message="x")
    assert caught.value.exit_code == 69


@pytest.mark.parametrize("name", ["", "a/b/c", "no--good", "me/x.git", "../up"])
def test_invalid_name_is_refused_before_anything_else(hub: FakeHub, name: str) -> None:
    with pytest.raises(UsageError):
        check_upload(name)
    assert hub.requests == []


def test_missing_token_and_offline_are_usage_errors(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="HF_TOKEN"):
        check_upload("me/mine")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE"):
        check_upload("me/mine")
    assert hub.requests == []

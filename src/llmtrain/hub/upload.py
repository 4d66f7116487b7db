"""Uploads an exported model to the Hugging Face hub."""

from pathlib import Path

from llmtrain.errors import HubError, LlmtrainError, UsageError
from llmtrain.hub.errors import explain_hub_error
from llmtrain.hub.find import check_id, quiet_bars
from llmtrain.hub.token import TOKEN_VARIABLES, hub_token, is_offline


def check_upload(name: str) -> None:
    """Refuse what cannot succeed, before the model is loaded and written."""
    check_id(name, f"--push-to-hub: '{name}' is not a valid name on the hub.")
    if is_offline():
        raise UsageError(
            "--push-to-hub: the hub must not be contacted (offline).",
            remedy="Unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE.",
        )
    if _token() is None:
        raise UsageError(
            "--push-to-hub requires a token of the hub.",
            remedy=f"Set {TOKEN_VARIABLES[0]} to a token with write permission.",
        )


def upload_model(directory: Path, name: str, private: bool, message: str) -> str:
    """Upload a directory in one commit, and create the repository if it does not exist; an existing one keeps its
    visibility. Returns the URL of the repository."""
    from huggingface_hub import HfApi

    quiet_bars(f"uploading {name}")
    what = f"Model '{name}'"
    try:
        api = HfApi(token=_token())
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(folder_path=directory, repo_id=repository.repo_id, commit_message=message)
    except Exception as problem:  # the library raises many types, few of them its own
        raise _explain(problem, what) from None
    return str(repository)


def _token() -> str | None:
    """From the environment, else from a login of the hub library."""
    from huggingface_hub import get_token

    return hub_token() or get_token()


def _explain(problem: BaseException, what: str) -> LlmtrainError:
    """The token is a matter of usage; anything else that the hub refuses or fails to do is not."""
    response = getattr(problem, "response", None)
    if getattr(response, "status_code", None) == 403:
        return HubError(
            f"{what}: the hub refuses the upload (403).",
            remedy="Use a token with write permission for this name, or a name that belongs to its account.",
        )
    remedy = "Run the command again when the hub can be reached."
    error = explain_hub_error(problem, what, remedy, failed="cannot be uploaded")
    if getattr(response, "status_code", None) == 401:
        return error
    return HubError(error.what, remedy=error.remedy)

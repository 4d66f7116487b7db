"""Errors of the Hugging Face hub as errors of llmtrain."""

import errno
from typing import Any

from llmtrain.core.text import one_line
from llmtrain.errors import DataError, LlmtrainError, UsageError
from llmtrain.hub.token import TOKEN_VARIABLES, redact_tokens, tokens

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG, errno.ENOTDIR}
_DISK |= {errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
_SET_A_TOKEN = f"set {TOKEN_VARIABLES[0]} (or {', '.join(TOKEN_VARIABLES[1:])}) to a token of that account."
OFFLINE_REMEDY = (
    "On a machine with network access, run `llmtrain fetch-model NAME --to DIR` (fetch-data for a dataset), then set "
    "model.path to DIR."
)


def explain_hub_error(
    problem: BaseException, what: str, offline_remedy: str = OFFLINE_REMEDY, failed: str = "cannot be downloaded"
) -> LlmtrainError:
    """The error for an exception of huggingface_hub, also if transformers or datasets wrapped it; without tokens.
    `what` begins the message: "Model 'owner/name'"."""
    error: LlmtrainError | None = None
    cause: BaseException | None = problem
    while cause is not None and error is None:
        error = _explain_one(cause, what, offline_remedy, failed)
        cause = cause.__cause__
    if error is None:
        first_line = str(problem).strip().partition("\n")[0]
        error = DataError(f"{what} {failed}: {type(problem).__name__}: {first_line.strip():.300}")
    remedy = error.remedy
    if remedy:
        remedy = redact_tokens(remedy)
    return type(error)(redact_tokens(error.what), remedy=remedy)


def _explain_one(problem: BaseException, what: str, offline_remedy: str, failed: str) -> LlmtrainError | None:
    from huggingface_hub import errors

    if isinstance(problem, errors.HfHubHTTPError):
        return _explain_answer(problem, what, failed)
    if isinstance(problem, errors.LocalEntryNotFoundError) and problem.__cause__ is not None:
        return None  # raised for any failure of the hub: the cause is more specific
    if isinstance(problem, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return UsageError(
            f"{what} is not in the local cache, and the hub must not be contacted (offline).", remedy=offline_remedy
        )
    # By name, because the library has changed its HTTP client (requests, httpx, httpx2).
    by_http = type(problem).__module__.partition(".")[0] in ("httpx2", "httpx", "requests", "urllib3")
    if by_http or isinstance(problem, ConnectionError | TimeoutError):
        reason = one_line(problem, 200) or type(problem).__name__
        return UsageError(f"{what}: the hub cannot be reached: {reason}.", remedy=offline_remedy)
    if isinstance(problem, FileNotFoundError) and problem.filename:
        return DataError(f"{what} has no file {problem.filename}.", remedy="Save or download it again.")
    if isinstance(problem, OSError) and problem.errno in _DISK:
        where = ""
        if problem.filename:
            where = f" ({problem.filename})"
        return UsageError(
            f"{what} cannot be written to disk: {problem.strerror}{where}.",
            remedy="Free some space, or choose a writable directory. Downloaded files are kept.",
        )
    return None


def _explain_answer(problem: Any, what: str, failed: str) -> LlmtrainError:
    """The error for an HTTP error response of the hub."""
    from huggingface_hub import errors

    variable: str | None = None  # whose token was sent
    sent = tokens()
    if sent:
        variable = sent[0][0]
    status = problem.response.status_code
    if isinstance(problem, errors.GatedRepoError):
        if variable:
            return UsageError(
                f"{what} is gated, and the token in {variable} has no access to it.",
                remedy="Accept its license on its page with the account of that token, and wait for approval.",
            )
        return UsageError(
            f"{what} is gated.", remedy=f"Accept its license on its page while logged in, and {_SET_A_TOKEN}"
        )
    if isinstance(problem, errors.RepositoryNotFoundError):
        if variable:
            return UsageError(
                f"{what} is not on the hub, or is private and not visible with the token in {variable}.",
                remedy="Check the spelling, and the validity and permissions of the token.",
            )
        return UsageError(
            f"{what} is not on the hub, or is private.",
            remedy=f"Check the spelling. For a private repository, {_SET_A_TOKEN}",
        )
    if isinstance(problem, errors.RevisionNotFoundError):
        return UsageError(f"{what}: the hub has no such revision.", remedy="Use one of its branches, tags or commits.")
    if status == 401:
        which = "the login of the hub library"
        if variable:
            which = f"the token in {variable}"
        return UsageError(f"{what}: the hub does not accept {which}.", remedy="Create a new token, or unset this one.")
    if status == 429:
        return DataError(f"{what}: the rate limit of the hub is exceeded (429).", remedy="Retry later, with a token.")
    reason = (problem.server_message or str(problem)).strip().partition("\n")[0][:300]
    return DataError(f"{what} {failed}: the hub returned {status} ({type(problem).__name__}): {reason}")

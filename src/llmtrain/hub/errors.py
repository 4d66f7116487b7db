"""What went wrong with the hub, in our words."""

import errno
from typing import Any

from llmtrain.errors import DataError, LlmtrainError, UsageError
from llmtrain.hub.token import TOKEN_VARIABLES, clean, tokens
from llmtrain.text import one_line

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG, errno.ENOTDIR}
_DISK |= {errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
_SET_A_TOKEN = f"set {TOKEN_VARIABLES[0]} (or {', '.join(TOKEN_VARIABLES[1:])}) to a token of that account."
OFFLINE_REMEDY = (
    "With a network, run `llmtrain fetch-model NAME --to DIR` (fetch-data for a dataset), then set model.path to DIR."
)


def explain_hub_error(problem: BaseException, what: str, offline_remedy: str = OFFLINE_REMEDY) -> LlmtrainError:
    """What the hub library raised, as an error of ours; `what` begins its sentence: "Model 'owner/name'". Works for
    what transformers and datasets make of it too: they keep the cause. No token is ever part of it."""
    error: LlmtrainError | None = None
    cause: BaseException | None = problem
    while cause is not None and error is None:
        error = _explain_one(cause, what, offline_remedy)
        cause = cause.__cause__
    if error is None:
        lines = [line for line in str(problem).splitlines() if line.strip()] or [""]
        error = DataError(f"{what} cannot be fetched: {type(problem).__name__}: {lines[0].strip():.300}")
    return type(error)(clean(error.what), remedy=clean(error.remedy) if error.remedy else None)


def _explain_one(problem: BaseException, what: str, offline_remedy: str) -> LlmtrainError | None:
    from huggingface_hub import errors

    if isinstance(problem, errors.HfHubHTTPError):
        return _explain_answer(problem, what)
    if isinstance(problem, errors.LocalEntryNotFoundError) and problem.__cause__ is not None:
        return None  # said of any trouble with the hub; the cause knows which
    if isinstance(problem, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return UsageError(
            f"{what} is not in the local cache, and the hub may not be asked (offline).", remedy=offline_remedy
        )
    # By name, since the library has changed what it talks HTTP with (requests, httpx, httpx2).
    by_http = type(problem).__module__.partition(".")[0] in ("httpx2", "httpx", "requests", "urllib3")
    if by_http or isinstance(problem, ConnectionError | TimeoutError):
        reason = one_line(problem, 200) or type(problem).__name__
        return UsageError(f"{what}: the hub cannot be reached: {reason}.", remedy=offline_remedy)
    if isinstance(problem, FileNotFoundError) and problem.filename:
        return DataError(f"{what} lacks a file: {problem.filename}.", remedy="Save or download it again.")
    if isinstance(problem, OSError) and problem.errno in _DISK:
        where = f" ({problem.filename})" if problem.filename else ""
        return UsageError(
            f"{what} cannot be written to disk: {problem.strerror}{where}.",
            remedy="Make room, or choose a directory you may write to. What is there already is kept.",
        )
    return None


def _explain_answer(problem: Any, what: str) -> LlmtrainError:
    """An answer of the hub that is not a yes."""
    from huggingface_hub import errors

    variable = next((name for name, _ in tokens()), None)
    status = problem.response.status_code
    if isinstance(problem, errors.GatedRepoError):
        if variable:
            return UsageError(
                f"{what} is gated, and the token in {variable} has no access yet.",
                remedy="Accept its licence on its page with the account of that token, and wait until it is granted.",
            )
        return UsageError(
            f"{what} is gated.", remedy=f"Accept its licence on its page while logged in, and {_SET_A_TOKEN}"
        )
    if isinstance(problem, errors.RepositoryNotFoundError):
        if variable:
            return UsageError(
                f"{what} is not on the hub, or is private and the token in {variable} may not see it.",
                remedy="Check the spelling, that the token is still valid, and what its account may read.",
            )
        return UsageError(
            f"{what} is not on the hub, or is private.",
            remedy=f"Check the spelling. To read a private one, {_SET_A_TOKEN}",
        )
    if isinstance(problem, errors.RevisionNotFoundError):
        return UsageError(f"{what}: the hub has no such revision.", remedy="Name one of its branches, tags or commits.")
    if status == 401:
        which = f"the token in {variable}" if variable else "the login of the hub library"
        return UsageError(f"{what}: the hub does not accept {which}.", remedy="Make a new token, or unset this one.")
    if status == 429:
        return DataError(f"{what}: the hub has been asked too often (429).", remedy="Try again later, with a token.")
    reason = (problem.server_message or str(problem)).strip().partition("\n")[0][:300]
    return DataError(f"{what} cannot be fetched: the hub answers {status} ({type(problem).__name__}): {reason}")

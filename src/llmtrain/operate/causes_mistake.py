"""Mistakes that another start would not fix: exit codes 64 and 65, told apart by the type and reason of the error."""

from collections.abc import Callable

from llmtrain.errors import Reason
from llmtrain.launch.pod import USER_ID
from llmtrain.operate.answers import Found, code_only, evidence_of, go_on, remedy_of, said_by, with_code
from llmtrain.operate.clues import Clues
from llmtrain.operate.container_ends import PREFETCH, Ending
from llmtrain.operate.log_words import Said, error_in, last_words, traceback_end


def prefetch_failed(clues: Clues) -> Found | None:
    """The init container: what it takes for a mistake it leaves to the trainer to end with, other codes are its own."""
    own = next((end for end in clues.endings if end.container == PREFETCH and end.reason != "OOMKilled"), None)
    end = own or next((end for end in clues.endings if end.code in (64, 65) and _is_passed_on(end)), None)
    if end is None:
        return None
    said = said_by(end) or traceback_end(end.lines) or last_words(end.lines)
    return Found(
        f"What the config takes from the hub could not be fetched{f': {said}' if said else '.'}",
        evidence_of(clues, end, said),
        remedy_of(clues, end, "Is the hub reachable from the cluster? See model.path and launch.hf_token_secret.")
        + _token_remedy(clues),
    )


def _token_remedy(clues: Clues) -> str:
    """The error's own remedy is for a process that one starts oneself."""
    if clues.record.config.launch.hf_token_secret.name:
        return ""
    return (
        f" Pods get a token from a Secret: llmtrain secret hf-token --from-env-file .env{clues.place}, and --set "
        "launch.hf_token_secret.name=hf-token."
    )


def _is_passed_on(end: Ending) -> bool:
    before = error_in(end.prefetch_lines)
    return before is not None and end.error is not None and before.what == end.error.what


def bad_config(clues: Clues) -> Found | None:
    end = with_code(clues, 64)
    if end is None:
        return None
    said = said_by(end)
    what = f"The config, the command or the machine is not fit for the run: {said}" if said else code_only(end)
    usual = f"Correct it; llmtrain logs {clues.run} shows all that it said."
    if end.error and end.error.reason == "not_writable":  # its own remedy is for a run by hand
        is_ours = clues.record.config.launch.security == "restricted"
        who = f"user or group {USER_ID}, as whom pods run" if is_ours else f"the image's own user, or group {USER_ID}"
        volume = f"The volume {clues.record.runs_claim} must be writable for {who}."
        return Found(what, evidence_of(clues, end, said), f"{volume} Then: {go_on(clues)}.")
    return Found(what, evidence_of(clues, end, said), remedy_of(clues, end, usual, may_change=True))


def nan(clues: Clues) -> Found | None:
    """The error's own remedy is for a run by hand: one on a cluster is not resumed with another trainer.lr."""
    remedy = "a lower trainer.lr or more trainer.warmup_steps, or without those samples"
    return _of_the_run(clues, "not_finite", "The numbers broke down", remedy)


def gpu_out_of_memory(clues: Clues) -> Found | None:
    remedy = "half of trainer.micro_batch_size and twice trainer.grad_accum_steps"
    return _of_the_run(clues, "gpu_memory", "The GPU's memory is too small", remedy)


def disk_full(clues: Clues) -> Found | None:
    found = _stopped(clues, _has_reason("disk_full"), "The run could not be written", "")
    if found is None:
        return None
    remedy = f"Free some space on the volume {clues.record.runs_claim}. Then: {go_on(clues)}."
    return Found(found.what, found.evidence, remedy)


def given_up(clues: Clues) -> Found | None:
    usual = f"llmtrain logs {clues.run} shows the crashes."
    return _stopped(clues, _has_reason("gave_up"), "llmtrain has given the run up", usual)


def bad_checkpoint(clues: Clues) -> Found | None:
    usual = "Restore a checkpoint from a backup, or start a new run."
    return _stopped(clues, lambda error: error.type == "CheckpointError", "No checkpoint can be used", usual)


def bad_data(clues: Clues) -> Found | None:
    end = with_code(clues, 65)
    if end is not None and end.error is None:
        usual = f"llmtrain logs {clues.run} shows what it said."
        return Found(code_only(end), evidence_of(clues, end, None), remedy_of(clues, end, usual))
    usual = "Correct the data, or the data section of the config."
    return _stopped(clues, bool, "The data cannot be used", usual, may_change=True)


def _has_reason(reason: Reason) -> Callable[[Said], bool]:
    return lambda error: error.reason == reason


def _of_the_run(clues: Clues, reason: Reason, what: str, change: str) -> Found | None:
    """What comes again, however often it is resumed."""
    found = _stopped(clues, _has_reason(reason), what, "")
    if found is None:
        return None
    command = f"llmtrain launch --config CONFIG --name NEW --set FIELD=VALUE{clues.place}"
    again = f"It would come again: launch a new run with {change}: {command}."
    return Found(found.what, found.evidence, again)


def _stopped(
    clues: Clues, is_it: Callable[[Said], object], what: str, usual: str, may_change: bool = False
) -> Found | None:
    """Of code 65, by the type or reason of the error."""
    end = next((e for e in clues.endings if e.code == 65 and e.error and is_it(e.error)), None)
    if end is None or end.error is None:
        return None
    said = end.error.what
    return Found(f"{what}: {said}", evidence_of(clues, end, said), remedy_of(clues, end, usual, may_change))

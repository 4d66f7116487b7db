"""Mistakes that another start would not fix: exit codes 64 and 65, told apart by the type and reason of the error."""

from collections.abc import Callable

from llmtrain.errors import Reason
from llmtrain.launch.pod import USER_ID
from llmtrain.operate.status.container_exits import PREFETCH
from llmtrain.operate.why.diagnosis import Diagnosis, code_only, evidence_of, go_on, message_of, remedy_of, with_code
from llmtrain.operate.why.log_patterns import last_words, traceback_end
from llmtrain.operate.why.snapshot import Snapshot
from llmtrain.runs.exit_report import ExitReport


def prefetch_failed(snapshot: Snapshot) -> Diagnosis | None:
    """The init container: what it takes for a mistake it leaves to the trainer to end with, other codes are its own."""
    own = next((end for end in snapshot.exits if end.container == PREFETCH and end.reason != "OOMKilled"), None)
    end = own or next(
        (end for end in snapshot.exits if end.code in (64, 65) and end.report and end.report.reason == "prefetch"), None
    )
    if end is None:
        return None
    said = message_of(end) or traceback_end(end.lines) or last_words(end.lines)
    return Diagnosis(
        f"What the config takes from the hub could not be fetched{f': {said}' if said else '.'}",
        evidence_of(snapshot, end, said),
        remedy_of(snapshot, end, "Is the hub reachable from the cluster? See model.path and launch.hf_token_secret.")
        + _token_remedy(snapshot),
    )


def _token_remedy(snapshot: Snapshot) -> str:
    """The error's own remedy is for a process that one starts oneself."""
    if snapshot.record.config.launch.hf_token_secret.name:
        return ""
    return (
        f" Pods get a token from a Secret: llmtrain secret hf-token --from-env-file .env{snapshot.place}, and --set "
        "launch.hf_token_secret.name=hf-token."
    )


def bad_config(snapshot: Snapshot) -> Diagnosis | None:
    end = with_code(snapshot, 64)
    if end is None:
        return None
    said = message_of(end)
    what = f"The config, the command or the machine is not fit for the run: {said}" if said else code_only(end)
    usual = f"Correct it; llmtrain logs {snapshot.run} shows all that it said."
    if end.report and end.report.reason == "not_writable":  # its own remedy is for a run by hand
        is_ours = snapshot.record.config.launch.security == "restricted"
        who = f"user or group {USER_ID}, as whom pods run" if is_ours else f"the image's own user, or group {USER_ID}"
        volume = f"The volume {snapshot.record.runs_claim} must be writable for {who}."
        return Diagnosis(what, evidence_of(snapshot, end, said), f"{volume} Then: {go_on(snapshot)}.")
    return Diagnosis(what, evidence_of(snapshot, end, said), remedy_of(snapshot, end, usual, may_change=True))


def nan(snapshot: Snapshot) -> Diagnosis | None:
    """The error's own remedy is for a run by hand: one on a cluster is not resumed with another trainer.lr."""
    remedy = "a lower trainer.lr or more trainer.warmup_steps, or without those samples"
    return _of_the_run(snapshot, "not_finite", "The numbers broke down", remedy)


def gpu_out_of_memory(snapshot: Snapshot) -> Diagnosis | None:
    remedy = "half of trainer.micro_batch_size and twice trainer.grad_accum_steps"
    return _of_the_run(snapshot, "gpu_memory", "The GPU's memory is too small", remedy)


def disk_full(snapshot: Snapshot) -> Diagnosis | None:
    found = _stopped(snapshot, _has_reason("disk_full"), "The run could not be written", "")
    if found is None:
        return None
    remedy = f"Free some space on the volume {snapshot.record.runs_claim}. Then: {go_on(snapshot)}."
    return Diagnosis(found.what, found.evidence, remedy)


def given_up(snapshot: Snapshot) -> Diagnosis | None:
    usual = f"llmtrain logs {snapshot.run} shows the crashes."
    return _stopped(snapshot, _has_reason("gave_up"), "llmtrain has given the run up", usual)


def bad_checkpoint(snapshot: Snapshot) -> Diagnosis | None:
    usual = "Restore a checkpoint from a backup, or start a new run."
    return _stopped(snapshot, lambda report: report.error == "CheckpointError", "No checkpoint can be used", usual)


def bad_data(snapshot: Snapshot) -> Diagnosis | None:
    end = with_code(snapshot, 65)
    if end is not None and end.report is None:
        usual = f"llmtrain logs {snapshot.run} shows what it said."
        return Diagnosis(code_only(end), evidence_of(snapshot, end, None), remedy_of(snapshot, end, usual))
    usual = "Correct the data, or the data section of the config."
    return _stopped(snapshot, bool, "The data cannot be used", usual, may_change=True)


def _has_reason(reason: Reason) -> Callable[[ExitReport], bool]:
    return lambda report: report.reason == reason


def _of_the_run(snapshot: Snapshot, reason: Reason, what: str, change: str) -> Diagnosis | None:
    """What comes again, however often it is resumed."""
    found = _stopped(snapshot, _has_reason(reason), what, "")
    if found is None:
        return None
    command = f"llmtrain launch --config CONFIG --name NEW --set FIELD=VALUE{snapshot.place}"
    again = f"It would come again: launch a new run with {change}: {command}."
    return Diagnosis(found.what, found.evidence, again)


def _stopped(
    snapshot: Snapshot, is_it: Callable[[ExitReport], object], what: str, usual: str, may_change: bool = False
) -> Diagnosis | None:
    """Of code 65, by the type or reason of the error."""
    end = next((e for e in snapshot.exits if e.code == 65 and e.report and is_it(e.report)), None)
    if end is None or end.report is None:
        return None
    said = end.report.message
    return Diagnosis(f"{what}: {said}", evidence_of(snapshot, end, said), remedy_of(snapshot, end, usual, may_change))

"""Errors that a restart does not fix: exit codes 64 and 65, classified by the type and reason of the error."""

from collections.abc import Callable

from llmtrain.errors import Reason
from llmtrain.launch.pod import USER_ID, pod_security
from llmtrain.operate.status.container_exits import PREFETCH
from llmtrain.operate.why.diagnosis import (
    Diagnosis,
    exit_code_text,
    exit_evidence,
    exit_with_code,
    remedy_with_resume,
    report_message,
    resume_command,
)
from llmtrain.operate.why.log_patterns import last_line, traceback_end
from llmtrain.operate.why.snapshot import Snapshot
from llmtrain.runs.exit_report import ExitReport


def prefetch_failed(snapshot: Snapshot) -> Diagnosis | None:
    """From the init container, or from the trainer, which reports user errors of the init container."""
    exits = snapshot.exits
    exit_ = next((each for each in exits if each.container == PREFETCH and each.reason != "OOMKilled"), None)
    if exit_ is None:
        reported = (each for each in exits if each.code in (64, 65) and each.report)
        exit_ = next((each for each in reported if each.report and each.report.reason == "prefetch"), None)
    if exit_ is None:
        return None
    message = report_message(exit_) or traceback_end(exit_.lines) or last_line(exit_.lines)
    default = "Check that the cluster can reach the hub, and check model.path and launch.hf_token_secret."
    return Diagnosis(
        f"Cannot download the model or data of the config from the hub{f': {message}' if message else '.'}",
        exit_evidence(snapshot, exit_, message),
        remedy_with_resume(snapshot, exit_, default) + _token_remedy(snapshot),
    )


def _token_remedy(snapshot: Snapshot) -> str:
    """The error's own remedy is for a local process."""
    if snapshot.record.config.launch.hf_token_secret.name:
        return ""
    return (
        f" To give pods a token, create a Secret: llmtrain secret hf-token --from-env-file .env{snapshot.place}, and "
        "pass --set launch.hf_token_secret.name=hf-token."
    )


def bad_config(snapshot: Snapshot) -> Diagnosis | None:
    exit_ = exit_with_code(snapshot, 64)
    if exit_ is None:
        return None
    message = report_message(exit_)
    what = f"The config, the command or the environment is invalid: {message}" if message else exit_code_text(exit_)
    evidence = exit_evidence(snapshot, exit_, message)
    if exit_.report and exit_.report.reason == "not_writable":  # the error's own remedy is for a local run
        context = pod_security(snapshot.record.config.launch)
        group = context.get("fsGroup", USER_ID)
        user = f"user {context['runAsUser']} or" if "runAsUser" in context else "the image's user or"
        user = f"{user} group {group}, which pods run as"
        remedy = f"Make the volume {snapshot.record.runs_claim} writable for {user}."
        return Diagnosis(what, evidence, f"{remedy} Then: {resume_command(snapshot)}.")
    default = f"Correct it. Check the log: llmtrain logs {snapshot.run}."
    return Diagnosis(what, evidence, remedy_with_resume(snapshot, exit_, default, with_settings=True))


def nan(snapshot: Snapshot) -> Diagnosis | None:
    """The error's own remedy is for a local run: a run on a cluster is not resumed with another trainer.lr."""
    change = "a lower trainer.lr or more trainer.warmup_steps, or without those samples"
    return _needs_new_run(snapshot, "not_finite", "Training diverged", change)


def gpu_out_of_memory(snapshot: Snapshot) -> Diagnosis | None:
    change = "half of trainer.micro_batch_size and twice trainer.grad_accum_steps"
    return _needs_new_run(snapshot, "gpu_memory", "The GPU ran out of memory", change)


def disk_full(snapshot: Snapshot) -> Diagnosis | None:
    diagnosis = _training_failed(snapshot, _has_reason("disk_full"), "The volume of the run is full", "")
    if diagnosis is None:
        return None
    remedy = f"Free some space on the volume {snapshot.record.runs_claim}. Then: {resume_command(snapshot)}."
    return Diagnosis(diagnosis.what, diagnosis.evidence, remedy)


def given_up(snapshot: Snapshot) -> Diagnosis | None:
    default = f"Check the crashes in the log: llmtrain logs {snapshot.run}."
    return _training_failed(snapshot, _has_reason("gave_up"), "llmtrain stopped restarting the run", default)


def bad_checkpoint(snapshot: Snapshot) -> Diagnosis | None:
    default = "Restore a checkpoint from a backup, or start a new run."
    return _training_failed(snapshot, lambda report: report.error == "CheckpointError", "No usable checkpoint", default)


def bad_data(snapshot: Snapshot) -> Diagnosis | None:
    exit_ = exit_with_code(snapshot, 65)
    if exit_ is not None and exit_.report is None:
        default = f"Check the log: llmtrain logs {snapshot.run}."
        remedy = remedy_with_resume(snapshot, exit_, default)
        return Diagnosis(exit_code_text(exit_), exit_evidence(snapshot, exit_, None), remedy)
    default = "Correct the data, or the data section of the config."
    return _training_failed(snapshot, bool, "The data cannot be used", default, with_settings=True)


def _has_reason(reason: Reason) -> Callable[[ExitReport], bool]:
    return lambda report: report.reason == reason


def _needs_new_run(snapshot: Snapshot, reason: Reason, what: str, change: str) -> Diagnosis | None:
    """For errors that a resumed run repeats."""
    diagnosis = _training_failed(snapshot, _has_reason(reason), what, "")
    if diagnosis is None:
        return None
    command = f"llmtrain launch --config CONFIG --name NEW --set FIELD=VALUE{snapshot.place}"
    remedy = f"Resuming would repeat the error. Launch a new run with {change}: {command}."
    return Diagnosis(diagnosis.what, diagnosis.evidence, remedy)


def _training_failed(
    snapshot: Snapshot,
    is_match: Callable[[ExitReport], object],
    what: str,
    default_remedy: str,
    with_settings: bool = False,
) -> Diagnosis | None:
    """For exit code 65, if `is_match` accepts its report."""
    exit_ = next((each for each in snapshot.exits if each.code == 65 and each.report and is_match(each.report)), None)
    if exit_ is None or exit_.report is None:
        return None
    message = exit_.report.message
    remedy = remedy_with_resume(snapshot, exit_, default_remedy, with_settings)
    return Diagnosis(f"{what}: {message}", exit_evidence(snapshot, exit_, message), remedy)

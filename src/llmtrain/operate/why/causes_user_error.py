"""Errors that a restart does not fix (ExitCode.USAGE and FAILED), by the type and reason of the error."""

from collections.abc import Callable

from llmtrain.errors import ExitCode, Reason
from llmtrain.launch.job import PREFETCH
from llmtrain.launch.pod import USER_ID, pod_security
from llmtrain.operate.status.container_exits import ContainerExit
from llmtrain.operate.why.diagnosis import (
    Diagnosis,
    exit_code_text,
    exit_evidence,
    exit_with_code,
    last_line,
    remedy_with_resume,
    report_message,
    resume_command,
    traceback_end,
    with_message,
)
from llmtrain.operate.why.snapshot import Snapshot
from llmtrain.runs.exit_report import ExitReport


def prefetch_failed(snapshot: Snapshot) -> Diagnosis | None:
    """From the init container, or from the trainer, which reports user errors of the init container."""
    exit_ = next(filter(_is_init_container, snapshot.exits), None) or next(filter(_is_reported, snapshot.exits), None)
    if exit_ is None:
        return None
    message = report_message(exit_) or traceback_end(exit_.lines) or last_line(exit_.lines)
    default = "Check that the cluster can reach the hub, and check model.path and launch.hf_token_secret."
    return Diagnosis(
        with_message("Cannot download the model or data of the config from the hub", message),
        exit_evidence(snapshot, exit_, message),
        remedy_with_resume(snapshot, exit_, default) + _token_remedy(snapshot),
    )


def _is_init_container(exit_: ContainerExit) -> bool:
    return exit_.container == PREFETCH and exit_.reason != "OOMKilled"


def _is_reported(exit_: ContainerExit) -> bool:
    is_user_error = exit_.code in (ExitCode.USAGE, ExitCode.FAILED)
    return is_user_error and exit_.report is not None and exit_.report.reason == "prefetch"


def _token_remedy(snapshot: Snapshot) -> str:
    """The error's own remedy is for a local process."""
    if snapshot.record.config.launch.hf_token_secret.name:
        return ""
    return (
        f" To give pods a token, create a Secret: llmtrain secret hf-token --from-env-file .env{snapshot.place}, and "
        "pass --set launch.hf_token_secret.name=hf-token."
    )


def bad_config(snapshot: Snapshot) -> Diagnosis | None:
    exit_ = exit_with_code(snapshot, ExitCode.USAGE)
    if exit_ is None:
        return None
    message = report_message(exit_)
    what = f"The config, the command or the environment is invalid: {message}" if message else exit_code_text(exit_)
    evidence = exit_evidence(snapshot, exit_, message)
    if exit_.report and exit_.report.reason == "not_writable":  # the error's own remedy is for a local run
        context = pod_security(snapshot.record.config.launch)
        user = f"user {context['runAsUser']}" if "runAsUser" in context else "the image's user"
        remedy = (
            f"Make the volume {snapshot.record.runs_claim} writable for {user} or group "
            f"{context.get('fsGroup', USER_ID)}, which pods run as."
        )
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
    exit_ = exit_with_code(snapshot, ExitCode.FAILED)
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
    """For the first exit with ExitCode.FAILED whose report `is_match` accepts."""
    for exit_ in snapshot.exits:
        if exit_.code == ExitCode.FAILED and exit_.report and is_match(exit_.report):
            message = exit_.report.message
            remedy = remedy_with_resume(snapshot, exit_, default_remedy, with_settings)
            return Diagnosis(f"{what}: {message}", exit_evidence(snapshot, exit_, message), remedy)
    return None

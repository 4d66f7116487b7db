"""Copies a run directory to object storage: s3://bucket/prefix/<run_id>/... (needs boto3).

The copy is consistent at any time: only complete checkpoints are sent, each with manifest.json last, then the pointers
to them, and finished.json at the end. An interrupted copy resumes: existing objects are not sent again, and nothing is
deleted. Endpoint, region, credentials and retries are configured as usual for boto3 (AWS_ENDPOINT_URL_S3, ...).
"""

import contextlib
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.config.output import S3_URI_PATTERN
from llmtrain.core.files import file_sha256, read_json
from llmtrain.core.install import install_command
from llmtrain.core.logs import log, warn
from llmtrain.core.redact import redact, redacted_line
from llmtrain.core.text import format_bytes, plural
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.runs.checksums import CHECKSUMS, POINTERS, step_of
from llmtrain.runs.directory import RunDirectory

CONNECT_SEC = 10
_SHA256 = "sha256"  # key in the metadata of an object

_NO_BUCKET = ("NoSuchBucket",)
_REFUSED = (
    "403",
    "AccessDenied",
    "AccountProblem",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "Unauthorized",
)
_OTHER_REGION = ("301", "AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "SSOError",
    "ProfileNotFound",
    "ConfigParseError",
}


def sync_run(run: RunDirectory, uri: str) -> dict[str, Any]:
    """Copy the files that the store does not have. `files` and `bytes` count sent files, `skipped` existing ones."""
    bucket, prefix = parse_uri(uri)
    check_installed("Copying a run needs boto3")
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    where = f"s3://{bucket}/{prefix}{run.run_id}"
    try:
        copy = _Copy(_client(), bucket, f"{prefix}{run.run_id}/", run.path)
        copy.list_objects()
        _send(run, copy)
    except (BotoCoreError, ClientError, Boto3Error, ValueError) as problem:  # ValueError: an invalid endpoint
        raise _explain(problem, bucket, where) from None
    except OSError as problem:
        raise LlmtrainError(
            f"Cannot read {problem.filename or run.path}: {problem.strerror or problem}.", remedy=_REPEAT
        ) from None
    return {"run_id": run.run_id, "uri": where, "files": copy.files, "bytes": copy.byte_count, "skipped": copy.skipped}


def sync_finished(run: RunDirectory, uri: str) -> None:
    """Copy a finished run; a failure is only a warning."""
    try:
        copied = sync_run(run, uri)
    except Exception as problem:
        what = problem.what if isinstance(problem, LlmtrainError) else redact(str(problem))
        warn("SAVE", f"the run is finished, but was not copied: {what} Run: llmtrain sync {run.shown()} {uri}")
        return
    log("SAVE", f"{plural(copied['files'], 'file')} ({format_bytes(copied['bytes'])}) copied to {copied['uri']}")


def _send(run: RunDirectory, copy: "_Copy") -> None:
    """Send files before the files that refer to them. The run may still be training: finished.json is read first and
    sent last, and a checkpoint that is removed meanwhile is skipped."""
    finished = run.finished.read_bytes() if run.finished.is_file() else None
    paths = sorted(run.checkpoints.glob("step_*"))
    checkpoints = []
    for path in paths:
        checkpoint = _complete_checkpoint(path)
        if checkpoint:
            checkpoints.append(checkpoint)
            copy.add_hashes(checkpoint)
    lists = sorted(run.checkpoints.glob("*.jsonl"))  # of removed checkpoints
    for path in (*_files(run.path, skip=(run.checkpoints, run.heartbeats, run.exits, run.lock, run.finished)), *lists):
        with contextlib.suppress(FileNotFoundError):
            copy.send_file(path)
    sent = {checkpoint.path.name for checkpoint in checkpoints if _send_checkpoint(checkpoint, copy)}
    for pointer in (run.checkpoints / name for name in POINTERS):
        data = pointer.read_bytes() if pointer.is_file() else b""
        if data.decode(errors="replace").strip() in sent:
            copy.send_bytes(pointer, data)
    if finished is not None:
        copy.send_bytes(run.finished, finished)


def _send_checkpoint(checkpoint: "_Checkpoint", copy: "_Copy") -> bool:
    try:
        for path in (*sorted(checkpoint.hashes), checkpoint.path / CHECKSUMS):
            copy.send_file(path)
    except FileNotFoundError:
        warn("SAVE", f"{checkpoint.path} was removed while it was copied: the run is training and has newer ones")
        return False
    return True


def parse_uri(uri: str) -> tuple[str, str]:
    """(bucket, prefix); the prefix is empty or ends with a slash."""
    match = re.fullmatch(S3_URI_PATTERN, uri)
    if match is None:
        raise UsageError(  # without the URI, which may contain a key
            "The target URI must be s3://bucket or s3://bucket/prefix.",
            remedy="Set credentials with AWS_PROFILE or AWS_ACCESS_KEY_ID, and an endpoint other than Amazon's with "
            "AWS_ENDPOINT_URL_S3, not in the URI.",
        )
    parts = [part for part in (match["prefix"] or "").split("/") if part]
    return match["bucket"], "".join(f"{part}/" for part in parts)


def check_installed(what: str) -> None:
    if importlib.util.find_spec("boto3") is None:
        raise UsageError(f"{what}, but boto3 is not installed.", remedy=install_command("s3"))


def _files(directory: Path, skip: tuple[Path, ...] = ()) -> Iterator[Path]:
    """All regular files below a directory, by name, except links and hidden files (temporary files and locks)."""
    for path in sorted(directory.iterdir()):
        if path in skip or path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(path, skip)
        elif path.is_file():
            yield path


@dataclass(frozen=True)
class _Checkpoint:
    path: Path
    hashes: dict[Path, str]
    """SHA-256 of every file except manifest.json, from manifest.json."""


def _complete_checkpoint(path: Path) -> _Checkpoint | None:
    """The checkpoint, if all files of its manifest.json exist with the recorded sizes."""
    if step_of(path.name) is None or path.is_symlink():
        return None
    checksums = read_json(path / CHECKSUMS)
    try:
        entries = {path / name: entry for name, entry in checksums["files"].items()}
        existing = set(_files(path))  # excludes names such as ../../x
        is_complete = all(p in existing and p.stat().st_size == entry["bytes"] for p, entry in entries.items())
        hashes = {p: str(entry["sha256"]) for p, entry in entries.items()}
    except (AttributeError, KeyError, TypeError, OSError):
        is_complete = False
    if not is_complete:
        warn("SAVE", f"{path} is not a complete checkpoint and is not copied")
        return None
    return _Checkpoint(path, hashes)


@dataclass
class _Copy:
    """The objects of one run in a bucket, and the counts of sent and skipped files."""

    client: Any
    bucket: str
    prefix: str
    root: Path
    sizes: dict[str, int] = field(default_factory=dict)
    """Key -> size of the objects that existed before."""
    hashes: dict[tuple[int, int], str] = field(default_factory=dict)
    """(device, inode) -> SHA-256 of checkpoint files, to which epoch-N/ and best/ are hard links."""
    files: int = 0
    byte_count: int = 0
    skipped: int = 0

    def list_objects(self) -> None:
        """One request for all files, which also fails early if the bucket does not exist."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        self.sizes = {row["Key"]: row["Size"] for page in pages for row in page.get("Contents", ())}

    def add_hashes(self, checkpoint: _Checkpoint) -> None:
        for path, sha256 in checkpoint.hashes.items():
            with contextlib.suppress(OSError):
                self.hashes[_inode(path)] = sha256

    def send_file(self, path: Path) -> None:
        size = path.stat().st_size
        sha256 = self.hashes.get(_inode(path)) or file_sha256(path)
        key = self._key(path)
        if self._skip(key, size, sha256):
            return
        self.client.upload_file(str(path), self.bucket, key, ExtraArgs={"Metadata": {_SHA256: sha256}})
        self._count(size)

    def send_bytes(self, path: Path, data: bytes) -> None:
        key = self._key(path)
        sha256 = hashlib.sha256(data).hexdigest()
        if self._skip(key, len(data), sha256):
            return
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data, Metadata={_SHA256: sha256})
        self._count(len(data))

    def _key(self, path: Path) -> str:
        return self.prefix + path.relative_to(self.root).as_posix()

    def _skip(self, key: str, size: int, sha256: str) -> bool:
        """Whether the object exists with this content; it then counts as skipped."""
        if self.sizes.get(key) != size:
            return False
        head = self.client.head_object(Bucket=self.bucket, Key=key)
        is_same = bool(head["ContentLength"] == size and head["Metadata"].get(_SHA256) == sha256)
        self.skipped += is_same
        return is_same

    def _count(self, size: int) -> None:
        self.files += 1
        self.byte_count += size


def _client() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client("s3", config=Config(connect_timeout=CONNECT_SEC))


def _inode(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _explain(problem: Exception, bucket: str, where: str) -> LlmtrainError:
    """The error for an exception of boto3, whose message is shortened and redacted."""
    cause: BaseException = problem
    inner = problem.__cause__ or problem.__context__
    if isinstance(inner, Exception) and hasattr(inner, "response"):  # boto3 wraps the refusal of an upload
        cause = inner
    code = str(getattr(cause, "response", {}).get("Error", {}).get("Code", ""))
    types = {type_.__name__ for type_ in type(cause).__mro__}
    message = redacted_line(cause, 300)
    if code in _NO_BUCKET:
        return UsageError(
            f"Bucket '{bucket}' does not exist ({message}).",
            remedy="Create it, or correct the URI or AWS_ENDPOINT_URL_S3.",
        )
    if code in _REFUSED:
        return UsageError(
            f"The credentials do not allow copying to {where} ({message}).",
            remedy=f"Grant s3:ListBucket on {bucket}, and s3:GetObject and s3:PutObject on its objects, or set other "
            "credentials with AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    if code in _OTHER_REGION or "NoRegionError" in types:
        return UsageError(
            f"Bucket '{bucket}' is in another region ({message}).", remedy="Set AWS_REGION to the bucket's region."
        )
    if types & _NO_CREDENTIALS:
        return UsageError(
            f"No usable credentials for {where} ({message}).",
            remedy="Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    if types & {"ValueError", "ParamValidationError", "InvalidRegionError", "UnknownEndpointError"}:
        return UsageError(
            f"boto3 does not accept the settings: {message}",
            remedy="Check the URI, AWS_ENDPOINT_URL_S3 and AWS_REGION.",
        )
    if types & {"HTTPClientError", "ConnectionError"}:
        return LlmtrainError(
            f"Cannot reach the store of {where}: {message}",
            remedy=f"Check the network and AWS_ENDPOINT_URL_S3. {_REPEAT}",
        )
    return LlmtrainError(f"Copying to {where} failed: {message}", remedy=_REPEAT)


_REPEAT = "Repeat the command: it continues where it stopped."

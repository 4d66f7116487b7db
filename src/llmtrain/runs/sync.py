"""A run directory copied to object storage: s3://bucket/prefix/<run_id>/... (needs boto3).

What is seen there is whole: only complete checkpoints go, each with its manifest last, then the pointers to them, and
finished.json at the very end. A copy that was broken off is gone on with: what is there already is not sent again.
Nothing is deleted there. Endpoint, region, credentials and retries are boto3's own business (AWS_ENDPOINT_URL_S3, ...).
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
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.files import file_sha256, read_json
from llmtrain.logs import log, warn
from llmtrain.redact import redact, redacted_line
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.manifest import MANIFEST, POINTERS, step_of

CONNECT_SEC = 10
_SHA256 = "sha256"  # name of the object's metadata that holds it

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
_ELSEWHERE = ("301", "AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
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
    """Copy what is not there yet. `files` and `bytes` count what was sent, `skipped` the files that were there."""
    bucket, prefix = parse_uri(uri)
    check_installed("Runs are copied with boto3")
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    where = f"s3://{bucket}/{prefix}{run.run_id}"
    try:
        copy = _Copy(_client(), bucket, f"{prefix}{run.run_id}/", run.path)
        copy.look()
        _send(run, copy)
    except (BotoCoreError, ClientError, Boto3Error, ValueError) as problem:  # ValueError: an endpoint that is none
        raise _explain(problem, bucket, where) from None
    except OSError as problem:
        raise LlmtrainError(
            f"{problem.filename or run.path} cannot be read: {problem.strerror or problem}.",
            remedy="When it can, the same command goes on where this one ended.",
        ) from None
    return {"run_id": run.run_id, "uri": where, "files": copy.files, "bytes": copy.byte_count, "skipped": copy.skipped}


def sync_finished(run: RunDirectory, uri: str) -> None:
    """The run is finished and stays so, whatever the storage says."""
    try:
        copied = sync_run(run, uri)
    except Exception as problem:
        what = problem.what if isinstance(problem, LlmtrainError) else redact(str(problem))
        warn("SAVE", f"the run is finished, but was not copied: {what} Repeat with: llmtrain sync {run.path} {uri}")
        return
    log("SAVE", f"{copied['files']} files, {copied['bytes'] / 1e6:.1f} MB copied to {copied['uri']}")


def _send(run: RunDirectory, copy: "_Copy") -> None:
    """In an order in which nothing speaks of what is not there yet. The run may be going on meanwhile: finished.json
    is read first of all and sent last, and a checkpoint that is removed under way is left out."""
    finished = run.finished.read_bytes() if run.finished.is_file() else None
    checkpoints = [found for folder in sorted(run.checkpoints.glob("step_*")) if (found := _checkpoint(folder))]
    for checkpoint in checkpoints:
        copy.know(checkpoint)
    lists = sorted(run.checkpoints.glob("*.jsonl"))  # of checkpoints that were removed
    for path in (*_files(run.path, skip=(run.checkpoints, run.heartbeats, run.lock, run.finished)), *lists):
        with contextlib.suppress(FileNotFoundError):
            copy.send_file(path)
    sent = {checkpoint.folder.name for checkpoint in checkpoints if _send_checkpoint(checkpoint, copy)}
    for pointer in (run.checkpoints / name for name in POINTERS):
        data = pointer.read_bytes() if pointer.is_file() else b""
        if data.decode(errors="replace").strip() in sent:
            copy.send_bytes(pointer, data)
    if finished is not None:
        copy.send_bytes(run.finished, finished)


def _send_checkpoint(checkpoint: "_Checkpoint", copy: "_Copy") -> bool:
    try:
        for path in (*sorted(checkpoint.hashes), checkpoint.folder / MANIFEST):
            copy.send_file(path)
    except FileNotFoundError:
        warn("SAVE", f"{checkpoint.folder} was removed while it was copied: the run goes on, and has newer ones")
        return False
    return True


def parse_uri(uri: str) -> tuple[str, str]:
    """(bucket, prefix); the prefix is empty or ends with a slash."""
    match = re.fullmatch(S3_URI_PATTERN, uri)
    if match is None:
        raise UsageError(  # the URI itself is not shown: it may hold a key
            "The URI to copy to is not of the form s3://bucket/prefix.",
            remedy="Write s3://bucket or s3://bucket/prefix. Credentials come from boto3's own places, such as "
            "AWS_PROFILE or AWS_ACCESS_KEY_ID, and another endpoint than Amazon's from AWS_ENDPOINT_URL_S3.",
        )
    parts = [part for part in (match["prefix"] or "").split("/") if part]
    return match["bucket"], "".join(f"{part}/" for part in parts)


def check_installed(what: str) -> None:
    if importlib.util.find_spec("boto3") is None:
        raise UsageError(f"{what}, but boto3 is not installed.", remedy="pip install 'llmtrain[s3]'.")


def _files(folder: Path, skip: tuple[Path, ...] = ()) -> Iterator[Path]:
    """All plain files below, by name. Names with a dot in front are temporary, or the guard of the lock; a link may
    lead anywhere."""
    for path in sorted(folder.iterdir()):
        if path in skip or path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(path, skip)
        elif path.is_file():
            yield path


@dataclass(frozen=True)
class _Checkpoint:
    folder: Path
    hashes: dict[Path, str]
    """SHA-256 of every file but the manifest, which says so."""


def _checkpoint(folder: Path) -> _Checkpoint | None:
    """A complete checkpoint: one whose manifest lists files that are there, as large as it says."""
    if step_of(folder.name) is None or folder.is_symlink():
        return None
    manifest = read_json(folder / MANIFEST)
    try:
        rows = {folder / name: row for name, row in manifest["files"].items()}
        there = set(_files(folder))  # so that a name such as ../../x is none of them
        is_whole = all(path in there and path.stat().st_size == row["bytes"] for path, row in rows.items())
        hashes = {path: str(row["sha256"]) for path, row in rows.items()}
    except (AttributeError, KeyError, TypeError, OSError):
        is_whole = False
    if not is_whole:
        warn("SAVE", f"{folder} is not a complete checkpoint and is not copied")
        return None
    return _Checkpoint(folder, hashes)


@dataclass
class _Copy:
    """The objects of one run in a bucket, and what was done to them."""

    client: Any
    bucket: str
    prefix: str
    root: Path
    there: dict[str, int] = field(default_factory=dict)
    """Key -> size, of what was there before."""
    known: dict[tuple[int, int], str] = field(default_factory=dict)
    """(device, inode) -> SHA-256 of checkpoint files; epoch-N/ and best/ are hard links to them."""
    files: int = 0
    byte_count: int = 0
    skipped: int = 0

    def look(self) -> None:
        """One listing, rather than a question a file; it also tells a missing bucket before anything is sent."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        self.there = {row["Key"]: row["Size"] for page in pages for row in page.get("Contents", ())}

    def know(self, checkpoint: _Checkpoint) -> None:
        for path, sha256 in checkpoint.hashes.items():
            with contextlib.suppress(OSError):
                self.known[_inode(path)] = sha256

    def send_file(self, path: Path) -> None:
        size, sha256 = path.stat().st_size, self.known.get(_inode(path)) or file_sha256(path)
        key = self._key(path)
        if self._is_there(key, size, sha256):
            return
        self.client.upload_file(str(path), self.bucket, key, ExtraArgs={"Metadata": {_SHA256: sha256}})
        self._count(size)

    def send_bytes(self, path: Path, data: bytes) -> None:
        key, sha256 = self._key(path), hashlib.sha256(data).hexdigest()
        if self._is_there(key, len(data), sha256):
            return
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data, Metadata={_SHA256: sha256})
        self._count(len(data))

    def _key(self, path: Path) -> str:
        return self.prefix + path.relative_to(self.root).as_posix()

    def _is_there(self, key: str, size: int, sha256: str) -> bool:
        if self.there.get(key) != size:
            return False
        found = self.client.head_object(Bucket=self.bucket, Key=key)
        is_same = bool(found["ContentLength"] == size and found["Metadata"].get(_SHA256) == sha256)
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
    """boto3's error in our words. What it says itself is kept short, and without secrets."""
    cause = problem.__cause__ or problem.__context__
    cause = cause if isinstance(cause, Exception) and hasattr(cause, "response") else problem  # of a failed upload
    code = str(getattr(cause, "response", {}).get("Error", {}).get("Code", ""))
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    said = redacted_line(cause, 300)
    if code in _NO_BUCKET:
        return UsageError(
            f"There is no bucket '{bucket}' ({said}).",
            remedy="Make it, or correct the URI. AWS_ENDPOINT_URL_S3 says at which store it is looked for.",
        )
    if code in _REFUSED:
        return UsageError(
            f"The store refuses to copy to {where} ({said}).",
            remedy=f"These credentials need s3:ListBucket on {bucket}, and s3:GetObject and s3:PutObject on what is "
            "in it. AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY name others.",
        )
    if code in _ELSEWHERE or "NoRegionError" in kinds:
        return UsageError(f"Bucket '{bucket}' is in another region ({said}).", remedy="Set AWS_REGION to the bucket's.")
    if kinds & _NO_CREDENTIALS:
        return UsageError(
            f"There are no usable credentials for {where} ({said}).",
            remedy="Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    if kinds & {"ValueError", "ParamValidationError", "InvalidRegionError", "UnknownEndpointError"}:
        return UsageError(
            f"boto3 cannot work with these settings: {said}",
            remedy="Look at the URI, AWS_ENDPOINT_URL_S3 and AWS_REGION.",
        )
    if kinds & {"HTTPClientError", "ConnectionError"}:
        return LlmtrainError(
            f"The store of {where} cannot be reached: {said}",
            remedy="Check the network and AWS_ENDPOINT_URL_S3. The same command goes on where this one ended.",
        )
    return LlmtrainError(f"Copying to {where} failed: {said}", remedy="The same command goes on where this one ended.")

"""Run directories, locks and token stores of 0.1.0, which lack what is recorded today."""

from collections.abc import Mapping
from typing import Any


def is_tokenizer_hash(recorded: object, sha256: str) -> bool:
    """Whether a recorded hash is that of the tokenizer. 0.1.0 recorded none."""
    return recorded is None or recorded == sha256


def source_units(facts: Mapping[str, Any]) -> list[str]:
    """What each source file of an example store consists of. 0.1.0 read files of lines only, and did not record it."""
    return facts.get("units") or ["line"] * len(facts["files"])


def lacks_tokenizer_hash(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint does not record which tokenizer its run has: the run directory then has it."""
    return "tokenizer_sha256" not in state


def lacks_namespaces(owner: Mapping[str, Any]) -> bool:
    """Whether a lock file does not say in which namespaces of Linux its owner's pid and start time are counted."""
    return "pid_namespace" not in owner or "time_namespace" not in owner


def lacks_checksums(meta: Mapping[str, Any]) -> bool:
    """Whether a token store was written without checksums, so that it must be rebuilt."""
    return "sha256" not in meta and "sizes" in meta


def architecture_in(platform: object) -> str | None:
    """The CPU architecture in the text of platform.platform(), which is all that 0.1.0 recorded of the machine."""
    for name in ("x86_64", "aarch64", "amd64", "arm64"):
        if name in str(platform):
            return name
    return None

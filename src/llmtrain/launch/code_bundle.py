"""The user's own code that `launch --with-code` ships to every pod: its files, their hash, and the check in the pod."""

import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from llmtrain.core.env import CODE_DIR, CODE_HASH
from llmtrain.core.redact import has_token
from llmtrain.errors import UsageError

MAX_BYTES = 2**20
"""What a ConfigMap can hold."""
# Caches, version control and secrets, which are never copied to a pod.
SKIPPED = (
    "__pycache__",
    ".git",
    ".venv",
    ".env",
    ".env.*",
    ".DS_Store",
    ".netrc",
    "_netrc",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "*.pem",
)
# Not part of a package either: hidden files, and what tools generate. `..data` and the like are of Kubernetes itself.
_GENERATED = (".*", "*.pyc", "*.egg-info", "node_modules", "venv")
METRICS_FILE = "metrics.jsonl"  # every run directory has one


@dataclass(frozen=True)
class CodeBundle:
    """The files of a code directory, by their path below it."""

    sha256: str
    paths: tuple[str, ...]
    contents: Mapping[str, bytes] = field(default_factory=dict, compare=False)
    """Empty for a run that is on the cluster already: its ConfigMap has them."""


def read_bundle(directory: str) -> CodeBundle:
    """The files of a directory that contains modules; of a package (it has an __init__.py), with the package's name."""
    if not directory:
        raise UsageError("--with-code is empty.", remedy="Pass the directory with your own classes, or leave it out.")
    top = Path(directory).expanduser().absolute()
    if not top.exists():
        raise UsageError(f"--with-code: {directory} is missing.")
    if not top.is_dir():
        raise UsageError(f"--with-code: {directory} is not a directory.")
    root = import_directory(directory)
    contents = {path.relative_to(root).as_posix(): _read(path) for path in _files(top)}
    if not any(path.endswith(".py") for path in contents):
        raise UsageError(f"--with-code: there is no Python file in {directory}.")
    exposed = [path for path, content in contents.items() if has_token(content.decode(errors="ignore"))]
    if exposed:
        raise UsageError(
            f"--with-code: {', '.join(exposed)} contains what looks like a token or password, which the ConfigMap "
            "would show.",
            remedy="Read it from an environment variable of a Secret (launch.env_secrets).",
        )
    size = sum(map(len, contents.values()))
    if size > MAX_BYTES:
        largest = sorted(contents, key=lambda path: -len(contents[path]))[:3]
        shown = ", ".join(f"{path} ({len(contents[path]):,})" for path in largest)
        raise UsageError(
            f"--with-code: the {len(contents)} files in {directory} have {size:,} bytes; a ConfigMap holds at most "
            f"{MAX_BYTES:,}. The largest: {shown}.",
            remedy="Ship a smaller directory, list other files in .gitignore, or install the package into the image "
            "(launch.image) and leave --with-code out. Data belongs on a volume (launch.data_volume).",
        )
    return CodeBundle(bundle_sha256(contents), tuple(sorted(contents)), contents)


def import_directory(directory: str) -> Path:
    """The directory from which the modules of a code directory are imported: of a package, the one that contains it."""
    top = Path(directory).expanduser().absolute()
    is_package = (top / "__init__.py").is_file()
    return top.parent if is_package else top


def bundle_sha256(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path in sorted(contents):
        digest.update(f"{path} {hashlib.sha256(contents[path]).hexdigest()}\n".encode())
    return digest.hexdigest()


def check_mounted_code() -> None:
    """Called in a pod: refuse to run other code than that which was launched."""
    directory = os.environ.get(CODE_DIR)
    expected = os.environ.get(CODE_HASH)
    if not directory or not expected:
        return
    found = bundle_sha256({path.relative_to(directory).as_posix(): _read(path) for path in _walk(Path(directory))})
    if found != expected:
        raise UsageError(
            f"The code in {directory} is not the code that was launched: its SHA-256 is {found[:12]}, expected "
            f"{expected[:12]}.",
            remedy="Its ConfigMap was changed, or another volume is mounted there. Launch the run again with "
            "--with-code.",
        )


def _files(top: Path) -> list[Path]:
    """The files to ship, sorted, without those that .gitignore names."""
    ignored = _ignored_by_git(top)
    root = import_directory(str(top))
    files = []
    for path in _walk(top):
        if path in ignored:
            continue
        shown = os.fsencode(path).decode(errors="backslashreplace")
        if not _is_utf8(path.relative_to(root)):
            raise UsageError(
                f"--with-code: the name of {shown} is not UTF-8.", remedy="Rename it, or list it in .gitignore."
            )
        target = Path(os.path.realpath(path))  # resolve() raises on a link that leads back to itself
        if path.is_symlink() and not target.is_relative_to(top.resolve()):
            raise UsageError(
                f"--with-code: {shown} is a symbolic link to {target}, outside {top}.",
                remedy="Copy the file into the directory, or list the link in .gitignore.",
            )
        if not path.is_file():
            raise UsageError(
                f"--with-code: {shown} is not a regular file.", remedy="Remove it, or list it in .gitignore."
            )
        files.append(path)
    return files


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _walk(top: Path) -> Iterator[Path]:
    """Everything below a directory except caches, hidden files, secrets and run directories. Links to directories are
    not followed, but in a pod every directory is one."""
    is_pod = os.environ.get(CODE_DIR) == str(top)
    for directory, names, files in os.walk(top, followlinks=is_pod):
        if METRICS_FILE in files:
            names[:] = []
            continue
        names[:] = sorted(name for name in names if not _is_skipped(name))
        if not is_pod:
            files += [name for name in names if (Path(directory) / name).is_symlink()]
        yield from (Path(directory) / name for name in sorted(files) if not _is_skipped(name))


def _is_skipped(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in (*SKIPPED, *_GENERATED))


def _ignored_by_git(top: Path) -> set[Path]:
    """Files that git ignores; none outside a git checkout, or without git."""
    command = ["git", "-C", str(top), "ls-files", "--others", "--ignored", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return set()
    return {top / os.fsdecode(name) for name in done.stdout.split(b"\0") if name}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror or problem}.") from None

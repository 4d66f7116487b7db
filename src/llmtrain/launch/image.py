"""The image of a run: what to do without one, and the name of the one that `launch --build` builds from a clone."""

import hashlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain.core.install import DOCKERFILE, source_clone
from llmtrain.errors import UsageError
from llmtrain.version import __version__

NAME = "llmtrain"
IGNORE_FILE = ".dockerignore"
DEFAULT_REGISTRY = "docker.io"
LOCAL_REGISTRY = "localhost"  # podman's and buildah's name for images that are on this machine only


def missing_image(what: str, *, can_build: bool) -> UsageError:
    """The error about an image that is not named, with the commands that build one. `can_build`: the command has the
    option --build."""
    image = f"REGISTRY/{NAME}:{__version__}"
    clone = source_clone()
    context = "."
    if clone not in (None, Path.cwd()):
        context = shlex.quote(str(clone))
    file = (Path(context) / DOCKERFILE).as_posix()
    build = f"docker build -t {image} -f {file} {context} && docker push {image}"
    if clone is None:
        return UsageError(what, remedy=f"Build one in a clone of llmtrain, and pass --image {image}: {build}")
    remedy = f"Build one, and pass --image {image}: {build}"
    if can_build:
        remedy += f"\n  Or let this command build it: add --build, with --image REGISTRY/{NAME} to push it."
    return UsageError(what, remedy=remedy)


def image_to_build(image: str | None, clone: Path, build_args: Sequence[str]) -> str:
    """The name of the image that is built: `image`, with a tag that follows from the content if it has none."""
    if image and "@" in image:
        raise UsageError(
            f"--build cannot build {image}: a digest names an image that exists.",
            remedy="Remove @sha256:..., or leave --build out.",
        )
    name = image or NAME
    if ":" in name.rpartition("/")[2]:
        return name
    version = __version__.replace("+", "-")
    return f"{name}:{version}-{_content_hash(clone, build_args)}"


def full_name(image: str) -> str:
    """The name with its registry, as containerd completes it. podman and buildah would complete it to localhost/."""
    first, slash, _ = image.partition("/")
    if not slash:
        return f"{DEFAULT_REGISTRY}/library/{image}"
    if first == LOCAL_REGISTRY or "." in first or ":" in first:
        return image
    return f"{DEFAULT_REGISTRY}/{image}"


def has_registry(image: str) -> bool:
    first, slash, _ = image.partition("/")
    return bool(slash) and first != LOCAL_REGISTRY


def _content_hash(clone: Path, build_args: Sequence[str]) -> str:
    """12 hex digits that change with each file of the build context and each build argument."""
    digest = hashlib.sha256()
    for file in sorted({clone / DOCKERFILE, *_context_files(clone)}):
        digest.update(f"{file.relative_to(clone).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    for argument in sorted(build_args):
        name, equals, value = argument.partition("=")
        if not equals:  # the builder takes it from the environment
            value = os.environ.get(name, "")
        digest.update(f"{name}={value}\0".encode())
    return digest.hexdigest()[:12]


def _context_files(clone: Path) -> Iterator[Path]:
    """The files that the builder reads: .dockerignore leaves out everything except the lines with an exclamation mark,
    and bytecode."""
    for line in (clone / IGNORE_FILE).read_text(encoding="utf-8").splitlines():
        if not line.startswith("!"):
            continue
        path = clone / line[1:]
        if path.is_file():
            yield path
        for file in path.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file

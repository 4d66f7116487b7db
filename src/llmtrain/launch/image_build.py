"""`launch --build`: build the image from the clone with docker, podman or buildah, and push it to its registry."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.core.install import DOCKERFILE, source_clone
from llmtrain.core.programs import run_program
from llmtrain.core.redact import redact
from llmtrain.errors import BuildError, ClusterError, UsageError
from llmtrain.launch.image import full_name, has_registry, image_to_build

BUILDERS = ("docker", "podman", "buildah")
SHOWN_LINES = 5


@dataclass(frozen=True)
class ImageBuild:
    """An image to build. `image` is the name in the config, `local_name` that on this machine."""

    clone: Path
    image: str
    build_args: tuple[str, ...] = ()

    @property
    def local_name(self) -> str:
        return full_name(self.image)


def plan_build(image: str | None, build_args: Sequence[str]) -> ImageBuild:
    """What --build would build; builds nothing."""
    clone = source_clone()
    if clone is None:
        raise UsageError(
            f"--build needs a clone of llmtrain with {DOCKERFILE}; this llmtrain is an installed package.",
            remedy="Run llmtrain from a clone (pip install -e .), or pass --image with an image that exists.",
        )
    return ImageBuild(clone, image_to_build(image, clone, build_args), tuple(build_args))


def build_image(build: ImageBuild) -> str:
    """Build the image and push it if its name has a registry. Returns the program that has it now."""
    program = find_builder()
    words = [program, "build", "--tag", build.local_name, "--file", str(build.clone / DOCKERFILE)]
    for argument in build.build_args:
        words += ["--build-arg", argument]
    code, output = run_program([*words, str(build.clone)])
    if code:
        raise BuildError(
            f"{program} build failed with exit code {code}:{_last_lines(output)}",
            remedy="Its full output is above. Build arguments, such as a package index: docs/images.md.",
        )
    if has_registry(build.image):
        code, output = run_program([program, "push", build.local_name])
        if code:
            raise ClusterError(
                f"{program} push failed with exit code {code}:{_last_lines(output)}",
                remedy=f"Check the name, and log in to the registry: {program} login. The image is built: "
                f"{build.local_name}.",
            )
    return program


def find_builder() -> str:
    """The first builder on the PATH that works: docker's client may be there without its daemon."""
    broken: dict[str, str] = {}
    for program in BUILDERS:
        if shutil.which(program) is None:
            continue
        done = subprocess.run(
            [program, "version"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        if not done.returncode:
            return program
        broken[program] = done.stderr
    if broken:
        program = next(iter(broken))
        raise ClusterError(
            f"{program} does not work:{_last_lines(broken[program])}",
            remedy=f"Check that `{program} version` works.",
        )
    raise UsageError(
        "--build needs docker, podman or buildah on the PATH.",
        remedy="Install one of them, or build the image elsewhere and pass --image (docs/images.md).",
    )


def _last_lines(output: str) -> str:
    lines = [redact(line.strip()) for line in output.splitlines() if line.strip()]
    return "".join(f"\n  {line}" for line in lines[-SHOWN_LINES:]) or " no output"

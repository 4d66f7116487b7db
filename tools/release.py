"""Build and check everything that a release publishes, from the files of the current commit.

python tools/release.py --to DIR [--images cpu cuda] [--image-build COMMAND] [--image-arguments VARIANT=ARGUMENTS]

DIR gets both wheels, the sdist, NOTES.md (the section of CHANGELOG.md) and SHA256SUMS. The images get the tags
llmtrain:VERSION and llmtrain:VERSION-cuda; the arguments say which package index has the torch build of a variant.
Nothing is uploaded.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP_OPTIONS = ["--quiet", "--disable-pip-version-check", "--no-compile", "-c", str(ROOT / "constraints.txt")]
IMAGE_TAGS = {"cpu": "", "cuda": "-cuda"}
"""Variant -> suffix of its tag."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--images", nargs="*", choices=IMAGE_TAGS, default=[])
    parser.add_argument("--image-build", default="docker build -t {tag} -f {dockerfile} {context}")
    parser.add_argument("--image-arguments", action="append", default=[], help="VARIANT=ARGUMENTS for --image-build")
    options = parser.parse_args()
    options.to = options.to.absolute()  # packages are installed from other directories

    version = read_version()
    say(f"llmtrain {version}")
    check_commit(version)
    notes = release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    options.to.mkdir(parents=True, exist_ok=True)
    if any(options.to.iterdir()):
        sys.exit(f"{options.to} is not empty. Delete it, or choose another directory with --to.")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        export_commit(source)
        build_packages(source, options.to)
        check_packages(options.to, version, Path(folder))
        for variant in options.images:
            build_image(source, version, variant, options)
    (options.to / "NOTES.md").write_text(notes, encoding="utf-8")
    write_checksums(options.to)
    say(f"ready to publish: {options.to}")


def read_version() -> str:
    text = (ROOT / "src" / "llmtrain" / "version.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"$', text, flags=re.M)
    return str(version)


def check_commit(version: str) -> None:
    """Exit unless the checkout is what would be tagged."""
    if git("status", "--porcelain"):
        sys.exit("There are uncommitted changes. Commit them first: a release is built from a commit.")
    tagged = subprocess.run(
        ["git", "rev-list", "-n", "1", f"v{version}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tagged.returncode == 0 and tagged.stdout.strip() != git("rev-parse", "HEAD"):
        sys.exit(f"Tag v{version} is another commit. Set a new version in src/llmtrain/version.py.")


def release_notes(changelog: str, version: str) -> str:
    """The section of a version, which must have a date."""
    section = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)", changelog, flags=re.M | re.S
    )
    if section is None or not section[1].strip():
        sys.exit(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'. Move the entries of Unreleased there.")
    return f"# llmtrain {version}\n\n{section[1].strip()}\n"


def export_commit(folder: Path) -> None:
    """Write the files of the commit: files that git ignores or does not track cannot get into a package."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    run(["git", "archive", "-o", str(archive), "HEAD"], ROOT)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")


def build_packages(source: Path, target: Path) -> None:
    """Both wheels and the sdist, twice: two builds of one commit have the same bytes."""
    say("building wheels and sdist")
    # Timestamps in the archives are those of the commit.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct")}
    build = [sys.executable, "-m", "build"]
    again = target.with_name(target.name + ".again")
    for folder in (target, again):
        run([*build, "--outdir", str(folder), str(source)], ROOT, environment)
        run([*build, "--wheel", "--outdir", str(folder), str(source / "client")], ROOT, environment)
    if checksums(target) != checksums(again):
        sys.exit("Two builds of this commit differ.")
    shutil.rmtree(again)


def check_packages(target: Path, version: str, folder: Path) -> None:
    """Install each package into an empty environment, and use it."""
    [wheel] = target.glob("llmtrain-*.whl")
    [client] = target.glob("llmtrain_client-*.whl")
    [sdist] = target.glob("llmtrain-*.tar.gz")
    for package in (wheel, sdist, client):
        say(f"installing {package.name} into an empty environment")
        environment = folder / package.name
        run([sys.executable, "-m", "venv", str(environment)], folder)
        run([str(environment / "bin" / "python"), "-m", "pip", "install", *PIP_OPTIONS, str(package)], folder)
        work = environment / "work"
        work.mkdir()
        program = str(environment / "bin" / "llmtrain")
        if output([program, "--version"], work) != f"llmtrain {version}":
            sys.exit(f"{package.name} does not report version {version}.")
        run([program, "validate", "--config", "gpt_stdlib"], work)
        if package is not client:
            run([program, "train", "--config", "gpt_smoke", "--set", "output.run_id=first"], work)
            run([program, "generate", "--run", "first", "--max-new-tokens", "5"], work)
        # The cluster commands, which the client exists for.
        if package is client:
            image = f"--image=llmtrain:{version}"
            run([program, "launch", "--config", "k8s_indexed_job", "--name", "first", image, "--dry-run"], work)


def build_image(source: Path, version: str, variant: str, options: argparse.Namespace) -> None:
    tag = f"llmtrain:{version}{IMAGE_TAGS[variant]}"
    say(f"building image {tag}")
    arguments = dict(row.split("=", 1) for row in options.image_arguments)
    paths = {"tag": tag, "dockerfile": str(source / "docker" / "Dockerfile"), "context": str(source)}
    build = [word.format(**paths) for word in shlex.split(options.image_build)]
    label = ["--label", f"org.opencontainers.image.version={version}"]
    # In the clone, where the one who gave the command is.
    run([*build, *label, *shlex.split(arguments.get(variant, ""))], ROOT)


def checksums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def write_checksums(target: Path) -> None:
    lines = [f"{digest}  {name}\n" for name, digest in checksums(target).items()]
    (target / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def git(*arguments: str) -> str:
    return output(["git", *arguments], ROOT)


def output(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command, and print its output only if it fails."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")


def say(text: str) -> None:
    print(f"[RELEASE] {text}", flush=True)


if __name__ == "__main__":
    main()

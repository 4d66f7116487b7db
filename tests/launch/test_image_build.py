"""launch without an image, and `launch --build` with programs that stand in for docker, podman and buildah."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube_server import KubeServer
from llmtrain import __version__
from llmtrain.launch import image as image_names
from llmtrain.launch import image_build
from llmtrain.launch.image import full_name, has_registry, image_to_build

Cli = Callable[..., Any]
LAUNCH = ("launch", "--config", "ddp_smoke", "--name", "demo")
REMOTE = "registry.example.com/ml/llmtrain"
# Records its arguments. $FAKE_FAILS names the commands that fail.
BUILDER = """#!/bin/sh
printf '%s\\n' "${0##*/} $*" >> "$FAKE_CALLS"
echo "output of $1"
case " $FAKE_FAILS " in *" $1 "*) echo "reason of $1"; echo "reason of $1" >&2; exit 3;; esac
"""


@dataclass
class Builders:
    bin: Path
    file: Path

    def install(self, *names: str) -> None:
        for name in names:
            (self.bin / name).write_text(BUILDER)
            (self.bin / name).chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        return [line.split() for line in self.file.read_text().splitlines()] if self.file.exists() else []


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builders:
    found = Builders(tmp_path / "bin", tmp_path / "calls")
    found.bin.mkdir()
    monkeypatch.setenv("PATH", str(found.bin))
    monkeypatch.setenv("FAKE_CALLS", str(found.file))
    monkeypatch.setenv("FAKE_FAILS", "")
    return found


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of a clone that the image is made of."""
    root = tmp_path / "clone"
    files = {
        ".dockerignore": "# only these\n*\n!pyproject.toml\n!src\n**/__pycache__\n",
        "pyproject.toml": "[project]\n",
        "src/llmtrain/cli.py": "x = 1\n",
        "docker/Dockerfile": "FROM scratch\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


class TestWithoutImage:
    @pytest.mark.parametrize("more", [(), ("--dry-run",), ("--hold", "--dry-run"), ("--set", "launch.image=null")])
    def test_launch_says_how_to_build_one(self, call: Cli, kube: KubeServer, more: tuple[str, ...], repo: Path) -> None:
        done = call(*LAUNCH, *more, "--json")
        assert (done.code, done.json["error"]) == (64, "UsageError")
        assert "launch.image" in done.json["what"]
        assert f"docker build -t REGISTRY/llmtrain:{__version__}" in done.json["remedy"]
        assert f"-f {repo}/docker/Dockerfile {repo}" in done.json["remedy"]
        assert "--build" in done.json["remedy"]
        assert kube.objects == {}

    def test_package_names_a_clone(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(image_names, "source_clone", lambda: None)
        done = cli(*LAUNCH, "--dry-run", "--json")
        assert done.code == 64
        assert "clone of llmtrain" in done.json["remedy"]
        assert "--build" not in done.json["remedy"]

    def test_new_guard_requires_an_image(self, call: Cli) -> None:
        done = call("guard", "install", "--json")
        assert done.code == 64
        assert "--image" in done.json["what"]
        assert "--build" not in done.json["remedy"]

    def test_resume_cannot_remove_the_image(self, call: Cli) -> None:
        assert call(*LAUNCH, "--image", "me/train:1", "-d").code == 0
        assert call("stop", "demo").code == 0
        done = call("resume", "demo", "--set", "launch.image=null", "-d", "--json")
        assert done.code == 64

    @pytest.mark.parametrize("version", [1, 2])
    def test_document_of_an_earlier_schema_keeps_its_default(self, cli: Cli, workdir: Path, version: int) -> None:
        (workdir / "old.yaml").write_text(f"schema_version: {version}\n")
        done = cli("launch", "--config", "old.yaml", "--name", "demo", "--dry-run", "--json")
        assert done.code == 0, done.err
        (container,) = done.json["manifests"][-1]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "llmtrain:latest"


class TestBuild:
    def test_image_is_built_and_launched(self, call: Cli, kube: KubeServer, builders: Builders, repo: Path) -> None:
        builders.install("docker", "podman", "buildah")
        done = call(*LAUNCH, "--build", "--build-arg", "EXTRAS=k8s", "-d", "--json")
        assert done.code == 0, done.err
        assert done.json["run_id"] == "demo", "standard output has the result only"
        image = image_to_build(None, repo, ["EXTRAS=k8s"])
        file = f"{repo}/docker/Dockerfile"
        words = ["build", "--tag", full_name(image), "--file", file, "--build-arg", "EXTRAS=k8s", str(repo)]
        assert builders.calls == [["docker", "version"], ["docker", *words]]
        assert "output of build" in done.err
        config = yaml.safe_load(kube.objects["configmaps", "team", "demo-config"]["data"]["train.yaml"])
        assert config["launch"]["image"] == image
        assert "names no registry" in done.err

    @pytest.mark.parametrize("name", ["podman", "buildah"])
    def test_image_with_a_registry_is_pushed(self, call: Cli, builders: Builders, name: str) -> None:
        builders.install(name)
        done = call(*LAUNCH, "--build", "--image", f"{REMOTE}:dev", "-d")
        assert done.code == 0, done.err
        assert [call[:2] for call in builders.calls] == [[name, "version"], [name, "build"], [name, "push"]]
        assert builders.calls[-1] == [name, "push", f"{REMOTE}:dev"]
        assert "names no registry" not in done.err

    def test_dry_run_builds_nothing(self, cli: Cli, builders: Builders, repo: Path) -> None:
        builders.install("docker")
        done = cli(*LAUNCH, "--build", "--image", REMOTE, "--dry-run", "--json")
        assert done.code == 0, done.err
        (container,) = done.json["manifests"][-1]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == image_to_build(REMOTE, repo, [])
        assert builders.calls == []

    def test_docker_without_its_daemon_is_passed_over(self, call: Cli, builders: Builders) -> None:
        builders.install("docker", "podman")
        (builders.bin / "docker").write_text("#!/bin/sh\nexit 1\n")
        assert call(*LAUNCH, "--build", "--image", f"{REMOTE}:1", "-d").code == 0
        assert [words[0] for words in builders.calls] == ["podman"] * 3

    def test_without_a_builder(self, call: Cli, kube: KubeServer, builders: Builders) -> None:
        done = call(*LAUNCH, "--build", "-d", "--json")
        assert done.code == 64
        assert "docker, podman or buildah" in done.json["what"]
        assert builders.calls == []
        assert kube.objects == {}

    def test_without_a_clone(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(image_build, "source_clone", lambda: None)
        done = cli(*LAUNCH, "--build", "--dry-run", "--json")
        assert done.code == 64
        assert "clone" in done.json["what"]

    @pytest.mark.parametrize(
        ("command", "code", "error"),
        [("version", 69, "ClusterError"), ("build", 65, "BuildError"), ("push", 69, "ClusterError")],
    )
    def test_failure_shows_the_last_lines(
        self,
        call: Cli,
        kube: KubeServer,
        builders: Builders,
        monkeypatch: pytest.MonkeyPatch,
        command: str,
        code: int,
        error: str,
    ) -> None:
        builders.install("docker")
        monkeypatch.setenv("FAKE_FAILS", command)
        done = call(*LAUNCH, "--build", "--image", f"{REMOTE}:dev", "-d", "--json")
        assert (done.code, done.json["error"]) == (code, error)
        assert f"reason of {command}" in done.json["what"]
        assert builders.calls[-1][1] == command
        assert kube.objects == {}, "nothing was launched"

    @pytest.mark.parametrize(
        "words", [("--build-arg", "EXTRAS=k8s", "--image", "a/b"), ("--build", "--image", f"a/b@sha256:{'0' * 64}")]
    )
    def test_options_that_exclude_each_other(self, cli: Cli, words: tuple[str, ...]) -> None:
        assert cli(*LAUNCH, "--dry-run", *words).code == 64


class TestNames:
    def test_tag_follows_from_the_content(self, clone: Path) -> None:
        def tag(*build_args: str) -> str:
            return image_to_build(None, clone, build_args)

        first = tag()
        assert first.startswith(f"llmtrain:{__version__}-")
        assert len(first.rpartition("-")[2]) == 12
        for name in ("README.md", "src/llmtrain/__pycache__/cli.pyc", "runs/one/config.yaml"):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_text("x")
        assert tag() == first, "not part of the build context"
        tags = [first, tag("EXTRAS=k8s")]
        for name in ("src/llmtrain/cli.py", "src/llmtrain/new.py", "docker/Dockerfile", "pyproject.toml"):
            (clone / name).write_text("y = 2\n")
            tags.append(tag())
        (clone / "src/llmtrain/new.py").rename(clone / "src/llmtrain/newer.py")
        tags.append(tag())
        assert len(set(tags)) == len(tags)

    def test_build_argument_without_a_value_is_that_of_the_environment(
        self, clone: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", "https://pypi.example.com")
        taken = image_to_build(None, clone, ["PIP_INDEX_URL"])
        assert taken == image_to_build(None, clone, ["PIP_INDEX_URL=https://pypi.example.com"])

    @pytest.mark.parametrize(
        ("image", "has_tag"), [("localhost:5000/a", False), ("localhost:5000/a:1", True), ("a:1", True), ("a", False)]
    )
    def test_given_tag_is_kept(self, clone: Path, image: str, has_tag: bool) -> None:
        built = image_to_build(image, clone, [])
        assert (built == image) is has_tag
        assert built.startswith(image)

    @pytest.mark.parametrize(
        ("image", "full", "is_pushed"),
        [
            ("llmtrain:1", "docker.io/library/llmtrain:1", False),
            ("me/llmtrain:1", "docker.io/me/llmtrain:1", True),
            ("localhost/llmtrain:1", "localhost/llmtrain:1", False),
            ("localhost:5000/llmtrain:1", "localhost:5000/llmtrain:1", True),
            (f"{REMOTE}:1", f"{REMOTE}:1", True),
        ],
    )
    def test_registry_of_a_name(self, image: str, full: str, is_pushed: bool) -> None:
        assert full_name(image) == full
        assert has_registry(image) is is_pushed

    def test_build_context_of_the_clone(self, repo: Path) -> None:
        """The tag is computed from the lines of .dockerignore that begin with an exclamation mark."""
        lines = (repo / ".dockerignore").read_text().splitlines()
        rules = {line for line in lines if line and not line.startswith(("#", "!"))}
        assert rules == {"*", "**/__pycache__"}
        files = {path.relative_to(repo).as_posix() for path in image_names._context_files(repo)}
        assert {"pyproject.toml", "constraints.txt", "src/llmtrain/cli.py", "configs/presets/ddp_smoke.yaml"} <= files

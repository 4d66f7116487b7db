"""The Dockerfile without building it: no host names, the uid of pods, exact versions, small layers."""

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import pytest

from llmtrain.launch.pod import CACHE_DIR, USER_ID

Instruction = tuple[str, str]  # ("RUN", "pip install ...")


@pytest.fixture(scope="module")
def text(repo: Path) -> str:
    return (repo / "docker" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def stages(text: str) -> dict[str, list[Instruction]]:
    """Stage name -> instructions, without comments and continuation lines; the last stage is named `image`."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: dict[str, list[Instruction]] = {}
    for line in code.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        word, rest = line.split(None, 1)
        if word == "FROM":
            _, _, name = rest.partition(" AS ")
            found[name or "image"] = []
        found[list(found)[-1]].append((word, " ".join(rest.split())))
    return found


def values(stage: list[Instruction], word: str) -> list[str]:
    return [rest for name, rest in stage if name == word]


def test_dockerfile_names_no_host(text: str) -> None:
    assert "://" not in text
    assert not re.search(r"\b[\w-]+\.(?:com|org|io|net|dev|local)\b", text.replace("org.opencontainers", ""))


def test_build_downloads_only_with_pip_and_requested_packages(stages: dict[str, list[Instruction]]) -> None:
    every = [row for stage in stages.values() for row in stage]
    assert not values(every, "ADD")
    runs = [rest for rest in values(every, "RUN") if not rest.startswith('test -z "$PACKAGES" || {')]
    assert not [rest for rest in runs if re.search(r"\b(?:curl|wget|git|apt|apt-get)\b", rest)]
    [asked] = [rest for rest in values(every, "RUN") if rest not in runs]
    assert asked.count("apt-get install") == 1
    assert "--no-install-recommends $PACKAGES &&" in asked


def test_index_settings_are_not_in_image(stages: dict[str, list[Instruction]]) -> None:
    """Build arguments are in the history of their stage, and the image keeps the history of its own and of base."""
    arguments = [row.split("=") for name in stages for row in values(stages[name], "ARG")]
    pip_arguments = {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"}
    assert {name for name, _ in arguments} == {"EXTRAS", "PACKAGES"} | pip_arguments
    assert all(value == '""' for name, value in arguments if name != "EXTRAS")
    for kept in ("base", "image"):
        assert values(stages[kept], "ARG") in ([], ['PACKAGES=""'])
        assert not [rest for _, rest in stages[kept] if re.search(r"PIP_|pip\.conf|secret|index", rest, re.I)]
    assert values(stages["image"], "FROM") == ["base"]
    # Copy only named results, never the root or home directory of the stage in which pip ran.
    assert values(stages["image"], "COPY") == ["--from=dependencies /opt/venv /opt/venv", "--from=project /image /"]


def test_image_user_is_pod_user(stages: dict[str, list[Instruction]]) -> None:
    assert values(stages["image"], "USER") == [f"{USER_ID}:{USER_ID}"]
    [made] = [rest for rest in values(stages["base"], "RUN") if "useradd" in rest]
    assert f"groupadd --gid {USER_ID} llmtrain" in made
    assert f"--uid {USER_ID} --gid {USER_ID} " in made
    assert f"--home-dir {CACHE_DIR} " in made
    assert f" HOME={CACHE_DIR} " in values(stages["image"], "ENV")[0]


def test_working_directory_is_writable(stages: dict[str, list[Instruction]]) -> None:
    """WORKDIR alone would create a directory of root."""
    [workdir] = values(stages["image"], "WORKDIR")
    made = re.search(r"install -d -m 1777 ([^&]+)", values(stages["base"], "RUN")[0])
    assert made is not None
    assert {workdir, CACHE_DIR} == set(made[1].split())


@pytest.mark.parametrize(("word", "expected"), [("ENTRYPOINT", ["python", "-m", "llmtrain"]), ("CMD", ["--help"])])
def test_entrypoint_has_exec_form(stages: dict[str, list[Instruction]], word: str, expected: list[str]) -> None:
    [value] = values(stages["image"], word)
    assert json.loads(value) == expected


def test_every_install_uses_constraints(stages: dict[str, list[Instruction]]) -> None:
    runs = [rest for stage in stages.values() for rest in values(stage, "RUN")]
    installs = [part for run in runs for part in run.split("&&") if re.search(r"\bpip\b.* (?:install|wheel) ", part)]
    assert len(installs) == 4
    for command in installs:
        assert ("-c /constraints.txt" in command) != ("--no-index --no-deps" in command), command


def test_dependency_layer_does_not_depend_on_source(stages: dict[str, list[Instruction]]) -> None:
    """A code change rebuilds only the last, small layer; the image has no editable install and no source tree."""
    copied = [rest for name in ("base", "requirements", "dependencies") for rest in values(stages[name], "COPY")]
    assert not [rest for rest in copied if "src" in rest.split()]
    assert list(stages) == ["base", "requirements", "dependencies", "project", "image"]
    assert not [rest for rest in values(stages["project"], "RUN") if re.search(r"(?:-e|--editable) ", rest)]


def test_image_extras_exist_without_dev(repo: Path, stages: dict[str, list[Instruction]]) -> None:
    [extras] = [row.removeprefix("EXTRAS=").split(",") for row in values(stages["requirements"], "ARG")]
    known = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known) - {"dev"}


def test_dockerignore_allows_only_copied_paths(repo: Path, stages: dict[str, list[Instruction]]) -> None:
    """Everything else is ignored, so no .env, .git or run can get into an image."""
    rows = [row for row in (repo / ".dockerignore").read_text().splitlines() if row and not row.startswith("#")]
    assert rows[0] == "*"
    allowed = {row.removeprefix("!") for row in rows if row.startswith("!")}
    every = [rest.split() for stage in stages.values() for rest in values(stage, "COPY")]
    assert allowed == {source for words in every if not words[0].startswith("--from") for source in words[:-1]}
    assert all((repo / name).exists() for name in allowed)
    assert any(fnmatch.fnmatch("src/llmtrain/__pycache__", row) for row in rows[1:])

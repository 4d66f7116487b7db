"""What the pages say exists: commands and their options, config fields, links, rules of lint, causes of `why`; and what
they show of commands that need no cluster is what those print. (What needs one: operate/test_doc_scenes.py.)"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from llmtrain.cli import _SPELLING, app
from llmtrain.config.schema import Config
from llmtrain.lint.check_manifests import RULES
from llmtrain.operate.why.causes import CAUSES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))])
NEW = ("docs/moving.md", "docs/troubleshooting.md")  # their commands are run here, as they are in no tour
CODE = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.S | re.M)
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.S)
SHELL = ("", "console", "sh")
GROUPS = ("llmtrain guard", "llmtrain cluster", "llmtrain secret")
MISTAKES = {"trainer.lrr"}  # which a page shows the answer to


def read(page: str) -> str:
    return (ROOT / page).read_text()


# Commands.


def typed(page: str) -> Iterator[str]:
    """Commands that stand on a line of their own: in a block, or indented."""
    text = read(page)
    for _, language, body in CODE.findall(text):
        if language.partition(" ")[0] in SHELL:
            yield from (line.removeprefix("$ ") for line in body.splitlines() if re.match(r"(\$ )?llmtrain ", line))
    for line in CODE.sub("", text).splitlines():
        if re.match(r"    llmtrain ", line):
            yield line.strip()


def mentioned(page: str) -> Iterator[str]:
    """In the middle of a sentence, often without what follows."""
    text = CODE.sub("", read(page))
    yield from (span for span in SPAN.findall(text) if re.match(r"llmtrain [a-z]", span))


def parse(command: str) -> None:
    """With the parser of the command line itself; nothing is run."""
    program, *words = shlex.split(command.partition(" # ")[0].replace("...", ""))
    assert program == "llmtrain"
    words = [_SPELLING.get(word, word) for word in words]
    group: Any = typer.main.get_command(app)
    parent = None
    while hasattr(group, "commands"):
        parent = group.make_context(group.name, [], parent=parent, resilient_parsing=True)
        name, group, words = group.resolve_command(parent, words or [""])
        assert group is not None, f"{name!r} is no command"
    group.make_context(group.name, words, parent=parent)


def problem_with(command: str, is_whole: bool) -> str:
    """Empty where it can be typed. `is_whole`: nothing may be missing, as it may in the middle of a sentence."""
    try:
        parse(command)
    except Exception as problem:
        if type(problem).__name__ == "MissingParameter" and not is_whole:
            return ""
        return f"{command}: {type(problem).__name__}: {problem}"
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_every_command_can_be_parsed(page: str) -> None:
    problems = [problem_with(command, is_whole=True) for command in typed(page)]
    problems += [problem_with(command, is_whole=False) for command in mentioned(page) if command not in GROUPS]
    assert [problem for problem in problems if problem] == []


@pytest.mark.parametrize(
    "command",
    [
        "llmtrain whi demo",
        "llmtrain why",
        "llmtrain why demo --rank 1",
        "llmtrain guard begin",
        "llmtrain guard",
        "llmtrain logs demo --tail x",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert problem_with(command, is_whole=True)
    assert not problem_with("llmtrain why", is_whole=False)


def test_the_new_pages_show_what_they_are_about() -> None:
    said = "\n".join(command for page in PAGES for command in typed(page))
    for verb in ("why", "recover", "guard install", "guard status", "guard remove", "push", "exec", "lint", "doctor"):
        assert f"llmtrain {verb}" in said, verb
    for option in ("--hold", "--detach", "--kill", "--recover-lost-nodes", "--doctor", "--smoke"):
        assert f" {option}" in said, option


# What commands show.


def load_tour_tool() -> Any:
    spec = importlib.util.spec_from_file_location("readme_tour", ROOT / "tools" / "readme_tour.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_abridged(shown: list[str], real: list[str]) -> bool:
    """All lines are real ones, in order and next to each other; `...` stands for any number of others."""
    if not shown:
        return not real
    if shown[0] == "...":
        return any(is_abridged(shown[1:], real[start:]) for start in range(len(real) + 1))
    return bool(real) and shown[0] == real[0] and is_abridged(shown[1:], real[1:])


def test_abridging() -> None:
    assert is_abridged(["a", "...", "d"], ["a", "b", "c", "d"])
    assert is_abridged(["...", "d"], ["d"])
    assert not is_abridged(["a", "d"], ["a", "b", "d"])
    assert not is_abridged(["...", "b", "...", "a"], ["a", "b"])
    assert not is_abridged(["a"], ["a", "b"])


@pytest.mark.parametrize("page", NEW)
def test_what_a_page_shows_is_what_is_printed(page: str, tmp_path: Path) -> None:
    tool, text, ran = load_tour_tool(), read(page), 0
    for name, content in FILE.findall(text):
        (tmp_path / name).write_text(content)
    for code, body in tool.BLOCK.findall(text):
        for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
            command, *shown = part.splitlines()
            real = tool.run(command, tmp_path, int(code or 0)).rstrip().splitlines()
            assert is_abridged(shown, real), f"{page}: {command}\n" + "\n".join(real)
            ran += 1
    assert ran >= 5


# Names.


def fields(model: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{before}{name}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields(kind, f"{before}{name}.")


KNOWN = set(fields(Config))
SECTIONS = "|".join(Config.model_fields)
NAMED = re.compile(rf"(?:^|--set )((?:{SECTIONS})\.[a-z0-9_]+(?:\.[a-z0-9_]+)*)(?![a-z0-9_.*/(-])")


@pytest.mark.parametrize("page", PAGES)
def test_every_config_field_exists(page: str) -> None:
    text = read(page)
    spans = [*SPAN.findall(CODE.sub("", text)), *typed(page)]
    named = {name for span in spans for name in NAMED.findall(span)}
    assert {name for name in named - KNOWN - MISTAKES if not name.startswith("launch.env.")} == set()
    if page in NEW:
        assert len(named) >= 10


def test_a_config_field_that_does_not_exist_is_found() -> None:
    assert NAMED.findall("launch.resources.memry: 8Gi") == ["launch.resources.memry"]
    assert "launch.resources.memry" not in KNOWN
    assert {"launch.resources.memory", "launch.runs_volume.claim", "model.lora.rank", "trainer.lr"} <= KNOWN


def test_every_cause_has_a_row_and_no_other() -> None:
    section = read("docs/troubleshooting.md").partition("\n## Causes\n")[2]
    rows = re.findall(r"^\| `([a-z_]+)` \|", section, re.M)
    assert rows == [*dict.fromkeys(cause.id for cause in CAUSES), "unknown"]


@pytest.mark.parametrize("page", NEW)
def test_every_rule_of_lint_exists(page: str) -> None:
    known = {rule.id for rule in RULES}
    text = read(page)
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", CODE.sub("", text))) | set(
        re.findall(r"\[([a-z-]+)\]$", text, re.M)
    )
    assert named - known - {"hf-token"} == set()
    assert len(named & known) >= 10


# Links.


def anchor(heading: str) -> str:
    """As GitHub makes them."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {anchor(line.lstrip("#").strip()) for line in CODE.sub("", path.read_text()).splitlines() if line[:1] == "#"}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_anchor_leads_somewhere(page: str) -> None:
    path = ROOT / page
    for target, part in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", CODE.sub("", path.read_text())):
        if "://" in target:
            continue
        to = (path.parent / target) if target else path
        assert to.exists(), f"{page}: {target}"
        assert not part or part in anchors(to), f"{page}: {target}#{part}; there are {sorted(anchors(to))}"


def test_the_readme_links_every_guide() -> None:
    text = read("README.md")
    for path in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{path.name})" in text, path.name


def test_every_symptom_has_its_section_and_every_section_a_symptom() -> None:
    text = read("docs/troubleshooting.md")
    table = set(re.findall(r"\]\(#([^)]+)\) \|$", text, re.M))
    sections = anchors(ROOT / "docs/troubleshooting.md") - {"troubleshooting", "causes"}
    assert table == sections

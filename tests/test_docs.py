"""Docs are true: commands and options, config fields, links, lint rules and causes of `why` exist, and the output shown
for commands that need no cluster is their real output. (For those that need one: operate/test_console_blocks.py and
end_to_end/test_guide.py.)"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import rank_harness as ranks
import readme_tour
import typer
from pydantic import BaseModel

from llmtrain.cli import _SPELLING, app, main
from llmtrain.config.schema import Config
from llmtrain.errors import ExitCode
from llmtrain.lint.check_manifests import RULES
from llmtrain.operate.why.causes import CAUSES

ROOT = Path(__file__).resolve().parents[1]
DOCS = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
PAGES = sorted(
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "client/README.md", "k8s/README.md", *DOCS]
)
RUN_HERE = readme_tour.ABRIDGED
# test_readme.py and end_to_end/test_guide.py run their commands.
TOURS = (*readme_tour.PAGES, readme_tour.FINE_TUNING, *readme_tour.CLUSTER_PAGES)
CODE = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.S | re.M)
SPAN = re.compile(r"`([^`\n]+)`")
SHELL = ("", "console", "sh")
GROUPS = ("llmtrain guard", "llmtrain cluster", "llmtrain secret")
DELIBERATE_MISTAKES = {"trainer.lrr"}
SCHEMA_2_FIELDS = {  # docs/moving.md shows their new names
    "data.bad_rows",
    "data.long_rows",
    "launch.master_port",
    "launch.name",
    "launch.runs_volume.mount_path",
    "launch.tracking_uri",
    "logging.tensorboard",
    "trainer.early_stopping",
}


def read(page: str) -> str:
    return (ROOT / page).read_text()


# Commands.


def command_lines(page: str) -> Iterator[str]:
    """Commands on their own line, in a fenced or indented block."""
    text = read(page)
    for _, language, body in CODE.findall(text):
        if language.partition(" ")[0] in SHELL:
            yield from (line.removeprefix("$ ") for line in body.splitlines() if re.match(r"(\$ )?llmtrain ", line))
    for line in CODE.sub("", text).splitlines():
        if re.match(r"    llmtrain ", line):
            yield line.strip()


def inline_commands(page: str) -> Iterator[str]:
    """Commands in the middle of a sentence, often without their arguments."""
    text = CODE.sub("", read(page))
    yield from (span for span in SPAN.findall(text) if re.match(r"llmtrain [a-z]", span))


def parse(command: str) -> None:
    """Parse with the parser of the command line; run nothing."""
    program, *words = shlex.split(command.partition(" # ")[0].replace("...", ""))
    assert program == "llmtrain"
    words = [_SPELLING.get(word, word) for word in words]
    group: Any = typer.main.get_command(app)
    parent = None
    while hasattr(group, "commands"):
        if group.invoke_without_command and not (words and words[0] in group.commands):
            group.make_context(group.name, words, parent=parent)
            return
        parent = group.make_context(group.name, [], parent=parent, resilient_parsing=True)
        name, group, words = group.resolve_command(parent, words or [""])
        assert group is not None, f"{name!r} is not a command"
    group.make_context(group.name, words, parent=parent)


def parse_error(command: str, is_complete: bool) -> str:
    """Empty if the command parses. `is_complete`: required arguments may not be missing."""
    try:
        parse(command)
    except Exception as error:
        if type(error).__name__ == "MissingParameter" and not is_complete:
            return ""
        return f"{command}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_commands_on_page_parse(page: str) -> None:
    errors = [parse_error(command, is_complete=True) for command in command_lines(page)]
    errors += [parse_error(command, is_complete=False) for command in inline_commands(page) if command not in GROUPS]
    assert [error for error in errors if error] == []


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
def test_parse_error_reports_invalid_command(command: str) -> None:
    assert parse_error(command, is_complete=True)
    assert not parse_error("llmtrain why", is_complete=False)


def test_docs_show_every_cluster_command() -> None:
    commands = "\n".join(command for page in PAGES for command in command_lines(page))
    for verb in ("why", "recover", "guard install", "guard status", "guard remove", "push", "exec", "lint", "doctor"):
        assert f"llmtrain {verb}" in commands, verb
    for option in ("--hold", "--detach", "--kill", "--recover-lost-nodes", "--doctor", "--smoke"):
        assert f" {option}" in commands, option


# Output of commands.


def test_is_abridged_accepts_only_omissions() -> None:
    is_abridged = readme_tour.is_abridged
    assert is_abridged(["a", "...", "d"], ["a", "b", "c", "d"])
    assert is_abridged(["...", "d"], ["d"])
    assert not is_abridged(["a", "d"], ["a", "b", "d"])
    assert not is_abridged(["...", "b", "...", "a"], ["a", "b"])
    assert not is_abridged(["a"], ["a", "b"])


def test_abridge_keeps_corresponding_lines() -> None:
    abridge, is_abridged = readme_tour.abridge, readme_tour.is_abridged
    shown, real = ["one: first", "...", "three: third"], ["one: 1st", "two: 2nd", "three: the third", "four: 4th"]
    assert abridge(shown, real) == ["one: 1st", "...", "three: the third", "..."]
    assert is_abridged(abridge(shown, real), real)
    assert abridge(["one: first"], real) == real


def test_shown_output_differs_in_numbers_only() -> None:
    is_shown = readme_tour.is_shown_output
    real = [
        "[TRAIN] step 10/30 | loss 4.4882 | 0:00:12 left",
        "[EVAL] step 10/30 | val loss 4.3604",
        "",
        "  | text",
        "end",
    ]
    assert is_shown("llmtrain train", ["[TRAIN] step 5/30 | loss 5.1 | 0:01:00 left", "...", "  | other", "end"], real)
    assert is_shown("llmtrain train", ["[TRAIN] step 10/30 | lo ...", "...", "end"], real)
    assert not is_shown("llmtrain train", ["[TRAIN] step 10/30 | lr 4.4882 | 0:00:12 left", "...", "end"], real)
    assert not is_shown("llmtrain train", ["[TRAIN] step 10/30 | loss 4.4882 | 0:00:12 left", "end"], real)
    assert is_shown("llmtrain runs list", ["run    loss", "first  10.51"], ["run    loss", "first  9.5"])
    assert is_shown(
        "llmtrain train --json", ['"state_sha256": "5053e5519f8b2003"'], ['"state_sha256": "abcdefabcdefabcd"']
    )
    assert not is_shown("llmtrain generate first", [], ["text"])


@pytest.mark.parametrize("page", RUN_HERE)
def test_page_shows_real_output(page: str, tmp_path: Path) -> None:
    text, ran = read(page), 0
    readme_tour.write_files(text, tmp_path)
    for code, body in readme_tour.BLOCK.findall(text):
        for command, shown in readme_tour.examples(body):
            words = shlex.split(command)[1:]
            done = ranks.start_cli(*words, cwd=tmp_path, env={"COLUMNS": "100", "HOME": str(tmp_path)})
            assert done.wait() == int(code or 0), f"{page}: {command}\n{done.out}\n{done.err}"
            output = done.out if "--json" in words else done.err + done.out
            real = readme_tour.portable(output).rstrip().splitlines()
            assert readme_tour.is_abridged(shown, real), f"{page}: {command}\n" + "\n".join(real)
            ran += 1
    assert ran >= 5


def unchecked_outputs(page: str, text: str) -> list[str]:
    """Console blocks with output that no test compares with real output."""
    if page in RUN_HERE:
        return []
    if page in TOURS:
        text = text.replace(readme_tour.tour(text), "")
    unchecked = []
    for _, language, body in CODE.findall(text):
        kind, _, flags = language.partition(" ")
        has_output = any(not line.startswith("$ ") for line in body.splitlines())
        if kind == "console" and has_output and not flags.startswith("scene="):
            unchecked.append(body)
    return unchecked


@pytest.mark.parametrize("page", PAGES)
def test_shown_output_is_checked(page: str) -> None:
    assert unchecked_outputs(page, read(page)) == []
    assert page in TOURS or "<!-- tour -->" not in read(page)


def test_unchecked_output_is_detected() -> None:
    assert unchecked_outputs("docs/pods.md", "```console\n$ llmtrain status\nrun\n```\n")
    assert not unchecked_outputs("docs/pods.md", "```console\n$ llmtrain status\n```\n")
    assert not unchecked_outputs("docs/pods.md", "```console scene=held\n$ llmtrain status\nrun\n```\n")


def dry_run(command: str) -> list[str]:
    """The arguments of a launch command, changed so that it only prints its manifests, or writes them with -o."""
    launch, separator, own = command.replace(" IMAGE", " llmtrain:1").partition(" -- ")
    arguments = shlex.split(launch.replace(" --dry-run=server", "").replace(" --dry-run", ""))[1:]
    return [*arguments, "--dry-run", *shlex.split(separator + own)]


LAUNCH_PAGES = [page for page in PAGES if any(line.startswith("llmtrain launch ") for line in command_lines(page))]


@pytest.mark.parametrize("page", LAUNCH_PAGES)
def test_launch_commands_on_page_render_manifests(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(
        "launch: {image: registry.example.com/llmtrain:0.2.0, runs_volume: {claim: runs}}\n"
    )
    readme_tour.write_files(read(page), tmp_path)
    for command in command_lines(page):
        if not command.startswith("llmtrain launch "):
            continue
        with pytest.raises(SystemExit) as ended:
            main(dry_run(command))
        output = capsys.readouterr()
        assert ended.value.code == ExitCode.FINISHED, f"{command}\n{output.err}"
        if " -o " in command:
            assert "kustomization.yaml" in output.out, command
        else:
            assert "\nkind: ConfigMap\n" in output.out, command


@pytest.mark.parametrize("page", PAGES)
def test_page_installs_from_the_clone(page: str) -> None:
    assert not re.search(r"pip install '?llmtrain(\[|$)", read(page), re.M), "the package is not on a package index"


# Exit codes.


def test_exit_code_tables_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, "tools/exit_codes.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Config fields, causes, rules.


def fields(model: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{before}{name}"
        for part in (field.annotation, *get_args(field.annotation)):
            kind = getattr(part, "__origin__", part)  # of Annotated[...]
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields(kind, f"{before}{name}.")


KNOWN = set(fields(Config))
OWN_NAMES = ("launch.env.", "model.options.", "data.options.")  # the user chooses what follows
SECTIONS = "|".join(Config.model_fields)
NAMED = re.compile(rf"(?:^|--set )((?:{SECTIONS})\.[a-z0-9_]+(?:\.[a-z0-9_]+)*)(?![a-z0-9_.*/(-])")


@pytest.mark.parametrize("page", PAGES)
def test_config_fields_on_page_exist(page: str) -> None:
    text = read(page)
    spans = [*SPAN.findall(CODE.sub("", text)), *command_lines(page)]
    # Without the numbers of a list's items: data.sources.0.weight.
    named = {re.sub(r"\.\d+(?=\.)", "", name) for span in spans for name in NAMED.findall(span)}
    allowed = DELIBERATE_MISTAKES | (SCHEMA_2_FIELDS if page == "docs/moving.md" else set())
    assert {name for name in named - KNOWN - allowed if not name.startswith(OWN_NAMES)} == set()
    if page in RUN_HERE:
        assert len(named) >= 10


def test_unknown_config_field_is_detected() -> None:
    assert NAMED.findall("launch.resources.memry: 8Gi") == ["launch.resources.memry"]
    assert "launch.resources.memry" not in KNOWN
    assert {"launch.resources.memory", "launch.runs_volume.claim", "model.lora.rank", "trainer.lr"} <= KNOWN


def test_troubleshooting_lists_every_cause() -> None:
    section = read("docs/troubleshooting.md").partition("\n## Causes\n")[2]
    rows = re.findall(r"^\| `([a-z_]+)` \|", section, re.M)
    assert rows == [*dict.fromkeys(cause.id for cause in CAUSES), "unknown"]


@pytest.mark.parametrize("page", RUN_HERE)
def test_lint_rules_on_page_exist(page: str) -> None:
    known = {rule.id for rule in RULES}
    text = read(page)
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", CODE.sub("", text))) | set(
        re.findall(r"\[([a-z-]+)\]$", text, re.M)
    )
    assert named - known - {"hf-token"} == set()
    assert len(named & known) >= 10


# Links.


def anchor(heading: str) -> str:
    """The anchor that GitHub generates for a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {anchor(line.lstrip("#").strip()) for line in CODE.sub("", path.read_text()).splitlines() if line[:1] == "#"}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_resolve(page: str) -> None:
    path = ROOT / page
    for target, part in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", CODE.sub("", path.read_text())):
        if "://" in target:
            continue
        to = (path.parent / target) if target else path
        assert to.exists(), f"{page}: {target}"
        assert not part or part in anchors(to), f"{page}: {target}#{part}; there are {sorted(anchors(to))}"


def test_readme_links_every_guide() -> None:
    text = read("README.md")
    for path in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{path.name})" in text, path.name


def test_every_symptom_has_a_section() -> None:
    text = read("docs/troubleshooting.md")
    table = set(re.findall(r"\]\(#([^)]+)\) \|$", text, re.M))
    sections = anchors(ROOT / "docs/troubleshooting.md") - {"troubleshooting", "causes"}
    assert table == sections

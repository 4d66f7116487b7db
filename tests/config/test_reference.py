import re
from pathlib import Path

from llmtrain.config.reference import reference_markdown
from llmtrain.config.schema import SECTIONS, Config, subsection
from llmtrain.env import VARIABLES


def test_the_document_is_what_the_schema_says(repo: Path) -> None:
    written = (repo / "docs" / "config.md").read_text()
    assert written == reference_markdown(), "make it anew: llmtrain print-config --reference > docs/config.md"


def test_every_field_has_a_row_with_a_meaning() -> None:
    config_part = reference_markdown().partition("## Environment variables")[0]
    rows = [line.split(" | ") for line in config_part.splitlines() if line.startswith("| `")]
    fields = []
    for kind in SECTIONS.values():
        for field in kind.model_fields:
            inner = subsection(kind, field)
            fields += [field, *(f"{field}.{name}" for name in (inner.model_fields if inner else ()))]
    assert "lora.rank" in fields
    assert [row[0].strip("| `") for row in rows] == fields
    assert all(row[-1].strip(" |") for row in rows)


def test_every_section_of_the_config_is_there() -> None:
    assert ["schema_version", *SECTIONS] == list(Config.model_fields)


def test_every_variable_of_ours_is_listed(repo: Path) -> None:
    """env.py declares all of them; programs that run in pods cannot import it, so their names are compared here."""
    listed = {name for variables in VARIABLES.values() for name in variables}
    used = {
        name
        for path in (repo / "src").rglob("*.py")
        for name in re.findall(r"\bLLMTRAIN_[A-Z_]+[A-Z]\b", path.read_text())
    }
    assert used == listed

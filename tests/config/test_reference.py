from pathlib import Path

from llmtrain.config.reference import reference_markdown
from llmtrain.config.schema import SECTIONS, Config, subsection


def test_the_document_is_what_the_schema_says(repo: Path) -> None:
    written = (repo / "docs" / "config.md").read_text()
    assert written == reference_markdown(), "make it anew: llmtrain print-config --reference > docs/config.md"


def test_every_field_has_a_row_with_a_meaning() -> None:
    rows = [line.split(" | ") for line in reference_markdown().splitlines() if line.startswith("| `")]
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

import re
from pathlib import Path

import pytest

from llmtrain.config.reference import reference_markdown
from llmtrain.config.schema import SECTIONS, Config, classes_of, may_change, subsection
from llmtrain.env import VARIABLES


def test_config_md_is_up_to_date(repo: Path) -> None:
    written = (repo / "docs" / "config.md").read_text()
    assert written == reference_markdown(), "regenerate it: llmtrain print-config --reference > docs/config.md"


def test_every_field_has_a_row_with_a_description() -> None:
    config_part = reference_markdown().partition("## Environment variables")[0]
    rows = [line.split(" | ") for line in config_part.splitlines() if line.startswith("| `")]
    fields = []
    for section in SECTIONS:
        for kind in classes_of(section):
            for field in kind.model_fields:
                inner = subsection(kind, field)
                fields += [field, *(f"{field}.{name}" for name in (inner.model_fields if inner else ()))]
    assert "lora.rank" in fields
    assert [row[0].strip("| `") for row in rows] == fields
    assert all(row[-1].strip(" |") for row in rows)


def test_every_section_of_the_config_is_listed() -> None:
    assert ["schema_version", *SECTIONS] == list(Config.model_fields)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("run.name", True),
        ("run.seed", False),
        ("run.threads", True),
        ("model.d_model", False),
        ("model.path", True),
        ("model.lora", False),
        ("data.files", True),
        ("data.val_fraction", False),
        ("data.tokenizer", True),
        ("trainer.max_steps", True),
        ("trainer.lr", False),
        ("trainer.early_stopping_patience", True),
        ("distributed.strategy", True),
        ("tracking.mlflow", True),
        ("output.root_dir", True),
        ("launch", True),
        ("nothing", False),
    ],
)
def test_fields_that_may_change_on_resume(path: str, expected: bool) -> None:
    assert may_change(path) is expected


def test_every_environment_variable_is_listed(repo: Path) -> None:
    """env.py declares all of them; programs that run in pods cannot import it, so their names are compared here."""
    listed = {name for variables in VARIABLES.values() for name in variables}
    used = {
        name
        for path in (repo / "src").rglob("*.py")
        for name in re.findall(r"\bLLMTRAIN_[A-Z_]+[A-Z]\b", path.read_text())
    }
    assert used == listed

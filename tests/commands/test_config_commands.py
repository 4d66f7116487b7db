"""validate, print-config and presets."""

from pathlib import Path

import pytest

from llmtrain.commands.presets import GROUPS as PRESET_GROUPS
from llmtrain.config.load import load_config


class TestConfigVerbs:
    def test_validate_names_the_file(self, cli) -> None:
        done = cli("validate", "--config", "gpt_smoke", "--json")
        assert done.json["valid"] is True
        assert done.json["config"].endswith("gpt_smoke.yaml")

    def test_print_config_is_a_valid_config(self, cli, workdir: Path) -> None:
        printed = cli("print-config", "--config", "example", "--set", "trainer.lr=1e-3").out
        (workdir / "mine.yaml").write_text(printed)
        expected = load_config("example", ["trainer.lr=1e-3"])
        assert load_config("mine.yaml") == expected
        assert cli("print-config", "--config", "mine.yaml", "--json").json == expected.as_dict()

    def test_config_reference_matches_docs(self, cli, repo: Path) -> None:
        assert cli("print-config", "--reference").out == (repo / "docs" / "config.md").read_text()

    def test_presets_fit_the_terminal(self, cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llmtrain.commands.presets.stream_width", lambda _: 60)
        lines = cli("presets").out.splitlines()
        assert max(map(len, lines[:-1])) <= 60

    def test_presets_match_the_files(self, cli, repo: Path) -> None:
        rows = cli("presets", "--json").json["presets"]
        assert {row["name"] for row in rows} == {path.stem for path in (repo / "configs/presets").glob("*.yaml")}
        assert all(row["about"] for row in rows)
        assert rows[0]["name"] == "gpt_stdlib", "the one to start with"

    def test_every_preset_has_a_group_and_a_description_of_its_own(self, cli) -> None:
        rows = cli("presets", "--json").json["presets"]
        assert {row["name"] for row in rows if row["group"] not in PRESET_GROUPS} == set()
        for row in rows:
            assert not any(other["name"] in row["about"].split() for other in rows if other is not row), row

    def test_presets_show_prints_a_config(self, cli, workdir: Path) -> None:
        text = cli("presets", "show", "gpt_smoke").out
        (workdir / "mine.yaml").write_text(text)
        assert text.startswith("# ")
        assert load_config("mine.yaml") == load_config("gpt_smoke")
        assert cli("presets", "show", "gpt_smok").code == 64

"""llmtrain generate."""

from pathlib import Path

import pytest


class TestGenerate:
    def test_seed_decides_the_text(self, cli, verb) -> None:
        texts = [cli(*verb("generate"), "--seed", seed, "--json").json["text"] for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    def test_temperature_zero_needs_no_seed(self, cli, verb) -> None:
        call = [*verb("generate"), "--temperature", "0", "--json"]
        assert cli(*call, "--seed", "1").json == cli(*call, "--seed", "2").json

    def test_prompt_is_printed_before_the_text(self, cli, verb) -> None:
        assert cli(*verb("generate")).out.startswith("the ")

    def test_empty_prompt_starts_a_document(self, cli, root: Path) -> None:
        assert cli("generate", "--run", "one", "--root", root, "--max-new-tokens", 5).code == 0

    @pytest.mark.parametrize(
        ("checkpoint", "step"), [("best", 4), ("latest", 4), ("step_2", 2), ("step_4", 4), ("step_2.pt", 2)]
    )
    def test_checkpoints_by_name(self, cli, verb, checkpoint: str, step: int) -> None:
        assert cli(*verb("generate"), "--checkpoint", checkpoint, "--json").json["step"] == step

    @pytest.mark.parametrize("checkpoint", ["step_99", "nonsense", "", "..", "../.."])
    def test_unknown_checkpoint_lists_known_ones(self, cli, verb, checkpoint: str) -> None:
        done = cli(*verb("generate"), "--checkpoint", checkpoint, "--json")
        assert done.code == 65
        assert {"best", "latest", "step_2", "step_4"} <= set(done.json["known"])

    @pytest.mark.parametrize(
        "options",
        [
            ["--temperature", "nan"],
            ["--temperature", "1e-40"],
            ["--temperature", "inf"],
            ["--temperature", "1e39"],
            ["--top-p", "1e-50"],
            ["--seed", 2**64],
            ["--top-k", 10**6],
            ["--prompt", "\udcff"],  # a byte that is not UTF-8, as Python receives it from a shell
            ["--prompt", "é" * 200],
        ],
        ids=lambda options: " ".join(map(str, options))[:30].encode("ascii", "replace").decode(),
    )
    def test_unusual_numbers_and_prompts(self, cli, verb, options: list[object]) -> None:
        done = cli(*verb("generate"), *options)
        assert "Traceback" not in done.err
        assert done.code in (0, 64, 65)

    def test_run_is_an_argument(self, cli, root: Path) -> None:
        words = ["--root", root, "--prompt", "the ", "--max-new-tokens", 8, "--json"]
        assert cli("generate", "one", *words).json == cli("generate", "--run", "one", *words).json
        assert cli("generate", "one", "--adapter", "x", "--root", root).code == 64
        assert cli("export", "--no-check", "one", "--root", root, "--to", "out").code == 0

    def test_run_by_path(self, cli, root: Path) -> None:
        assert cli("generate", "--run", root / "one", "--max-new-tokens", 3, "--json").json["run"] == "one"

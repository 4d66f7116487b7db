"""Large manifests."""

import pytest
from lint_examples import TOKEN, find

from llmtrain.lint.yaml_nodes import LineFinder, parse


class TestSize:
    """Time is linear in the size of a script: at these sizes a quadratic linter takes many minutes."""

    @pytest.mark.parametrize(
        ("shape", "count"),
        [
            ("\n", 300_000),
            ("x", 300_000),
            pytest.param("$(", 300_000, marks=pytest.mark.slow),
            pytest.param("kubectl -a ", 60_000, marks=pytest.mark.slow),
            pytest.param("A{}=1\n", 60_000, marks=pytest.mark.slow),
            pytest.param("A{}=1 ", 40_000, marks=pytest.mark.slow),
            ("--flag{} 1 ", 40_000),
            pytest.param("  --flag{} 1 \\\n", 60_000, marks=pytest.mark.slow),
            pytest.param(f"echo {TOKEN}{{}}\n", 20_000, marks=pytest.mark.slow),
        ],
    )
    def test_long_script(self, shape: str, count: int) -> None:
        script = "torchrun --nnodes 2 " + "".join(shape.format(n) for n in range(count)) + "\necho done"
        lines = "".join(f"\n          {line}" if line else "\n" for line in script.split("\n"))
        head = (
            "apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\nspec:\n  template:\n    spec:\n      containers:\n"
        )
        assert find(
            f"{head}      - name: a\n        image: b\n        command: [bash, -c]\n        args:\n        - |{lines}\n"
        )

    def test_lines_of_repeated_parts(self) -> None:
        node = parse("a: |\n  A=1\n  B=2\n  A=3\n", "a.yaml")[0].get("a")
        finder = LineFinder(node)
        assert [finder.line_of(part) for part in ("A=", "A=", "B=", "C=", "C=")] == [2, 4, 3, 1, 1]
        assert node.line_of("B=") == 3

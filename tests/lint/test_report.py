"""What the linter prints: order, folding, ignored rules and color."""

import json
import sys
from pathlib import Path

import pytest
import typer

from llmtrain.commands.lint import command
from llmtrain.errors import UsageError
from llmtrain.lint.check_manifests import RULES, lint
from llmtrain.lint.report import LintReport
from llmtrain.lint.source import Sources, read_sources
from llmtrain.lint.yaml_nodes import parse

MANIFESTS = Path(__file__).parent / "manifests"
JOB = (MANIFESTS / "job.yaml").read_text()
PYTORCHJOB = (MANIFESTS / "pytorchjob.yaml").read_text()
IMAGE = "image: registry.example.org/nlp/translator"
UNPINNED = JOB.replace(f"{IMAGE}:7", IMAGE)


def check(text: str, *ignore: str) -> LintReport:
    return lint(Sources(parse(text, "a.yaml"), ["a.yaml"], []), ignore)


def found(text: str, *ignore: str) -> list[str]:
    return [finding.name for finding in check(text, *ignore).findings]


class TestOrder:
    def test_errors_come_before_warnings_and_advice(self) -> None:
        report = lint(read_sources([str(MANIFESTS / "guide.yaml")]))
        places = [(["error", "warning", "advice"].index(one.severity), one.line) for one in report.findings]
        assert places == sorted(places)
        assert {severity for severity, _ in places} == {0, 1, 2}

    def test_files_stay_in_the_order_given(self, tmp_path: Path) -> None:
        for name in ("b.yaml", "a.yaml"):
            (tmp_path / name).write_text(UNPINNED)
        report = lint(read_sources([str(tmp_path / "b.yaml"), str(tmp_path / "a.yaml")]))
        files = [Path(finding.file).name for finding in report.findings if finding.name == "image-not-pinned"]
        assert files == ["b.yaml", "a.yaml"]


class TestFolding:
    def test_mistake_of_master_and_worker_is_one_finding(self) -> None:
        text = PYTORCHJOB.replace(f"{IMAGE}:7", IMAGE)
        lines = [number for number, line in enumerate(text.splitlines(), start=1) if IMAGE in line]
        (finding,) = check(text).findings
        assert [finding.line, *finding.also_lines] == lines
        assert len(lines) == 2
        assert finding.as_dict()["also_lines"] == lines[1:]
        assert f"(also line {lines[1]})" in check(text).text()

    def test_different_mistakes_are_not_folded(self) -> None:
        text = PYTORCHJOB.replace(f"{IMAGE}:7", IMAGE, 1).replace(f"{IMAGE}:7", f"{IMAGE}:latest")
        assert [finding.also_lines for finding in check(text).findings] == [(), ()]

    def test_jobs_are_not_folded(self) -> None:
        text = UNPINNED + "---\n" + UNPINNED.replace("name: translator", "name: other")
        unpinned = [finding for finding in check(text).findings if finding.name == "image-not-pinned"]
        assert [finding.also_lines for finding in unpinned] == [(), ()]

    def test_repeated_mistake_in_one_pod_is_not_folded(self) -> None:
        text = JOB.replace("- train.py", "- train.py\n        - 1\n        - 2")
        assert [finding.also_lines for finding in check(text).findings] == [(), ()]

    def test_shared_template_is_reported_once(self) -> None:
        master, _, _ = PYTORCHJOB.replace(f"{IMAGE}:7", IMAGE).partition("    Worker:\n")
        text = master.replace("      template:\n", "      template: &template\n")
        text += "    Worker:\n      replicas: 3\n      restartPolicy: OnFailure\n      template: *template\n"
        (finding,) = check(text).findings
        assert finding.also_lines == ()


class TestIgnore:
    def test_ignored_rule_is_not_reported(self) -> None:
        assert found(UNPINNED) == ["image-not-pinned"]
        report = check(UNPINNED, "image-not-pinned", "writable-root")
        assert report.findings == []
        assert report.ignored == 1
        assert report.as_dict(is_strict=True)["ok"] is True
        assert ", 1 ignored: " in report.summary()

    def test_other_rules_are_reported(self) -> None:
        assert found(UNPINNED, "writable-root") == ["image-not-pinned"]

    def test_unknown_rule_is_refused_with_the_list(self) -> None:
        with pytest.raises(UsageError) as caught:
            check(JOB, "image-not-pined")
        assert caught.value.exit_code == 64
        assert caught.value.known == sorted(rule.id for rule in RULES)
        assert "'image-not-pinned'" in caught.value.what

    @pytest.mark.parametrize(
        "new",
        [
            f"{IMAGE}  # llmtrain: ignore[image-not-pinned]",
            f"{IMAGE}  # built today; llmtrain: ignore x # llmtrain: ignore[image-not-pinned]",
            f"{IMAGE}  # llmtrain: ignore[writable-root, image-not-pinned]",
            f"# llmtrain: ignore[image-not-pinned]\n        # why\n        {IMAGE}",
        ],
    )
    def test_comment_at_the_line_or_above_it(self, new: str) -> None:
        report = check(JOB.replace(f"{IMAGE}:7", new))
        assert (report.findings, report.ignored) == ([], 1)

    @pytest.mark.parametrize(
        "new",
        [
            f"{IMAGE}  # llmtrain: ignore[writable-root]",
            f"{IMAGE}\n        # llmtrain: ignore[image-not-pinned]",
            f"imagePullPolicy: Always  # llmtrain: ignore[image-not-pinned]\n        {IMAGE}",
        ],
    )
    def test_comment_elsewhere_has_no_effect(self, new: str) -> None:
        assert found(JOB.replace(f"{IMAGE}:7", new)) == ["image-not-pinned"]

    def test_comment_in_a_script(self) -> None:
        text = (MANIFESTS / "statefulset.yaml").read_text()
        line = "          export NODE_RANK="
        text = text.replace(line, f"          sleep $RANDOM  # llmtrain: ignore[sleep-random]\n{line}")
        assert found(text) == []

    def test_comment_hides_one_of_two_places(self) -> None:
        text = PYTORCHJOB.replace(f"{IMAGE}:7", f"{IMAGE}  # llmtrain: ignore[image-not-pinned]", 1)
        (finding,) = check(text.replace(f"{IMAGE}:7", IMAGE)).findings
        assert (finding.name, finding.also_lines) == ("image-not-pinned", ())

    @pytest.mark.parametrize("comment", ["ignore[nonsense]", "ignore[]", "ignore", "ignore[image-not-pinned,]"])
    def test_comment_without_a_known_rule_is_refused(self, comment: str) -> None:
        with pytest.raises(UsageError) as caught:
            check(JOB.replace(f"{IMAGE}:7", f"{IMAGE}:7  # llmtrain: {comment}"))
        assert f"a.yaml:{JOB[: JOB.index(IMAGE)].count(chr(10)) + 1}: " in caught.value.what
        assert caught.value.known


class TestColor:
    @pytest.fixture
    def arguments(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Arguments of the command; the terminal is simulated."""
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "80")
        path = tmp_path / "a.yaml"
        path.write_text(UNPINNED.replace("--nnodes=4", "--nnodes=3"))
        return [str(path)]

    @staticmethod
    def run(arguments: list[str]) -> int:
        app = typer.Typer(add_completion=False)
        app.command()(command)
        return int(app(args=arguments, standalone_mode=False) or 0)

    def test_terminal_has_the_same_text_with_color(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.run(arguments) == 1
        plain = capsys.readouterr().out
        assert "\x1b" not in plain
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert self.run(arguments) == 1
        colored = capsys.readouterr().out
        assert "\x1b[1;31merror" in colored
        from rich.text import Text

        assert Text.from_ansi(colored).plain.rstrip() == plain.rstrip()

    @pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
    def test_color_is_off_on_request(
        self,
        arguments: list[str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        value: str,
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv(name, value)
        assert self.run(arguments) == 1
        assert "\x1b" not in capsys.readouterr().out

    def test_json_has_no_color(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert self.run(["--json", "--ignore", "nnodes-mismatch", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["ignored"] == 1

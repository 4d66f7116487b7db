"""llmtrain lint: exit codes, output, and the files it reads."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from lint_examples import DIRECTORY, OTHERS_WORK, TOKEN, Lint, edited, find, line_with, script, variable

from limits import limit
from llmtrain.errors import UsageError
from llmtrain.lint.check_manifests import RULES, lint
from llmtrain.lint.report import ManifestFinding
from llmtrain.lint.source import Sources, objects_of
from llmtrain.lint.yaml_nodes import NotAManifest, parse


class TestCommand:
    def test_clean_manifest_exits_with_0(self, run: Lint) -> None:
        code, out = run(DIRECTORY / "job.yaml")
        assert code == 0
        assert "3 objects in 1 file, 1 training pod template" in out

    def test_findings_exit_with_1_and_have_line_reason_and_fix(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        text = edited("job", ("translator-0.peers:29500", "peers:29500"))
        path.write_text(text)
        code, out = run(path)
        assert code == 1
        (rule,) = [rule for rule in RULES if rule.id == "rdzv-endpoint-is-service"]
        line = line_with(text, "--rdzv-endpoint")
        first, *rest = out.splitlines()
        assert first.startswith(f"{path}:{line}: error: peers ")
        assert first.endswith("[rdzv-endpoint-is-service]")
        assert rest[:2] == [f"    why: {rule.why}", f"    fix: {rule.remedy}"]
        assert rest[2].startswith("1 error, 0 warnings, 0 suggestions: 3 objects")

    def test_advice_fails_only_with_strict(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(edited("job", ("enableServiceLinks: false", "enableServiceLinks: true")))
        assert run(path)[0] == 0
        assert "service-links" in run(path)[1]
        assert run("--strict", path)[0] == 1

    def test_json_output(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(edited("job", ("--nnodes=4", "--nnodes=3")))
        code, out = run("--json", path)
        value = json.loads(out)
        assert code == 1
        assert value["ok"] is False
        assert value["counts"] == {"error": 1, "warning": 0, "advice": 0}
        (found,) = value["findings"]
        assert set(found) == {"rule", "severity", "file", "line", "also_lines", "what", "why", "fix"}
        assert (found["rule"], found["file"]) == ("nnodes-mismatch", str(path))

    def test_reads_standard_input(self, run: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
        text = edited("job", ("--nnodes=4", "--nnodes=3"))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code, out = run("-")
        assert code == 1
        assert out.startswith("<stdin>:")

    def test_service_in_another_file_is_found(self, run: Lint, tmp_path: Path) -> None:
        service, _, rest = edited("job").partition("---\n")
        (tmp_path / "job.yaml").write_text(rest)
        (tmp_path / "service.yml").write_text(service)
        (tmp_path / "values.yaml").write_text("image: a\n")
        (tmp_path / ".hidden.yaml").write_text("{")
        code, out = run(tmp_path / "job.yaml")
        assert code == 1
        assert "[subdomain-without-service]" in out
        code, out = run(tmp_path)
        assert code == 0
        assert f"{tmp_path / 'values.yaml'}: skipped" in out

    def test_files_without_training_pods_exit_with_2(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "others.yaml"
        path.write_text(OTHERS_WORK)
        code, out = run(path)
        assert (code, out.count("\n")) == (2, 1)
        assert "nothing to check" in out
        code, out = run("--json", path)
        assert (code, json.loads(out)["ok"], json.loads(out)["training_pod_templates"]) == (2, None, 0)

    def test_problem_in_files_without_training_pods_exits_with_1(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "others.yaml"
        path.write_text(OTHERS_WORK.replace("python, shard.py", "python, shard.py, 7"))
        code, out = run(path)
        assert code == 1
        assert "value-not-a-string" in out

    def test_secrets_are_not_printed(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        changes = [
            variable("HF_TOKEN", TOKEN),
            variable("PASSWORD", "opensesame"),
            ("- train.py", f"- a --token {TOKEN}"),
        ]
        path.write_text(edited("job", *changes))
        for arguments in ((path,), ("--json", path)):
            code, out = run(*arguments)
            assert code == 1
            assert out.count("secret-in-manifest") == 3
            assert TOKEN not in out
            assert "opensesame" not in out

    def test_control_characters_are_removed(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        lookup = f'curl -H "Authorization: Bearer {"x" * 9}" https://kubernetes.default/api'
        nodes = ("  name: translator\nspec:\n  replicas", '  name: "t\\e[31m"\nspec:\n  replicas')
        path.write_text(edited("statefulset", script(lookup), nodes, ("  serviceName: peers\n", "")))
        out = run(path)[1]
        assert "api-lookup" in out
        assert "x" * 9 not in out
        assert "\x1b" not in out


def refusal(run: Lint, *arguments: object) -> str:
    with pytest.raises(UsageError) as caught:
        run(*arguments)
    assert caught.value.exit_code == 64
    return str(caught.value)


class TestSources:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("a: [1, 2\nb: 3\n", "not YAML"),
            ("a: b: c\n", ":1: not YAML"),
            ("\tkind: Job\n", "not YAML"),
            ("kind: *nobody\n", "no anchor nobody"),
            ("apiVersion: v1\nkind: List\nitems: &a\n- *a\n", "an alias inside its own anchor"),
            ("[" * 100_000, "nested more than"),
            ("kind: {[a]: b}\n", "a key is a list"),
            ("services:\n  web: {image: a}\n", ":1: not a Kubernetes manifest"),
            ("- 1\n- 2\n", "not a Kubernetes manifest"),
            ("just words\n", "not a Kubernetes manifest"),
            ("", ": empty"),
            ("# nothing\n---\n---\n", ": empty"),
            ("kind: Job\nmetadata:\n  name: {{ .Values.name }}\n", ":3: a template"),
            ("{{- if .Values.on }}\nkind: Job\n{{- end }}\n", "helm template CHART | llmtrain lint -"),
            ('kind: Job\nname: "{{ .Release.Name }}"\n', ":2: a template"),
            ("kind: Job\nname: {{ name }}\n", ":2: a template"),
        ],
    )
    def test_invalid_file_exits_with_64_and_a_reason(self, run: Lint, tmp_path: Path, text: str, reason: str) -> None:
        path = tmp_path / "a.yaml"
        path.write_text(text)
        message = refusal(run, path)
        assert reason in message
        assert str(path) in message

    def test_binary_file_is_refused(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_bytes(b"\xff\xfe\x00\x01")
        assert "not UTF-8" in refusal(run, path)
        path.write_bytes(b"kind: a\x00b\n")
        assert "not YAML" in refusal(run, path)

    def test_all_unreadable_files_are_reported_at_once(self, run: Lint, tmp_path: Path) -> None:
        (tmp_path / "b.yaml").write_text("{")
        message = refusal(run, tmp_path / "a.yaml", tmp_path / "b.yaml", DIRECTORY / "job.yaml")
        assert "2 files" in message
        assert "no such file" in message

    def test_file_with_another_document_is_refused(self, run: Lint, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(edited("job") + "---\nimage: a\n")
        assert "`apiVersion` or `kind` is missing" in refusal(run, tmp_path)

    def test_file_named_twice_is_read_once(self, run: Lint) -> None:
        assert "3 objects in 1 file" in run(DIRECTORY / "job.yaml", DIRECTORY / ".." / "manifests" / "job.yaml")[1]

    def test_directory_without_manifests_is_refused(self, run: Lint, tmp_path: Path) -> None:
        assert "No Kubernetes manifest" in refusal(run, tmp_path)

    def test_braces_of_other_programs_are_accepted(self) -> None:
        assert find(edited("job", variable("FORMAT", "'{{ level }}'"))) == []
        assert find(edited("job", variable("VAULT", """'{{- with secret "a" -}}{{ .Data }}{{- end }}'"""))) == []

    def test_lists_are_expanded(self) -> None:
        text = edited("job", ("--nnodes=4", "--nnodes=3"))
        items = "".join("- " + document.strip().replace("\n", "\n  ") + "\n" for document in text.split("---\n"))
        text = f"apiVersion: v1\nkind: List\nitems:\n{items}".replace("- # A ", "# A ").replace("  apiV", "- apiV", 1)
        (found,) = find_in_objects(text)
        assert (found.name, found.line) == ("nnodes-mismatch", line_with(text, "--nnodes"))

    def test_json_manifests_are_read(self, run: Lint, tmp_path: Path) -> None:
        path = tmp_path / "all.json"
        objects = list(yaml.safe_load_all(edited("job")))
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1))
        assert run("--strict", path)[0] == 0

    def test_anchors_and_merge_keys(self) -> None:
        shared = "        resources: &all\n          limits: {cpu: 8, memory: 64Gi}\n"
        old = edited("job").partition("        resources:\n")[2].partition("        securityContext")[0]
        assert find(edited("job", (f"        resources:\n{old}", shared))) == []
        merged = "        resources:\n          <<: {limits: {cpu: 8, memory: 64Gi}}\n"
        assert find(edited("job", (f"        resources:\n{old}", merged))) == []
        nodes = edited("job", ("completions: 4", "completions: &n 3"), ("parallelism: 4", "parallelism: *n"))
        assert [one.name for one in find(nodes)] == ["nnodes-mismatch"]

    def test_nested_aliases_take_linear_time(self) -> None:
        rows = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30))]
        text = "apiVersion: v1\nkind: Pod\n" + "\n".join(rows) + "\nspec:\n  containers: *a29\n"
        assert find(text) == []

    @pytest.mark.parametrize(
        "text",
        [
            "apiVersion: batch/v1\nkind: Job\n",
            "apiVersion: batch/v1\nkind: Job\nmetadata: x\nspec: [1]\n",
            "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec:\n  pytorchReplicaSpecs: {Master: null, Worker: 3}\n",
            "apiVersion: x/v1\nkind: JobSet\nspec: {replicatedJobs: {a: 1}}\n",
            "apiVersion: x/v1\nkind: TrainJob\nspec: {trainer: {env: {a: b}, command: x}, podSpecOverrides: 1}\n",
            "apiVersion: v1\nkind: Service\nspec: {selector: [a], ports: x}\n",
            "apiVersion: v1\nkind: Pod\nspec: {containers: [1, null, {command: [torchrun, null, [1]], env: [1]}]}\n",
        ],
    )
    def test_unexpected_types_do_not_crash(self, text: str) -> None:
        find(text + "---\n" + edited("job"))

    def test_large_file_takes_seconds(self) -> None:
        body = edited("job").partition("---\n")[2]
        text = "\n---\n".join(body.replace("translator", f"run-{n}").replace("peers", f"p-{n}") for n in range(300))
        started = time.monotonic()
        found = find(text)
        assert time.monotonic() - started < limit(60)  # some 2 s on an idle core
        assert {one.name for one in found} == {"subdomain-without-service"}
        assert len(found) == 300

    def test_long_line_takes_seconds(self) -> None:
        started = time.monotonic()
        find(edited("statefulset", script("echo " + "a$(b 'c\"" * 20_000)))
        assert time.monotonic() - started < limit(30)

    def test_lines_inside_a_folded_string(self) -> None:
        folded = ("        - |\n          # which of the pods this is\n", "        - >-\n")
        text = edited("statefulset", folded, script("sleep $RANDOM;"))
        assert ("sleep-random", line_with(text, "sleep $RANDOM")) in {(one.name, one.line) for one in find(text)}

    def test_parse_error_has_a_line(self) -> None:
        with pytest.raises(NotAManifest) as caught:
            parse("a: 1\nb: [\n", "x")
        assert caught.value.line >= 2


def find_in_objects(text: str) -> list[ManifestFinding]:
    """As find, with Lists expanded."""
    return lint(Sources(list(objects_of(parse(text, "a.yaml"))), ["a.yaml"], [])).findings


def test_linting_does_not_import_torch() -> None:
    code = "import sys, llmtrain.lint.check_manifests; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

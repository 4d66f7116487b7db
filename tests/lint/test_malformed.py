"""Malformed manifests give findings or an error with exit code 64, never another exception."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.errors import UsageError
from llmtrain.lint.check_manifests import lint
from llmtrain.lint.source import MAX_BYTES, read_sources

MANIFESTS = sorted((Path(__file__).parent / "manifests").glob("*.yaml"))
# In place of a value of any type.
REPLACEMENTS: list[Any] = [None, "", "x", 0, -1, 1.5, True, [], {}, [None], ["x"], [[]], [{}], {"x": None}, {"x": [1]}]
CHANGES_PER_FILE = 60
CUTS_PER_FILE = 15


def check(path: Path) -> str:
    """The report as text and JSON, or the error."""
    try:
        report = lint(read_sources([str(path)]))
    except UsageError as error:
        return str(error)
    report.as_dict(is_strict=True)
    return report.text()


def slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value inside."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in rows:
        yield value, key
        yield from slots(inner)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_values_of_another_type(path: Path, tmp_path: Path) -> None:
    random_ = random.Random(path.stem)
    documents = list(yaml.safe_load_all(path.read_text()))
    for _ in range(CHANGES_PER_FILE):
        changed = copy.deepcopy(documents)
        for _ in range(random_.choice([1, 1, 2, 5])):
            container, key = random_.choice(list(slots(changed)))
            container[key] = copy.deepcopy(random_.choice(REPLACEMENTS))
        (tmp_path / "a.yaml").write_text(yaml.safe_dump_all(changed))
        assert check(tmp_path / "a.yaml"), changed


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_damaged_bytes(path: Path, tmp_path: Path) -> None:
    random_ = random.Random(path.stem)
    raw = path.read_bytes()
    for _ in range(CUTS_PER_FILE):
        start, length = random_.randrange(len(raw)), random_.randrange(20)
        inserted = random_.choice(
            [b"", b"\x00", b"\xff\xfe", b"\t", b": ", b"- [", b"*a", b"&a ", b"<<: ", b"? ", b"{{"]
        )
        (tmp_path / "a.yaml").write_bytes(raw[:start] + inserted + raw[start + length :])
        assert check(tmp_path / "a.yaml"), (start, length, inserted)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "---\n---\n",
        "null\n",
        "apiVersion: [v1]\nkind: {Job: 1}\n",
        "apiVersion: v1\nkind: List\nitems: null\n",
        "apiVersion: v1\nkind: List\nitems: [null, 1, [x], {kind: Pod}]\n",
        "apiVersion: batch/v1\nkind: Job\nspec: {template: {spec: {containers: null}}}\n",
        "apiVersion: batch/v1\nkind: Job\nspec: {template: {spec: {containers: {a: {image: torch}}}}}\n",
        "apiVersion: v1\nkind: Pod\nspec: {containers: [{image: torch, env: {A: 1}, args: torchrun, ports: 1}]}\n",
        "apiVersion: v1\nkind: Pod\nspec: {containers: [{image: torch, resources: [1], livenessProbe: [x]}]}\n",
        "apiVersion: v1\nkind: Pod\nmetadata: &m {labels: &l [x]}\nspec: {<<: *m, containers: *l}\n",
        "apiVersion: v1\nkind: Pod\nspec: {<<: [1, null, x], containers: []}\n",
        "apiVersion: v1\nkind: Pod\n? : x\nnull: y\n1: z\ntrue: w\n",
        "apiVersion: v1\nkind: Pod\nkind: Job\n",
        "apiVersion: v1\nkind: Pod\nspec: !!python/object:os.system {x: 1}\n",
        "apiVersion: v1\nkind: Pod\nspec: {containers: [{image: !!int x, name: !!binary '=', args: [!!float y]}]}\n",
        "apiVersion: apps/v1\nkind: Deployment\nspec: {replicas: many, template: [x]}\n",
        "apiVersion: v1\nkind: Pod\nspec: {terminationGracePeriodSeconds: 99999999999999999999, containers: []}\n",
        "apiVersion: v1\nkind: Pod\nspec: {containers: [{args: [1e999, .nan, .inf, 2024-01-01, 0x1F, 1_000]}]}\n",
    ],
)
def test_odd_documents(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert check(tmp_path / "a.yaml")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_other_encodings_are_refused(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes("# ä\napiVersion: v1\nkind: Pod\n".encode(encoding))
    with pytest.raises(UsageError) as caught:
        read_sources([str(tmp_path / "a.yaml")])
    assert caught.value.exit_code == 64


def test_byte_order_mark_and_crlf_are_accepted(tmp_path: Path) -> None:
    text = MANIFESTS[1].read_text().replace("\n", "\r\n")
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert lint(read_sources([str(tmp_path / "a.yaml")])).training == 1


def test_huge_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.yaml").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for path in (str(tmp_path / "a.yaml"), "/dev/zero"):
        with pytest.raises(UsageError) as caught:
            read_sources([path])
        assert caught.value.exit_code == 64

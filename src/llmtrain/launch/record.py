"""The record of a run on the cluster: its ConfigMap, which is created first and outlives the job until `delete`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from llmtrain import registry
from llmtrain.compat.records import upgraded_record, with_image_schema
from llmtrain.config.document import Document, parse_dumped
from llmtrain.config.load import build_config
from llmtrain.config.schema import SECTIONS, Config, section_class, subsection
from llmtrain.config.section import Section
from llmtrain.core.redact import redacted_line
from llmtrain.errors import LlmtrainError, UsageError, nearest
from llmtrain.kubernetes.client import Cluster, Object, plural_of
from llmtrain.kubernetes.labels import (
    APP_LABEL,
    ATTEMPT,
    CODE_LABEL,
    DELETED_AT,
    ENDED_AS,
    RUN_LABEL,
    STOPPED_AT,
    belongs_to_run,
    has_labels,
    run_id_of,
    run_label_of,
    run_selector,
)
from llmtrain.launch.code_bundle import CodeBundle
from llmtrain.launch.job import JOB_FILE, JobPlan, Manifest, config_map_name
from llmtrain.launch.kinds.base import Kind, find_kind
from llmtrain.launch.manifests import render
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.pod_task import CONFIG_FILE, MODES_WITH_FILES, PodTask
from llmtrain.runs.directory import local_run_hint


@dataclass(frozen=True)
class Record:
    """A launched run."""

    run_id: str
    namespace: str
    config: Config
    task: PodTask
    number: int
    """Number of its last launch: 1, incremented by each resume."""
    launched_at: str
    stopped_at: str | None
    ended_as: str | None = None
    """Its state when it was stopped, if it had already ended: `finished` or `failed`."""
    nonce: str = ""
    unknown: tuple[str, ...] = ()
    """Fields of its config that this version of llmtrain does not have; they are dropped."""
    uid: str = ""
    """uid of its ConfigMap; a later run of the same name has another."""
    deleted_at: str | None = None
    run_label: str = RUN_LABEL
    """Key of the label that carries its run id: runs of the first version have another."""
    attempt: str | None = field(default=None, compare=False)
    code: CodeBundle | None = None
    """The user's own code, without its contents."""

    @property
    def kind(self) -> Kind:
        return find_kind(self.config.launch)

    @property
    def selector(self) -> dict[str, str | None]:
        """Labels that select its pods."""
        return {**run_selector(self.run_id, self.run_label)}

    @cached_property
    def plan(self) -> JobPlan:
        """The plan of its last launch."""
        return plan_job(
            self.config, self.task, self.number, self.nonce, run_label=self.run_label, is_launched=True, code=self.code
        )

    @cached_property
    def manifests(self) -> list[Manifest]:
        """The manifests of its last launch: the ConfigMap first, the job last."""
        return render(self.plan)

    @property
    def runs_claim(self) -> str | None:
        """The claim of its files; None if it has no volume for them."""
        volume = self.config.launch.runs_volume
        if volume is None:
            return None
        return volume.claim or f"{self.run_id}-runs"

    @property
    def has_files(self) -> bool:
        """Whether it leaves files that `fetch` can download."""
        return self.task.mode in MODES_WITH_FILES and self.runs_claim is not None


@dataclass(frozen=True)
class UnreadableRecord:
    """The record of a run that this version cannot read: it was written by another version, or edited."""

    run_id: str
    namespace: str
    problem: str
    launched_at: str


@dataclass(frozen=True)
class _CodeFile:
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    paths: Annotated[tuple[str, ...], Field(min_length=1)]


@dataclass(frozen=True)
class _JobFile:
    """The content of job.json, which manifests.py writes."""

    work: PodTask
    number: NonNegativeInt
    nonce: str = ""
    code: _CodeFile | None = None


_JOB_FILE = TypeAdapter(_JobFile)


def find_record(cluster: Cluster, run_id: str, namespace: str) -> Record:
    """The record of a run, or an error that lists the existing runs."""
    found = cluster.get("v1", "ConfigMap", config_map_name(run_id), namespace)
    if found is not None and belongs_to_run(found, run_id):
        return read_record(found, cluster.place(namespace))
    known = [record.run_id for record in all_records(cluster, namespace)]
    raise UsageError(
        f"Run '{run_id}' does not exist in namespace {namespace} of {cluster.name}.{nearest(run_id, known)}",
        known=known,
        remedy=local_run_hint(run_id)
        or f"List the runs of all namespaces: llmtrain status --all-namespaces{cluster.options}. Select another "
        "namespace or cluster with --namespace and --context.",
    )


def list_records(cluster: Cluster, namespace: str | None) -> list[Record]:
    """The runs of a namespace, or of all namespaces, oldest first, without unreadable records."""
    return [record for record in all_records(cluster, namespace) if isinstance(record, Record)]


def all_records(cluster: Cluster, namespace: str | None) -> list[Record | UnreadableRecord]:
    """The runs of a namespace, or of all namespaces, oldest first, including unreadable records."""
    records: list[Record | UnreadableRecord] = []
    for config_map in cluster.find("v1", "ConfigMap", namespace, {**APP_LABEL}):
        meta = config_map["metadata"]
        run_id = run_id_of(config_map)
        if run_id is None or has_labels(config_map, CODE_LABEL):
            continue
        try:
            records.append(read_record(config_map))
        except LlmtrainError as problem:
            launched_at = meta.get("creationTimestamp", "")
            records.append(UnreadableRecord(run_id, meta["namespace"], redacted_line(problem.what), launched_at))
    return sorted(records, key=lambda record: (record.launched_at, record.run_id))


def read_record(config_map: Object, options: str = "") -> Record:
    """The record in a ConfigMap. Its content is untrusted: anyone with write access to the namespace can edit it.
    `options`: command-line options that select the namespace, for remedies."""
    meta = config_map["metadata"]
    data = config_map.get("data") or {}
    run_id = run_id_of(config_map) or ""
    run_label = run_label_of(config_map) or RUN_LABEL
    notes = meta.get("annotations") or {}
    where = f"ConfigMap {meta['name']} in namespace {meta['namespace']}"
    kinds = ",".join(["all,configmap,networkpolicy,poddisruptionbudget", *_operator_kinds(data)])
    remedy = (
        "If another version of llmtrain wrote it, use that version. To remove the run without llmtrain: kubectl delete "
        f"{kinds} -l {run_label}={run_id}{options or ' -n ' + meta['namespace']}"
    )
    for name in (CONFIG_FILE, JOB_FILE):
        if name not in data:
            raise UsageError(f"{where} is not the record of a run: {name} is missing.", remedy=remedy)
    if meta["name"] != config_map_name(run_id):
        raise UsageError(
            f"{where} is not the record of a run: its name must be {config_map_name(run_id)}.", remedy=remedy
        )
    try:
        job = _JOB_FILE.validate_json(data[JOB_FILE], strict=True)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        path = ".".join([JOB_FILE, *map(str, first["loc"])])
        raise UsageError(f"{where} is not a readable record of a run: {path}: {first['msg']}.", remedy=remedy) from None
    unknown: list[str] = []
    try:
        source = f"the config of {run_id}"
        recorded = parse_dumped(data[CONFIG_FILE], source)
        upgraded = upgraded_record(recorded)
        values = _known(upgraded.values, unknown)
        if upgraded.problems:
            raise UsageError(upgraded.problems[0])
        config = build_config(Document(source, values), is_launched=True)
        config = with_image_schema(config, recorded)
    except LlmtrainError as problem:
        raise UsageError(f"{where} is not a readable record of a run: {problem.what}", remedy=remedy) from None
    if config.output.run_id != run_id:  # else `delete RUN` would delete the objects of another run
        raise UsageError(
            f"{where} is not the record of '{run_id}': output.run_id is {config.output.run_id}.", remedy=remedy
        )
    return Record(
        run_id=run_id,
        namespace=meta["namespace"],
        config=config.with_values("launch", namespace=meta["namespace"]),
        task=job.work,
        number=job.number,
        launched_at=meta.get("creationTimestamp", ""),
        stopped_at=notes.get(STOPPED_AT),
        ended_as=notes.get(ENDED_AS),
        nonce=job.nonce,
        unknown=tuple(unknown),
        uid=str(meta.get("uid", "")),
        deleted_at=notes.get(DELETED_AT),
        run_label=run_label,
        attempt=notes.get(ATTEMPT),
        code=CodeBundle(job.code.sha256, job.code.paths) if job.code else None,
    )


def is_same_launch(config_map: Object, record: Record) -> bool:
    """Whether a ConfigMap is still the record of this launch, not of a later one."""
    data = config_map.get("data") or {}
    try:
        job = _JOB_FILE.validate_json(data.get(JOB_FILE, ""), strict=True)
    except ValidationError:
        return False
    uid = str(config_map["metadata"].get("uid", ""))
    return uid == record.uid and job.number == record.number


def _operator_kinds(data: Mapping[str, Any]) -> list[str]:
    """Resources of operators, which `kubectl delete all` does not cover. Found by a search, because the config may be
    unreadable. Only those of this run: kubectl deletes nothing if one of the resources is not installed."""
    names = "|".join(registry.KINDS)
    found = re.search(rf"^\s+kind: ['\"]?({names})\b", str(data.get(CONFIG_FILE)), re.MULTILINE)
    if found is None:
        return []
    kind: type[Kind] = registry.resolve("launch.kind", found[1], registry.KINDS)
    return [plural_of(each) for each in kind.operator_kinds]


def check_applied(record: Record, changed: Config, plan: JobPlan) -> None:
    """Refuse changes that would have no effect in the pods, where the launch section or the environment overrides
    them."""
    before = _flat(record.config.as_dict())
    in_pods = _flat(plan.config.as_dict())
    for name, value in _flat(changed.as_dict()).items():
        if value in (before.get(name), in_pods.get(name)):
            continue
        raise UsageError(
            f"{name} is set to {value}, but the pods would use {in_pods.get(name)}.",
            remedy=f"Remove it: {_DECIDED_BY.get(name, 'each pod reads it from its environment')}.",
        )


_DECIDED_BY = {"output.root_dir": "a relative path is a directory of this machine; use an absolute one"}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """`section.field` -> value."""
    flat = {}
    for section, fields in values.items():
        if isinstance(fields, dict):
            for name, value in fields.items():
                flat[f"{section}.{name}"] = value
    return flat


def _known(values: dict[str, Any], unknown: list[str]) -> dict[str, Any]:
    """Drop fields that only another version of llmtrain has, so that its runs can be listed, stopped and fetched."""
    kept = {}
    for name, value in values.items():
        if name not in (*SECTIONS, "schema_version"):
            unknown.append(name)
            continue
        kept[name] = value
        if name in SECTIONS and isinstance(value, dict):
            kind = section_class(name, value)
            if kind is not None:
                kept[name] = _known_fields(kind, value, f"{name}.", unknown)
    return kept


def _known_fields(kind: type[Section], values: dict[str, Any], path: str, unknown: list[str]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        if name not in kind.model_fields:
            unknown.append(f"{path}{name}")
            continue
        inner = subsection(kind, name, value)
        if inner is not None and isinstance(value, dict):
            value = _known_fields(inner, value, f"{path}{name}.", unknown)
        kept[name] = value
    return kept

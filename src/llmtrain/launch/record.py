"""The record of a run on the cluster: its ConfigMap, which is created first and outlives the job until `delete`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from llmtrain.code_bundle import CodeBundle
from llmtrain.config.document import Document, parse_document
from llmtrain.config.load import build_config
from llmtrain.config.schema import SECTIONS, Config, section_class, subsection
from llmtrain.config.section import Section
from llmtrain.config.upgrade import Upgrade, is_old, upgrade
from llmtrain.errors import LlmtrainError, UsageError, nearest
from llmtrain.kubernetes.client import PLURALS, Cluster, Object
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
from llmtrain.launch.manifests import render
from llmtrain.launch.plan import JOB_FILE, JobPlan, Manifest, Workload, config_map_name, find_workload, plan_job
from llmtrain.launch.work import CONFIG_FILE, Work
from llmtrain.redact import redacted_line
from llmtrain.runs.directory import local_run_hint


@dataclass(frozen=True)
class Record:
    """A launched run."""

    run_id: str
    namespace: str
    config: Config
    work: Work
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
    def workload(self) -> Workload:
        return find_workload(self.config.launch)

    @property
    def selector(self) -> dict[str, str | None]:
        """Labels that select its pods."""
        return {**run_selector(self.run_id, self.run_label)}

    @cached_property
    def plan(self) -> JobPlan:
        """The plan of its last launch."""
        return plan_job(
            self.config, self.work, self.number, self.nonce, run_label=self.run_label, is_launched=True, code=self.code
        )

    @cached_property
    def manifests(self) -> list[Manifest]:
        """The manifests of its last launch: the ConfigMap first, the job last."""
        return render(self.plan)

    @property
    def runs_claim(self) -> str:
        return self.config.launch.runs_volume.claim or f"{self.run_id}-runs"


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

    work: Work
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
        meta, run_id = config_map["metadata"], run_id_of(config_map)
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
    meta, data = config_map["metadata"], config_map.get("data") or {}
    run_id, run_label = run_id_of(config_map) or "", run_label_of(config_map) or RUN_LABEL
    notes = meta.get("annotations") or {}
    where = f"ConfigMap {meta['name']} in namespace {meta['namespace']}"
    kinds = ",".join(["all,configmap,networkpolicy,poddisruptionbudget", *_operator_kinds(data)])
    remedy = (
        "If another version of llmtrain wrote it, use that version. To remove the run without llmtrain: kubectl delete "
        f"{kinds} -l {run_label}={run_id}{options or ' -n ' + meta['namespace']}"
    )
    missing = [name for name in (CONFIG_FILE, JOB_FILE) if name not in data]
    if missing or meta["name"] != config_map_name(run_id):
        reason = f"{missing[0]} is missing" if missing else f"its name must be {config_map_name(run_id)}"
        raise UsageError(f"{where} is not the record of a run: {reason}.", remedy=remedy)
    try:
        job = _JOB_FILE.validate_json(data[JOB_FILE], strict=True)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        path = ".".join([JOB_FILE, *map(str, first["loc"])])
        raise UsageError(
            f"{where} is not a readable record of a run: {path}: {first['msg']}.",
            remedy=remedy,
        ) from None
    unknown: list[str] = []
    try:
        document = parse_document(data[CONFIG_FILE], f"the config of {run_id}")
        version = document.values.get("schema_version")
        upgraded = upgrade(document.values, version, for_launch=True) if is_old(version) else Upgrade(document.values)
        values = _known(upgraded.values, unknown)
        if upgraded.problems:
            raise UsageError(upgraded.problems[0])
        config = build_config(Document(document.source, values), is_launched=True)
        if is_old(version):  # the image may not read a later schema
            config = config.with_values("launch", image_schema=2)
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
        work=job.work,
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
    try:
        number = _JOB_FILE.validate_json((config_map.get("data") or {}).get(JOB_FILE, ""), strict=True).number
    except ValidationError:
        return False
    return (str(config_map["metadata"].get("uid", "")), number) == (record.uid, record.number)


def _operator_kinds(data: Mapping[str, Any]) -> list[str]:
    """Resources of operators, which `kubectl delete all` does not cover. Found by a search, because the config may be
    unreadable. Only those of this run: kubectl deletes nothing if one of the resources is not installed."""
    found = re.search(rf"^\s+kind: ['\"]?({'|'.join(_OPERATOR_KINDS)})\b", str(data.get(CONFIG_FILE)), re.MULTILINE)
    return [PLURALS[kind] for kind in _OPERATOR_KINDS[found[1]]] if found else []


_OPERATOR_KINDS = {
    "pytorch_job": ("PyTorchJob",),
    "train_job": ("TrainJob", "TrainingRuntime"),
    "job_set": ("JobSet",),
}


def check_applied(record: Record, changed: Config, plan: JobPlan) -> None:
    """Refuse changes that would have no effect in the pods, where the launch section or the environment overrides
    them."""
    before, after, in_pods = (_flat(config.as_dict()) for config in (record.config, changed, plan.config))
    for name, value in after.items():
        if value in (before.get(name), in_pods.get(name)):
            continue
        raise UsageError(
            f"{name} is set to {value}, but the pods would use {in_pods.get(name)}.",
            remedy=f"Remove it: {_DECIDED_BY.get(name, 'each pod reads it from its environment')}.",
        )


_DECIDED_BY = {"output.root_dir": "a relative path is a directory of this machine; use an absolute one"}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """`section.field` -> value."""
    return {
        f"{section}.{name}": value
        for section, fields in values.items()
        if isinstance(fields, dict)
        for name, value in fields.items()
    }


def _known(values: dict[str, Any], unknown: list[str]) -> dict[str, Any]:
    """Drop fields that only another version of llmtrain has, so that its runs can be listed, stopped and fetched."""
    kept = {}
    for name, value in values.items():
        kind = section_class(name, value) if name in SECTIONS and isinstance(value, dict) else None
        if kind is not None:
            value = _known_fields(kind, value, f"{name}.", unknown)
        elif name not in (*SECTIONS, "schema_version"):
            unknown.append(name)
            continue
        kept[name] = value
    return kept


def _known_fields(kind: type[Section], values: dict[str, Any], path: str, unknown: list[str]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        if name not in kind.model_fields:
            unknown.append(f"{path}{name}")
            continue
        inner = subsection(kind, name)
        if inner is not None and isinstance(value, dict):
            value = _known_fields(inner, value, f"{path}{name}.", unknown)
        kept[name] = value
    return kept

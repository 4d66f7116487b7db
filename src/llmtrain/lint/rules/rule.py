"""Rule: one mistake, with the reason and the remedy; a small function finds its occurrences."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from llmtrain.core.text import one_line
from llmtrain.lint.manifests import Manifests, Pod, Workload
from llmtrain.lint.yaml_nodes import Node

Severity = Literal["error", "warning", "advice"]
"""error: breaks or hangs. warning: breaks in some clusters, or loses data. advice: hardening."""
T = TypeVar("T")


@dataclass(frozen=True)
class Match:
    """An occurrence of a mistake; with its rule it becomes a ManifestFinding."""

    node: Node
    evidence: str
    line: int | None = None
    """Set if it differs from the line of the node: inside a script."""
    pod: Pod | None = None
    """The pod template in which it is; set by `rule`."""


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Severity
    what: str
    why: str
    remedy: str
    find: Callable[[Manifests], Iterator[Match]]


def rule(
    id_: str,
    severity: Severity,
    what: str,
    *,
    why: str,
    remedy: str,
    over: Callable[[Manifests], Iterable[T]],
) -> Callable[[Callable[[T], Iterator[Match]]], Rule]:
    """Decorator that makes a Rule of a function that checks one of the objects that `over` selects."""

    def make(function: Callable[[T], Iterator[Match]]) -> Rule:
        def find(manifests: Manifests) -> Iterator[Match]:
            for checked in over(manifests):
                pod = checked if isinstance(checked, Pod) else None
                yield from (replace(match, pod=pod) for match in function(checked))

        return Rule(id_, severity, what, why, remedy, find)

    return make


def all_pods(manifests: Manifests) -> Iterable[Pod]:
    return manifests.pods


def training_pods(manifests: Manifests) -> Iterable[Pod]:
    return manifests.training


def complete_pods(manifests: Manifests) -> Iterable[Pod]:
    """Training pods whose complete template is in the files."""
    return (pod for pod in manifests.training if pod.is_complete)


def multi_node_pods(manifests: Manifests) -> Iterable[Pod]:
    """Pods of distributed training with several pods."""
    return (pod for pod in manifests.training if pod.is_multi_node)


def job_pods(manifests: Manifests) -> Iterable[Pod]:
    """Pods of a Job, standalone or inside a JobSet or a runtime."""
    return (pod for pod in manifests.pods if pod.job is not None)


def training_job_pods(manifests: Manifests) -> Iterable[Pod]:
    return (pod for pod in job_pods(manifests) if pod.is_training)


def workloads(*kinds: str) -> Callable[[Manifests], Iterable[Workload]]:
    return lambda manifests: (workload for workload in manifests.workloads if workload.kind in kinds)


def matches_in_commands(pod: Pod, pattern: re.Pattern[str], problem: str) -> Iterator[Match]:
    """Every place in the commands of the pod's containers where the pattern occurs, as `PLACE` PROBLEM."""
    for container in pod.all_containers:
        for entry, line, what in container.find(pattern):
            yield Match(entry, f"`{shorten(what)}` {problem}", line)


def shorten(value: object) -> str:
    """A value for a message, shortened to 60 characters."""
    text = one_line(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

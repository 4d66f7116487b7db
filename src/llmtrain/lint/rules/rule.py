"""Rule: one trap. A row says what, why and the fix; a small function finds the places."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from llmtrain.lint.model import Manifests, Pod, Workload
from llmtrain.lint.yaml_nodes import Node
from llmtrain.text import one_line

Severity = Literal["error", "warning", "advice"]
"""error: it will break or hang. warning: it breaks in some clusters, or loses data. advice: hardening."""
T = TypeVar("T")


@dataclass(frozen=True)
class Seen:
    """A place of a trap."""

    node: Node
    evidence: str
    line: int | None = None
    """Where it is another than the node's: inside a script."""


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Severity
    what: str
    why: str
    fix: str
    look: Callable[[Manifests], Iterator[Seen]]


def rule(
    id_: str,
    severity: Severity,
    what: str,
    *,
    why: str,
    fix: str,
    over: Callable[[Manifests], Iterable[T]],
) -> Callable[[Callable[[T], Iterator[Seen]]], Rule]:
    """Make a Rule of a function that looks at one of the things that `over` picks."""

    def make(function: Callable[[T], Iterator[Seen]]) -> Rule:
        def look(manifests: Manifests) -> Iterator[Seen]:
            for thing in over(manifests):
                yield from function(thing)

        return Rule(id_, severity, what, why, fix, look)

    return make


def all_pods(manifests: Manifests) -> Iterable[Pod]:
    return manifests.pods


def training_pods(manifests: Manifests) -> Iterable[Pod]:
    return manifests.training()


def whole_pods(manifests: Manifests) -> Iterable[Pod]:
    """Training pods whose whole template is in the files."""
    return (pod for pod in manifests.training() if pod.is_whole)


def joined_pods(manifests: Manifests) -> Iterable[Pod]:
    """Of training on several nodes."""
    return (pod for pod in manifests.training() if pod.is_many)


def job_pods(manifests: Manifests) -> Iterable[Pod]:
    """Training pods that a Job makes, by itself or inside a JobSet or a runtime."""
    return (pod for pod in manifests.training() if pod.job is not None)


def workloads(*kinds: str) -> Callable[[Manifests], Iterable[Workload]]:
    return lambda manifests: (workload for workload in manifests.workloads if workload.kind in kinds)


def shown(value: object) -> str:
    """A value for a message, short."""
    text = one_line(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

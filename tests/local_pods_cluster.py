"""A fake cluster for code that reads the runs volume. A command in a pod runs as a local process, with the variables of
the pod and the volume's directory in place of its mount path. Its output arrives in chunks of an odd size, and the
connection breaks where a test asks for it."""

# ruff: noqa: ARG002 (the signatures are those of Cluster)

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.errors import ClusterError
from llmtrain.launch.pod_task import PodTask
from llmtrain.launch.record import Record
from llmtrain.operate.fetch.reader_pod import COMMAND

CHUNK = 7919


class LocalPodsCluster:
    name = "local-pods"
    namespace = "ns"
    options = ""

    def place(self, namespace: str) -> str:
        return f" -n {namespace}"

    def __init__(self, volume: Path, breaks: list[int | None] | None = None, pause_sec: float = 0.0) -> None:
        self.volume, self.breaks, self.pause_sec = volume, breaks or [], pause_sec
        self.pods: dict[str, dict[str, Any]] = {}
        self.made: list[dict[str, Any]] = []
        self.commands: list[list[str]] = []
        self.claims: dict[str, dict[str, Any]] = {"runs": {}}
        self.status: dict[str, Any] = {"phase": "Running"}
        self.before: Callable[[list[str]], None] = lambda _: None

    def get(self, api_version: str, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        return {"Pod": self.pods, "PersistentVolumeClaim": self.claims}.get(kind, {}).get(name)

    def find(self, api_version: str, kind: str, namespace: str | None, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return [{"metadata": {"name": name}} for name in self.claims] if kind == "PersistentVolumeClaim" else []

    def create(self, manifest: dict[str, Any], dry_run: bool = False) -> dict[str, Any]:
        self.made.append(manifest)
        self.pods[manifest["metadata"]["name"]] = {**manifest, "status": self.status}
        return manifest

    def delete(self, api_version: str, kind: str, name: str, namespace: str, grace_sec: int | None = None) -> bool:
        return self.pods.pop(name, None) is not None

    def run(self, pod: str, namespace: str, container: str, command: list[str]) -> Iterator[bytes]:
        if pod not in self.pods:
            raise ClusterError(f"There is no pod {pod} any more.")
        (reader,) = self.pods[pod]["spec"]["containers"]
        mount = reader["volumeMounts"][0]["mountPath"]
        words = [word.replace(mount, str(self.volume), 1) if word.startswith(mount) else word for word in command]
        self.commands.append(words[len(COMMAND) :])
        self.before(words[len(COMMAND) :])
        limit = self.breaks.pop(0) if self.breaks else None
        process = subprocess.Popen(
            [sys.executable, *words[1:]],
            env={**os.environ, **{row["name"]: row["value"] for row in reader["env"]}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout
        assert process.stderr
        try:
            while chunk := process.stdout.read(CHUNK if limit is None else min(CHUNK, limit)):
                yield chunk
                time.sleep(self.pause_sec)
                limit = None if limit is None else limit - len(chunk)
                if limit == 0:
                    raise ClusterError("The connection broke off.")
            if process.wait():
                raise ClusterError(f"A command in {pod} failed: {process.stderr.read().decode()}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


def record_of_claim(run_id: str) -> Record:
    launch = {"namespace": "ns", "image": "me/llmtrain:1", "runs_volume": {"claim": "runs"}}
    config = build_config(Document("test", {"launch": launch, "output": {"run_id": run_id}}))
    return Record(run_id, "ns", config, PodTask(), 1, "", None)

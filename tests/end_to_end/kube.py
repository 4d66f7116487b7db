"""The cluster of the end-to-end tests, and llmtrain as its user.

LLMTRAIN_E2E_KUBECONFIG and LLMTRAIN_E2E_IMAGE name a cluster and an image on its nodes, given for the purpose. Else
../shared/kube starts one (and stops it again, unless it was up already) and builds docker/Dockerfile. The user's own
kubeconfig is never read.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("LLMTRAIN_KUBE", ROOT.parent / "shared" / "kube"))
HOME = Path(os.environ.get("LT_KUBE_HOME", "/opt/lt-kube"))
IMAGE = "llmtrain:e2e"
SMALL = ["cpu=900m", "memory=1536Mi", "shm_size=64Mi"]
# A run slow enough to be caught in the middle: the sums are the same, only more of them.
SLOWER = ["trainer.max_steps=120", "model.d_model=128", "model.block_size=128", "trainer.save_every_steps=10"]
SET = [word for setting in SLOWER for word in ("--set", setting)]
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


@dataclass(frozen=True)
class Kube:
    kubeconfig: Path
    image: str
    namespace: str
    folder: Path
    """Where the user works."""

    def llmtrain(self, *words: str, expect: int | None = 0, timeout: float = 300) -> Done:
        """A command that talks to the cluster, as a process of its own."""
        return self.local(*self._placed(*words), expect=expect, timeout=timeout)

    def _placed(self, *words: str) -> list[str]:
        split = words.index("--") if "--" in words else len(words)
        return [*words[:split], "--kubeconfig", str(self.kubeconfig), "--namespace", self.namespace, *words[split:]]

    def local(self, *words: str, expect: int | None = 0, timeout: float = 300) -> Done:
        command = [sys.executable, "-m", "llmtrain", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=environment(self.folder), capture_output=True, text=True, timeout=timeout
        )
        if expect is not None and done.returncode != expect:
            pytest.fail(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "llmtrain", *self._placed(*words)],
            cwd=self.folder,
            env=environment(self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def launch_words(
        self, kind: str, run: str, *more: str, config: str = "ddp_smoke", nodes: int = 2, claim: str | None = "runs"
    ) -> list[str]:
        small = [word for setting in SMALL for word in ("--set", f"launch.resources.{setting}")]
        volume = ["--set", f"launch.runs_volume.{f'claim={claim}' if claim else 'size=1Gi'}"]
        volume += ["--set", "launch.grace_period_sec=60"]
        job = ["--kind", kind, "--name", run, "--nodes", str(nodes), "--image", self.image]
        return ["launch", "--config", config, *job, *small, *volume, *more]

    @property
    def kubectl_program(self) -> str:
        binary = HOME / "bin" / "kubectl"
        return str(binary) if binary.exists() else "kubectl"

    def kubectl(self, *words: str, input_: str | None = None, expect: int | None = 0) -> str:
        done = subprocess.run(
            [self.kubectl_program, "--kubeconfig", str(self.kubeconfig), "-n", self.namespace, *words],
            input=input_,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert expect is None or done.returncode == expect, done.stderr
        return done.stdout

    def objects(self, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", *words, "-o", "json"))["items"]
        return found

    def status(self, run: str) -> dict[str, Any]:
        return self.llmtrain("status", run, "--json").json

    def wait(self, run: str, wanted: Callable[[dict[str, Any]], bool], within: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + within
        while True:
            status = self.status(run)
            if wanted(status):
                return status
            if time.monotonic() > deadline:
                pods = self.kubectl("get", "pods", "-o", "wide") + self.kubectl("get", "events")[-3000:]
                pytest.fail(f"{run} did not come there in {within} s: {json.dumps(status, indent=1)}\n{pods}")
            time.sleep(1)

    def volume(self, claim: str) -> Path:
        """Where a claim's files lie on this machine; only the test cluster has them here."""
        name = json.loads(self.kubectl("get", "pvc", claim, "-o", "json"))["spec"]["volumeName"]
        volume = json.loads(self.kubectl("get", "pv", name, "-o", "json"))
        return Path(volume["spec"]["hostPath"]["path"])

    def claim(self, name: str) -> None:
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "5Gi"}}}
        self.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec})

    def apply(self, manifest: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", input_=json.dumps(manifest))


def finished_hash(kube: Kube, run: str) -> str:
    kube.llmtrain("fetch", run)
    return str(json.loads((kube.folder / "runs" / run / "finished.json").read_text())["state_sha256"])


def environment(folder: Path) -> dict[str, str]:
    """Of a user who has no kubeconfig of their own, so that nothing but the one given can be reached."""
    left_out = {"KUBECONFIG", "CI"}
    return {**{k: v for k, v in os.environ.items() if k not in left_out}, "HOME": str(folder), "COLUMNS": "120"}


@contextmanager
def running_cluster(folder: Path) -> Iterator[tuple[Path, str]]:
    """(kubeconfig, image) of a cluster that may be used."""
    given = os.environ.get("LLMTRAIN_E2E_KUBECONFIG")
    if given:
        yield Path(given), os.environ.get("LLMTRAIN_E2E_IMAGE", IMAGE)
        return
    if not (TOOLS / "cluster").exists():
        pytest.skip("needs ../shared/kube, or LLMTRAIN_E2E_KUBECONFIG and LLMTRAIN_E2E_IMAGE for the purpose")
    if os.geteuid() != 0:
        pytest.skip("../shared/kube needs root")
    if "LLMTRAIN_E2E_IMAGE" not in os.environ:
        _install(folder, "buildah", "debootstrap")
    was_up = subprocess.run([str(TOOLS / "cluster"), "status"], capture_output=True).returncode == 0
    if not was_up:
        _run(folder, str(TOOLS / "cluster"), "up", "--nodes", "2")
    try:
        image = os.environ.get("LLMTRAIN_E2E_IMAGE", IMAGE)
        with ThreadPoolExecutor() as pool:  # the operators mostly wait for their pods
            steps = [pool.submit(_run, folder, str(TOOLS / "cluster"), "operators")]
            if "LLMTRAIN_E2E_IMAGE" not in os.environ:
                file = ["-f", str(ROOT / "docker" / "Dockerfile"), "--layers"]
                extras = ["--build-arg", f"EXTRAS={os.environ.get('LLMTRAIN_E2E_EXTRAS', 'k8s')}"]  # a third smaller
                steps.append(pool.submit(_run, folder, str(TOOLS / "build-image"), image, str(ROOT), *file, *extras))
        for step in steps:
            step.result()
        yield HOME / "run" / "admin.kubeconfig", image
    finally:
        if not was_up:
            _run(folder, str(TOOLS / "cluster"), "down")


def _install(folder: Path, *programs: str) -> None:
    """The packages that build-image installs when it starts. It runs beside `cluster operators`, which may install
    packages too, and apt-get does not wait for another apt-get."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        _run(folder, "apt-get", "update", "-qq")
        _run(folder, "apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def load_image(kubeconfig: Path, name: str, context: Path) -> None:
    """Build an image and put it on the nodes of the test cluster, which pulls none. Any other has its registries."""
    if kubeconfig == HOME / "run" / "admin.kubeconfig":
        _run(context, str(TOOLS / "build-image"), name, str(context))


def free_volumes(kubeconfig: Path) -> None:
    """Of the test cluster: volumes whose claim was deleted keep its files, and serve nobody else. Eight are all there
    are, and each file of tests takes one."""
    if kubeconfig != HOME / "run" / "admin.kubeconfig":
        return
    kubectl = [str(HOME / "bin" / "kubectl"), "--kubeconfig", str(HOME / "run" / "admin.kubeconfig")]
    found = json.loads(subprocess.run([*kubectl, "get", "pv", "-o", "json"], capture_output=True, check=True).stdout)
    for volume in found["items"]:
        if volume["status"]["phase"] == "Released":
            for path in Path(volume["spec"]["hostPath"]["path"]).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            change = [*kubectl, "patch", "pv", volume["metadata"]["name"], "-p", '{"spec":{"claimRef":null}}']
            subprocess.run(change, capture_output=True, check=True)


def _run(folder: Path, *command: str) -> str:
    """The tools speak much; what they said is shown only if they fail."""
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    print(f"{Path(command[0]).name} {command[1]}: {time.monotonic() - began:.0f} s")
    return done.stdout + done.stderr

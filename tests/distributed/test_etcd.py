"""Rendezvous over etcd. Needs the `etcd` program (Debian: etcd-server) and the extra etcd."""

import importlib.util
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import rank_harness as ranks
from rank_harness import free_port, start_cli

from limits import limit, wait_until

Cli = Callable[..., Any]
HAS_MODULE = importlib.util.find_spec("etcd") is not None


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    ranks.end_clis()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """host:port of a real server with the v2 API."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd program here (Debian: apt-get install etcd-server)")
    if not HAS_MODULE:
        pytest.skip("torch's etcd rendezvous needs the package python-etcd")
    port, peer = free_port(), free_port()
    urls = [f"--listen-client-urls=http://127.0.0.1:{port}", f"--advertise-client-urls=http://127.0.0.1:{port}"]
    peers = [f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}"]
    cluster = f"--initial-cluster=default=http://127.0.0.1:{peer}"
    words = ["etcd", "--enable-v2", f"--data-dir={tmp_path / 'etcd'}", *urls, *peers, cluster]
    with (tmp_path / "etcd.log").open("w") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        wait_until(lambda: _answers(port) or server.poll() is not None, 30)
        assert server.poll() is None, (tmp_path / "etcd.log").read_text()[-2000:]
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/machines", timeout=limit(2)) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


SCRIPT = """
import os, pathlib
pathlib.Path(f"rank-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").write_text(os.environ["MASTER_ADDR"])
"""


@pytest.mark.etcd
@pytest.mark.parametrize("backend", ["etcd-v2", pytest.param("etcd", marks=pytest.mark.slow)])
def test_two_nodes_join_over_etcd(tmp_path: Path, etcd: str, backend: str) -> None:
    words = ["node", "--nodes", 2, "--rdzv-backend", backend, "--rdzv-endpoint", etcd, "--rdzv-id", "job"]
    nodes = [start_cli(*words, "--", sys.executable, "-c", SCRIPT, cwd=tmp_path) for _ in range(2)]
    assert [one.wait(90) for one in nodes] == [0, 0], "\n".join(one.err for one in nodes)
    assert (tmp_path / "rank-0-of-2").exists()
    assert (tmp_path / "rank-1-of-2").exists()


@pytest.mark.etcd
@pytest.mark.slow
def test_two_nodes_train_over_etcd(tmp_path: Path, cache: Path, etcd: str) -> None:
    changes = {"trainer__grad_accum_steps": 4, "distributed__reproducible_reduce": True}
    config = harness.tiny_config(tmp_path / "runs", cache, distributed__strategy="ddp", **changes)
    (tmp_path / "train.json").write_text(json.dumps(config.as_dict()))
    words = ["node", "--nodes", 2, "--rdzv-backend", "etcd-v2", "--rdzv-endpoint", etcd, "--config", "train.json"]
    nodes = [start_cli(*words, "--json", cwd=tmp_path) for _ in range(2)]
    assert [one.wait(150) for one in nodes] == [0, 0], "\n".join(one.err for one in nodes)
    (result,) = [json.loads(one.out) for one in nodes if one.out]
    golden = ranks.trained(harness.tiny_config(tmp_path / "golden", cache, **changes), 1)
    assert (result["world_size"], result["state_sha256"]) == (2, golden["state_sha256"])


def two_pods(cli: Cli, etcd: str, *words: str) -> tuple[list[str], str]:
    """The command and the config of the two pods of a launched Job, as rendered."""
    sets = ("distributed.rendezvous.backend=etcd-v2", f"distributed.rendezvous.endpoint={etcd}")
    flags = [flag for text in sets for flag in ("--set", text)]
    done = cli(
        "launch", "--dry-run", "--name", "train-llm", "--image", "me/train:1", "--nodes", "2", *flags, "--json", *words
    )
    assert done.code == 0, done.err
    job = done.json["manifests"][-1]
    assert (job["kind"], job["spec"]["completions"]) == ("Job", 2)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:4] == ["python", "-m", "llmtrain", "node"]
    return container["command"][3:], done.json["manifests"][0]["data"]["train.yaml"]


def run_pods(words: list[str], directory: Path) -> tuple[list[int], list[ranks.Cli]]:
    """Both as processes of this machine, with the variables of an Indexed Job."""
    pods = [start_cli(*words, cwd=directory, env={"JOB_COMPLETION_INDEX": str(index)}) for index in range(2)]
    return [pod.wait(150) for pod in pods], pods


FAILS_ONCE = f"""{SCRIPT}
failed = pathlib.Path(f"failed-{{os.environ['RANK']}}")
if not failed.exists():
    failed.touch()
    raise SystemExit(3)
"""


@pytest.mark.etcd
def test_launched_pods_join_over_etcd(cli: Cli, tmp_path: Path, etcd: str) -> None:
    words, _ = two_pods(cli, etcd, "--", sys.executable, "-c", SCRIPT)
    codes, pods = run_pods(words, tmp_path)
    assert codes == [0, 0], "\n".join(pod.err for pod in pods)
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0-of-2", "rank-1-of-2"]


@pytest.mark.etcd
@pytest.mark.slow
def test_replacement_pods_join_again(cli: Cli, tmp_path: Path, etcd: str) -> None:
    """A rendezvous closed in etcd stays closed for two hours."""
    words, _ = two_pods(cli, etcd, "--", sys.executable, "-c", FAILS_ONCE)
    codes, pods = run_pods(words, tmp_path)
    assert codes == [3, 3], "\n".join(pod.err for pod in pods)
    for _ in range(2):  # a run that has finished may be applied once more, too
        codes, pods = run_pods(words, tmp_path)
        assert codes == [0, 0], "\n".join(pod.err for pod in pods)


@pytest.mark.etcd
@pytest.mark.slow
def test_launched_pods_train_over_etcd(cli: Cli, tmp_path: Path, cache: Path, etcd: str) -> None:
    changes = {"trainer__grad_accum_steps": 4, "distributed__reproducible_reduce": True}
    # Not in tmp_path: it may be below /dev/shm, where a pod has a volume of its own.
    config = harness.tiny_config(Path("runs"), cache, distributed__strategy="ddp", output__run_id=None, **changes)
    (tmp_path / "train.json").write_text(json.dumps(config.as_dict()))
    words, pod_config = two_pods(cli, etcd, "--config", str(tmp_path / "train.json"))
    (tmp_path / "train.yaml").write_text(pod_config.replace("root_dir: /out", f"root_dir: {tmp_path / 'out'}"))
    words = [word.replace("/config/train.yaml", str(tmp_path / "train.yaml")) for word in words]
    codes, pods = run_pods([*words, "--json"], tmp_path)
    assert codes == [0, 0], "\n".join(pod.err for pod in pods)
    (result,) = [json.loads(pod.out) for pod in pods if pod.out]
    golden = ranks.trained(harness.tiny_config(tmp_path / "golden", cache, **changes), 1)
    assert (result["world_size"], result["state_sha256"]) == (2, golden["state_sha256"])
    assert (tmp_path / "out" / "train-llm").is_dir()


def test_missing_etcd_package_is_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "etcd.py").write_text("raise ModuleNotFoundError('No module named etcd')")
    monkeypatch.syspath_prepend(tmp_path / "none")  # the command is forked from this process
    done = start_cli(
        *("node", "--nodes", 2, "--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "127.0.0.1:2379", "--", "true"),
        cwd=tmp_path,
    )
    assert done.wait(30) == 64, done.err
    assert "python-etcd" in done.err


@pytest.mark.skipif(not HAS_MODULE, reason="needs the package python-etcd")
@pytest.mark.parametrize(
    "backend",
    ["etcd-v2", "etcd"],
)
def test_unreachable_etcd_is_join_error(tmp_path: Path, backend: str) -> None:
    done = start_cli(
        *("node", "--nodes", 2, "--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        *("--", "true"),
        cwd=tmp_path,
        env={"LLMTRAIN_DIST_TIMEOUT": "3"},
    )
    assert done.wait(60) == 69, done.err
    assert "Traceback" not in done.err

"""output.sync_uri from pods, with a login from a Secret, against the S3 server of the test cluster."""

import hashlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_faults import kill_pod, tool, waiting_at
from kube import HOME, SET, TOOLS, Kube, finished_hash

from llmtrain.runs.checksums import step_of

pytestmark = pytest.mark.slow  # needs an image with the extra s3

BUCKET = "e2e-runs"


@pytest.fixture(scope="module")
def s3(kube: Kube) -> Iterator[Any]:
    """The store as this machine sees it; pods get the same endpoint, and the login from the Secret s3-login."""
    boto3 = pytest.importorskip("boto3", reason="needs the s3 extra")
    if kube.kubeconfig != HOME / "run" / "admin.kubeconfig":
        pytest.skip("the S3 server is one of ../shared/kube")
    said = subprocess.run([str(TOOLS / "cluster"), "s3"], capture_output=True, text=True, check=True, timeout=60).stdout
    values = dict(re.findall(r"(AWS_\w+)=(\S+)", said))
    (HOME / "run" / "s3" / BUCKET).mkdir(exist_ok=True)
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    kube.kubectl("create", "secret", "generic", "s3-login", *(f"--from-literal={key}={values[key]}" for key in keys))
    yield boto3.client(
        "s3",
        endpoint_url=values["AWS_ENDPOINT_URL"],
        aws_access_key_id=values[keys[0]],
        aws_secret_access_key=values[keys[1]],
        region_name=values["AWS_DEFAULT_REGION"],
    )
    tool("kill-s3")


def words(s3: Any, prefix: str = "team/a", secret: str = "[s3-login]") -> list[str]:
    settings = {
        "output.sync_uri": f"s3://{BUCKET}/{prefix}",
        "launch.env_secrets": secret,
        "launch.env.AWS_ENDPOINT_URL_S3": s3.meta.endpoint_url,
        "launch.env.AWS_DEFAULT_REGION": "us-east-1",
    }
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def objects(s3: Any, prefix: str) -> dict[str, str]:
    """Name below the prefix -> SHA-256 of what is there."""
    found = {}
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        for row in page.get("Contents", ()):
            body = s3.get_object(Bucket=BUCKET, Key=row["Key"])["Body"].read()
            found[row["Key"].removeprefix(prefix)] = hashlib.sha256(body).hexdigest()
    return found


def check_copy(kube: Kube, s3: Any, run: str) -> None:
    """What is there is the run: every file that says so of itself, and what was kept of checkpoints."""
    there = objects(s3, f"team/a/{run}/")
    here = {
        path.relative_to(kube.volume("runs") / run).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((kube.volume("runs") / run).rglob("*"))
        if path.is_file()
    }
    # Who is alive is no part of a run; log, lock and exit reports are written until the very end.
    moving = {"logs", "heartbeats", "lock", "ended.json", "exits"}
    wanted = {
        name: value for name, value in here.items() if name.split("/")[0] not in moving and "/." not in f"/{name}"
    }
    assert {"finished.json", "metrics.jsonl", "config.yaml", "checkpoints/latest"} <= set(wanted)
    assert {name: there.get(name) for name in wanted} == wanted
    steps = {name.split("/")[1] for name in there if name.startswith("checkpoints/") and step_of(name.split("/")[1])}
    assert steps
    assert all(f"checkpoints/{step}/manifest.json" in there for step in steps)


def test_run_is_copied_after_a_pod_was_killed(kube: Kube, s3: Any, reference: str) -> None:
    run = "copied"
    with waiting_at(kube, run, "save_before_rename", 40) as wait:
        kube.llmtrain(*kube.launch_words("indexed_job", run, *SET, *words(s3), *wait), "--detach")
        kube.wait(run, lambda status: (status["step"] or 0) >= 20)
        kill_pod(kube, next(pod["name"] for pod in kube.status(run)["pods"] if pod["index"] == 0))
    kube.llmtrain("status", run, "--watch")
    assert finished_hash(kube, run) == reference
    check_copy(kube, s3, run)
    for item in kube.objects("pods,configmaps", "-l", f"llmtrain.dev/run={run}"):
        assert "llmtrain-secret" not in str(item)
    kube.llmtrain("delete", run)

"""What a cluster can say no to: each comes as one message with a remedy, and nothing is left behind."""

import base64
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube import Kube

OBJECTS = "configmaps,services,jobs,networkpolicies,persistentvolumeclaims"


def left(kube: Kube, run: str) -> list[str]:
    return [found["kind"] for found in kube.objects(OBJECTS, "-l", f"llmtrain.dev/run={run}")]


def refused(kube: Kube, run: str, *more: str, code: int = 64) -> str:
    began = time.monotonic()
    done = kube.llmtrain(*kube.launch_words("indexed_job", run, *more), expect=code, timeout=120)
    assert "Traceback" not in done.err
    assert time.monotonic() - began < 60
    return done.err


def test_missing_namespace(kube: Kube) -> None:
    err = refused(replace(kube, namespace="nowhere"), "lost")
    assert "namespace nowhere" in err.lower()


def test_unreachable_cluster(kube: Kube, tmp_path: Path) -> None:
    document = yaml.safe_load(kube.kubeconfig.read_text())
    document["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "away").write_text(yaml.safe_dump(document))
    err = refused(replace(kube, kubeconfig=tmp_path / "away"), "away", code=69)
    assert "Unable to connect" in err


@pytest.mark.slow
def test_an_image_that_cannot_be_pulled(kube: Kube) -> None:
    err = refused(replace(kube, image="nobody/has-this:1"), "no-image")
    assert "nobody/has-this:1" in err
    assert left(kube, "no-image") == []


def test_missing_claim(kube: Kube) -> None:
    err = refused(kube, "no-claim", "--set", "launch.data_volume.claim=corpus")
    assert "claim corpus" in err
    assert "Known: runs" in err
    assert left(kube, "no-claim") == []


@pytest.mark.slow
def test_missing_secret(kube: Kube) -> None:
    more = ["--set", "launch.env_secrets=[nothing]"]
    err = refused(kube, "no-secret", *more)
    assert "nothing" in err
    assert left(kube, "no-secret") == []


@pytest.mark.slow
def test_exceeded_quota(kube: Kube) -> None:
    quota: dict[str, Any] = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}}
    kube.apply({**quota, "spec": {"hard": {"pods": "0"}}})
    try:
        err = refused(kube, "too-many")
        assert "quota" in err
        assert "pods" in err
        assert left(kube, "too-many") == []
    finally:
        kube.kubectl("delete", "resourcequota", "few")


def test_an_object_of_somebody_else(kube: Kube) -> None:
    kube.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "mine"}, "spec": {"ports": [{"port": 80}]}})
    before = kube.kubectl("get", "service", "mine", "-o", "jsonpath={.metadata.resourceVersion}")
    err = refused(kube, "mine", "--resume")
    assert "Service mine" in err
    assert "does not belong to this run" in err
    assert left(kube, "mine") == []
    assert kube.kubectl("get", "service", "mine", "-o", "jsonpath={.metadata.resourceVersion}") == before
    assert "does not exist in namespace" in kube.llmtrain("delete", "mine", expect=64).err
    assert kube.kubectl("get", "service", "mine", "-o", "name").strip() == "service/mine"


@pytest.fixture(scope="module")
def visitor(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Kube:
    """Somebody who may do much, but make no jobs."""
    kube.kubectl("create", "serviceaccount", "visitor")
    resources = "configmaps,services,persistentvolumeclaims,networkpolicies.networking.k8s.io,pods"
    kube.kubectl("create", "role", "visitor", "--verb=get,list,create,delete,patch", f"--resource={resources}")
    kube.kubectl("create", "role", "jobs", "--verb=get,list", "--resource=jobs.batch")
    for role in ("visitor", "jobs"):
        account = f"--serviceaccount={kube.namespace}:visitor"
        kube.kubectl("create", "rolebinding", role, f"--role={role}", account)
    token = kube.kubectl("create", "token", "visitor").strip()
    document = yaml.safe_load(kube.kubeconfig.read_text())
    document["users"][0]["user"] = {"token": token}
    path = tmp_path_factory.mktemp("visitor") / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return replace(kube, kubeconfig=path)


def test_missing_permission_deletes_the_rest(kube: Kube, visitor: Kube) -> None:
    err = refused(visitor, "no-right")
    assert "Not allowed to create jobs" in err
    assert left(kube, "no-right") == []  # of what was made before the job
    assert json.loads(kube.kubectl("get", "services", "-l", "llmtrain.dev/run=no-right", "-o", "json"))["items"] == []


def test_status_of_a_stranger(visitor: Kube) -> None:
    done = visitor.local("status", "-A", "--kubeconfig", str(visitor.kubeconfig), expect=64)
    assert "Not allowed to list configmaps" in done.err


def test_token_from_a_file(kube: Kube) -> None:
    canary = "hf_" + "c4n4ry" * 6
    (kube.folder / ".env").write_text(f"OTHER=1\nHF_TOKEN={canary}\n")
    done = kube.llmtrain("secret", "hf-token", "--from-env-file", ".env")
    assert canary not in done.out + done.err
    secret = json.loads(kube.kubectl("get", "secret", "hf-token", "-o", "json"))
    assert base64.b64decode(secret["data"]["token"]).decode() == canary
    (kube.folder / ".env").write_text(f"HF_TOKEN={canary}2\n")
    kube.llmtrain("secret", "hf-token", "--from-env-file", ".env")
    secret = json.loads(kube.kubectl("get", "secret", "hf-token", "-o", "json"))
    assert base64.b64decode(secret["data"]["token"]).decode() == canary + "2"

"""The guard of a namespace, from its own pod: what it may, and what it tells. That it recovers runs is in
test_lost_node.py."""

import json

import pytest
from cluster_faults import wait_for
from kube import Kube
from webhook import webhook


def test_it_watches_tells_and_goes(kube: Kube) -> None:
    with webhook(kube) as told:
        kube.llmtrain("guard", "install", "--image", kube.image, "--webhook", told.url)
        status = kube.llmtrain("guard", "status", "--json")
        assert status.json["watching"]
        assert told.url not in status.out
        [role] = kube.objects("role")
        assert sorted(resource for rule in role["rules"] for resource in rule["resources"]) == ["pods", "pods/status"]
        kube.llmtrain(*kube.launch_words("indexed_job", "good", nodes=1), "--set", "distributed.strategy=none")
        bad = ["--set", "distributed.strategy=none", "--set", "data.cache_dir=/nowhere"]
        kube.llmtrain(*kube.launch_words("indexed_job", "bad", nodes=1), *bad, expect=65)
        wait_for(lambda: len(told.rows) >= 2, 30, f"two events: {told.rows}")
        # A guard that comes back knows what was told.
        kube.kubectl("delete", "pod", "-l", "llmtrain/guard", "--wait=true")
        wait_for(lambda: kube.llmtrain("guard", "status", "--json").json["watching"], 60, "the guard to be back")
        kube.llmtrain("delete", "good")
        kube.llmtrain("delete", "bad")
        kube.llmtrain("guard", "remove")
        assert [(row["event"], row["run"], row["exit_code"]) for row in told.rows] == [
            ("finished", "good", 0),
            ("failed", "bad", 65),
        ]
    assert not kube.llmtrain("guard", "status", "--json").json["installed"]
    kinds = "deployment,role,rolebinding,serviceaccount,secret"
    left = json.loads(kube.kubectl("get", kinds, "-o", "json", "-l", "app=llmtrain"))["items"]
    assert left == []


@pytest.mark.slow
def test_an_image_that_cannot_watch(kube: Kube) -> None:
    refused = kube.llmtrain("guard", "install", "--image", "no/such:image", expect=69)
    assert "ErrImagePull" in refused.err or "ImagePullBackOff" in refused.err
    assert "guard remove" in refused.err
    kube.llmtrain("guard", "remove")

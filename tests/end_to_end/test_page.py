"""`llmtrain page` beside a run on a cluster: while it trains, while a pod is replaced, and when all pods are gone."""

import http.cookiejar
import json
import re
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster_faults import waiting_at
from kube import SET, Kube, finished_hash

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
RUN = "seen"


class Page:
    """A browser without a screen: it has the cookie that the URL with the token gives."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._base = f"{parts.scheme}://{parts.netloc}"
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener = urllib.request.build_opener(cookies)
        self._opener.open(url, timeout=30).read()

    def get(self, path: str, **query: object) -> Any:
        url = f"{self._base}/api/{path}?{urllib.parse.urlencode(query)}"
        return json.load(self._opener.open(url, timeout=60))


def until(kube: Kube, read: Callable[[], Any], within: float = 300) -> Any:
    """The first value that is not empty."""
    deadline = time.monotonic() + within
    while not (value := read()):
        if time.monotonic() > deadline:
            pods = kube.kubectl("get", "pods", "-o", "wide") + kube.kubectl("get", "events")[-3000:]
            log = kube.llmtrain("logs", RUN).out[-6000:]
            pytest.fail(f"timed out: {json.dumps(kube.status(RUN), indent=1)}\n{pods}\n{log}")
        time.sleep(0.5)
    return value


@pytest.fixture
def page(kube: Kube) -> Iterator[Page]:
    process = kube.start("page", "--no-open", "--port", "0")
    assert process.stdout is not None
    url = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+token=\S+", line)))
    yield Page(url)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_run_is_shown_with_a_killed_pod_and_without_pods(kube: Kube, page: Page, reference: str) -> None:
    key = f"{kube.namespace}/{RUN}"

    def row() -> Any:
        return next((row for row in page.get("runs")["rows"] if row["key"] == key), None)

    with waiting_at(kube, RUN, "forward", 25) as wait:
        kube.llmtrain(*kube.launch_words("indexed_job", RUN, *SET, *wait), "--detach")
        running = until(kube, lambda: (now := row()) and (now["step"] or 0) >= 20 and now)
        assert (running["state"], running["pods"]) == ("running", 2)
        details = until(kube, lambda: (now := page.get("run", key=key)["details"])["pods"] and now)
        assert {pod["phase"] for pod in details["pods"]} == {"Running"}
        until(kube, lambda: "[TRAIN] step 20/" in page.get("log", key=key, rank=0)["text"])
        curve = until(kube, lambda: page.get("curves", key=key, metric="train/loss:100")["curves"]["train/loss"]["x"])
        assert max(curve) >= 20
        victim = next(pod["name"] for pod in details["pods"] if pod["index"] == 1)
        kube.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        until(kube, lambda: victim not in [pod["name"] for pod in page.get("run", key=key)["details"]["pods"]])
    ended = until(kube, lambda: (now := row()) and now["state"] == "finished" and now)
    assert ended["restarts"] >= 1

    def marks() -> set[str]:
        return {mark["kind"] for mark in page.get("curves", key=key, metric="train/loss:100")["marks"]}

    until(kube, lambda: "restart" in marks())

    assert finished_hash(kube, RUN) == reference

    kube.kubectl("delete", "pods", "--all", "--wait=true")
    until(kube, lambda: page.get("run", key=key)["details"]["pods"] == [])
    assert row()["state"] == "finished"
    text = until(kube, lambda: page.get("log", key=key, rank=0).get("text"))  # from the volume
    assert "[DONE]" in text
    assert page.get("log/search", key=key, rank=0, text="[DONE]")["matches"]
    kube.llmtrain("delete", RUN)
    until(kube, lambda: row() is None)

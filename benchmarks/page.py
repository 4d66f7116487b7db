"""`llmtrain page` in a real browser: how long lists and curves take, what they cost to send, and what the server needs.

python benchmarks/page.py [--runs 1000] [--rows 100000] [--ranks 512] [--seconds 30] [--rounds 5]

Needs the extra `page`, playwright and Debian's chromium. Each line ends with its ratio to the limit.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_MS = 240_000
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("runs", 1000), ("rows", 100_000), ("ranks", 512), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        sys.exit(print("skipped: playwright is not installed"))
    if CHROMIUM is None:
        sys.exit(print("skipped: chromium is not installed"))
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        make_runs(Path(directory), options)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; medians of {options.rounds}")
        measure_list(browser, Path(directory), options)
        measure_curve(browser, Path(directory), options)
        measure_latency(browser, Path(directory), options)
        measure_ranks(browser, Path(directory), options)
        browser.close()


def make_runs(directory: Path, options: argparse.Namespace) -> None:
    from demo_runs import make_run

    for number in range(options.runs):
        make_run(directory / "many", f"run-{number:05}", steps=100, extras=False, seed=number)
    make_run(directory / "one", "long", steps=options.rows, extras=False, started=time.time())
    make_run(directory / "one", "live", steps=100, max_steps=100_000, state="running")
    make_run(directory / "one", "wide", steps=50, max_steps=1000, state="running", world_size=options.ranks)


@contextlib.contextmanager
def served(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server as its own process, and the URL with the token."""
    command = [
        sys.executable,
        "-m",
        "llmtrain",
        "page",
        "--root",
        str(root),
        "--port",
        "0",
        "--no-open",
        "--no-cluster",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()


def enter(browser: Any, url: str) -> Any:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    page.wait_for_url(re.compile(r".*/$"))
    return page


def wait_text(page: Any, selector: str, pattern: str) -> None:
    script = "([s, p]) => new RegExp(p).test(document.querySelector(s)?.textContent ?? '')"
    page.wait_for_function(script, arg=[selector, pattern], polling=20)


def report(what: str, value: float, unit: str, limit: float) -> None:
    print(f"{what:52}{value:9.2f} {unit:4}{value / limit:7.2f} x the limit of {limit:g} {unit}", flush=True)


def measure_list(browser: Any, directory: Path, options: argparse.Namespace) -> None:
    """From the request for the page to the number of runs and the first rows on screen."""
    first, later, busy = [], [], []
    for _ in range(options.rounds):
        with served(directory / "many") as (_, url):
            page = enter(browser, url)
            for times in (first, later):
                page.goto("about:blank")
                page.wait_for_timeout(1000)
                started, before = time.perf_counter(), children_cpu_seconds()
                page.goto(url.split("?")[0])
                wait_text(page, ".toolbar", f"{options.runs:,} runs")
                page.wait_for_selector(".runs tbody tr:nth-child(20)" if options.runs > 20 else ".runs tbody tr")
                times.append(time.perf_counter() - started)
                busy.append(children_cpu_seconds() - before)
            page.context.close()
    report(f"{options.runs:,} runs listed", statistics.median(first), "s", 1.0)
    report("  again", statistics.median(later), "s", 1.0)
    report("  CPU time of server and browser together", statistics.median(busy), "s", 1.0)


def measure_curve(browser: Any, directory: Path, options: argparse.Namespace) -> None:
    """By a server that has not read the run before. Bytes as they travel, compressed; scripts and styles are cached."""
    times, sizes, busy = [], [], []
    for _ in range(options.rounds):
        with served(directory / "one") as (_, url):
            page = enter(browser, url)
            page.goto("about:blank")
            sent = count_bytes(page)
            page.wait_for_timeout(1000)
            started, before = time.perf_counter(), children_cpu_seconds()
            page.goto(f"{url.split('?')[0]}#/run/local/long")
            wait_text(page, "[data-chart=loss] .shown", f"of {options.rows:,} points")
            times.append(time.perf_counter() - started)
            busy.append(children_cpu_seconds() - before)
            page.wait_for_timeout(500)
            sizes.append(sum(size for path, size in sent if "/api/" in path) / 1000)
            page.context.close()
    report(f"curves of {options.rows:,} rows on screen", statistics.median(times), "s", 1.0)
    report("  CPU time of server and browser together", statistics.median(busy), "s", 1.0)
    report("  sent for it", statistics.median(sizes), "kB", 100.0)


def count_bytes(page: Any) -> list[tuple[str, int]]:
    """(URL, bytes) of everything that the page receives from now on."""
    sent: list[tuple[str, int]] = []
    urls: dict[str, str] = {}
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.requestWillBeSent", lambda event: urls.update({event["requestId"]: event["request"]["url"]}))
    session.on(
        "Network.dataReceived",
        lambda event: sent.append((urls.get(event["requestId"], ""), event["encodedDataLength"])),
    )
    return sent


def size_of(event: Any) -> int:
    return int(event["encodedDataLength"])


def measure_latency(browser: Any, directory: Path, options: argparse.Namespace) -> None:
    """From the write of a row to its number on screen."""
    from demo_runs import write_rows

    times, run, step = [], directory / "one" / "live", 100
    with served(directory / "one") as (_, url), kept_alive(directory / "one"):
        page = enter(browser, url)
        page.goto(f"{url.split('?')[0]}#/run/local/live")
        wait_text(page, "[data-chart=loss] .shown", "of 100 points")
        for _ in range(2 * options.rounds):
            time.sleep(random.random())
            step += 1
            write_rows(run, step, step, time.time(), 0.5, 6e-4, 100_000)
            started = time.perf_counter()
            wait_text(page, "[data-chart=loss] .shown", f"of {step:,} points")
            times.append(time.perf_counter() - started)
        page.context.close()
    report("a new row on screen, slowest", max(times), "s", 2.0)


def measure_ranks(browser: Any, directory: Path, options: argparse.Namespace) -> None:
    """Heartbeats of all ranks every two seconds, and one viewer."""
    from demo_runs import write_heartbeats

    run, stop = directory / "one" / "wide", threading.Event()

    def beat() -> None:
        step = 50
        while not stop.wait(2.0):
            step += 1
            write_heartbeats(run, options.ranks, step, time.time())

    writer = threading.Thread(target=beat, daemon=True)
    with served(directory / "one") as (process, url), kept_alive(directory / "one"):
        page = enter(browser, url)
        page.goto(f"{url.split('?')[0]}#/run/local/wide/ranks")
        page.wait_for_function("(count) => document.querySelectorAll('.cell').length === count", arg=options.ranks)
        writer.start()
        wait_text(page, ".keys", "step 5[2-9]")
        before, started = cpu_seconds(process.pid), time.perf_counter()
        page.wait_for_timeout(options.seconds * 1000)
        share = (cpu_seconds(process.pid) - before) / (time.perf_counter() - started)
        memory = resident_bytes(process.pid) / 1e6
        stop.set()
        writer.join()
        page.context.close()
    report(f"{options.ranks} ranks, server CPU per viewer", 100 * share, "%", 5.0)
    report("  its memory", memory, "MB", 150.0)


@contextlib.contextmanager
def kept_alive(root: Path) -> Iterator[None]:
    """The locks of running runs are refreshed."""
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(5.0):
            for lock in root.glob("*/lock"):
                os.utime(lock)

    for lock in root.glob("*/lock"):
        os.utime(lock)
    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def children_cpu_seconds() -> float:
    """Of all processes that this one has started, directly or not: it says more than seconds on a busy machine."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    own, total = {os.getpid()}, 0.0
    while new := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= new
    for pid in own - {os.getpid()}:
        with contextlib.suppress(OSError):
            total += cpu_seconds(pid)
    return total


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()

"""Write the pictures of the page in docs/images: a list of runs, one run, the ranks of a large run.

python tools/page_screenshots.py [--to docs/images]

Needs the extra `page`, playwright, pillow and Debian's chromium. The runs are made up (tests/demo_runs.py).
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
COLORS = 256
SIZE = {"width": 1280, "height": 800}
DAY = 86400


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", default=str(ROOT / "docs" / "images"))
    target = Path(parser.parse_args().to)
    target.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        runs = Path(directory) / "runs"
        make_runs(runs)
        command = [sys.executable, "-m", "llmtrain", "page", "--port", "0", "--no-open", "--no-cluster"]
        server = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout
            take(driver, server.stdout.readline().split()[-1], runs, target)
        finally:
            server.terminate()
            server.wait()


def make_runs(root: Path) -> None:
    from demo_runs import make_run

    now = time.time()
    make_run(root, "gpt2-124m", steps=5200, max_steps=19_000, state="running", world_size=8, started=now - 2605)
    for number, (rate, age) in enumerate((("3e-4", 2.1), ("6e-4", 1.4), ("1e-3", 0.6))):
        name = f"gpt2-124m-lr{rate}"
        make_run(root, name, steps=4000, world_size=8, lr=float(rate), seed=number, started=now - age * DAY)
    make_run(root, "llama-1b-lora", steps=70, max_steps=400, state="failed", seed=4, started=now - 7200)
    old = now - 3 * DAY
    make_run(root, "spot-pretrain", steps=2100, max_steps=8000, state="interrupted", world_size=16, started=old)
    big = {"steps": 1900, "max_steps": 40_000, "world_size": 256, "seed": 6}
    make_run(root, "pretrain-256", state="running", started=now - 955, **big)
    make_run(root, "shakespeare", steps=900, seed=7, device="cpu", started=now - 6 * DAY)


def take(driver: Any, url: str, runs: Path, target: Path) -> None:
    from demo_runs import write_heartbeats

    browser = driver.chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    )
    pictures = {
        "page-runs": ("", ".spark polyline", "light"),
        "page-run": ("#/run/local/gpt2-124m", "[data-chart=lr] canvas", "light"),
        "page-ranks": ("#/run/local/pretrain-256/ranks", ".cell.silent", "dark"),
    }
    for name, (place, selector, scheme) in pictures.items():
        for lock in runs.glob("*/lock"):
            os.utime(lock)
        write_heartbeats(runs / "pretrain-256", 256, 1900, time.time(), silent=(77,), slow=(200, 201))
        write_heartbeats(runs / "gpt2-124m", 8, 5200, time.time())
        page = browser.new_context(viewport=SIZE, color_scheme=scheme).new_page()
        page.set_default_timeout(120_000)
        page.goto(url)
        page.wait_for_url(re.compile(r".*/$"))
        page.goto(f"{url.split('?')[0]}{place}")
        page.wait_for_selector(selector, state="attached")
        page.wait_for_timeout(3000)
        save(page.screenshot(), target / f"{name}.png")
    browser.close()


def save(data: bytes, path: Path) -> None:
    """With a palette: a third of the bytes. `kmeans` keeps the color of large areas."""
    from PIL import Image

    Image.open(io.BytesIO(data)).convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, kmeans=3).save(
        path, optimize=True
    )
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

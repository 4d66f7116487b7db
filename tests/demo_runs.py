"""Run directories as llmtrain writes them, without training: for tests, benchmarks and pictures of the page."""

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

HOSTILE = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
"""Text that a page must show, and not run."""

CONFIG = """\
schema_version: 3
run:
  name: {name}
  seed: {seed}
model:
  name: gpt
  d_model: 768
  n_layers: 12
data:
  name: text
  files: [data/web.txt]
trainer:
  lr: {lr}
  max_steps: {max_steps}
  micro_batch_size: 16
"""


def make_run(
    root: Path,
    run_id: str,
    *,
    steps: int = 100,
    max_steps: int | None = None,
    state: str = "finished",
    started: float | None = None,
    world_size: int = 1,
    step_sec: float = 0.5,
    lr: float = 6e-4,
    seed: int = 0,
    device: str = "cuda",
    device_name: str = "NVIDIA H200",
    prices: str = "",
    message: str = "Loss is not finite in step 70.",
    extras: bool = True,
) -> Path:
    """`state`: finished, running (by a lock that is alive), interrupted, failed or killed. `prices`: of the
    config, as YAML. `extras`: also logs, checkpoints, samples and heartbeats."""
    run = root / run_id
    run.mkdir(parents=True)
    now = time.time()
    started = started if started is not None else now - steps * step_sec - 5
    stamp = _stamp(started)
    max_steps = max_steps or steps
    config = CONFIG.format(name=run_id, seed=seed, lr=lr, max_steps=max_steps)
    if prices:
        config += f"plan:\n  prices: {prices}\n"
    (run / "config.yaml").write_text(config)
    machine = {"host": "node-a", "device": device, "platform": "Linux", "python": "3.11"}
    _write(run / "meta.json", {"run_id": run_id, "name": run_id, "started_at": stamp, "machine": machine})
    ended = {"interrupted": "stopped", "failed": "failed", "finished": "finished"}.get(state)
    row = {"generation": 1, "started_at": stamp, "host": "node-a", "world_size": world_size, "from_step": 0}
    row |= {"to_step": max_steps, "crashes": 0, "ended": ended, "step": steps if ended else None}
    row |= {"device_name": device_name}
    _write(run / "generations.json", [row])
    write_rows(run, 1, steps, started, step_sec, lr, max_steps, seed)
    if state == "finished":
        result = {"status": "finished", "steps": steps, "parameters": 124_000_000}
        result |= {"sample_prompt": "Once upon a time", "sample": "there was a model that had finished."}
        _write(run / "finished.json", result)
    if state == "running":
        hold_lock(run)
    if state in ("failed", "interrupted", "finished"):
        write_exit(run, state, steps, message, at=started + 5 + steps * step_sec)
    if extras:
        add_extras(run, steps, world_size, now, started + 5 + steps * step_sec / 2)
    return run


def write_rows(
    run: Path, first: int, last: int, started: float, step_sec: float, lr: float, max_steps: int, seed: int = 0
) -> None:
    """Append the rows of some steps to metrics.jsonl."""
    rng = random.Random(seed * 1_000_003 + first)
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            at = round(started + 5 + step * step_sec, 3)
            file.write(json.dumps(train_row(step, at, lr, max_steps, rng)) + "\n")
            if step % max(1, max_steps // 20) == 0:
                value = base_loss(step, lr) + 0.06 + rng.gauss(0, 0.01)
                row = {
                    "step": step,
                    "val/loss": value,
                    "val/perplexity": math.exp(value),
                    "val/is_best": 1.0,
                    "time": at,
                }
                file.write(json.dumps({**row, "val/bits_per_byte": value / math.log(2) / 4.4}) + "\n")


def base_loss(step: int, lr: float) -> float:
    return 2.6 + 8.2 / (1 + step * lr * 200) ** 0.55


def train_row(step: int, at: float, lr: float, max_steps: int, rng: random.Random) -> dict[str, Any]:
    left = max(0, max_steps - step)
    return {
        "step": step,
        "train/loss": base_loss(step, lr) + rng.gauss(0, 0.06) + (0.9 if rng.random() < 0.002 else 0),
        "train/lr": lr * min(1.0, step / (0.02 * max_steps + 1)) * (0.55 + 0.45 * math.cos(math.pi * step / max_steps)),
        "train/grad_norm": 0.35 + 3 / (1 + step * 0.02) + abs(rng.gauss(0, 0.05)),
        "train/tokens": step * 524_288,
        "train/epoch": step / max_steps,
        "train/tokens_per_second": 1_048_000 + rng.gauss(0, 6000) - (250_000 if rng.random() < 0.004 else 0),
        "train/seconds_left": left * 0.5,
        "train/mfu": 0.472 + rng.gauss(0, 0.003),
        "train/peak_memory_bytes": 61_400_000_000 + (step > 50) * 1_300_000_000,
        "time": at,
    }


def hold_lock(run: Path) -> None:
    """A lock whose owner is another machine with a fresh heartbeat; `touch` it to keep the run running."""
    _write(run / "lock", {"token": "demo", "pid": 1, "host": "node-a", "boot": "other", "namespace": "other"})


def write_exit(run: Path, state: str, step: int, message: str, generation: int = 1, *, at: float) -> None:
    codes = {"failed": (65, "TrainingFailed", "not_finite"), "interrupted": (75, "Interrupted", None)}
    code, error, reason = codes.get(state, (0, "", None))
    text = message if code == 65 else f"Interrupted at step {step}; checkpoint saved." if code else ""
    remedy = "Lower trainer.lr, or set trainer.grad_clip to 1.0." if code == 65 else None
    report = {"exit_code": code, "error": error, "reason": reason, "message": text, "remedy": remedy, "step": step}
    report |= {"generation": generation, "pod": "node-a", "node": "", "time": _stamp(at), "silent_ranks": []}
    (run / "exits").mkdir(exist_ok=True)
    name = time.strftime("%Y%m%d%H%M%S", time.gmtime(at))
    _write(run / "exits" / f"{name}-node-a-0.json", report)


def add_extras(run: Path, steps: int, world_size: int, now: float, middle: float) -> None:
    (run / "logs").mkdir()
    lines = [
        f"2026-11-17 12:00:00 [TRAIN] step {step}/{steps} | loss {base_loss(step, 6e-4):.4f}" for step in range(steps)
    ]
    (run / "logs" / "train.log").write_text("\n".join(lines[-5000:]) + "\n")
    if world_size > 1:
        (run / "logs" / "rank-1.log").write_text("2026-11-17 12:00:00 [DDP] rank 1 is ready\n")
    for step, at in ((max(1, steps // 2), middle), (steps, middle + 0.25 * steps)):
        directory = run / "checkpoints" / f"step_{step}"
        directory.mkdir(parents=True, exist_ok=True)
        files = {
            "model.safetensors": {"bytes": 497_759_232, "sha256": "0"},
            "state.json": {"bytes": 1800, "sha256": "0"},
        }
        _write(directory / "manifest.json", {"files": files, "sha256": "0"})
        os.utime(directory / "manifest.json", (at, at))
    for name in ("latest", "best"):
        (run / "checkpoints" / name).write_text(f"step_{steps}\n")
    (run / "samples").mkdir()
    answers = [{"prompt": "Once upon a time", "answer": f"there was a gradient of step {steps}. {HOSTILE}"}]
    _write(run / "samples" / f"step_{steps}.json", answers)
    write_heartbeats(run, world_size, steps, now)


def write_heartbeats(
    run: Path,
    world_size: int,
    step: int,
    now: float,
    silent: tuple[int, ...] = (),
    slow: tuple[int, ...] = (),
    silent_sec: float = 95.0,
) -> None:
    directory = run / "heartbeats"
    directory.mkdir(exist_ok=True)
    _write(directory / "generation.json", {"generation": 1})
    for rank in range(world_size):
        beat = {"rank": rank, "host": f"{run.name}-{rank // 8}", "pid": 1, "generation": 1, "beat": int(now)}
        beat |= {"step": step - 4 * (rank in slow), "progress": step, "time": now - silent_sec * (rank in silent)}
        temporary = directory / f".rank-{rank}.json"
        temporary.write_text(json.dumps(beat))
        temporary.replace(directory / f"rank-{rank}.json")


def add_starts(run: Path, starts: list[tuple[float, float, str | None]]) -> None:
    """Earlier starts of a run: (begin, end, how it ended) of each; None: without an exit report."""
    (last,) = json.loads((run / "generations.json").read_text())
    rows, step = [], 0
    for number, (begin, end, ended) in enumerate(starts, 1):
        new = {"generation": number, "started_at": _stamp(begin), "ended": ended, "from_step": step}
        step += int((end - begin) / 0.5)
        rows.append({**last, **new, "step": step if ended else None})
        if ended:
            write_exit(run, {"stopped": "interrupted"}.get(ended, ended), step, "Loss is not finite.", number, at=end)
    _write(run / "generations.json", [*rows, {**last, "generation": len(starts) + 1, "from_step": step}])


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(at))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))

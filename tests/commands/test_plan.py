"""llmtrain plan."""

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.limits import limit
from tests.plan.plan_cases import LLAMA_1B, make_llama

from slow_cases import some

SMOKE = ("plan", "--config", "gpt_smoke")
ON_CPU = (*SMOKE, "--set", "run.device=cpu")


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_exit_code_says_whether_a_run_fits(cli) -> None:
    codes = {}
    for memory in ("8GB", "100MB"):
        codes[memory] = cli(*ON_CPU, "--memory", memory).code
    codes["not known"] = cli(*SMOKE, "--set", "run.device=cuda").code
    assert codes == {"8GB": 0, "100MB": 1, "not known": 2}


def test_json_has_every_part(cli) -> None:
    done = cli(*SMOKE, "--gpu", "h100-80g", "--nodes", 1, "--json")
    assert done.code == 0, done.err
    value = done.json
    assert value.keys() >= {"verdict", "reason", "target", "model", "memory", "time", "cost", "change", "options"}
    assert value["verdict"] == "fits"
    assert value["target"]["gpu"] == "h100-80g"
    assert value["target"]["world_size"] == 1
    memory = value["memory"]
    states = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert memory["peak"] > states + memory["activations"]
    assert memory["needed"] == memory["peak"] + memory["overhead"]
    assert memory["unknown"] == {}
    assert (value["change"], value["options"]) == (None, None)
    assert value["time"]["tokens_per_second"] > 0
    assert value["time"]["run_id"] is None


def test_without_prices_only_gpu_hours_are_known(cli) -> None:
    done = cli(*SMOKE, "--gpu", "h100-80g", "--json")
    assert done.json["cost"]["gpu_hours"] >= 0
    assert done.json["cost"]["cost"] is None
    prices = ("--set", 'plan.prices.gpu_hour={"h100-80g": 2.5}')
    priced = cli(*SMOKE, *prices, "--gpu", "h100-80g", "--json")
    assert priced.json["cost"]["cost"] == pytest.approx(2.5 * priced.json["cost"]["gpu_hours"])


def test_run_that_does_not_fit_gets_the_cheapest_change(cli) -> None:
    large = ("--set", "trainer.micro_batch_size=4096", "--set", "trainer.grad_accum_steps=1")
    done = cli(*SMOKE, *large, "--memory", "1500MB", "--json")
    assert done.code == 1
    settings = done.json["change"]["settings"]
    sequences = settings["trainer.micro_batch_size"] * settings["trainer.grad_accum_steps"]
    assert sequences == 4096
    assert done.json["change"]["verdict"] == "fits"


def test_find_lists_options(cli) -> None:
    done = cli(*ON_CPU, "--memory", "8GB", "--find", "--json")
    assert done.code == 0
    assert len(done.json["options"]) == 3
    assert done.json["options"][0]["settings"] == {}
    found = cli(*ON_CPU, "--memory", "1MB", "--find")
    assert found.code == 1
    assert "Nothing fits" in found.out


def test_find_without_known_memory_does_not_say_that_nothing_fits(cli) -> None:
    found = cli(*SMOKE, "--set", "run.device=cuda", "--find")
    assert found.code == 2
    assert "No setting is known to fit" in found.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--gpu", "h900"), "h100-80g"),
        (("--memory", "much"), "24GB"),
        (("--memory", "0"), "24GB"),
        (("--set", "model.name=gtp"), "gpt"),
        (("--set", "trainer.micro_batch_size=0"), "micro_batch_size"),
        (("--processes-per-node", "3", "--set", "trainer.grad_accum_steps=2"), "grad_accum_steps"),
        (("--nodes", "0"), "nodes"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_bad_input_is_a_usage_error(cli, words: tuple[str, ...], expected: str) -> None:
    done = cli(*(SMOKE if words[0] != "--config" else ("plan",)), *words)
    assert done.code == 64
    assert expected in done.err
    assert "Traceback" not in done.err


@pytest.fixture
def silent_hub() -> Iterator[list[int]]:
    """A hub that breaks every connection off. [number of connections, port]"""
    counted = [0, 0]

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            counted[0] += 1

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        counted[1] = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield counted
        server.shutdown()


@pytest.mark.hf
@pytest.mark.parametrize("offline", some(["0", "1"], "1"))
def test_model_that_is_only_on_the_hub_says_what_to_fetch(silent_hub: list[int], workdir: Path, offline: str) -> None:
    """Without a network nothing is tried again: the library would for half a minute."""
    pytest.importorskip("huggingface_hub")
    model = ("model.name=hf_causal_lm", "model.path=someone/model", "model.block_size=64")
    data = ("data.name=instruct_jsonl", "data.train_file=examples.jsonl")
    words = [word for each in (*model, *data) for word in ("--set", each)]
    hub = {
        "HF_ENDPOINT": f"http://127.0.0.1:{silent_hub[1]}",
        "HF_HOME": str(workdir / "hub"),
        "HF_HUB_OFFLINE": offline,
    }
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "plan", *words, "--gpu", "h100-80g"],
        env=os.environ | hub,
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=False,
    )
    assert done.returncode == 64
    assert "llmtrain fetch-model someone/model" in done.stderr
    assert "Traceback" not in done.stderr
    assert silent_hub[0] <= (2 if offline == "0" else 0)  # six more with the retries of the library


@pytest.mark.hf
def test_llama_needs_only_its_config(cli, workdir: Path) -> None:
    pytest.importorskip("peft")
    model = {**make_llama(workdir / "llama", LLAMA_1B), "block_size": 2048, "lora": {"rank": 16}, "dtype": "bfloat16"}
    config = {
        "model": model,
        "data": {"name": "instruct_jsonl", "train_file": "examples.jsonl"},
        "trainer": {"micro_batch_size": 8, "precision": "bf16"},
    }
    (workdir / "llama.yaml").write_text(json.dumps(config))
    done = cli("plan", "--config", "llama.yaml", "--gpu", "l40s-48g", "--json")
    assert done.code in (0, 1), done.err
    assert 1.2e9 < done.json["model"]["parameters"] < 1.3e9
    assert 2.4e9 < done.json["memory"]["weights"] < 2.7e9
    assert done.json["time"]["tokens_per_second"] is not None

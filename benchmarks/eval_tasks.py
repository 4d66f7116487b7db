"""Seconds to score multiple choice items, compared with lm_eval's own model class (HFLM) on the same model directory.

    python benchmarks/eval_tasks.py [--model DIR --items 40 --rounds 3 --layouts 'short answers']

Both sides compute the log-likelihoods of the same choices in float32, with the same batch size, on the same threads.
The items have the lengths of two well-known tasks: long endings of a long text, and short answers to a short question.
Without --model it is a random GPT of bytes. Prints every round, the medians of the ratios of time and of CPU time
(which other work on the machine changes less), and how far the log-likelihoods are apart. Needs the extra `eval`.
"""

import argparse
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

WORDS = ["a", "the", "old", "red", "man", "dog", "house", "river", "takes", "finds", "to", "from", "with", "slowly"]
LAYOUTS = {"long endings": (60, 18), "short answers": (22, 4)}
"""Words of the question, and of each of the four choices."""


def random_model(directory: Path) -> Path:
    from llmtrain.config.model import ModernGptSection
    from llmtrain.data.tokenizers.byte import ByteTokenizer
    from llmtrain.models.gpt.adapter import GPTAdapter

    adapter = GPTAdapter(ModernGptSection(n_layers=4, d_model=256, block_size=1024), 256)
    torch.manual_seed(0)
    module = adapter.build()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
    adapter.export(module, directory, end_of_text=0)
    ByteTokenizer().export(directory, 1024)
    return directory


def make_pairs(count: int, question: int, choice: int) -> list[list[tuple[str, str]]]:
    """Per item its (question, choice) pairs."""
    rng = random.Random(0)

    def text(length: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(length // 2, length * 3 // 2)))

    items = []
    for _ in range(count):
        asked = text(question)
        items.append([(asked, " " + text(choice)) for _ in range(4)])
    return items


def ours(directory: Path, batch_size: int) -> Callable[[list[list[tuple[str, str]]]], list[float]]:
    from llmtrain.core.arguments import Source
    from llmtrain.inference.load import load_model
    from llmtrain.inference.tasks import TaskOptions, task_model
    from llmtrain.training.tasks.likelihoods import Request, log_likelihoods

    loaded = load_model(Source(model=str(directory)), "cpu")
    model = task_model(loaded, loaded.computing, TaskOptions(batch_size, chat_template=False))

    def score(items: list[list[tuple[str, str]]]) -> list[float]:
        requests = []
        for number, item in enumerate(items):
            requests += [Request(*model.encode_pair(*pair), number) for pair in item]
        return [each.value for each in log_likelihoods(model, requests)]

    return score


def theirs(directory: Path, batch_size: int) -> Callable[[list[list[tuple[str, str]]]], list[float]]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(directory), dtype="float32", device="cpu", batch_size=batch_size)

    def score(items: list[list[tuple[str, str]]]) -> list[float]:
        requests: list[Any] = [Instance("loglikelihood", {}, pair, 0) for item in items for pair in item]
        return [value for value, _ in model.loglikelihood(requests, disable_tqdm=True)]

    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments = parser.parse_args()
    if find_spec("lm_eval") is None:
        print("skipped: needs lm_eval (pip install 'llmtrain[eval]')")
        return
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        directory = arguments.model or random_model(Path(folder))
        sides = {"llmtrain": ours(directory, arguments.batch_size), "HFLM": theirs(directory, arguments.batch_size)}
        for name in arguments.layouts:
            items = make_pairs(arguments.items, *LAYOUTS[name])
            compare(name, items, sides, arguments.rounds)


def compare(
    name: str,
    items: list[list[tuple[str, str]]],
    sides: dict[str, Callable[[list[list[tuple[str, str]]]], list[float]]],
    rounds: int,
) -> None:
    ratios = []
    cpu_ratios = []
    found = {side: score(items[:2]) for side, score in sides.items()}  # warm up
    for number in range(rounds):
        seconds = {}
        cpu_seconds = {}
        for side, score in sides.items():
            started = time.perf_counter()
            cpu_started = time.process_time()
            found[side] = score(items)
            seconds[side] = time.perf_counter() - started
            cpu_seconds[side] = time.process_time() - cpu_started
        ratios.append(seconds["HFLM"] / seconds["llmtrain"])
        cpu_ratios.append(cpu_seconds["HFLM"] / cpu_seconds["llmtrain"])
        sides_text = [f"{side} {seconds[side]:.2f} s (CPU {cpu_seconds[side]:.2f} s)" for side in sides]
        print(f"{name}, round {number + 1}: {', '.join(sides_text)}", flush=True)
    apart = max(abs(mine - other) for mine, other in zip(found["llmtrain"], found["HFLM"], strict=True))
    median = statistics.median(ratios)
    cpu_median = statistics.median(cpu_ratios)
    print(f"{name}: ratio {median:.2f}, of CPU time {cpu_median:.2f}, log-likelihoods at most {apart:.1e} apart")


if __name__ == "__main__":
    main()

"""Data for stock tasks of lm_eval, in the layouts of their data sets, with rows that are made here."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_llama import WORDS

Row = dict[str, Any]
TASKS = ("hellaswag", "arc_easy", "piqa", "winogrande", "lambada_openai", "openbookqa", "sciq", "boolq")


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def hellaswag(rng: random.Random) -> Row:
    return {
        "activity_label": words(rng, 1, 2).capitalize(),
        "ctx_a": words(rng, 3, 9),
        "ctx_b": words(rng, 1, 3),
        "endings": [f"{words(rng, 1, 6)} [title] {words(rng, 1, 3)}." for _ in range(4)],
        "label": str(rng.randrange(4)),
    }


def lettered(rng: random.Random) -> Row:
    labels = ["A", "B", "C", "D"]
    choices = {"text": [words(rng, 1, 4) for _ in labels], "label": labels}
    return {"choices": choices, "answerKey": rng.choice(labels)}


def arc_easy(rng: random.Random) -> Row:
    return {"question": words(rng, 4, 12) + "?", **lettered(rng)}


def openbookqa(rng: random.Random) -> Row:
    return {"question_stem": words(rng, 4, 12), **lettered(rng)}


def piqa(rng: random.Random) -> Row:
    return {
        "goal": words(rng, 3, 8),
        "sol1": words(rng, 2, 8),
        "sol2": words(rng, 2, 8),
        "label": rng.randrange(2),
    }


def winogrande(rng: random.Random) -> Row:
    return {
        "sentence": f"{words(rng, 3, 8)} _ {words(rng, 2, 6)}.",
        "option1": rng.choice(WORDS),
        "option2": rng.choice(WORDS),
        "answer": rng.choice(["1", "2"]),
    }


def lambada_openai(rng: random.Random) -> Row:
    return {"text": words(rng, 10, 20)}


def sciq(rng: random.Random) -> Row:
    return {
        "question": words(rng, 3, 9) + "?",
        "support": words(rng, 0, 9),
        "correct_answer": words(rng, 1, 2),
        **{f"distractor{number}": words(rng, 1, 2) for number in (1, 2, 3)},
    }


def boolq(rng: random.Random) -> Row:
    return {"passage": words(rng, 5, 15), "question": words(rng, 3, 6), "label": rng.randrange(2)}


# Task -> (its data set on the hub, its configuration there, the function that makes a row)
DATA: dict[str, tuple[str, str | None, Callable[[random.Random], Row]]] = {
    "hellaswag": ("Rowan/hellaswag", None, hellaswag),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", arc_easy),
    "piqa": ("baber/piqa", None, piqa),
    "winogrande": ("allenai/winogrande", "winogrande_xl", winogrande),
    "lambada_openai": ("EleutherAI/lambada_openai", "default", lambada_openai),
    "openbookqa": ("allenai/openbookqa", "main", openbookqa),
    "sciq": ("allenai/sciq", None, sciq),
    "boolq": ("aps/super_glue", "boolq", boolq),
}


def dataset_files(task: str, count: int) -> dict[str, bytes]:
    """The files of a data set with the card that says which file is which split."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    _, config, make_row = DATA[task]
    folder = config or "data"
    rng = random.Random(task)
    files = {}
    for split in ("train", "validation", "test"):
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([make_row(rng) for _ in range(count)]), buffer)
        files[f"{folder}/{split}-00000-of-00001.parquet"] = buffer.getvalue()
    lines = ["---", "configs:", f"- config_name: {config or 'default'}", "  data_files:"]
    for split in ("train", "validation", "test"):
        lines += [f"  - split: {split}", f"    path: {folder}/{split}-*"]
    files["README.md"] = "\n".join([*lines, "---", "# Made for tests", ""]).encode()
    return files


def write_task_data(directory: Path, tasks: tuple[str, ...] = TASKS, count: int = 40) -> Path:
    """As `llmtrain fetch-tasks` leaves them."""
    for task in tasks:
        for name, data in dataset_files(task, count).items():
            path = directory / DATA[task][0] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return directory

"""Preference tuning by the command line: after supervised fine-tuning, with an objective of one's own, and errors."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.runs.metrics import read_metrics
from preference_data import make_pairs
from tiny_llama import make_examples, make_model

pytestmark = pytest.mark.hf
LN_2 = 0.6931471805599453
Train = Callable[..., Any]
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture
def train(cli: Any, workdir: Path) -> Train:
    """`llmtrain train` with a model, examples and pairs in the current directory; `sft.yaml` and `dpo.yaml`."""
    make_model(workdir / "base")
    make_examples(workdir / "examples.jsonl", 24)
    make_pairs(workdir / "pairs.jsonl", 12)
    make_pairs(workdir / "val.jsonl", 3, first=100)
    common: dict[str, Any] = {
        "run": {"name": "tiny", "device": "cpu", "threads": 1},
        "model": {"name": "hf_causal_lm", "path": "base", "block_size": 96, "lora": LORA},
        "trainer": {"max_steps": 4, "micro_batch_size": 1, "grad_accum_steps": 2, "lr": 1e-2, "log_every_steps": 1},
        "data": {"cache_dir": str(workdir / "cache")},
    }
    common["trainer"]["schedule"] = "constant"
    supervised = {**common, "data": {**common["data"], "name": "instruct_jsonl", "train_file": "examples.jsonl"}}
    pairs = {"name": "preference_jsonl", "train_file": "pairs.jsonl", "val_file": "val.jsonl"}
    preference = {
        **common,
        "data": {**common["data"], **pairs},
        "trainer": {**common["trainer"], "objective": {"name": "dpo"}},
    }
    (workdir / "sft.yaml").write_text(yaml.safe_dump(supervised))
    (workdir / "dpo.yaml").write_text(yaml.safe_dump(preference))

    def run(*words: str, **changes: Any) -> Any:
        sets = [part for name, value in changes.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
        return cli("train", *words, *sets, "--json")

    return run


def first_loss(run: Path) -> float:
    return float(next(read_metrics(run / "metrics.jsonl"))["train/loss"])


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_supervised_then_dpo_is_two_commands(train: Train, cli: Any, workdir: Path, lora: bool) -> None:
    """The reference is the model as it was fine-tuned, and not its base: the first loss is ln 2. If the reference is
    lost, a resumed run computes it from the run it started from, and ends with the same bits."""
    model = {} if lora else {"model__lora": "null"}
    assert train("-c", "sft.yaml", output__run_id="sft", **model).code == 0
    done = train("-c", "dpo.yaml", "--from", "sft", output__run_id="tuned", **model)
    assert done.code == 0, done.err
    assert first_loss(workdir / "runs" / "tuned") == pytest.approx(LN_2, abs=1e-6)
    shown = cli("runs", "show", "tuned")
    assert "objective     dpo, beta 0.1, label_smoothing 0, from sft at step 4" in shown.out
    assert re.search(r"pairs +validation accuracy .*%, margin .*, logps_chosen -.*, logps_rejected -.*, kl ", shown.out)
    compared = cli("runs", "compare", "sft", "tuned")
    assert "objectives differ (next_token, dpo)" in compared.out
    assert "Best" not in compared.out
    # From the config of the first run, with changes alone
    changes = {"data__name": "preference_jsonl", "data__train_file": "pairs.jsonl", "data__val_file": "val.jsonl"}
    same = train("--from", "sft", output__run_id="same", trainer__objective__name="dpo", **changes)
    assert same.code == 0, same.err
    assert same.json["state_sha256"] == done.json["state_sha256"]

    half = train("-c", "dpo.yaml", "--from", "sft", output__run_id="half", trainer__max_steps=2, **model)
    assert half.code == 0, half.err
    shutil.rmtree(workdir / "cache" / "references")
    rest = train("--resume", "half", trainer__max_steps=4)
    assert rest.code == 0, rest.err
    assert rest.json["state_sha256"] == done.json["state_sha256"]

    shutil.rmtree(workdir / "cache" / "references")
    checkpoint = CheckpointStore(workdir / "runs" / "sft" / "checkpoints").best()
    assert checkpoint is not None
    shutil.rmtree(checkpoint.path)
    gone = train("--resume", "half", trainer__max_steps=6)
    assert gone.code == 65
    assert "Traceback" not in gone.err


OBJECTIVE = """
import torch
from pydantic import BaseModel

from llmtrain.training.objectives.preference import Answers, PreferenceObjective


class Hinge(PreferenceObjective):
    needs_reference = True

    class Options(BaseModel):
        margin: float = 1.0

    options: Options

    def losses(self, answers: Answers) -> torch.Tensor:
        ratios = answers.ratios
        return torch.relu(self.options.margin - (ratios[:, 0] - ratios[:, 1]))

    def rewards(self, answers: Answers) -> torch.Tensor:
        return answers.ratios


class Wrong(Hinge):
    def losses(self, answers: Answers) -> torch.Tensor:
        return super().losses(answers).sum()
"""


def with_objective(workdir: Path, objective: dict[str, Any]) -> None:
    document = yaml.safe_load((workdir / "dpo.yaml").read_text())
    document["trainer"]["objective"] = objective
    (workdir / "own.yaml").write_text(yaml.safe_dump(document))


def test_objective_may_be_a_plugin(train: Train, workdir: Path) -> None:
    (workdir / "own_objective.py").write_text(OBJECTIVE)
    with_objective(workdir, {"name": "own_objective:Hinge", "options": {"margin": 2.0}})
    done = train("-c", "own.yaml", output__run_id="own")
    assert done.code == 0, done.err
    assert first_loss(workdir / "runs" / "own") == pytest.approx(2.0, abs=1e-5)
    assert "own_objective" in json.dumps(json.loads((workdir / "runs" / "own" / "meta.json").read_text())["plugins"])
    with_objective(workdir, {"name": "own_objective:Hinge", "options": {"width": 2.0}})
    done = train("-c", "own.yaml")
    assert done.code == 64
    assert "trainer.objective.options.width is unknown" in done.err
    with_objective(workdir, {"name": "own_objective:Wrong"})
    done = train("-c", "own.yaml", output__run_id="wrong")
    assert done.code == 64
    assert "losses returned" in done.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer__objective__name": "next_token"}, "dpo, ipo, orpo or simpo"),
        ({"trainer__objective__gamma": 1.0}, "only applies to trainer.objective.name simpo"),
        ({"trainer__objective__name": "dpoo"}, "Did you mean 'dpo'"),
        ({"trainer__objective": "dpo"}, "trainer.objective.name"),
        ({"trainer__objective__beta": 0}, "above 0"),
        ({"trainer__objective__beta": 1e3}, "at most 100"),
        ({"data__name": "chat_jsonl"}, "data.name to preference_jsonl"),
        ({"data__truncation": "right"}, "data.truncation only applies to"),
    ],
)
def test_config_that_does_not_fit_is_refused(train: Train, workdir: Path, changes: Any, message: str) -> None:
    done = train("-c", "dpo.yaml", **changes)
    assert done.code == 64
    assert message in done.err
    assert not (workdir / "runs").exists()


def test_four_bits_are_valid_and_need_a_gpu(train: Train, cli: Any) -> None:
    done = cli("validate", "-c", "dpo.yaml", "--set", "model.lora.quantize=true")
    assert done.code == 0, done.err
    done = train("-c", "dpo.yaml", model__lora__quantize=True)
    assert done.code == 64
    assert "model.lora.quantize requires " in done.err  # bitsandbytes or a GPU
    assert "Traceback" not in done.err


def test_another_objective_has_its_own_defaults(train: Train, workdir: Path) -> None:
    """Those of the objective in the file do not remain."""
    with_objective(workdir, {"name": "dpo", "beta": 0.7, "label_smoothing": 0.1})
    done = train("-c", "own.yaml", output__run_id="simple", trainer__objective__name="simpo")
    assert done.code == 0, done.err
    recorded = yaml.safe_load((workdir / "runs" / "simple" / "config.yaml").read_text())
    assert recorded["trainer"]["objective"] == {"name": "simpo", "beta": 2.0, "gamma": 1.0}
    (workdir / "derived.yaml").write_text("extends: own.yaml\ntrainer: {objective: {name: ipo}}\n")
    done = train("-c", "derived.yaml", output__run_id="derived")
    assert done.code == 0, done.err
    recorded = yaml.safe_load((workdir / "runs" / "derived" / "config.yaml").read_text())
    assert recorded["trainer"]["objective"] == {"name": "ipo", "beta": 0.1}


def test_dry_run_computes_the_loss_of_the_objective(train: Train) -> None:
    done = train("-c", "dpo.yaml", "--dry-run")
    assert done.code == 0, done.err
    assert done.json["loss"] == pytest.approx(LN_2, abs=1e-6)
    assert done.json["plan"]["memory"] is not None


def test_accuracy_decides_what_is_best_and_when_to_stop(train: Train, workdir: Path) -> None:
    """Of 3 pairs it can rise three times: then an evaluation without improvement ends the run."""
    often = {"trainer__eval_every_steps": 1, "trainer__max_steps": 8, "trainer__early_stopping_patience": 1}
    done = train("-c", "dpo.yaml", output__run_id="best", trainer__best_metric="val/accuracy", **often)
    assert done.code == 0, done.err
    assert done.json["stopped_early"]
    rows = list(read_metrics(workdir / "runs" / "best" / "metrics.jsonl"))
    accuracies = {row["step"]: row["val/accuracy"] for row in rows if "val/accuracy" in row}
    best = CheckpointStore(workdir / "runs" / "best" / "checkpoints").best()
    assert best is not None
    assert best.step == max(accuracies, key=lambda step: (accuracies[step], -step))


@pytest.mark.slow
def test_pairs_without_a_reference_get_one_on_resume(train: Train, workdir: Path) -> None:
    """More validation batches, or other pairs of the same number: the values of the first start are not theirs."""
    for run in ("more", "other", "again"):
        first = {"trainer__eval_batches": 1, "trainer__max_steps": 1, "data__packing": False}
        start = train("-c", "dpo.yaml", output__run_id=run, **first)
        assert start.code == 0, start.err
    more = train("--resume", "more", "--allow-config-change", trainer__eval_batches=3, trainer__max_steps=2)
    assert more.code == 0, more.err
    assert "are computed again" in more.err
    assert math.isfinite(more.json["final_val_loss"])

    make_pairs(workdir / "pairs.jsonl", 12, first=200)
    other = train("--resume", "other", "--allow-config-change", trainer__max_steps=2)
    assert other.code == 0, other.err
    assert "are computed again" in other.err
    shutil.rmtree(workdir / "cache" / "references")
    again = train("--resume", "again", "--allow-config-change", trainer__max_steps=2)
    assert again.code == 0, again.err
    assert other.json["final_val_loss"] == again.json["final_val_loss"]


def test_full_disk_does_not_stop_the_run(train: Train, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """References that cannot be stored are computed again by a resumed run."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llmtrain.training.objectives.references.write_bytes_atomic", refuse)
    done = train("-c", "dpo.yaml", output__run_id="full", trainer__max_steps=2)
    assert done.code == 0, done.err
    assert "could not be stored" in done.err
    assert train("--resume", "full", trainer__max_steps=3).code == 0
    assert list((workdir / "cache" / "references").iterdir()) == []


def test_prompts_of_a_preference_run_are_questions(train: Train, cli: Any) -> None:
    """In the format of the pairs, so that the model answers; it does not continue the text of the question."""
    trained = train("-c", "dpo.yaml", output__run_id="tuned", trainer__eval_prompts="[say red]")
    assert trained.code == 0, trained.err
    options = ("--prompt", "say red", "--temperature", "0", "--max-new-tokens", "4")
    answer = cli("generate", "tuned", *options)
    assert answer.code == 0, answer.err
    assert not answer.out.startswith("say red")
    assert cli("generate", "tuned", *options, "--raw").out.startswith("say red")


def test_eval_of_a_preference_run_reads_examples_and_refuses_pairs(train: Train, cli: Any) -> None:
    assert train("-c", "dpo.yaml", output__run_id="tuned", trainer__max_steps=1).code == 0
    done = cli("eval", "tuned", "--file", "examples.jsonl", "--json")
    assert done.code == 0, done.err
    done = cli("eval", "tuned", "--file", "pairs.jsonl", "--json")
    assert done.code == 65
    assert "preference pair" in done.err

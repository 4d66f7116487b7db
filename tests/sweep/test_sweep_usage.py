"""What `llmtrain sweep` refuses: every problem at once, before the first trial, and nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmtrain
from llmtrain.errors import ExitCode, UsageError

SPACE = "trainer.lr=log(1e-3,1e-1)"
TEXT = ["--set", "data.name=text_files", "--set", "data.files=[a.txt]"]
GRAMMAR = ["--space", SPACE, "--trials", "2", "--set", "trainer.eval_tasks.tasks=[grammar]"]


@pytest.fixture
def refused(cli: Callable[..., Any], workdir: Path) -> "Refused":
    return Refused(cli, workdir)


class Refused:
    def __init__(self, cli: Callable[..., Any], workdir: Path) -> None:
        self._cli = cli
        self._workdir = workdir

    def __call__(self, *words: str) -> Any:
        result = self._cli("sweep", "--config", "gpt_smoke", "--name", "demo", *words)
        assert result.code == ExitCode.USAGE, result.err
        assert "Traceback" not in result.err
        assert not (self._workdir / "runs").exists()
        return result


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--space", "trainer.lrr=[1,2]", "--trials", "2"], "trainer.lr"),
        (["--space", "lr=[1,2]", "--trials", "2"], "section.field"),
        (["--space", "trainer.lr=[]", "--trials", "2"], "empty"),
        (["--space", "trainer.lr=log(0,1)", "--trials", "2"], "above 0"),
        (["--space", "trainer.lr=log(1,1e-3)", "--trials", "2"], "empty"),
        (["--space", "trainer.lr=[0.1,0.2]", "--trials", "3"], "2 combinations"),
        (["--space", SPACE], "--trials"),
        (["--space", SPACE, "--search", "grid"], "grid"),
        (["--space", SPACE, "--trials", "2", "--search", "bayes"], "halton"),
        (["--space", SPACE, "--trials", "2", "--metric", "val/los"], "Did you mean 'val/loss'?"),
        (["--space", SPACE, "--trials", "2", "--metric", "val/accuracy"], "next_token does not measure"),
        (["--space", SPACE, "--trials", "2", "--metric", "tasks/grammar/acc"], "trainer.eval_tasks.tasks"),
        ([*GRAMMAR, "--metric", "tasks/grammar/exact_match"], "Known: tasks/grammar/acc, tasks/grammar/acc_norm"),
        (["--space", "trainer.optimizer=[adamw,sgd]", "--trials", "2"], "trial 0: space trainer.optimizer"),
        (["--space", "run.threads=[1,2]", "--trials", "2"], "run.threads"),
        (["--space", "output.run_id=[aa,bb]", "--trials", "2"], "output.run_id"),
        (["--space", "run.name=[aa,bb]", "--trials", "2"], "run.name"),
        (["--space", "run.device=[cpu,cuda]", "--trials", "2"], "run.device"),
        (["--space", f"{SPACE} trainer.lr=[0.1]", "--trials", "2"], "trainer.lr is given twice"),
        (["--space", "trainer.lr=uniform(1,1.0000001)", "--trials", "5"], "only 1 different trial "),
        (["--space", "trainer.lr=uniform(1,1.0000001)", "--trials", "9", "--search", "optuna"], "only 1 different"),
        (["--space", "trainer.lr=uniform(-1e308,1e308)", "--trials", "2"], "too wide"),
        (["--space", SPACE, "--trials", "10001"], "10000"),
        (["--space", "model.d_model=int(1,20000)", "--search", "grid"], "10,000 combinations"),
        (["--space", "data.files=[[a.txt],[b.txt]]", "--search", "grid", *TEXT], "trial 1: data.files"),
        (["--space", SPACE, "--trials", "9", "--halving", "4"], "schedule_steps"),
        (["--trials", "3"], "no space"),
        ([], "nothing to compare"),
        (["--seeds", "2", "--name", "x" * 31], "30"),
        (["--resume", "demo", "--trials", "3"], "--trials"),
        (["--resume", "demo", "--dry-run"], "--dry-run"),
        (["--file", "nothing.yaml"], "nothing.yaml"),
    ],
)
def test_bad_input_is_refused(refused: Refused, words: list[str], named: str, workdir: Path) -> None:
    (workdir / "a.txt").write_text("the pod waits for the master.\n" * 40)
    if "optuna" in words:
        pytest.importorskip("optuna")
    assert named in refused(*words).err


def test_all_problems_are_listed_at_once(refused: Refused) -> None:
    text = refused("--space", "trainer.lr=log(0,1) lr=[1]", "--search", "bayes", "--metric", "x").err
    for named in ("above 0", "section.field", "bayes", "metric"):
        assert named in text


def test_problems_of_trials_are_listed_once_with_their_trials(refused: Refused) -> None:
    text = refused("--space", "model.n_heads=[2,3,5] trainer.lr=[0.1,-1]", "--search", "grid").err
    assert text.count("trainer.lr must be above 0") == 1


def test_halving_refuses_schedules_that_know_their_end(refused: Refused) -> None:
    words = ["--space", SPACE, "--trials", "9"]
    assert "trainer.schedule_steps=30" in refused(*words, "--halving", "4").err
    assert "max_epochs" in refused(*words, "--halving", "4", "--set", "trainer.max_epochs=2").err
    assert "first_rung" in refused(*words, "--halving", "20", "--set", "trainer.schedule=constant").err
    patience = ["--set", "trainer.schedule=constant", "--set", "trainer.early_stopping_patience=2"]
    assert "early_stopping_patience=null" in refused(*words, "--halving", "10", *patience).err
    assert "warmup" in refused(*words, "--halving", "3", "--set", "trainer.schedule=constant").err
    steps = ["--space", "trainer.max_steps=[10,20]", "--trials", "2", "--halving", "3"]
    assert "trainer.max_steps" in refused(*steps, "--set", "trainer.schedule=constant").err


def test_dry_run_shows_trials_and_price_and_writes_nothing(cli: Callable[..., Any], workdir: Path) -> None:
    words = ["--config", "gpt_smoke", "--space", SPACE, "--trials", "9", "--set", "trainer.schedule=constant"]
    words += ["--set", "run.device=cpu", "--halving", "6", "--seeds", "2", "--dry-run"]
    done = cli("sweep", *words, "--json")
    assert done.code == 0, done.err
    assert len(done.json["trials"]) == 9
    # Rungs at 10 and 30 steps: 9 x 10 + 3 x 20; and three finalists once more.
    assert done.json["price"]["steps"] == 9 * 10 + 3 * 20 + 3 * 30
    assert done.json["price"]["all_steps"] == 9 * 30
    assert done.json["price"]["starts"] == 9 + 3 + 3
    assert done.json["price"]["seconds"] > 0
    assert "rungs at 10, 30 steps" in cli("sweep", *words).out
    assert not (workdir / "runs").exists()


def test_price_is_in_money_where_prices_are_known(cli: Callable[..., Any]) -> None:
    words = ["--config", "gpt_smoke", "--space", SPACE, "--trials", "4", "--set", "run.device=cpu", "--dry-run"]
    words += ["--set", "plan.prices.node_hour={c5.xlarge: 0.17}"]
    words += ["--set", "launch.node_selector={node.kubernetes.io/instance-type: c5.xlarge}"]
    priced = cli("sweep", *words, "--json").json["price"]
    assert priced["currency"] == "USD"
    assert priced["cost"] == pytest.approx(priced["seconds"] / 3600 * 0.17)


def test_root_is_where_the_sweep_is_written(cli: Callable[..., Any], workdir: Path) -> None:
    (workdir / "other" / "demo").mkdir(parents=True)
    words = ["sweep", "--config", "gpt_smoke", "--seeds", "2", "--name", "demo", "--dry-run"]
    assert cli(*words).code == 0
    assert "other/demo" in cli(*words, "--root", "other").err


def test_python_refuses_what_a_resumed_sweep_ignores() -> None:
    with pytest.raises(UsageError, match="as it was started"):
        llmtrain.run_sweep(resume="demo", trials=3)
    with pytest.raises(UsageError, match="parallel"):
        llmtrain.run_sweep("gpt_smoke", seeds=2, parallel=-1)


def test_file_has_the_fields_of_the_options(cli: Callable[..., Any], workdir: Path) -> None:
    (workdir / "here").mkdir()
    (workdir / "here" / "c.yaml").write_text("extends: gpt_smoke\nrun: {device: cpu}\n")
    (workdir / "here" / "sweep.yaml").write_text(
        "config: c.yaml\n"
        "set: {trainer.optimizer: adamw}\n"
        "space:\n"
        "  trainer.optimizer: [adamw, muon]\n"
        "  trainer.lr: log(1e-3, 1e-2)\n"
        "  trainer.momentum: {values: [0.9, 0.95], when: {trainer.optimizer: muon}}\n"
        "trials: 8\n"
    )
    done = cli("sweep", "--file", "here/sweep.yaml", "--trials", "6", "--dry-run", "--json")
    assert done.code == 0, done.err
    trials = done.json["trials"]
    assert len(trials) == 6
    for trial in trials:
        has_momentum = "trainer.momentum" in trial["values"]
        assert has_momentum == (trial["values"]["trainer.optimizer"] == "muon")


def test_bad_file_lists_its_problems(cli: Callable[..., Any], workdir: Path) -> None:
    (workdir / "sweep.yaml").write_text("spaces: {}\ntrials: many\nsearch: halton\nseeds: 0\n")
    done = cli("sweep", "--file", "sweep.yaml", "--json")
    assert done.code == ExitCode.USAGE
    assert len(done.json["problems"]) >= 3
    (workdir / "sweep.yaml").write_text("space: [\n")
    assert cli("sweep", "--file", "sweep.yaml").code == ExitCode.USAGE

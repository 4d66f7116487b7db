"""The public Python API: every function, in the main thread, in other threads, twice in one process."""

import ast
import asyncio
import importlib
import importlib.util
import inspect
import json
import logging
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kube_runs import STEP, FakeRun

import llmtrain
from kube_server import KubeServer, kube_server
from llmtrain.api import PathLike
from llmtrain.core.arguments import ClusterPlace, Sampling, Source
from local_pods_cluster import LocalPodsCluster

PAGE = Path("docs/python-api.md")
FUNCTIONS = {"load_config", "train", "load_model", "generate", "evaluate", "export", "metrics"}
CLUSTER_FUNCTIONS = {"submit", "cluster_run", "status", "why", "fetch"}
MakeConfig = Callable[..., llmtrain.Config]

pytestmark = pytest.mark.filterwarnings("ignore:.*dummy_gpt does not have it")


@pytest.fixture(autouse=True, scope="module")
def _every_submodule_is_imported() -> None:
    """A submodule with the name of a function would replace it as an attribute of the package."""
    for module in pkgutil.walk_packages(llmtrain.__path__, "llmtrain."):
        needs_triton = module.name.endswith("_kernel")  # part of torch for GPUs
        if not module.name.endswith("__main__") and not (needs_triton and find_spec("triton") is None):
            importlib.import_module(module.name)


@pytest.fixture
def make(tiny: list[str], workdir: Path) -> MakeConfig:  # noqa: ARG001 (runs are written there)
    """A tiny config: make("first", **{"run.seed": 1})."""
    base = llmtrain.load_config("gpt_smoke", tiny)

    def config(run_id: str, **overrides: Any) -> llmtrain.Config:
        return llmtrain.load_config(base, {"output.run_id": run_id, **overrides})

    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> llmtrain.TrainResult:
    """A finished run of a GPT, which can be exported."""
    root = tmp_path_factory.mktemp("api") / "runs"
    overrides = {"output.root_dir": root, "output.run_id": "first", "data.cache_dir": cache, "run.device": "cpu"}
    sizes = {"run.threads": 1, "trainer.max_steps": 6, "trainer.eval_batches": 1, "trainer.log_every_steps": 1}
    return llmtrain.train(llmtrain.load_config("gpt_smoke", {**overrides, **sizes}), progress="none")


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call returns or raises in a thread of its own."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append(call())
        except BaseException as problem:
            outcome.append(problem)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


# Names.


def test_names_are_not_hidden_by_submodules() -> None:
    for name in FUNCTIONS | CLUSTER_FUNCTIONS:
        assert inspect.isfunction(getattr(llmtrain, name)), name
        assert inspect.getdoc(getattr(llmtrain, name)), name
    assert dir(llmtrain) == sorted(llmtrain.__all__)
    with pytest.raises(AttributeError):
        _ = llmtrain.trian


def test_declared_names_exist(repo: Path) -> None:
    """Type checkers read __init__.pyi, in which `import name as name` is what makes a name public."""
    stub = ast.parse((repo / "src/llmtrain/__init__.pyi").read_text())
    aliases = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {alias.name: alias.asname for alias in aliases} == {name: name for name in llmtrain.__all__}
    assert {"train", "HubError", "__version__"} <= set(llmtrain.__all__)
    for name in llmtrain.__all__:
        assert getattr(llmtrain, name) is not None
    assert (repo / "src/llmtrain/py.typed").is_file()


def test_api_and_commands_have_the_same_defaults() -> None:
    for function in (llmtrain.generate, llmtrain.Model.generate):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in vars(Sampling())} == vars(Sampling())
    for function in (llmtrain.load_model, llmtrain.generate, llmtrain.evaluate, llmtrain.export):
        parameters = inspect.signature(function).parameters
        assert parameters["checkpoint"].default == Source.checkpoint
        assert parameters["root"].default == Source.root
    for name in CLUSTER_FUNCTIONS:
        parameters = inspect.signature(getattr(llmtrain, name)).parameters
        assert {each: parameters[each].default for each in vars(ClusterPlace())} == vars(ClusterPlace())


def test_import_is_light() -> None:
    script = """
import sys
import llmtrain
light = set(sys.modules)
assert "train" in dir(llmtrain) and callable(llmtrain.train) and llmtrain.ConfigError.exit_code == 64
print([name for name in ("torch", "pydantic", "yaml", "numpy", "kubernetes", "typer", "rich") if name in sys.modules])
print(sorted(name for name in light if name.startswith("llmtrain")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['llmtrain']"]


USER_SCRIPT = """
import threading
import llmtrain

def on_log(step: int, metrics: dict[str, float]) -> None:
    print(step, metrics["train/loss"])

config: llmtrain.Config = llmtrain.load_config("gpt_smoke", {"trainer.lr": 1e-3})
try:
    result = llmtrain.train(config, on_log=on_log, stop=threading.Event(), progress="none")
except llmtrain.Interrupted as error:
    print(error.remedy, error.exit_code)
else:
    best: float = result.best_val_loss
    text: str = llmtrain.load_model(result.run_dir).generate("The ", max_new_tokens=5)
    loss: float = llmtrain.evaluate(result.run_dir, "a.txt").loss
    names: list[str] = llmtrain.export(result.run_dir, "out", dtype="bfloat16", check=False).files
    rows: list[dict[str, object]] = [dict(row) for row in llmtrain.metrics(result.run_id, wide=True)]
    listed: int = len(llmtrain.list_runs(sort="age"))
    differences: object = llmtrain.compare_runs(["first", result.run_id])["config_differences"]
state: str = llmtrain.submit(config).state
cause: str = llmtrain.why("first").cause
path: str = llmtrain.fetch("first", only="best").path
is_over: bool = llmtrain.status("first").has_ended
"""


@pytest.mark.slow
def test_user_script_type_checks(tmp_path: Path, repo: Path) -> None:
    pytest.importorskip("mypy")
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    for name, script, errors in (("right", USER_SCRIPT, 0), ("wrong", USER_SCRIPT.replace(": float =", ": str ="), 2)):
        path = tmp_path / f"{name}.py"
        path.write_text(script)
        env = {**os.environ, "MYPYPATH": str(repo / "src")}
        done = subprocess.run([*words, "--follow-imports=silent", str(path)], capture_output=True, text=True, env=env)
        assert done.stdout.count(": error:") == errors, done.stdout + done.stderr


# Configs.


def test_load_config_takes_presets_files_dicts_and_configs(workdir: Path) -> None:
    preset = llmtrain.load_config("gpt_smoke", {"trainer.lr": 2e-3, "data.cache_dir": workdir / "cache"})
    (workdir / "my.yaml").write_text(json.dumps(preset.as_dict()))
    assert preset.trainer.lr == 2e-3
    assert preset.data.cache_dir == str(workdir / "cache")
    assert llmtrain.load_config(workdir / "my.yaml") == preset
    assert llmtrain.load_config(preset.as_dict()) == preset
    assert llmtrain.load_config(preset) == preset
    assert llmtrain.load_config({"trainer": {"lr": 1e-3, "betas": (0.8, 0.9)}}).trainer.betas == (0.8, 0.9)
    by_text = llmtrain.load_config(preset, ["trainer.lr=1e-4", "run.name=text"])
    assert by_text == llmtrain.load_config(preset, {"trainer.lr": 1e-4, "run.name": "text"})
    nested = {"trainer": {"lr": 1e-4}, "run": {"name": "text"}}
    assert by_text == llmtrain.load_config(preset, nested)
    assert preset.trainer.lr == 2e-3, "a derived config does not change the other"


def test_load_config_reports_all_problems_as_data() -> None:
    with pytest.raises(llmtrain.ConfigError) as caught:
        llmtrain.load_config({"trainer": {"lr": "much"}, "run": {"sed": 1}}, {"trainer.max_steps": -1, "lr": 3})
    assert caught.value.exit_code == 64
    assert len(caught.value.problems) == 4
    assert not any("--set" in problem for problem in caught.value.problems)
    with pytest.raises(llmtrain.UsageError):
        llmtrain.load_config("gpt_smok")


def test_load_config_refuses_values_that_contain_themselves_or_cannot_be_printed() -> None:
    own: dict[str, Any] = {"trainer": {"lr": 1e-3}}
    own["trainer"]["again"] = own
    twice: list[Any] = []
    twice += [twice, twice]
    wide: Any = 1
    for _ in range(40):
        wide = [wide, wide]
    for value in (own, {"run": twice}, {"run": wide}, {"extends": 10**5000}):
        with pytest.raises(llmtrain.ConfigError):
            llmtrain.load_config(value)
    for override in (("trainer.lr", twice), ("trainer.lr", wide), ("trainer.lr", 10**5000), ("lr", 10**5000)):
        with pytest.raises(llmtrain.ConfigError):
            llmtrain.load_config("gpt_smoke", [override])


def test_upgrade_notes_are_python_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="schema_version 2") as caught:
        config = llmtrain.load_config({"schema_version": 2, "trainer": {"early_stopping": 3}})
    assert config.trainer.early_stopping_patience == 3
    assert caught[0].filename == __file__
    assert capfd.readouterr().err == ""


# Training.


def process_state() -> dict[str, Any]:
    """What a training may change for the whole process."""
    import torch

    logger = logging.getLogger("llmtrain")
    return {
        "threads": torch.get_num_threads(),
        "random": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "logging": (logger.level, logger.propagate, list(logger.handlers), list(logging.getLogger().handlers)),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        # torch itself sets that of its compiler, for good.
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")},
        "directory": Path.cwd(),
    }


def test_trainings_in_one_process_are_equal_and_leave_no_trace(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch, workdir: Path
) -> None:
    own = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger("llmtrain"), "handlers", [own])
    before = process_state()
    results = [
        llmtrain.train(make("main")),
        in_thread(lambda: llmtrain.train(make("thread"))),
        asyncio.run(in_event_loop(make("loop"))),
        llmtrain.train(make("exact", **{"run.deterministic": True})),
    ]
    assert process_state() == before
    assert len({result.state_sha256 for result in results}) == 1
    first = results[0]
    assert first.run_dir == workdir / "runs/main"
    assert first.steps == 4
    assert first.final_val_loss == first.values["final_val_loss"]
    assert first.as_dict() == json.loads((first.run_dir / "finished.json").read_text())


async def in_event_loop(config: llmtrain.Config) -> llmtrain.TrainResult:
    return llmtrain.train(config, progress="none")


def test_another_thread_count_is_warned_of(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    from llmtrain.training import torch_settings

    monkeypatch.setattr(torch_settings, "_first_threads", None)
    before = torch.get_num_threads()
    llmtrain.train(make("one", **{"run.threads": 1}), progress="none")
    assert capfd.readouterr().err == ""
    result = llmtrain.train(make("two", **{"run.threads": 2}), progress="none")
    assert result.values["threads"] == 2
    assert capfd.readouterr().err.count("warning") == 1
    assert torch.get_num_threads() == before


def test_progress_none_prints_nothing_and_the_log_file_has_all(
    make: MakeConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = llmtrain.train(make("shown"))
    out, err = capfd.readouterr()
    assert out == ""
    assert "[TRAIN] step 4/4" in err
    silent = llmtrain.train(make("silent"), progress="none")
    assert capfd.readouterr() == ("", "")
    logs = [next((result.run_dir / "logs").iterdir()).read_text() for result in (shown, silent)]
    assert [log.count("[TRAIN] step") for log in logs] == [4, 4]


def test_on_log_gets_the_rows_of_the_metrics(make: MakeConfig) -> None:
    rows: list[dict[str, Any]] = []
    llmtrain.train(make("rows"), on_log=lambda step, metrics: rows.append({"step": step, **metrics}), progress="none")
    recorded = llmtrain.metrics("rows")
    assert rows == [{name: value for name, value in row.items() if name != "time"} for row in recorded]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "val/loss" in row] == [2, 4]


@pytest.mark.parametrize("run", [lambda call: call(), in_thread], ids=["main thread", "other thread"])
def test_stop_saves_and_the_run_resumes_to_the_same_bits(
    make: MakeConfig, run: Callable[[Callable[[], Any]], Any]
) -> None:
    whole = llmtrain.train(make("whole"), progress="none")
    stop = threading.Event()

    def stop_at_3(step: int, _: dict[str, float]) -> None:
        if step == 3:
            stop.set()

    with pytest.raises(llmtrain.Interrupted) as caught:
        run(lambda: llmtrain.train(make("parts"), stop=stop, on_log=stop_at_3, progress="none"))
    assert caught.value.exit_code == 75
    assert caught.value.remedy
    assert caught.value.details["steps"] == 3
    resumed = run(lambda: llmtrain.train(resume="parts", progress="none"))
    assert resumed.state_sha256 == whole.state_sha256
    assert resumed.values["resumed_from"] == 3


def test_ctrl_c_saves_in_the_main_thread(make: MakeConfig) -> None:
    def press(step: int, _: dict[str, float]) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(llmtrain.Interrupted) as caught:
        llmtrain.train(make("pressed"), on_log=press, progress="none")
    assert caught.value.details["steps"] == 1


def test_second_ctrl_c_raises_instead_of_ending_the_program(make: MakeConfig) -> None:
    def press_twice(_: int, __: dict[str, float]) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llmtrain.train(make("twice"), on_log=press_twice, progress="none")


def test_train_starts_from_the_weights_of_another_run(make: MakeConfig) -> None:
    llmtrain.train(make("origin"), progress="none")
    rows: list[float] = []
    started = llmtrain.train(
        start_from="origin", on_log=lambda _, metrics: rows.append(metrics.get("train/loss", 0.0)), progress="none"
    )
    assert started.run_id != "origin"
    assert rows[0] != llmtrain.metrics("origin")[0]["train/loss"]
    with pytest.raises(llmtrain.UsageError):
        llmtrain.train(make("both"), start_from="origin", resume="origin")


def test_stop_that_is_set_before_ends_it_before_anything_is_written(make: MakeConfig) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(llmtrain.Interrupted):
        in_thread(lambda: llmtrain.train(make("never"), stop=stop, progress="none"))
    assert not Path("runs/never").exists()


def test_error_of_on_log_is_raised_and_the_run_has_failed(make: MakeConfig) -> None:
    def fail(step: int, _: dict[str, float]) -> None:
        if step == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llmtrain.train(make("pruned"), on_log=fail, progress="none")
    (start,) = json.loads(Path("runs/pruned/generations.json").read_text())
    assert start["ended"] == "failed"
    assert llmtrain.train(make("next"), progress="none").steps == 4


def test_one_process_trains_one_config_at_a_time(make: MakeConfig) -> None:
    def train_inside(_: int, __: dict[str, float]) -> None:
        in_thread(lambda: llmtrain.train(make("inner"), progress="none"))

    with pytest.raises(llmtrain.UsageError) as caught:
        llmtrain.train(make("outer"), on_log=train_inside, progress="none")
    assert caught.value.remedy
    assert not Path("runs/inner").exists()


def test_train_without_config_needs_a_run_to_resume(workdir: Path) -> None:
    for resume in (None, "auto", "no-such-run"):
        with pytest.raises(llmtrain.UsageError):
            llmtrain.train(resume=resume)
    assert list(workdir.iterdir()) == []


# Trained models.


def test_model_functions_return_what_commands_print(trained: llmtrain.TrainResult, cli: Any) -> None:
    root = trained.run_dir.parent
    Path("text.txt").write_text("a pod is a pod " * 50)
    where = ("--run", "first", "--root", root, "--json")
    generated = cli("generate", *where, "--prompt", "The ", "--max-new-tokens", 8).json
    assert llmtrain.generate("first", "The ", max_new_tokens=8, root=root) == generated["text"]
    evaluated = cli("eval", *where, "--file", "text.txt").json
    assert llmtrain.evaluate("first", "text.txt", root=root).as_dict() == evaluated
    exported = cli("export", *where, "--no-check", "--to", "one").json
    result = llmtrain.export("first", Path("two"), check=False, root=root)
    assert {**result.as_dict(), "to": "one", "pushed_to": None} == exported
    for name in result.files:
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()
    assert llmtrain.metrics("first", root=root)[0]["step"] == 1


def test_runs_are_listed_and_compared_as_the_commands_do(trained: llmtrain.TrainResult, cli: Any) -> None:
    root = trained.run_dir.parent
    options = ("--root", root, "--json")
    assert llmtrain.list_runs(root=root) == cli("runs", "list", *options).json["runs"]
    assert llmtrain.list_runs(root=root, sort="age", limit=1, text="FIRST")[0]["run_id"] == "first"
    assert llmtrain.list_runs(root=root, text="no such text") == []
    comparison = llmtrain.compare_runs(["first", trained.run_dir], group_by=["trainer.lr"], root=root)
    assert comparison == cli("runs", "compare", "first", trained.run_dir, "--group-by", "trainer.lr", *options).json


def test_wide_metrics_have_one_row_per_step(trained: llmtrain.TrainResult) -> None:
    rows = llmtrain.metrics(trained.run_dir)
    table = llmtrain.metrics(trained.run_dir, wide=True)
    assert [row["step"] for row in table] == sorted({row["step"] for row in rows})
    assert {tuple(row) for row in table} == {tuple(table[0])}
    assert {name for row in rows for name in row} == set(table[0])
    by_step = {row["step"]: row for row in table}
    for row in rows:
        known = {name: value for name, value in row.items() if name != "time"}
        assert by_step[row["step"]].items() >= known.items()
    assert table[-1]["val/loss"] is not None


def test_a_loaded_model_is_used_more_than_once(trained: llmtrain.TrainResult, workdir: Path) -> None:
    model = llmtrain.load_model(trained.run_dir)
    assert isinstance(model, llmtrain.Model)
    texts = {model.generate("a", max_new_tokens=4), in_thread(lambda: model.generate("a", max_new_tokens=4))}
    assert len(texts) == 1
    assert model.generate("a", max_new_tokens=4, seed=7) not in texts
    (workdir / "text.txt").write_text("a pod is a pod " * 50)
    assert model.evaluate([workdir / "text.txt"]).tokens > 0
    stop = threading.Event()
    stop.set()
    assert model.generate("a", stop=stop) == ""
    with pytest.raises(llmtrain.Interrupted):
        model.evaluate("text.txt", stop=stop)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda _: llmtrain.load_model(), llmtrain.UsageError),
        (lambda _: llmtrain.load_model("no-such-run"), llmtrain.UsageError),
        (lambda run: llmtrain.load_model(run, checkpoint="step_9"), llmtrain.CheckpointError),
        (lambda run: llmtrain.generate(run, temperature=-1.0), llmtrain.UsageError),
        (lambda run: llmtrain.evaluate(run, "no-such-file"), llmtrain.DataError),
        (lambda run: llmtrain.export(run, "out", dtype="int8"), llmtrain.UsageError),
        (lambda run: llmtrain.export(run, "x\0y"), llmtrain.UsageError),
        (lambda run: llmtrain.evaluate(run, "x\0y"), llmtrain.UsageError),
        (lambda _: llmtrain.train({"output": {"root_dir": "x\0y"}}), llmtrain.ConfigError),
        (lambda _: llmtrain.train({"data": {"cache_dir": "x\0y"}}), llmtrain.ConfigError),
        (lambda _: llmtrain.metrics("Not An Id"), llmtrain.UsageError),
        (lambda _: llmtrain.list_runs(sort="colour"), llmtrain.UsageError),
        (lambda run: llmtrain.compare_runs([run]), llmtrain.UsageError),
        (lambda run: llmtrain.compare_runs([run, run], group_by=["no.field"]), llmtrain.UsageError),
    ],
)
def test_errors_have_types(
    call: Callable[[PathLike], object],
    error: type[llmtrain.LlmtrainError],
    trained: llmtrain.TrainResult,
    workdir: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(error):
        call(trained.run_dir)
    assert list(workdir.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_loading_models_does_not_change_a_training(trained: llmtrain.TrainResult, cache: Path) -> None:
    root = Path(trained.run_dir).parent
    overrides = {"output.root_dir": root, "output.run_id": "beside", "data.cache_dir": cache, "run.device": "cpu"}
    sizes = {"run.threads": 1, "trainer.max_steps": 6, "trainer.eval_batches": 1, "trainer.log_every_steps": 1}
    config = llmtrain.load_config("gpt_smoke", {**overrides, **sizes})
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(llmtrain.train, config, progress="none")
        while not training.done():
            llmtrain.load_model("first", root=root)
    assert training.result().state_sha256 == trained.state_sha256


INVALID: dict[str, Callable[[Any], Any]] = {
    "max_new_tokens": lambda run: [llmtrain.load_model(run).generate, (0, -1, 2.5, "5", None, True)],
    "temperature": lambda run: [llmtrain.load_model(run).generate, ("x", None, -1, 1e39, float("nan"))],
    "top_k": lambda run: [llmtrain.load_model(run).generate, (0, "x")],
    "top_p": lambda run: [llmtrain.load_model(run).generate, (0, "x")],
    "seed": lambda run: [llmtrain.load_model(run).generate, ("x", None, 1.5, -1)],
    "prompt": lambda run: [llmtrain.load_model(run).generate, (3, None, b"x")],
    "on_text": lambda run: [llmtrain.load_model(run).generate, (3,)],
    "batch_size": lambda run: [partial(llmtrain.load_model(run).evaluate, "x"), (0, "x")],
    "block_size": lambda run: [partial(llmtrain.load_model(run).evaluate, "x"), (0, "x")],
    "files": lambda run: [llmtrain.load_model(run).evaluate, (None, 3, ["x", 3])],
    "to": lambda run: [llmtrain.load_model(run).export, (None, 3, "")],
    "checkpoint": lambda run: [partial(llmtrain.load_model, run), (None, 1.5, -1)],
    "run": lambda _: [llmtrain.load_model, (3, b"x", "")],
    "root": lambda run: [partial(llmtrain.load_model, run), (None, 3)],
    "source": lambda _: [llmtrain.load_config, (3, [], b"gpt_smoke", "", {3: 4}, True)],
    "overrides": lambda _: [partial(llmtrain.load_config, "gpt_smoke"), (3, None, "trainer.lr=1", [3], {3: 4})],
    "resume": lambda _: [partial(llmtrain.train, "gpt_smoke"), ("", 3, True)],
    "start_from": lambda _: [partial(llmtrain.train, "gpt_smoke"), ("", 3, Path("nowhere"))],
    "progress": lambda _: [partial(llmtrain.train, "gpt_smoke"), ("bogus", None)],
    "stop": lambda _: [partial(llmtrain.train, "gpt_smoke"), (True, "x")],
    "on_log": lambda _: [partial(llmtrain.train, "gpt_smoke"), (3, "x")],
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_argument_is_a_usage_error(name: str, trained: llmtrain.TrainResult, workdir: Path) -> None:
    call, values = INVALID[name](trained.run_dir)
    for value in values:
        with pytest.raises(llmtrain.UsageError):
            call(**{name: value})
    assert list(workdir.iterdir()) == []


def test_integers_of_numpy_and_steps_are_accepted(trained: llmtrain.TrainResult) -> None:
    model = llmtrain.load_model(trained.run_dir, checkpoint=np.int64(trained.steps))
    assert model.loaded.step == trained.steps
    assert len(model.generate("a", max_new_tokens=np.int64(2), seed=np.int64(1))) <= 2


# Runs on a cluster.


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with kube_server() as server:
        yield server


def test_cluster_functions(kube: KubeServer, tmp_path: Path, call: Any) -> None:
    where = {"kubeconfig": kube.kubeconfig(tmp_path)}
    config = llmtrain.load_config("ddp_smoke", {"output.run_id": "demo", "launch.image": "me/train:1"})
    submitted = llmtrain.submit(config, **where)
    assert (submitted.run_id, submitted.namespace, submitted.has_ended) == ("demo", "team", False)
    with pytest.raises(llmtrain.UsageError):
        llmtrain.submit(config, **where)
    run = fake_run(kube)
    run.pod(0)
    run.end(0, 65)
    run.finish("Failed")
    status = llmtrain.status("demo", **where)
    assert (status.state, status.has_ended, status.exit_code) == ("failed", True, 65)
    assert {**call("status", "demo", "--json").json, "age_sec": status.age_sec} == status.as_dict()
    why = llmtrain.why("demo", **where)
    assert why.as_dict() == call("why", "demo", "--json").json
    assert why.cause != "unknown"
    del kube.objects["pods", "team", run.pods[0]]  # as the controller does when the job is deleted
    again = llmtrain.submit(config, resume=True, **where)
    assert (again.run_id, again.has_ended) == ("demo", False)
    elsewhere = llmtrain.submit(config, namespace="lab", **where)
    assert elsewhere.namespace == "lab"
    assert llmtrain.status("demo", context="there", **where).namespace == "lab"
    with pytest.raises(llmtrain.UsageError):
        llmtrain.status("demo", namespace="empty", **where)


def test_handle_on_a_run(kube: KubeServer, tmp_path: Path) -> None:
    where = {"kubeconfig": kube.kubeconfig(tmp_path)}
    image = {"launch.image": "me/train:1", "launch.nodes": 2}
    run = llmtrain.submit(llmtrain.load_config("ddp_smoke", {"output.run_id": "demo", **image}), **where)
    assert run.as_dict().keys() == llmtrain.status("demo", **where).as_dict().keys()
    assert (run.state, run.pods, run.world_size) == ("pending", [], 2)
    fake = fake_run(kube)
    fake.pod(0)
    fake.pod(1)
    fake.say(0, STEP.format(7))
    assert run.state == "pending", "as of the last status()"
    status = run.status()
    assert (status.state, status.step) == (run.state, run.step) == ("running", 7)
    assert [line.text for line in run.logs(rank=0)] == [STEP.format(7)]
    assert run.why().cause == "healthy"
    with pytest.raises(llmtrain.UsageError):
        run.resume()
    for index in (0, 1):
        fake.end(index, 65)
    fake.finish("Failed")
    assert run.status().exit_code == 65
    for name in fake.pods.values():  # as the controller does when the job is deleted
        del kube.objects["pods", "team", name]
    stopped = run.stop()
    assert (stopped.state, stopped.lost_pods, run.status().state) == ("failed", [], "failed")
    assert run.resume({"launch.nodes": 1}) == []
    assert (run.has_ended, run.nodes) == (False, 1)
    assert run.stop().state == "stopped"
    assert run.delete().kept_claim == "demo-runs"
    with pytest.raises(llmtrain.UsageError):
        llmtrain.cluster_run("demo", **where)
    with pytest.raises(AttributeError):
        _ = run.sate


def test_submit_ships_user_code(kube: KubeServer, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("VALUE = 1\n")
    config = llmtrain.load_config("ddp_smoke", {"output.run_id": "demo", "launch.image": "me/train:1"})
    llmtrain.submit(config, with_code=tmp_path / "code", kubeconfig=kube.kubeconfig(tmp_path))
    shipped = [name for kind, _, name in kube.objects if kind == "configmaps" and name.startswith("demo-code-")]
    assert len(shipped) == 1
    with pytest.raises(llmtrain.UsageError):
        llmtrain.submit(config, with_code=tmp_path / "missing", kubeconfig=kube.kubeconfig(tmp_path))


def fake_run(kube: KubeServer) -> FakeRun:
    from llmtrain.launch.record import find_record

    return FakeRun(kube, find_record(kube.cluster(), "demo", "team").plan)


def test_cluster_functions_without_a_cluster(workdir: Path) -> None:
    config = llmtrain.load_config("ddp_smoke")
    for attempt in (
        lambda: llmtrain.submit(config),
        lambda: llmtrain.status("demo"),
        lambda: llmtrain.why("demo"),
        lambda: llmtrain.fetch("demo"),
    ):
        with pytest.raises(llmtrain.LlmtrainError) as caught:
            attempt()
        assert caught.value.exit_code in (64, 69)
    assert list(workdir.iterdir()) == []


def test_fetch_downloads_a_run(trained: llmtrain.TrainResult, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmtrain.kubernetes.client import Cluster

    cluster = LocalPodsCluster(trained.run_dir.parent)
    monkeypatch.setattr(Cluster, "connect", lambda *_: cluster)
    received: list[int] = []
    fetched = llmtrain.fetch("first", claim="runs", on_progress=lambda progress: received.append(progress.received))
    assert fetched.is_finished
    assert fetched.bytes == received[-1] > 0
    assert cluster.pods == {}
    assert llmtrain.metrics(workdir / fetched.path) == llmtrain.metrics(trained.run_dir)


# The guide.


def page_blocks(repo: Path) -> dict[str, list[str]]:
    """Python code of the page by section."""
    blocks: dict[str, list[str]] = {}
    for section in re.split(r"^##? ", (repo / PAGE).read_text(), flags=re.M)[1:]:
        title, _, text = section.partition("\n")
        blocks[title] = re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M)
    return blocks


def test_page_names_every_function(repo: Path) -> None:
    text = (repo / PAGE).read_text()
    for name in llmtrain.__all__:
        assert f"`{name}" in text or f"llmtrain.{name}" in text, name


@pytest.mark.timeout(300)
def test_page_examples_run_in_order(repo: Path, tmp_path: Path) -> None:
    """In one fresh process, in an empty directory."""
    blocks = page_blocks(repo)
    code = [block for title, each in blocks.items() if title != "Runs on a cluster" for block in each]
    assert len(code) >= 6
    (tmp_path / "page.py").write_text("\n".join(code))
    env = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "empty"
    folder.mkdir()
    done = subprocess.run([sys.executable, "../page.py"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "runs/first/finished.json").is_file()


def test_page_cluster_example(
    repo: Path, kube: KubeServer, tmp_path: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails while the example waits for it."""

    def play(_: float) -> None:
        run = fake_run(kube)
        run.pod(0)
        run.end(0, 65)
        run.finish("Failed")

    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig(tmp_path)))
    monkeypatch.setattr(time, "sleep", play)
    names: dict[str, Any] = {}
    for block in page_blocks(repo)["Runs on a cluster"]:
        exec(block, names)
    assert names["status"].state == "failed"
    assert list(workdir.iterdir()) == []

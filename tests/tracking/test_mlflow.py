"""MLflow: a local store is complete, a resumed run continues its MLflow run, an unreachable server costs no time."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import RUN_ID
from task_models import choice_items, write_items

from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.errors import UsageError
from llmtrain.tracking import background, mlflow
from llmtrain.tracking.mlflow import local_directory, store_at, tracking_location
from slow_cases import some

MakeConfig = Callable[..., Config]
NO_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""The others take as long as they take in test_unreachable_server_never_stops_training."""


@pytest.fixture(scope="module", autouse=True)
def _mlflow() -> None:
    """Imported here once, for all child processes."""
    pytest.importorskip("mlflow", reason="needs the mlflow extra")
    from mlflow.tracking import MlflowClient  # noqa: F401


@pytest.fixture(autouse=True)
def _no_uri_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def location_of(config: Config) -> tuple[str, str | None]:
    return tracking_location(config.tracking.mlflow, config.output.root_dir)


def read_store(uri: str) -> list[dict[str, Any]]:
    """All runs of a store, read with MLflow's client."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = []
    for experiment in client.search_experiments(filter_string="name != 'Default'"):
        for run in client.search_runs([experiment.experiment_id]):
            names = ("train/loss", "train/lr", "val/loss", "tasks/items/acc")
            history = {name: client.get_metric_history(run.info.run_id, name) for name in names}
            found.append(
                {
                    "experiment": experiment.name,
                    "name": run.info.run_name,
                    "id": run.info.run_id,
                    "status": run.info.status,
                    "params": run.data.params,
                    "tags": run.data.tags,
                    "history": {name: [(m.step, m.value) for m in rows] for name, rows in history.items()},
                    "artifacts": sorted(item.path for item in client.list_artifacts(run.info.run_id)),
                }
            )
    return found


def root_of(config: Config) -> Path:
    return Path(config.output.root_dir)


def with_mlflow(make_config: MakeConfig, **changes: Any) -> Config:
    return make_config(tracking__mlflow__enabled=True, **changes)


@pytest.fixture
def tracked(make_config: MakeConfig, empty_store: Path) -> MakeConfig:
    """Configs with MLflow enabled, and its database at the default path."""

    def make(**changes: Any) -> Config:
        config = with_mlflow(make_config, **changes)
        root_of(config).mkdir(parents=True)
        shutil.copy(empty_store, root_of(config) / "mlflow.db")
        return config

    return make


def test_local_store_is_complete(make_config: MakeConfig, tmp_path: Path) -> None:
    items = write_items(tmp_path / "items.jsonl", choice_items(4))
    config = with_mlflow(
        make_config,
        tracking__mlflow__experiment="tries",
        tracking__mlflow__run_name="first try",
        model__block_size=64,
        trainer__eval_tasks={"tasks": [str(items)]},
    )
    ended = harness.run(config)
    assert ended.code == 0, ended.output
    [run] = read_store(f"sqlite:///{root_of(config) / 'mlflow.db'}")
    assert run["experiment"] == "tries"
    assert run["name"] == "first try"
    assert run["status"] == "FINISHED"
    assert run["tags"]["llmtrain.run_id"] == RUN_ID
    assert run["artifacts"] == ["config.yaml", "meta.json", "report.html"]
    assert not [name for name in run["params"] if name.startswith(("launch.", "distributed."))]
    assert run["params"]["tracking.mlflow.experiment"] == "tries"
    expected = {"trainer.lr": "0.003", "model.d_model": "32", "data.name": "dummy_text", "run.seed": "7"}
    assert expected.items() <= run["params"].items()
    assert int(run["params"]["parameters"]) == ended.result["parameters"]
    rows = harness.train_rows(root_of(config) / RUN_ID)
    assert run["history"]["train/loss"] == [(step, float.fromhex(values[0])) for step, values in rows]
    assert run["history"]["train/lr"] == [(step, float.fromhex(values[1])) for step, values in rows]
    assert [step for step, _ in run["history"]["val/loss"]] == [4, 8]
    assert [step for step, _ in run["history"]["tasks/items/acc"]] == [4, 8]


def test_run_name_defaults_to_run_id_and_run_directory_has_its_id(tracked: MakeConfig) -> None:
    config = tracked()
    assert harness.run(config).code == 0
    kept = json.loads((root_of(config) / RUN_ID / "mlflow.json").read_text())
    [run] = read_store(f"sqlite:///{root_of(config) / 'mlflow.db'}")
    assert (run["name"], run["id"]) == (RUN_ID, kept["run_id"])


@pytest.mark.parametrize("action", [pytest.param("term", marks=pytest.mark.slow), "kill"])
def test_resumed_run_continues_its_mlflow_run(tracked: MakeConfig, action: str) -> None:
    config = tracked()
    uri = f"sqlite:///{root_of(config) / 'mlflow.db'}"
    first = harness.run(config, fault=f"after_optimizer:5:0:{action}")
    assert first.code == {"term": 75, "kill": -9}[action], first.output
    if action == "term":
        [run] = read_store(uri)
        assert run["status"] == "KILLED"
        assert [step for step, _ in run["history"]["train/loss"]] == [1, 2, 3, 4, 5]
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    [run] = read_store(uri)
    assert run["status"] == "FINISHED"
    assert [step for step, _ in run["history"]["train/loss"]] == [*range(1, 9)]  # none is missing, none is twice
    assert [step for step, _ in run["history"]["val/loss"]] == [4, 8]
    assert run["artifacts"] == ["config.yaml", "meta.json", "report.html"]
    assert "trainer.lr" in run["params"]


@pytest.mark.parametrize("is_finished", [False, True], ids=["resumed", "finished"])
def test_unsent_rows_of_killed_process_are_sent(tracked: MakeConfig, is_finished: bool) -> None:
    """Also if the run is finished and needs no training."""
    config = tracked()

    def send_nothing() -> None:
        import os
        import signal
        import threading

        mlflow.MlflowRun.add = lambda *_: threading.Event().wait()
        mlflow.MlflowTracker.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    assert harness.run(config, fault=None if is_finished else "forward:8:0:kill", before=send_nothing).code == -9
    assert (root_of(config) / RUN_ID / "finished.json").exists() == is_finished
    ended = harness.run(config, RUN_ID)
    assert ended.code == 0, ended.output
    [run] = read_store(f"sqlite:///{root_of(config) / 'mlflow.db'}")
    assert run["status"] == "FINISHED"
    assert [step for step, _ in run["history"]["train/loss"]] == [*range(1, 9)]
    assert [step for step, _ in run["history"]["val/loss"]] == [4, 8]


def test_finished_run_with_unreachable_server(make_config: MakeConfig) -> None:
    config = with_mlflow(make_config, tracking__mlflow__tracking_uri="http://127.0.0.1:9")
    for resume in (None, RUN_ID):
        ended = harness.run(config, resume, env=NO_RETRIES)
        assert ended.code == 0, ended.output
        assert "Traceback" not in ended.output


def test_failed_run_has_status_failed(tracked: MakeConfig) -> None:
    def wait_longer() -> None:
        from llmtrain.tracking import background

        background.FLUSH_WHEN_STOPPED_SEC = 60.0  # a busy machine takes more than 5 s to create the database

    config = tracked()
    assert harness.run(config, fault="loss:3:0:nan", before=wait_longer).code == 65
    [run] = read_store(f"sqlite:///{root_of(config) / 'mlflow.db'}")
    assert run["status"] == "FAILED"


def test_directory_with_special_characters(tmp_path: Path) -> None:
    from sqlalchemy.engine import make_url

    directory = tmp_path / "50% a?b #1"
    uri, artifacts = store_at(str(directory))
    assert make_url(uri).database == str(directory / "mlflow.db")
    assert local_directory(uri) == directory
    assert artifacts == (directory / "mlartifacts").as_uri()


def test_file_uri_of_other_host_is_refused() -> None:
    with pytest.raises(UsageError, match="nas"):
        store_at("file://nas/mlruns")
    assert local_directory("file://localhost/a%20b") == Path("/a b")


@pytest.mark.parametrize("kind", some(["directory", "file", "sqlite"], "directory"))
def test_config_overrides_environment(make_config: MakeConfig, empty_store: Path, tmp_path: Path, kind: str) -> None:
    """The config overrides MLFLOW_TRACKING_URI."""
    directory = tmp_path / "my store"
    directory.mkdir()
    shutil.copy(empty_store, directory / "mlflow.db")
    uri = {"directory": str(directory), "file": directory.as_uri(), "sqlite": f"sqlite:///{directory}/mlflow.db"}[kind]
    elsewhere = tmp_path / "elsewhere"
    config = with_mlflow(make_config, tracking__mlflow__tracking_uri=uri)
    ended = harness.run(config, env={"MLFLOW_TRACKING_URI": str(elsewhere)})
    assert ended.code == 0, ended.output
    assert ended.result["tracking_uri"] == f"sqlite:///{directory}/mlflow.db"
    assert ended.output.count(ended.result["tracking_uri"]) == 1
    assert ended.output.count("MLFLOW_TRACKING_URI") == 1, "a warning about the one that is not used"
    [run] = read_store(ended.result["tracking_uri"])
    assert len(run["history"]["train/loss"]) == 8
    assert run["artifacts"] == ["config.yaml", "meta.json", "report.html"]
    assert list(directory.rglob("meta.json"))
    assert not elsewhere.exists()
    assert not (root_of(config) / "mlflow.db").exists()


def opened(uri: str) -> list[dict[str, Any]] | None:
    """The runs that a plain client reads from a store; None if it refuses to open it."""
    from mlflow.exceptions import MlflowException

    try:
        return read_store(uri)
    except MlflowException:
        return None


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ("{}", None),
        ("{}", "true"),
        pytest.param("file:{}", "1", marks=pytest.mark.slow),
        pytest.param("file://{}", "false", marks=pytest.mark.slow),
    ],
)
def test_store_can_be_opened_by_plain_client(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, allowed: str | None
) -> None:
    """MLFLOW_TRACKING_URI=/dir, as document 1 has it: the same value opens it where MLflow opens directories at all;
    where not, the URI in the result does."""
    named = form.format(tmp_path / "mlruns")
    variables = {"MLFLOW_ALLOW_FILE_STORE": allowed} if allowed else {}
    for name in ("MLFLOW_ALLOW_FILE_STORE", *variables):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = harness.run(with_mlflow(make_config), env={"MLFLOW_TRACKING_URI": named, **variables})
    assert ended.code == 0, ended.output
    assert "MLflow failed" not in ended.output
    uri = ended.result["tracking_uri"]
    assert uri in ended.output
    opened_runs = opened(named)
    assert (opened_runs is None) == uri.startswith("sqlite:"), "a sqlite file only if clients do not open directories"
    for runs in (read_store(uri), *([opened_runs] if opened_runs is not None else [])):
        [run] = runs
        assert (run["status"], len(run["history"]["train/loss"])) == ("FINISHED", 8)
        assert run["artifacts"] == ["config.yaml", "meta.json", "report.html"]


def test_resumed_run_continues_in_directory_store(make_config: MakeConfig, tmp_path: Path) -> None:
    config = with_mlflow(make_config, tracking__mlflow__tracking_uri=str(tmp_path / "mlruns"))
    allowed = {"MLFLOW_ALLOW_FILE_STORE": "true"}
    assert harness.run(config, fault="after_optimizer:5:0:term", env=allowed).code == 75
    ended = harness.run(config, RUN_ID, env=allowed)
    assert ended.code == 0, ended.output
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(allowed.items())))
        [run] = read_store(str(tmp_path / "mlruns"))
    assert run["status"] == "FINISHED"
    assert [step for step, _ in run["history"]["train/loss"]] == [*range(1, 9)]


def test_environment_selects_store(make_config: MakeConfig, empty_store: Path, tmp_path: Path) -> None:
    shutil.copy(empty_store, tmp_path / "env.db")
    config = with_mlflow(make_config)
    ended = harness.run(config, env={"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/env.db"})
    assert ended.code == 0, ended.output
    assert len(read_store(f"sqlite:///{tmp_path}/env.db")) == 1


def test_tracking_location(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert location_of(make_config(tracking__mlflow__tracking_uri="http://server:5000")) == (
        "http://server:5000",
        None,
    )
    directory = tmp_path / "x"
    for version, allowed, uri in (
        ((3, 12), "", directory.as_uri()),
        ((3, 13), "", f"sqlite:///{directory}/mlflow.db"),
        ((4, 0), "", f"sqlite:///{directory}/mlflow.db"),
        ((3, 17), "True", directory.as_uri()),
        ((3, 17), "0", f"sqlite:///{directory}/mlflow.db"),
    ):
        monkeypatch.setattr(mlflow, "mlflow_version", lambda version=version: version)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", allowed)
        assert location_of(make_config(tracking__mlflow__tracking_uri=str(directory)))[0] == uri
        default = location_of(make_config(tracking__mlflow__tracking_uri=None, output__root_dir=str(directory)))[0]
        assert default == f"sqlite:///{directory}/mlflow.db", "the run directory is never an MLflow store"
    assert not directory.exists()
    uri, artifacts = location_of(make_config(tracking__mlflow__tracking_uri=f"sqlite:///{tmp_path}/x/m.db"))
    assert (uri, artifacts) == (f"sqlite:///{tmp_path}/x/m.db", f"file://{tmp_path}/x/mlartifacts")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment")
    assert location_of(make_config())[0] == "http://from-environment"
    assert location_of(make_config(tracking__mlflow__tracking_uri="http://from-config"))[0] == "http://from-config"


def test_unreachable_server_never_stops_training(make_config: MakeConfig) -> None:
    config = with_mlflow(make_config, tracking__mlflow__tracking_uri="http://127.0.0.1:9")
    ended = harness.run(config)
    assert ended.code == 0, ended.output
    assert ended.output.count("MLflow failed") == 1
    assert ended.seconds < 45
    assert len(harness.train_rows(root_of(config) / RUN_ID)) == 8
    assert ended.result["state_sha256"] == harness.run(make_config()).result["state_sha256"]


@pytest.fixture
def silent_server() -> Any:
    """Accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_silent_server_delays_the_end_by_bounded_time(make_config: MakeConfig, silent_server: str) -> None:
    def less_patience() -> None:
        background.FLUSH_SEC = 3.0

    config = with_mlflow(make_config, tracking__mlflow__tracking_uri=silent_server)
    ended = harness.run(config, before=less_patience)
    assert ended.code == 0, ended.output
    assert ended.seconds < 15
    assert ended.output.count("MLflow did not accept all metrics") + ended.output.count("MLflow failed") == 1
    assert len(harness.train_rows(root_of(config) / RUN_ID)) == 8


def test_server_reachable_again_on_resume(make_config: MakeConfig, empty_store: Path, tmp_path: Path) -> None:
    """The first attempt created no MLflow run: the resumed one creates it, and sends the missing rows."""
    shutil.copy(empty_store, tmp_path / "back.db")
    config = with_mlflow(make_config, tracking__mlflow__tracking_uri="http://127.0.0.1:9")
    assert harness.run(config, fault="after_optimizer:5:0:term", env=NO_RETRIES).code == 75
    store = f"sqlite:///{tmp_path}/back.db"
    ended = harness.run(config.with_values("tracking.mlflow", tracking_uri=store), RUN_ID)
    assert ended.code == 0, ended.output
    [run] = read_store(store)
    assert [step for step, _ in run["history"]["train/loss"]] == [*range(1, 9)]
    assert run["status"] == "FINISHED"


@pytest.mark.slow
def test_resume_with_another_store(make_config: MakeConfig, empty_store: Path, tmp_path: Path) -> None:
    """A run moved to another server has no MLflow run there: one is created."""
    for name in ("one.db", "two.db"):
        shutil.copy(empty_store, tmp_path / name)
    config = with_mlflow(make_config, tracking__mlflow__tracking_uri=f"sqlite:///{tmp_path}/one.db")
    assert harness.run(config, fault="after_optimizer:5:0:term").code == 75
    ended = harness.run(config.with_values("tracking.mlflow", tracking_uri=f"sqlite:///{tmp_path}/two.db"), RUN_ID)
    assert ended.code == 0, ended.output
    assert "MLflow failed" not in ended.output
    [run] = read_store(f"sqlite:///{tmp_path}/two.db")
    assert run["status"] == "FINISHED"


def test_best_checkpoint_is_uploaded(tracked: MakeConfig) -> None:
    """log_models, for a run whose last model is worse than its best."""
    config = tracked(
        tracking__mlflow__log_models=True,
        trainer__schedule="constant",
        trainer__lr=0.3,
        trainer__warmup_steps=0,
        trainer__max_steps=6,
        trainer__eval_every_steps=1,
    )
    ended = harness.run(config)
    assert ended.code == 0, ended.output
    best = ended.result["best_step"]
    assert best < 6, "the run was meant to get worse"
    [run] = read_store(f"sqlite:///{root_of(config) / 'mlflow.db'}")
    assert run["artifacts"] == ["best_checkpoint", "config.yaml", "meta.json", "report.html"]
    [uploaded] = root_of(config).glob("mlartifacts/**/best_checkpoint")
    assert harness.tree(uploaded) == harness.tree(root_of(config) / RUN_ID / "checkpoints" / f"step_{best}")


def test_log_models_with_every_model(tracked: MakeConfig) -> None:
    """Also for one without an export format."""
    config = tracked(tracking__mlflow__log_models=True, model__name="dummy_gpt")
    ended = harness.run(config)
    assert ended.code == 0, ended.output
    assert "MLflow failed" not in ended.output
    assert list(root_of(config).glob("mlartifacts/**/best_checkpoint/model.safetensors"))


LOGIN = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "canary-word"}


@pytest.mark.parametrize(
    ("uri", "env", "is_missing"),
    [
        ("http://***@server:5000", {}, True),
        ("http://***@server:5000", {"MLFLOW_TRACKING_USERNAME": "me"}, True),
        ("http://***@server:5000", LOGIN, False),
        ("https://***@server:5000", {"MLFLOW_TRACKING_TOKEN": "canary-word"}, False),
        ("http://***@server:5000", {"MLFLOW_TRACKING_URI": "http://me:word@server:5000"}, False),
        ("postgresql://***@db/mlflow", LOGIN, True),
        ("http://server:5000", {}, False),
        (None, {}, False),
    ],
)
def test_login_of_recorded_server_comes_from_environment(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, uri: str | None, env: dict[str, str], is_missing: bool
) -> None:
    for name in (*LOGIN, "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert mlflow.is_login_missing(uri) is is_missing
    if uri:
        found = location_of(make_config(tracking__mlflow__tracking_uri=uri))[0]
        assert found == env.get("MLFLOW_TRACKING_URI", uri.replace("***@", ""))


@pytest.mark.slow
def test_missing_login_is_warned_about(make_config: MakeConfig) -> None:
    """Its config.yaml has the URI without the login."""
    uri = "http://me:canary-word@127.0.0.1:9"
    config = with_mlflow(make_config, tracking__mlflow__tracking_uri=uri, output__save_config_copy=True)
    assert harness.run(config, fault="after_optimizer:3:0:term").code == 75
    recorded = load_config(root_of(config) / RUN_ID / "config.yaml")
    assert recorded.tracking.mlflow.tracking_uri == "http://***@127.0.0.1:9"
    without = harness.run(recorded, RUN_ID, fault="after_optimizer:5:0:term")
    with_login = harness.run(recorded, RUN_ID, env=LOGIN)
    assert (without.code, with_login.code) == (75, 0)
    assert "MLFLOW_TRACKING_PASSWORD" in without.output
    assert "MLFLOW_TRACKING_PASSWORD" not in with_login.output

"""Uploading a run directory to MLflow after training: complete, and without duplicates if repeated."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import yaml
from fault_harness import RUN_ID

from llmtrain.config.schema import Config
from llmtrain.core.install import install_command
from llmtrain.errors import UsageError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.metrics import read_metrics
from llmtrain.tracking import mlflow as tracker_module
from llmtrain.tracking.replay import replay_run

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module", autouse=True)
def _mlflow() -> None:
    pytest.importorskip("mlflow", reason="needs the mlflow extra")
    from mlflow.tracking import MlflowClient  # noqa: F401


@pytest.fixture(autouse=True)
def _no_uri_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables, whose creation takes seconds: tests copy it."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    shutil.copy(empty_store, tmp_path / "store" / "mlflow.db")
    return f"sqlite:///{tmp_path}/store/mlflow.db"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, cache: Path, tiny: list[str]) -> Path:
    """A real run of the preset gpt_smoke, created once; tests copy it."""
    from llmtrain.config.load import load_config
    from llmtrain.training.run import run_training

    root = tmp_path_factory.mktemp("smoke") / "runs"
    expected = [*tiny, f"output.root_dir={root}", f"output.run_id={RUN_ID}", f"data.cache_dir={cache}"]
    expected += ["trainer.eval_prompts=[hello]", "trainer.eval_prompt_tokens=4", "tracking.mlflow.experiment=tries"]
    assert run_training(load_config("gpt_smoke", expected))
    return root / RUN_ID


@pytest.fixture
def fetched(smoke: Path, tmp_path: Path) -> RunDirectory:
    """The run as fetched from a cluster: its config has paths that do not exist here."""
    run = RunDirectory(Path(shutil.copytree(smoke, tmp_path / "here" / RUN_ID)))
    change_config(run, "output", root_dir="/out")
    return run


def change_config(run: RunDirectory, section: str, **values: Any) -> None:
    config = yaml.safe_load(run.config.read_text())
    (config["tracking"]["mlflow"] if section == "mlflow" else config[section]).update(values)
    run.config.write_text(yaml.safe_dump(config))


def read_all(uri: str) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(ids))


def history(uri: str, mlflow_run_id: str, name: str) -> list[tuple[int, float, int]]:
    from mlflow.tracking import MlflowClient

    rows = MlflowClient(tracking_uri=uri).get_metric_history(mlflow_run_id, name)
    return sorted((row.step, row.value, row.timestamp) for row in rows)


def wanted_history(run: RunDirectory, name: str) -> list[tuple[int, float, int]]:
    rows = [row for row in read_metrics(run.metrics) if row.get(name) is not None]
    return sorted((row["step"], row[name], round(row["time"] * 1000)) for row in rows)


def files_of(uri: str, mlflow_run_id: str) -> set[str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found: set[str] = set()
    waiting: list[str | None] = [None]
    while waiting:
        for item in client.list_artifacts(mlflow_run_id, waiting.pop()):
            waiting += [item.path] if item.is_dir else []
            found |= set() if item.is_dir else {item.path}
    return found


def test_replay_is_complete(fetched: RunDirectory, store: str) -> None:
    fetched.adapter.mkdir()
    (fetched.adapter / "adapter_config.json").write_text("{}")
    value = replay_run(fetched, store)
    [run] = read_all(store)
    assert value["mlflow_run_id"] == run.info.run_id
    assert value["is_new"]
    assert value["experiment"] == "tries"
    assert run.info.run_name == RUN_ID
    assert run.data.tags["llmtrain.run_id"] == RUN_ID
    assert run.info.status == "FINISHED"
    expected = {"model.name": "dummy_gpt", "trainer.max_steps": "4", "world_size": "1", "steps": "4"}
    assert expected.items() <= run.data.params.items()
    result = json.loads(fetched.finished.read_text())
    assert run.data.params["parameters"] == str(result["parameters"])
    for name in ("train/loss", "train/lr", "val/loss"):
        assert history(store, run.info.run_id, name) == wanted_history(fetched, name)
    times = [row["time"] for row in read_metrics(fetched.metrics)]
    assert (run.info.start_time, run.info.end_time) == (round(min(times) * 1000), round(max(times) * 1000))
    files = files_of(store, run.info.run_id)
    assert {"config.yaml", "meta.json", "finished.json", "logs/train.log", "samples/step_4.json"} <= files
    assert "adapter/adapter_config.json" in files
    assert not [name for name in files if "step_4/" in name or "safetensors" in name]


def test_repeated_replay_adds_nothing(fetched: RunDirectory, store: str) -> None:
    first = replay_run(fetched, store)
    for note in ("kept", "lost"):  # fetched anew, the directory has no note
        if note == "lost":
            fetched.mlflow.unlink()
        again = replay_run(fetched, store)
        assert (again["mlflow_run_id"], again["is_new"]) == (first["mlflow_run_id"], False)
        assert (again["metrics"], again["metrics_there"]) == (0, first["metrics"])
    [run] = read_all(store)
    assert run.info.status == "FINISHED"
    assert history(store, run.info.run_id, "train/loss") == wanted_history(fetched, "train/loss")


def test_replay_after_resume(fetched: RunDirectory, store: str) -> None:
    """Interrupted and uploaded, then resumed with other settings and uploaded again."""
    finished = fetched.finished.read_bytes()
    generations = fetched.generations.read_text()
    fetched.finished.unlink()
    fetched.generations.write_text(generations.replace('"finished"', '"stopped"'))
    lines = fetched.metrics.read_text().splitlines(keepends=True)
    fetched.metrics.write_text("".join(lines[:2]) + '{"step": 3, "train')  # torn by a kill
    assert replay_run(fetched, store)["status"] == "stopped"
    assert read_all(store)[0].info.status == "KILLED"
    fetched.metrics.write_text("".join(lines))
    fetched.generations.write_text(generations)
    fetched.finished.write_bytes(finished)
    change_config(fetched, "trainer", max_steps=5)  # MLflow never changes a parameter
    assert replay_run(fetched, store)["metrics_there"] > 0
    [run] = read_all(store)
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.max_steps"] == "4"
    assert history(store, run.info.run_id, "train/loss") == wanted_history(fetched, "train/loss")


def test_start_without_recorded_end_has_failed(fetched: RunDirectory, store: str) -> None:
    fetched.finished.unlink()
    fetched.generations.write_text(fetched.generations.read_text().replace('"finished"', "null"))
    assert replay_run(fetched, store)["status"] == "failed"
    assert read_all(store)[0].info.status == "FAILED"


def test_live_tracked_run_is_completed(make_config: MakeConfig, store: str) -> None:
    """The times of the live tracker are kept, and nothing is duplicated."""
    config = make_config(tracking__mlflow__enabled=True, tracking__mlflow__tracking_uri=store)
    ended = harness.run(config)
    assert ended.code == 0, ended.output
    run = RunDirectory(Path(config.output.root_dir) / RUN_ID)
    value = replay_run(run)
    [there] = read_all(store)
    assert (value["mlflow_run_id"], value["metrics"], value["is_new"]) == (there.info.run_id, 0, False)
    assert len(history(store, there.info.run_id, "train/loss")) == 8
    assert "finished.json" in files_of(store, there.info.run_id)


def test_record_of_other_store_is_kept(fetched: RunDirectory, store: str) -> None:
    """A resumed run continues in the store of its record."""
    note = {"run_id": "1", "tracking_uri": "http://server", "described": True}
    fetched.mlflow.write_text(json.dumps(note))
    replay_run(fetched, store)
    assert json.loads(fetched.mlflow.read_text()) == note
    fetched.mlflow.unlink()
    value = replay_run(fetched, store)
    assert json.loads(fetched.mlflow.read_text())["run_id"] == value["mlflow_run_id"]


def test_default_store_is_beside_the_run(fetched: RunDirectory, empty_store: Path) -> None:
    """Not in /out, as in the config, nor in a store on the file system of the pods."""
    shutil.copy(empty_store, fetched.path.parent / "mlflow.db")
    change_config(fetched, "mlflow", tracking_uri="sqlite:////out/not/here/mlflow.db")
    value = replay_run(fetched)
    assert value["tracking_uri"] == f"sqlite:///{fetched.path.parent / 'mlflow.db'}"
    assert (fetched.path.parent / "mlartifacts").is_dir()
    assert not Path("/out").exists()


def test_store_precedence(fetched: RunDirectory, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config overrides the environment, as in the live tracker; its login is not stored."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert replay_run(fetched)["tracking_uri"] == store
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    named = f"sqlite:///{tmp_path}/other/mlflow.db"
    change_config(fetched, "mlflow", tracking_uri=named)
    assert replay_run(fetched)["tracking_uri"] == named
    change_config(fetched, "mlflow", tracking_uri="http://***@server")
    assert replay_run(fetched)["tracking_uri"] == store
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(UsageError, match="without its login"):
        replay_run(fetched)


def test_metrics_are_sent_in_batches(fetched: RunDirectory, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": step, "train/loss": 1 / step, "time": 1000.0 + step} for step in range(1, 2502)]
    rows.append({"step": 2502, "train/loss": None, "time": 9000.0})  # it was not finite
    fetched.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from mlflow.tracking import MlflowClient

    sizes = []
    original = MlflowClient.log_batch

    def note(self: Any, run_id: str, metrics: Any = (), **more: Any) -> Any:
        sizes.append(len(metrics))
        return original(self, run_id, metrics=metrics, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", note)
    assert replay_run(fetched, store)["metrics"] == 2502
    assert [size for size in sizes if size] == [1000, 1000, 502]
    again = replay_run(fetched, store)
    assert (again["metrics"], again["metrics_there"]) == (0, 2502)


def test_missing_mlflow_is_usage_error(fetched: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="mlflow is not installed") as problem:
        replay_run(fetched)
    assert install_command("mlflow") in str(problem.value)


def test_unusable_stores_are_usage_errors(fetched: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for uri in ("http://me:hidden-word@127.0.0.1:9", "nonsense://x"):
        with pytest.raises(UsageError, match="MLflow store") as problem:
            replay_run(fetched, uri)
        assert "hidden-word" not in str(problem.value)
        assert problem.value.remedy


def test_run_without_config_is_refused(fetched: RunDirectory, store: str) -> None:
    fetched.config.unlink()
    with pytest.raises(UsageError, match=r"has no config\.yaml"):
        replay_run(fetched, store)

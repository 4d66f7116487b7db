"""What the tests share: a directory of their own, the command line in this process, the optional data folder."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

# Helpers that tests share: tiny_llama, hub_server, and the harness that trains in children of the fork server. And the
# tools that write and check the docs.
TESTS = Path(__file__).parent
PACKAGES_WITH_HELPERS = ("faults", "launch", "lint", "operate", "sweep", "training")
sys.path[:0] = [str(TESTS), *(str(TESTS / name) for name in PACKAGES_WITH_HELPERS), str(TESTS.parent / "tools")]

from stack_dumps import pytest_exception_interact, pytest_timeout_set_timer  # noqa: E402, F401

if TYPE_CHECKING:
    from kube_server import KubeServer

# No limit per example: on a busy machine any may take long.
settings.register_profile("llmtrain", deadline=None)
settings.load_profile("llmtrain")

# `nohup make test &` in a script starts this process with both ignored, and what tests start would inherit that. A
# handler is not inherited: Ctrl-C works in tests again, and the end of the login still does not end the run.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Before any library reads them: no test may wait for a network, and the caller's settings must not leak in.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["KUBECONFIG"] = "/nowhere/kubeconfig"  # no test reaches a cluster of the caller's
for _name in ("LLMTRAIN_FAULT", "MLFLOW_TRACKING_URI", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
    os.environ.pop(_name, None)
# As the command line sets it (openmp_variables): forked children have loaded OpenMP before they could. Else two threads
# on a busy machine spend five times the CPU time.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Without bytecode every process that a test starts compiles all that it imports, for seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).resolve().parents[1]
MEMORY_FILES = Path("/dev/shm")
MEMORY_BYTES = 8 * 2**30


def _has_memory_for_files() -> bool:
    try:
        found = os.statvfs(MEMORY_FILES)
        available = next(row for row in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in row)
    except (OSError, StopIteration):
        return False
    is_executable = not found.f_flag & os.ST_NOEXEC  # tests write programs
    return is_executable and min(found.f_bavail * found.f_frsize, int(available.split()[1]) * 1024) >= MEMORY_BYTES


# tmp_path is in memory where there is plenty: a run of eight steps calls fsync 70 times, and on a disk the tests spend
# half of their time in it. What fsync is for, a machine that loses power, no test can cause.
if "PYTEST_DEBUG_TEMPROOT" not in os.environ and _has_memory_for_files():
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY_FILES)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which must be one JSON object and nothing else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Cli = Callable[..., Result]


_threads_at_forks: list[int] = []
if sys.platform == "linux":
    os.register_at_fork(before=lambda: _threads_at_forks.append(len(list(Path("/proc/self/task").iterdir()))))


@pytest.fixture(autouse=True)
def _no_fork_with_threads() -> Iterator[None]:
    """A child of a process with threads may wait forever for a lock that one of them held: see fork_server.py."""
    yield
    found = max(_threads_at_forks, default=0)
    _threads_at_forks.clear()
    assert found <= 1, f"the test process forked while it had {found} threads"


@pytest.fixture(autouse=True)
def _default_sigterm() -> None:
    """llmtrain's main, called in this process, ignores SIGTERM once it has ended, and children inherit that."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _forget_modules_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A plugin that a test wrote must not be what the next test's module of the same name is taken for."""
    path, known = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    written = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]


@pytest.fixture(scope="session")
def repo() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenized text, written once for all tests of a session that may share it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables, whose creation takes seconds: tests copy it."""
    pytest.importorskip("mlflow", reason="needs the mlflow extra")
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory; the default cache (below the home directory) is outside it."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def cli(workdir: Path, capfd: pytest.CaptureFixture[str]) -> Cli:  # noqa: ARG001 (runs inside it)
    """llmtrain's command line in this process: cli("validate", "--json"). A crash becomes a traceback in `err`."""
    from llmtrain.cli import main

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        crash = ""
        code: object = None
        environment = dict(os.environ)
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            code, crash = 1, traceback.format_exc()
        finally:  # a command sets variables for its worker processes; the next test must not inherit them
            os.environ.clear()
            os.environ.update(environment)
        out, err = capfd.readouterr()
        assert isinstance(code, int)
        return Result(code, out, err + crash)

    return run


@pytest.fixture
def call(cli: Cli, kube: "KubeServer", tmp_path: Path) -> Cli:
    """llmtrain with a kubeconfig of the test's own API server: call("status", "demo")."""
    from llmtrain.commands.table import GROUPS

    path = kube.kubeconfig(tmp_path)

    def run(*words: object) -> Result:
        verbs = 2 if words[0] in GROUPS else 1
        done = cli(*words[:verbs], "--kubeconfig", path, *words[verbs:])
        assert "Traceback" not in done.err, done.err
        return done

    return run


@pytest.fixture(scope="session")
def tiny(cache: Path) -> list[str]:
    """Overrides for the fastest run there is; later ones win, so add your own behind them."""
    return [
        "run.device=cpu",
        "run.threads=1",
        "model.name=dummy_gpt",
        "model.block_size=16",
        "model.d_model=16",
        "data.name=dummy_text",
        f"data.cache_dir={cache}",
        "trainer.max_steps=4",
        "trainer.micro_batch_size=2",
        "trainer.lr=1e-2",
        "trainer.warmup_steps=0",
        "trainer.log_every_steps=1",
        "trainer.eval_every_steps=2",
        "trainer.eval_batches=2",
        "trainer.save_every_steps=2",
    ]


@pytest.fixture
def train(cli: Cli, tiny: list[str]) -> Cli:
    """`llmtrain train` with the tiny overrides and then yours: train("run.seed=1", more=["--json"])."""

    def run(*overrides: str, config: str = "gpt_smoke", more: tuple[str, ...] | list[str] = ()) -> Result:
        sets = [part for text in (*tiny, *overrides) for part in ("--set", text)]
        return cli("train", "--config", config, *sets, *more)

    return run


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data folder beside the checkout; tests that need it are marked `shared` and skipped without it."""
    folder = Path(os.environ.get("LLMTRAIN_SHARED") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here (LLMTRAIN_SHARED names another place)")
    return folder


@pytest.fixture
def make_config(tmp_path: Path, cache: Path) -> Iterator[Callable[..., Any]]:
    """Configs of tiny runs for the harness, each in a directory of its own."""
    import fault_harness as harness

    made = []

    def make(**changes: Any) -> Any:
        made.append(None)
        return harness.tiny_config(tmp_path / str(len(made)) / "runs", cache, **changes)

    yield make
    harness.end_all()


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model directory and examples to fine-tune it on."""
    from test_fine_tune_faults import make_material

    return make_material(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def make_fine_tune(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, material: Any
) -> Iterator[Callable[..., Any]]:
    """Configs of fine-tuning runs for the harness, each in a directory of its own."""
    import fault_harness as harness
    from test_fine_tune_faults import fine_tune_config

    yield lambda **changes: fine_tune_config(tmp_path_factory.mktemp("tune") / "runs", cache, material, **changes)
    harness.end_all()


@pytest.fixture
def kube() -> "Iterator[KubeServer]":
    from kube_server import kube_server

    with kube_server() as server:
        yield server


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short polling intervals and timeouts."""
    from llmtrain.operate.logs import merged_logs as logs
    from llmtrain.operate.logs import pod_log
    from llmtrain.operate.status import watch as follow

    for module, name, value in (
        (follow, "POLL_SEC", 0.05),
        (follow, "START_FAILURE_SEC", 0.3),
        (follow, "REMOVED_SEC", 0.3),
        (follow, "DRAIN_SEC", 1.0),
        (follow, "USAGE_SEC", 0.0),
        (follow, "EVENTS_SEC", 0.0),
        (logs, "POLL_SEC", 0.05),
        (pod_log, "RETRY_SEC", 0.05),
    ):
        monkeypatch.setattr(module, name, value)

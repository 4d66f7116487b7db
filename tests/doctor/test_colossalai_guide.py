"""The variables and the three functions of ColossalAI's Kubernetes guide, with llmtrain instead."""

import pytest

from llmtrain.config.distributed import DistributedSection
from llmtrain.core.logs import is_debugging
from llmtrain.diagnose import diagnose, require_environment, setup_network, validate_environment
from llmtrain.distributed.rendezvous import join_deadline_sec, ready_deadline_sec
from llmtrain.doctor.collective import version_skew
from llmtrain.errors import UsageError

SECTION = DistributedSection(join_timeout_sec=5, master_ready_timeout_sec=6)
# The environment of its training pods.
WORKER = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "train-0.train",
    "MASTER_PORT": "29500",
}


def test_timeout_variables_and_precedence() -> None:
    guide_variables = {"COLOSSALAI_DIST_TIMEOUT": "1800", "COLOSSALAI_MASTER_READY_TIMEOUT": "600"}
    assert (join_deadline_sec(SECTION, {}), ready_deadline_sec(SECTION, {})) == (5, 6)
    assert (join_deadline_sec(SECTION, guide_variables), ready_deadline_sec(SECTION, guide_variables)) == (1800, 600)
    both = {**guide_variables, "LLMTRAIN_DIST_TIMEOUT": "7", "LLMTRAIN_MASTER_READY_TIMEOUT": "8"}
    assert (join_deadline_sec(SECTION, both), ready_deadline_sec(SECTION, both)) == (7, 8)
    with pytest.raises(UsageError, match="COLOSSALAI_DIST_TIMEOUT"):
        join_deadline_sec(SECTION, {"COLOSSALAI_DIST_TIMEOUT": "soon"})


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, False),
        ({"COLOSSALAI_DEBUG": "1"}, True),
        ({"DEBUG_DISTRIBUTED": "1"}, True),
        ({"DEBUG_DISTRIBUTED": "0"}, False),
        ({"LLMTRAIN_DEBUG": "0", "COLOSSALAI_DEBUG": "1"}, False),
    ],
)
def test_debug_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_on: bool) -> None:
    for name in ("LLMTRAIN_DEBUG", "COLOSSALAI_DEBUG", "DEBUG_DISTRIBUTED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_debugging() is is_on


def test_require_environment() -> None:
    assert validate_environment(WORKER, "train-1") == []
    assert require_environment(WORKER, "train-1") == WORKER
    broken = {**WORKER, "RANK": "7", "MASTER_PORT": "no"}
    problems = validate_environment(broken, "train-1")
    assert len(problems) > 1
    with pytest.raises(RuntimeError) as refused:  # what the guide's own function raises
        require_environment(broken, "train-1")
    assert isinstance(refused.value, UsageError)
    for problem in problems:
        assert problem.what in str(refused.value)


def test_setup_network_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {"MASTER_ADDR": "127.0.0.1"}
    assert setup_network(environ=environ)["GLOO_SOCKET_IFNAME"] == "lo"
    assert setup_network(environ={})["GLOO_SOCKET_IFNAME"] == "lo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "kept")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    assert setup_network() == {}
    assert callable(diagnose)


def test_version_skew_of_missing_packages() -> None:
    rows = [{"torch": "2.13", "transformers": "5.22.2"}, {"torch": "2.13"}]
    found = version_skew(rows)
    assert found.status == "fail"
    assert "transformers" in found.evidence
    assert version_skew([rows[0], rows[0]]).status == "pass"

"""The checks of one process: environment, network, machine."""

import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.core.findings import is_ok
from llmtrain.diagnose import Finding, diagnose
from llmtrain.distributed import machine_limits
from llmtrain.doctor import machine, memory
from llmtrain.doctor.diagnose import checks_after
from llmtrain.doctor.environment import Master, Position
from llmtrain.doctor.network import chosen_interfaces, master_port, route_to_master
from llmtrain.errors import JoinError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    base = Config().with_values("output", root_dir=str(tmp_path / "runs"))
    return base.with_values("data", cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def look(config: Config, environ: Mapping[str, str] | None = None) -> dict[str, Finding]:
    return by_name(diagnose(config, environ or {}))


def test_laptop_passes(config: Config, tmp_path: Path) -> None:
    findings = diagnose(config, {})
    assert is_ok(findings), findings
    names = by_name(findings)
    assert set(names) >= {"versions", "identity", "gpu", "cores", "memory", "shared memory", "output"}
    assert set(names) >= {"file system", "write speed"}
    assert "master port" not in names
    assert "torch" in names["versions"].evidence
    assert list(tmp_path.iterdir()) == [], "the probe file is left behind, or a directory was made"


def test_diagnose_without_config(workdir: Path) -> None:  # noqa: ARG001
    assert is_ok(diagnose(environ={}))


def test_bad_environment_fails(config: Config) -> None:
    findings = diagnose(config, {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "many"})
    wrong = [f for f in findings if f.name == "identity"]
    assert wrong
    assert {f.status for f in wrong} == {"fail"}
    assert any("LOCAL_RANK" in f.evidence for f in wrong)
    assert all(f.remedy for f in wrong)


def test_environment_is_shown_without_secrets(config: Config) -> None:
    found = look(config, {"WORLD_SIZE": "1", "MY_TOKEN": "hush", "NCCL_DEBUG": "INFO"})["environment"]
    assert "WORLD_SIZE=1" in found.evidence
    assert "NCCL_DEBUG=INFO" in found.evidence
    assert "hush" not in found.evidence


@pytest.mark.parametrize(
    ("variable", "text", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", "pass"),
        ("GLOO_SOCKET_IFNAME", "nope7", "fail"),
        ("GLOO_SOCKET_IFNAME", "lo,nope7", "fail"),
        ("GLOO_SOCKET_IFNAME", "l", "fail"),
        ("NCCL_SOCKET_IFNAME", "l", "pass"),
        ("NCCL_SOCKET_IFNAME", "=l", "fail"),
        ("NCCL_SOCKET_IFNAME", "=lo", "pass"),
        ("NCCL_SOCKET_IFNAME", "nope7", "fail"),
        ("NCCL_SOCKET_IFNAME", "nope7,lo", "pass"),
        ("NCCL_SOCKET_IFNAME", "^nope7", "pass"),
    ],
)
def test_missing_interface_fails(variable: str, text: str, status: str) -> None:
    (found,) = chosen_interfaces({variable: text})
    assert (found.name, found.status) == (variable, status)
    if status == "fail":
        assert "lo" in found.evidence
        assert f"Unset {variable}" in str(found.remedy)


def test_excluding_every_interface_fails() -> None:
    every = ",".join(name for _, name in socket.if_nameindex())
    (found,) = chosen_interfaces({"NCCL_SOCKET_IFNAME": f"^{every}"})
    assert found.status == "fail"


def test_refusing_master_fails(config: Config, closed_port: int) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed_port)}
    found = look(config, environ)["master port"]
    assert found.status == "fail"
    assert "refused" in found.evidence
    assert "MASTER_PORT" in str(found.remedy)


def test_listening_master_passes(listening: int) -> None:
    (found,) = master_port(Master("127.0.0.1", listening, is_hosted_here=False))
    assert found.status == "pass"


def test_own_master_port_must_be_free(listening: int, closed_port: int) -> None:
    (taken,) = master_port(Master("127.0.0.1", listening, is_hosted_here=True))
    (free,) = master_port(Master("127.0.0.1", closed_port, is_hosted_here=True))
    assert (taken.status, free.status) == ("fail", "pass")
    assert "in use" in taken.evidence


def test_rank0_hosts_unless_agent_does(config: Config, listening: int) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening), "GROUP_RANK": "0"}
    assert look(config, environ)["master port"].status == "fail"
    assert look(config, environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"})["master port"].status == "pass"


def test_unresolvable_master_fails() -> None:
    (found,) = route_to_master(Master("no-such-host.invalid", 29500, is_hosted_here=False), 1)
    assert (found.name, found.status) == ("master name", "fail")
    assert "headless Service" in str(found.remedy)


def test_interface_to_master() -> None:
    master = Master("127.0.0.1", 29500, is_hosted_here=True)
    assert by_name(list(route_to_master(master, 0)))["interface"].status == "pass"
    other = by_name(list(route_to_master(master, 1)))["interface"]
    assert other.status == "warn"
    assert "(lo)" in other.evidence


def test_port_is_checked_after_failed_start_of_remote_master(config: Config) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}

    def names(environ: dict[str, str], **details: object) -> list[str]:
        error = JoinError("no")
        error.details = details
        return [name for name, _ in checks_after(error, config.distributed, environ)]

    assert names(environ) == ["master name", "master port"]
    assert names(environ, host="127.0.0.1", port=1, failed="refused") == ["master name"]
    assert names(environ | {"RANK": "0", "LOCAL_RANK": "0"}) == ["master name"]
    assert names({}, host="127.0.0.1", port=1) == ["master name"]
    assert names({}) == []


def test_root_dir_that_is_a_file_fails(config: Config, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    names = look(config)
    assert names["output"].status == "fail"
    assert "output.root_dir" in str(names["output"].remedy)
    assert "write speed" not in names
    assert names["cache"].status == "pass"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_root_dir_without_write_access_fails(config: Config, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    assert look(config)["output"].status == "fail"


def test_directory_of_existing_run_is_checked(config: Config, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("")
    named = config.with_values("output", run_id="mine")
    assert look(named)["output"].status == "fail"
    assert look(named.with_values("output", run_id="other"))["output"].status == "pass"


def test_slow_volume_warns(tmp_path: Path) -> None:
    slow = machine.write_speed(tmp_path, slow_bytes_per_sec=1e15)
    assert slow.status == "warn"
    assert "MB/s" in slow.evidence or "GB/s" in slow.evidence
    assert machine.write_speed(tmp_path, slow_bytes_per_sec=1).status == "pass"
    assert list(tmp_path.iterdir()) == []


def test_small_volume_warns(tmp_path: Path) -> None:
    assert machine.free_space("output space", tmp_path / "not" / "yet", 1 << 60).status == "warn"
    assert machine.free_space("output space", tmp_path / "not" / "yet", 1).status == "pass"


def test_pod_without_runs_volume_needs_no_output(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = config.with_values("output", root_dir="/proc/none").with_values("launch", runs_volume=None)
    assert look(missing)["output"].status == "fail", "outside of a pod the volume does not matter"
    monkeypatch.setenv("LLMTRAIN_LAUNCH", "1")
    assert look(missing)["output"].status == "pass"


def test_model_larger_than_memory_fails(config: Config) -> None:
    wide = config.with_values("model", d_model=16384, n_layers=10, n_heads=32).with_values("run", device="cpu")
    size = memory.plan_here(wide, Position()).size
    assert size is not None
    assert 2e10 < size.parameters < 5e10
    names = look(wide)
    assert names["memory"].status == "fail"
    assert f"{size.parameters:,} parameters" in names["memory"].evidence
    assert "activations" in names["memory"].evidence
    assert "trainer.micro_batch_size" in (names["memory"].remedy or "")
    assert names["output space"].status == "warn", "its checkpoints do not fit either"


@pytest.mark.slow
def test_memory_requirement(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = config.with_values("run", device="cpu").with_values("trainer", optimizer="adamw", grad_accum_steps=4)
    need = needed(cpu, Position())
    assert needed(cpu.with_values("trainer", optimizer="adafactor"), Position()) < need
    assert needed(cpu.with_values("trainer", micro_batch_size=64), Position()) > need

    def status(limit: float, position: Position) -> str:
        monkeypatch.setattr(memory, "machine_memory", lambda: int(limit))
        (found,) = memory.memory(memory.plan_here(cpu, position))
        return found.status

    two = Position(world_size=2, local_world_size=2)
    assert status(1.2 * need, Position()) == "pass"
    assert status(1.05 * need, Position()) == "warn", "the estimate may be wrong by more"
    assert status(0.9 * need, Position()) == "fail"
    assert status(1.2 * need, two) == "fail"
    assert status(1.2 * need, Position(world_size=2)) == "pass", "on two nodes"
    assert status(2.4 * need, two) == "pass"


def needed(config: Config, position: Position) -> int:
    plan = memory.plan_here(config, position)
    assert plan.memory is not None
    assert plan.memory.needed is not None
    return plan.memory.needed


def test_shards_need_less(config: Config) -> None:
    wide = config.with_values("model", d_model=1024, n_layers=4).with_values("run", device="cpu")
    wide = wide.with_values("trainer", optimizer="adamw", grad_accum_steps=4)
    four = Position(world_size=4, local_world_size=4)
    assert needed(wide.with_values("distributed", strategy="fsdp"), four) < 0.8 * needed(wide, four)


def test_memory_of_processes_that_cannot_share_a_step(config: Config) -> None:
    two = Position(world_size=2, local_world_size=2)
    one = config.with_values("trainer", grad_accum_steps=1, scale_batch=False)
    (found,) = memory.memory(memory.plan_here(one, two))
    assert found.status == "pass"
    assert "in each of 2 processes" in found.evidence  # it is the same as with two micro-batches
    refused = one.with_values("trainer", optimizer="adafactor").with_values("distributed", strategy="fsdp")
    (found,) = memory.memory(memory.plan_here(refused, two))
    assert found.status == "pass"
    assert "unknown" in found.evidence


def test_model_on_the_hub_is_not_downloaded(config: Config) -> None:
    section = HfCausalLmSection(path="some/model")
    found = look(config.model_copy(update={"model": section}))["memory"]
    assert found.status == "pass"
    assert "some/model is on the hub" in found.evidence


def test_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine_limits, "CGROUP_LIMITS", (tmp_path / "missing", limit))
    limit.write_text("max\n")
    assert machine_limits.machine_memory() > 1 << 28
    limit.write_text("123456\n")
    assert machine_limits.machine_memory() == 123456


def test_vocabulary_that_depends_on_the_text(config: Config) -> None:
    char = config.with_values("data", tokenizer="char")
    assert memory.plan_here(char, Position()).memory
    assert look(char)["memory"].status == "pass"


def test_vocabulary_smaller_than_tokenizer_fails(config: Config) -> None:
    found = look(config.with_values("model", vocab_size=10))["memory"]
    assert found.status == "fail"
    assert "model.vocab_size" in found.evidence


def test_initial_weights_are_not_read(config: Config) -> None:
    started = config.with_values("model", init="/no/such/directory")
    assert memory.plan_here(started, Position()).memory == memory.plan_here(config, Position()).memory


def test_more_threads_than_cores(config: Config) -> None:
    (many,) = machine.cores(config.with_values("run", threads=4096).run, processes=2)
    (one,) = machine.cores(config.with_values("run", threads=1).run, processes=1)
    assert (many.status, one.status) == ("warn", "pass")
    assert "8192" in many.evidence


def test_small_shared_memory_warns_with_workers(config: Config) -> None:
    run = config.with_values("run", device="cpu").run
    (small,) = machine.shared_memory(run, 2, least_bytes=1 << 60)
    (enough,) = machine.shared_memory(run, 2, least_bytes=1)
    (unused,) = machine.shared_memory(run, 0, least_bytes=1 << 60)
    assert (small.status, enough.status, unused.status) == ("warn", "pass", "pass")
    assert "emptyDir" in str(small.remedy)
    assert "/dev/shm has" in unused.evidence


def test_missing_gpu_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (finding,) = machine.gpus(config.with_values("run", device="cuda").run, 1, {})
    assert finding.status == "fail"
    (unusable,) = machine.gpus(config.run, 1, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert unusable.status == "warn"
    assert "2 GPUs" in unusable.evidence
    (none,) = machine.gpus(config.run, 1, {"CUDA_VISIBLE_DEVICES": ""})
    assert (none.status, none.evidence) == ("pass", "no GPU: training runs on the CPU")

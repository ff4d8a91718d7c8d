"""`zeroweave doctor`: every check does what it reports."""

from __future__ import annotations

import pytest

from tests.support.commands import zeroweave
from zeroweave.report import doctor


@pytest.mark.matrix
def test_the_doctor_finds_a_machine_that_trains() -> None:
    done = zeroweave("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok       gloo: works") for line in lines)
    assert any(line.startswith("ok       Inductor (cpu): compiles") for line in lines), done.stdout
    assert any(line.startswith("ok       links: 2 ranks exchange ") for line in lines), done.stdout
    assert lines[-1].startswith("zeroweave works here")
    names = {line[9:].split(":")[0] for line in lines[:-1] if not line[9:].startswith("->")}
    assert {"CPU threads", "shared memory", "libraries"} <= names


@pytest.mark.matrix
def test_a_machine_without_a_compiler_is_limited_and_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    check = doctor.inductor("cpu")
    assert check.state == "limited" and "rror:" in check.detail
    assert check.cure.startswith("apt-get install g++")
    assert "aot_eager" in check.cure


def test_a_compiler_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "COMPILE_SECONDS", 0.01)
    check = doctor.inductor("cpu")
    assert check.state == "limited" and "no result" in check.detail
    assert check.cure.startswith("train with")


@pytest.mark.parametrize(
    ("version", "state", "cure"),
    [
        ((2, 28, 3), "ok", ""),
        ((2, 27, 5), "slow", "pip install 'nvidia-nccl-cu"),
        (None, "failed", "install a PyTorch with NCCL"),
    ],
)
def test_nccl(version: tuple[int, ...] | None, state: str, cure: str) -> None:
    check = doctor.nccl(version)
    assert check.state == state and check.cure.startswith(cure)


@pytest.mark.parametrize(
    ("cuda", "present", "visible", "state", "cure"),
    [
        (None, False, None, "ok", ""),
        ("13.0", False, None, "ok", ""),
        (None, True, None, "limited", "pip install --force-reinstall torch, with CUDA"),
        ("13.0", True, "", "limited", "unset CUDA_VISIBLE_DEVICES"),
        ("13.0", True, None, "limited", "install a driver for CUDA 13.0 or newer; nvidia-smi shows the installed one"),
    ],
)
def test_a_gpu_that_pytorch_cannot_use(
    cuda: str | None, present: bool, visible: str | None, state: str, cure: str
) -> None:
    check = doctor.no_gpu(cuda, present, visible)
    assert (check.state, check.cure) == (state, cure)


def test_gpus_that_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 2)
    for reach, state in ((True, "ok"), (False, "slow")):
        monkeypatch.setattr(doctor.torch.cuda, "can_device_access_peer", lambda a, b, reach=reach: reach)
        check = doctor.peer_access()
        assert check.state == state
    assert "GPUs 0-1, 1-0 cannot reach each other's memory" in check.detail


def test_a_network_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    check = doctor.gloo()
    assert check.state == "failed" and "nowhere7" in check.detail
    assert check.cure.startswith("set GLOO_SOCKET_IFNAME")


def test_ranks_that_cannot_exchange_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(ranks: int) -> None:
        raise RuntimeError(f"{ranks} ranks found no network")

    monkeypatch.setattr(doctor, "measured_links", fails)
    (check,) = doctor.between_ranks(0)
    assert check.state == "failed" and check.detail.endswith("2 ranks found no network")
    assert check.cure.startswith("set GLOO_SOCKET_IFNAME")
    (alone,) = doctor.between_ranks(1)
    assert alone.state == "ok"


def test_the_line_that_says_most() -> None:
    assert doctor.reason("ValueError: first\n  note\n", 1) == "ValueError: first"
    assert doctor.reason("", -11) == "ended with exit code -11"

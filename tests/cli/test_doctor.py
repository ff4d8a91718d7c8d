"""`zeroweave doctor`: every check does what it reports."""

from __future__ import annotations

import os

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
    assert lines[-1] == "zeroweave works here"


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.10.1", "failed"),
        ("2.11.0+cu130", "ok"),
        ("2.13.0+cpu", "ok"),
        ("2.14.0a0+git123", "failed"),
        ("3.0", "failed"),
    ],
)
def test_the_range_of_pytorch(version: str, state: str) -> None:
    check = doctor.pytorch(version)
    assert check.state == state
    assert "torch>=2.11,<2.14" in check.cure


@pytest.mark.matrix
def test_a_machine_without_a_compiler_is_limited_and_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    check = doctor.inductor("cpu")
    assert check.state == "limited"
    assert "no C++ compiler (/nowhere/g++): install g++" in check.cure
    assert "aot_eager" in check.cure


def test_a_compiler_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "COMPILE_SECONDS", 0.01)
    check = doctor.inductor("cpu")
    assert check.state == "limited" and "no result" in check.detail
    assert check.cure.startswith("train with")


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("x.cpp:1: fatal error: Python.h: No such file", "python3-dev"),
        ("fatal error: omp.h: No such file", "libgomp"),
        ("something else", "TORCH_LOGS"),
    ],
)
def test_what_is_missing(output: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{os.path.basename(name)}")
    assert hint in doctor.missing(output, "cpu")


def test_the_line_that_says_most() -> None:
    assert doctor.reason("ValueError: first\n  note\n", 1) == "ValueError: first"
    assert doctor.reason("", -11) == "ended with exit code -11"

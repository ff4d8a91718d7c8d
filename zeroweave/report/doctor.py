"""Checks of the machine: can zeroweave train here, and if not, what is missing.

Each check does the thing (starts a group, compiles a function) rather than looks for its parts, and returns a
`Check`. `limited` means that training works in some other way, which `cure` names; `failed` that it does not.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from typing import Any, Literal

import torch
import torch.distributed as dist

from zeroweave.report.gathers import measured

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, FIRST_UNSUPPORTED_TORCH = (2, 11), (2, 14)
COMPILE_SECONDS = 240

State = Literal["ok", "limited", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of the report; `cure` says what to do about a state other than ok."""

    name: str
    state: State
    detail: str
    cure: str = ""


def checks() -> Iterator[Check]:
    """All checks in order, each run when it is asked for: the compiling ones take seconds."""
    yield python()
    yield pytorch(torch.__version__)
    yield processors()
    yield from devices()
    yield gloo()
    yield nccl()
    yield peer_access()
    yield from gathers()
    yield inductor("cpu")
    if torch.cuda.is_available():
        yield inductor("cuda")


def python() -> Check:
    """The interpreter's version."""
    fine = sys.version_info[:2] >= OLDEST_PYTHON
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return Check("Python", "ok" if fine else "failed", platform.python_version(), f"install Python {wanted} or newer")


def pytorch(version: str) -> Check:
    """PyTorch's version, such as "2.13.0+cpu", against the supported range."""
    major, minor = (int(part) for part in version.split(".")[:2])
    fine = OLDEST_TORCH <= (major, minor) < FIRST_UNSUPPORTED_TORCH
    wanted = "torch>={}.{},<{}.{}".format(*OLDEST_TORCH, *FIRST_UNSUPPORTED_TORCH)
    return Check("PyTorch", "ok" if fine else "failed", version, f"pip install '{wanted}'")


def processors() -> Check:
    """The cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("CPU", "ok", f"{cores} cores, {platform.machine()}")


def devices() -> Iterator[Check]:
    """One line per GPU, or one that says why there is none."""
    if not torch.cuda.is_available():
        why = "no GPU found" if torch.version.cuda else "this PyTorch is built without CUDA"
        yield Check("CUDA", "ok", f"{why}: ranks train on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        detail = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        yield Check(f"CUDA {torch.version.cuda}, GPU {index}", "ok", detail)


def gloo() -> Check:
    """Starts a gloo group of this process alone: gloo carries the agreement, and everything on the CPU."""
    cure = "set GLOO_SOCKET_IFNAME to a working network interface, such as lo"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Check("gloo", "failed", "not in this PyTorch", "install a PyTorch with torch.distributed and gloo")
    try:
        wait = timedelta(seconds=60)
        store = dist.TCPStore("localhost", 0, 1, is_master=True, timeout=wait)  # type: ignore[attr-defined]
        group: Any = dist.ProcessGroupGloo(store, 0, 1, wait)
        group.allreduce([torch.ones(1)]).wait()
    except RuntimeError as error:
        return Check("gloo", "failed", str(error).splitlines()[0], cure)
    return Check("gloo", "ok", "works (agreement between ranks, transport on the CPU)")


def nccl() -> Check:
    """Whether GPUs can talk to each other through NCCL."""
    if not torch.cuda.is_available():
        return Check("NCCL", "ok", "not needed without GPUs")
    if not dist.is_nccl_available():
        return Check("NCCL", "failed", "not in this PyTorch", "install a PyTorch with NCCL")
    return Check("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def peer_access() -> Check:
    """Whether GPUs of this machine can map each other's memory, as `symmetric_memory` of `zeroweave.dc` needs."""
    count = torch.cuda.device_count()
    apart = [f"{a}-{b}" for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    found = f"GPUs {', '.join(apart)} cannot reach each other's memory" if apart else "available"
    return Check("symmetric memory", "ok", found if count > 1 else "needs two GPUs in one machine")


def gathers() -> Iterator[Check]:
    """Whether parameters are gathered by kernels or by copy engines, and what both cost, a line for each size."""
    count = torch.cuda.device_count()
    if count < 2:
        yield Check("gathers", "ok", "by kernel: copy engines gather between GPUs of one machine")
        return
    try:
        choice = measured(count)
    except RuntimeError as error:
        yield Check("gathers", "limited", f"not measured: {error}", 'train with {"transport": {"gathers": "kernel"}}')
        return
    yield Check("gathers", "ok", str(choice))
    for mib, kernel, lost, copy, copy_lost in choice.table():
        detail = f"kernel {kernel} ms, matmuls lose {lost}; copy engine {copy} ms, matmuls lose {copy_lost}"
        yield Check(f"gathers of {mib} MiB", "ok", detail)


PROBE = """
import sys, torch
factor, device = float(sys.argv[1]), sys.argv[2]
def probe(x):
    return (x.sin() * factor + x).sum(-1)
x = torch.linspace(0, 1, 4096, device=device).view(64, 64).requires_grad_()
y = torch.compile(probe)(x)
y.sum().backward()
torch.testing.assert_close(y, probe(x))
"""


def inductor(device: str) -> Check:
    """Compiles, runs and differentiates a small function in a process of its own.

    Its constant is random, so that the answer does not come out of a cache of compiled code.
    """
    name = f"Inductor ({device})"
    way_out = 'or train with {"compile": {"lower": "aot_eager"}}'
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(random.random()), device],
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Check(name, "limited", f"no result after {COMPILE_SECONDS} s", way_out.removeprefix("or "))
    if done.returncode == 0:
        return Check(name, "ok", "compiles")
    return Check(name, "limited", reason(done.stderr, done.returncode), f"{missing(done.stderr, device)}, {way_out}")


def reason(output: str, code: int) -> str:
    """The line of a failed probe's output that says most: the last one that names an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror:" in line]
    return (errors or lines or [f"ended with exit code {code}"])[-1]


def missing(output: str, device: str) -> str:
    """What to install, guessed from a failed probe's output and from what is on the PATH."""
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and not (shutil.which(compiler) or shutil.which("clang++")):
        return f"no C++ compiler ({compiler}): install g++ (apt-get install g++) or set CXX"
    if "Python.h" in output:
        return "Python's headers are missing: install them (apt-get install python3-dev)"
    if "omp.h" in output or "-lgomp" in output:
        return "OpenMP is missing: install libgomp and its headers"
    if "triton" in output.lower() and device == "cuda":
        return "Triton does not work here: it needs a C compiler (apt-get install gcc) and Python's headers"
    return "see TORCH_LOGS=inductor python -c ... for the compiler's own words"

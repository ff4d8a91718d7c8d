"""Checks of the machine: can zeroweave train here, and if not, what is missing.

Each check does the thing (starts a group, compiles a function) rather than looks for its parts, wherever it can.
docs/doctor.md says what each looks for.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroweave.comm.choose import OLDEST_NCCL, Choice
from zeroweave.report.attention import attempt, attention, of_transformers
from zeroweave.report.check import Check
from zeroweave.report.gathers import measured
from zeroweave.report.links import links
from zeroweave.report.links import measured as measured_links
from zeroweave.report.settings import of_this_machine

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, FIRST_UNSUPPORTED_TORCH = (2, 11), (2, 14)
COMPILE_SECONDS = 240


def checks() -> Iterator[Check]:
    """All checks in order, each run when it is asked for: those that compile or start ranks take seconds."""
    gpus, cores = torch.cuda.device_count() if torch.cuda.is_available() else 0, processors()
    yield python()
    yield pytorch(torch.__version__)
    yield Check("CPU", "ok", f"{cores} cores, {platform.machine()}")
    yield from of_this_machine(gpus, cores)
    yield from devices()
    yield gloo()
    yield nccl(torch.cuda.nccl.version() if gpus and dist.is_nccl_available() else None, gpus)
    yield peer_access()
    yield from between_ranks(gpus)
    yield from gathers()
    for device in ("cpu", "cuda") if gpus else ("cpu",):
        yield attention(device, partial(attempt, device))
        yield inductor(device)
    if (found := of_transformers()) is not None:
        yield found


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


def processors() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices() -> Iterator[Check]:
    """One line per GPU, or one that says why there is none."""
    if not torch.cuda.is_available():
        yield no_gpu(torch.version.cuda, Path("/dev/nvidia0").exists(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        detail = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        yield Check(f"CUDA {torch.version.cuda}, GPU {index}", "ok", detail)


def no_gpu(cuda: str | None, present: bool, visible: str | None) -> Check:
    """Why PyTorch, built for this CUDA, finds no GPU. `present`: the machine has one; `visible`: the variable."""
    why = "no GPU found" if cuda else "this PyTorch is built without CUDA"
    if not present:
        return Check("CUDA", "ok", f"{why}: ranks train on the CPU")
    if cuda is None:
        return Check("CUDA", "limited", f"{why}, and there is a GPU", "pip install --force-reinstall torch, with CUDA")
    if visible is not None:
        detail = f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides the GPUs that are here"
        return Check("CUDA", "limited", detail, "unset CUDA_VISIBLE_DEVICES")
    detail = f"there is a GPU, and PyTorch for CUDA {cuda} cannot use it"
    return Check(
        "CUDA", "limited", detail, f"install a driver for CUDA {cuda} or newer; nvidia-smi shows which one is here"
    )


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


def nccl(version: tuple[int, ...] | None, gpus: int) -> Check:
    """Whether GPUs can talk to each other through NCCL. `version`: None where it is not there."""
    if not gpus:
        return Check("NCCL", "ok", "not needed without GPUs")
    if version is None:
        return Check("NCCL", "failed", "not in this PyTorch", "install a PyTorch with NCCL")
    detail = ".".join(map(str, version))
    if version[:2] < OLDEST_NCCL:
        cuda, oldest = (torch.version.cuda or "13").split(".")[0], ".".join(map(str, OLDEST_NCCL))
        cure = f"pip install 'nvidia-nccl-cu{cuda}>={oldest}'"
        return Check("NCCL", "slow", f"{detail}: copy engines gather from {oldest} on", cure)
    return Check("NCCL", "ok", detail)


def peer_access() -> Check:
    """Whether GPUs of this machine can map each other's memory: NCCL gathers by copy engine only where all can."""
    count = torch.cuda.device_count()
    apart = [f"{a}-{b}" for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        detail = f"GPUs {', '.join(apart)} cannot reach each other's memory: they exchange through the host's"
        cure = "set CUDA_VISIBLE_DEVICES to GPUs that nvidia-smi topo -p2p r shows as OK, and switch off the IOMMU"
        return Check("peer access", "slow", detail, cure)
    return Check("peer access", "ok", "available" if count > 1 else "needs two GPUs in one machine")


def between_ranks(gpus: int) -> Iterator[Check]:
    """How fast ranks exchange data: of a GPU each, or two on the CPU where there is none."""
    if gpus == 1:
        yield Check("links", "ok", "one GPU here, and nothing to exchange")
        return
    try:
        yield from links(measured_links(gpus or 2))
    except RuntimeError as error:
        cure = "TORCH_CPP_LOG_LEVEL=INFO zeroweave run -n 2 -m zeroweave.report.links shows more"
        yield Check("links", "failed", f"ranks cannot exchange data: {error}", cure)


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
    yield from by_size(choice)


def by_size(choice: Choice) -> Iterator[Check]:
    """What gathers cost either way, a line for each size that was measured."""
    for mib, *times in choice.table():
        ways = zip(("kernel", "copy engine"), (times[:3], times[3:]), strict=True)
        detail = "; ".join(
            f"{way} {alone} ms alone, {beside} beside matmuls, which lose {lost}" for way, (alone, beside, lost) in ways
        )
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
    if device == "cuda" and not any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang", "cc"))):
        return "no C compiler, which Triton needs: install gcc (apt-get install gcc) or set CC"
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

"""The doctor: can zeroweave train on this machine, and if not, what is missing.

Where it can, a check does the thing (starts a group, compiles a function). docs/doctor.md lists the checks.
"""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from zeroweave.comm.copy_engine import OLDEST_NCCL
from zeroweave.report.links import links
from zeroweave.report.links import measured as measured_links
from zeroweave.report.settings import Check, of_this_machine

COMPILE_SECONDS = 240
_INSTALL: Final = "apt-get install g++ python3-dev libgomp1 (Inductor's compiler, the one that CXX and CC name)"


def checks() -> Iterator[Check]:
    """All checks in order. Each runs when it is asked for: those that compile or start ranks take seconds."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("Python", "ok", f"{platform.python_version()}, PyTorch {torch.__version__}")
    yield Check("CPU", "ok", f"{cores} cores, {platform.machine()}")
    yield from of_this_machine(gpus, cores)
    if gpus:
        yield from devices()
    else:
        yield no_gpu(torch.version.cuda, Path("/dev/nvidia0").exists(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield gloo()
    if gpus:
        yield nccl(torch.cuda.nccl.version() if dist.is_nccl_available() else None)
        yield peer_access()
    yield from between_ranks(gpus)
    for device in ("cpu", "cuda") if gpus else ("cpu",):
        yield inductor(device)


def devices() -> Iterator[Check]:
    """One line for each GPU."""
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        detail = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        yield Check(f"CUDA {torch.version.cuda}, GPU {index}", "ok", detail)


def no_gpu(cuda: str | None, present: bool, visible: str | None) -> Check:
    """Why PyTorch, built for this CUDA, finds no GPU.

    `present`: the machine has one. `visible`: the variable CUDA_VISIBLE_DEVICES.
    """
    why = "no GPU found" if cuda else "this PyTorch is built without CUDA"
    if not present:
        return Check("CUDA", "ok", f"{why}: ranks train on the CPU")
    if cuda is None:
        return Check("CUDA", "limited", f"{why}, and there is a GPU", "pip install --force-reinstall torch, with CUDA")
    if visible is not None:
        detail = f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides the GPUs of this machine"
        return Check("CUDA", "limited", detail, "unset CUDA_VISIBLE_DEVICES")
    detail = f"there is a GPU, and PyTorch for CUDA {cuda} cannot use it"
    cure = f"install a driver for CUDA {cuda} or newer; nvidia-smi shows the installed one"
    return Check("CUDA", "limited", detail, cure)


def gloo() -> Check:
    """Starts a gloo group of this process alone. Gloo carries the agreement, and everything on the CPU."""
    try:
        wait = timedelta(seconds=60)
        store = dist.TCPStore("localhost", 0, 1, is_master=True, timeout=wait)  # type: ignore[attr-defined]
        group: Any = dist.ProcessGroupGloo(store, 0, 1, wait)
        group.allreduce([torch.ones(1)]).wait()
    except (RuntimeError, AttributeError) as error:  # a PyTorch without gloo has no such class
        cure = "set GLOO_SOCKET_IFNAME to a working network interface, such as lo"
        return Check("gloo", "failed", str(error).splitlines()[0], cure)
    return Check("gloo", "ok", "works (agreement between ranks, transport on the CPU)")


def nccl(version: tuple[int, ...] | None) -> Check:
    """Checks that GPUs can communicate through NCCL. `version`: None where it is missing."""
    if version is None:
        return Check("NCCL", "failed", "not in this PyTorch", "install a PyTorch with NCCL")
    detail = ".".join(map(str, version))
    if version[:2] < OLDEST_NCCL:
        cuda, oldest = (torch.version.cuda or "13").split(".")[0], ".".join(map(str, OLDEST_NCCL))
        cure = f"pip install 'nvidia-nccl-cu{cuda}>={oldest}'"
        return Check("NCCL", "slow", f"{detail}: copy engines gather from {oldest} on", cure)
    return Check("NCCL", "ok", detail)


def peer_access() -> Check:
    """Checks that GPUs of this machine can map each other's memory. NCCL gathers by copy engine only where all can."""
    count = torch.cuda.device_count()
    unreachable = [f"{a}-{b}" for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if unreachable:
        detail = f"GPUs {', '.join(unreachable)} cannot reach each other's memory: they exchange through the host's"
        cure = "set CUDA_VISIBLE_DEVICES to GPUs that nvidia-smi topo -p2p r shows as OK, and switch off the IOMMU"
        return Check("peer access", "slow", detail, cure)
    return Check("peer access", "ok", "available" if count > 1 else "needs two GPUs in one machine")


def between_ranks(gpus: int) -> Iterator[Check]:
    """How fast ranks exchange data: one for each GPU, or two on the CPU."""
    if gpus == 1:
        yield Check("links", "ok", "one GPU, and so nothing to exchange")
        return
    try:
        yield from links(measured_links(gpus or 2))
    except RuntimeError as error:
        name = "NCCL_SOCKET_IFNAME" if gpus else "GLOO_SOCKET_IFNAME"
        cure = f"set {name} to a working network interface; zeroweave run -n 2 -m zeroweave.report.links shows more"
        yield Check("links", "failed", f"ranks cannot exchange data: {error}", cure)


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
    """Compiles, runs and differentiates a small function in another process.

    Its constant is random, so that the compiled code does not come from a cache.
    """
    name, way_out = f"Inductor ({device})", 'train with {"compile": {"lower": "aot_eager"}}'
    command = [sys.executable, "-c", PROBE, str(random.random()), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        return Check(name, "limited", f"no result after {COMPILE_SECONDS} s", way_out)
    if done.returncode == 0:
        return Check(name, "ok", "compiles")
    return Check(name, "limited", reason(done.stderr, done.returncode), f"{_INSTALL}, or {way_out}")


def reason(output: str, code: int) -> str:
    """The last line of a failed probe's output that names an error, or else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror:" in line]
    return (errors or lines or [f"ended with exit code {code}"])[-1]

"""The doctor: can zeroweave train on this machine, and if not, what is missing.

Where it can, a check does the thing (starts a group, compiles a function). docs/doctor.md lists the checks.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from itertools import permutations
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from zeroweave.comm.copy_engine import OLDEST_NCCL
from zeroweave.report.links import Links
from zeroweave.report.links import measured as measured_links

State = Literal["ok", "slow", "limited", "failed"]
"""`slow`: training works, and could be faster; `limited`: training works in another way; `failed`: it does not work."""


@dataclass(frozen=True)
class Check:
    """One finding in one line. `cure`: the command or the setting that mends it, where the state is not ok."""

    name: str
    state: State
    detail: str
    cure: str = ""

    def lines(self) -> Iterator[str]:
        """The lines that the doctor prints."""
        yield f"{self.state:8} {self.name}: {self.detail}"
        if self.state != "ok":
            yield f"{'':8} -> {self.cure}"


COMPILE_SECONDS = 240
_INSTALL: Final = "apt-get install g++ python3-dev libgomp1 (Inductor's compiler, the one that CXX and CC name)"


ROOM: Final = 1 << 30
"""Bytes of shared memory that NCCL and the workers of data loaders should find."""

_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off")
VARIABLES: Final[Mapping[str, tuple[int, tuple[str, ...] | None, str]]] = {
    "NCCL_P2P_DISABLE": (2, _ON, "GPUs of this machine exchange through host memory"),
    "NCCL_P2P_LEVEL": (2, ("0", "loc"), "GPUs exchange through host memory"),
    "NCCL_SHM_DISABLE": (2, _ON, "what GPUs cannot exchange directly goes over the network"),
    "NCCL_CUMEM_ENABLE": (2, _OFF, "copy engines cannot gather: no memory is registered"),
    "NCCL_ALGO": (2, None, "every collective has this algorithm; NCCL chooses by size"),
    "NCCL_PROTO": (2, None, "every collective has this protocol; NCCL chooses by size"),
    "NCCL_DEBUG": (2, ("trace",), "every call of NCCL is logged"),
    "TORCH_NCCL_BLOCKING_WAIT": (2, _ON, "the program waits for each collective: nothing overlaps"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (2, ("1",), "communication queues behind computation"),
    "CUDA_LAUNCH_BLOCKING": (1, _ON, "the program waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (1, _ON, "every allocation asks the driver"),
    "TORCH_DISTRIBUTED_DEBUG": (0, ("detail",), "each collective waits for a check"),
    "TORCHDYNAMO_DISABLE": (0, _ON, "nothing is compiled"),
    "TORCH_COMPILE_DISABLE": (0, _ON, "nothing is compiled"),
}
"""Variables by name: the fewest GPUs with which they matter, their wrong values in lower case (None: any), and why."""


def checks() -> Iterator[Check]:
    """All checks in order. Each runs when it is asked for: those that compile or start ranks take seconds."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0))
    yield Check("Python", "ok", f"{platform.python_version()}, PyTorch {torch.__version__}")
    yield Check("CPU", "ok", f"{cores} cores, {platform.machine()}")
    infiniband = Path("/sys/class/infiniband")
    yield from variables(os.environ, gpus, infiniband.is_dir() and any(infiniband.iterdir()))
    yield threads(os.environ, cores, _quota(), max(1, gpus))
    memory = Path("/dev/shm")
    yield shared_memory(*shutil.disk_usage(memory)[::2]) if memory.is_dir() else shared_memory(0, 0)
    if _installed("zeroweave") is not None:  # else it runs from its sources
        yield from libraries(metadata.requires("zeroweave") or [], _installed)
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


def links(found: Links) -> Iterator[Check]:
    """One line for each slow link, or one for all links."""
    if slow := [Check(f"link {pair}", "slow", detail, cure) for pair, detail, cure in found.slow()]:
        yield from slow
        return
    low, high = min(found.rates.values()), max(found.rates.values())
    yield Check("links", "ok", f"{len(found.hosts)} ranks exchange {low:.1f} to {high:.1f} GB/s, each with each")


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


# ---------------------------------------------------------------------- settings, memory and versions
def variables(environ: Mapping[str, str], gpus: int, infiniband: bool) -> Iterator[Check]:
    """Variables that slow training down or endanger it. Checks of gloo and of links find wrong network interfaces."""
    given = {name: value.strip().lower() for name, value in environ.items() if value.strip()}
    found = [
        Check(name, "slow", f"{environ[name]}: {means}", f"unset {name}")
        for name, (least, wrong, means) in VARIABLES.items()
        if gpus >= least and name in given and (wrong is None or given[name] in wrong)
    ]
    if gpus and infiniband and given.get("NCCL_IB_DISABLE") in _ON:
        detail = f"{environ['NCCL_IB_DISABLE']}: machines exchange over TCP, and there is InfiniBand here"
        found.append(Check("NCCL_IB_DISABLE", "slow", detail, "unset NCCL_IB_DISABLE"))
    allocator = " ".join(given.get(f"PYTORCH_{name}ALLOC_CONF", "") for name in ("", "CUDA_"))
    grows = "expandable_segments:true" in allocator.replace(" ", "")
    if gpus > 1 and grows and given.get("NCCL_GRAPH_REGISTER") != "0":
        detail = "CUDA graphs may hang, or end: NCCL registers memory there that may move under it"
        found.append(Check("expandable_segments", "limited", detail, "export NCCL_GRAPH_REGISTER=0"))
    yield from found or [Check("settings", "ok", "no environment variable slows training down")]


def threads(environ: Mapping[str, str], cores: int, quota: float | None, ranks: int) -> Check:
    """Checks that there is a core for each thread of all ranks.

    `cores`: those that this process may use. `quota`: how many of them a container may use together; None: all.
    """
    usable = max(1, int(min(cores, quota or cores)))
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    fewer = f"export OMP_NUM_THREADS={max(1, usable // ranks)}, or start with zeroweave run, which does"
    if usable < ranks:
        detail = f"{usable} cores for {ranks} ranks, each of which keeps one busy"
        return Check("CPU threads", "slow", detail, f"give the job {ranks} cores (docker run --cpus, --cpus-per-task)")
    if (each := int(given) if given.isdecimal() else cores // ranks) * ranks > usable:
        return Check("CPU threads", "slow", f"{each * ranks} threads of {ranks} ranks on {usable} cores", fewer)
    return Check("CPU threads", "ok", f"{given or 1} for each rank, {usable} cores")


def shared_memory(total: int, free: int) -> Check:
    """Checks that /dev/shm, of `total` bytes, has room. 0: it does not exist."""
    detail = f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB are free in /dev/shm"
    if total < ROOM:
        cure = "docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=16g /dev/shm"
        return Check("shared memory", "slow", f"{detail}: NCCL and workers of data loaders need more", cure)
    if free < ROOM:
        return Check("shared memory", "slow", f"{detail}: processes that ended have left files there", "ls -l /dev/shm")
    return Check("shared memory", "ok", detail)


def libraries(requirements: Iterable[str], installed: Callable[[str], str | None]) -> Iterator[Check]:
    """Versions of required libraries, and of optional ones that are installed, against the tested ranges.

    `requirements`: the package's metadata. `installed`: the version of a name; None: not installed.
    """
    tested = []
    for wanted in map(Requirement, requirements):
        version, extra = installed(wanted.name), str(wanted.marker or "")
        if '"test"' in extra or '"lint"' in extra or (extra and version is None):
            continue
        if version is not None and wanted.specifier.contains(version, prereleases=True):
            tested.append(f"{wanted.name} {version}")
            continue
        state: State = "limited" if extra else "failed"
        detail = "not installed" if version is None else f"{version} is not the tested {wanted.specifier}"
        yield Check(wanted.name, state, detail, f"pip install '{wanted.name}{wanted.specifier}'")
    yield Check("libraries", "ok", ", ".join(tested))


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _quota(limits: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """How many cores a container may use together, by its cgroup. None: no limit."""
    try:
        share, period = limits.read_text().split()
    except (OSError, ValueError):
        return None
    return None if share == "max" else int(share) / int(period)

"""What a check of the doctor is, and its checks of environment variables, CPU threads, shared memory and versions.

Each of these takes what it looks at as arguments. `of_this_machine` reads that from this machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from packaging.requirements import Requirement

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


def of_this_machine(gpus: int, cores: int) -> Iterator[Check]:
    """All of the above, here."""
    infiniband = Path("/sys/class/infiniband")
    yield from variables(os.environ, gpus, infiniband.is_dir() and any(infiniband.iterdir()))
    yield threads(os.environ, cores, _quota(), max(1, gpus))
    memory = Path("/dev/shm")
    yield shared_memory(*shutil.disk_usage(memory)[::2]) if memory.is_dir() else shared_memory(0, 0)
    try:
        requirements = metadata.requires("zeroweave") or []
    except metadata.PackageNotFoundError:  # run from its sources
        return
    yield from libraries(requirements, _installed)


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

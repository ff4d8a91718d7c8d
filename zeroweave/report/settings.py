"""Checks of what surrounds training: environment variables, CPU threads, shared memory, versions of libraries.

Each takes what it looks at as arguments, and a function beside it reads that from this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from zeroweave.report.check import Check

ROOM: Final = 1 << 30
"""Bytes of shared memory that NCCL and the workers of data loaders should find."""


@dataclass(frozen=True)
class Variable:
    """An environment variable that is wrong with some values. `gpus`: so many are needed before it matters."""

    name: str
    wrong: Callable[[str], bool]
    means: str
    gpus: int = 0


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _given(value: str) -> bool:
    return bool(value.strip())


VARIABLES: Final = (
    Variable("NCCL_P2P_DISABLE", _on, "GPUs of this machine exchange through host memory", 2),
    Variable("NCCL_P2P_LEVEL", lambda value: value.upper() in ("0", "LOC"), "GPUs exchange through host memory", 2),
    Variable("NCCL_SHM_DISABLE", _on, "what GPUs cannot exchange directly goes over the network", 2),
    Variable(
        "NCCL_CUMEM_ENABLE", lambda value: not _on(value), "copy engines cannot gather: no memory is registered", 2
    ),
    Variable("NCCL_ALGO", _given, "every collective has this algorithm, the right one or not", 2),
    Variable("NCCL_PROTO", _given, "every collective has this protocol, the right one or not", 2),
    Variable("NCCL_DEBUG", lambda value: value.upper() == "TRACE", "every call of NCCL is logged", 2),
    Variable("TORCH_NCCL_BLOCKING_WAIT", _on, "the program waits for each collective: nothing overlaps", 2),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", lambda value: value == "1", "communication queues behind computation", 2),
    Variable("CUDA_LAUNCH_BLOCKING", _on, "the program waits for every kernel", 1),
    Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, "every allocation asks the driver", 1),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "each collective is checked by others"
    ),
    Variable("TORCHDYNAMO_DISABLE", _on, "nothing is compiled"),
    Variable("TORCH_COMPILE_DISABLE", _on, "nothing is compiled"),
)


def variables(environ: Mapping[str, str], gpus: int, interfaces: Iterable[str], infiniband: bool) -> Iterator[Check]:
    """The variables that slow training down or endanger it, and network interfaces that are named and not there."""
    found = [
        Check(each.name, "slow", f"{environ[each.name]}: {each.means}", f"unset {each.name}")
        for each in VARIABLES
        if gpus >= each.gpus and each.name in environ and each.wrong(environ[each.name])
    ]
    if gpus and infiniband and _on(environ.get("NCCL_IB_DISABLE", "0")):
        detail = f"{environ['NCCL_IB_DISABLE']}: machines exchange over TCP beside the InfiniBand that is here"
        found.append(Check("NCCL_IB_DISABLE", "slow", detail, "unset NCCL_IB_DISABLE"))
    if gpus > 1 and _grows(environ) and environ.get("NCCL_GRAPH_REGISTER") != "0":
        detail = "steps as CUDA graphs may hang, or end: NCCL registers memory there that may move under it"
        found.append(Check("expandable_segments", "limited", detail, "export NCCL_GRAPH_REGISTER=0"))
    there = sorted(interfaces)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if (name[0] == "G" or gpus) and (absent := _absent(environ.get(name, ""), there, exact=name[0] == "G")):
            detail = f"no interface of this machine is called {absent}: it has {', '.join(there)}"
            found.append(Check(name, "failed", detail, f"export {name}={_outward(there)}"))
    yield from found or [Check("settings", "ok", "no environment variable slows training down")]


def _grows(environ: Mapping[str, str]) -> bool:
    """Is PyTorch's allocator told to make its segments larger and smaller?"""
    told = (environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:True" in each.replace(" ", "") for each in told)


def _absent(value: str, there: list[str], exact: bool) -> str:
    """Which of the interfaces in `value` are not there. Gloo takes names; NCCL beginnings, "=" names or "^" others."""
    if not value or value.startswith("^"):
        return ""
    exact, names = exact or value.startswith("="), value.removeprefix("=").split(",")
    missing = [name for name in names if not any(each == name if exact else each.startswith(name) for each in there)]
    return ", ".join(missing) if exact or len(missing) == len(names) else ""


def _outward(there: list[str]) -> str:
    return next((name for name in there if name != "lo"), "lo")


def threads(environ: Mapping[str, str], cores: int, quota: float | None, ranks: int) -> Check:
    """Whether the threads of all ranks have a core each. `cores`: allowed ones; `quota`: of them at once; None: all."""
    usable = max(1, int(min(cores, quota or cores)))
    share = max(1, usable // ranks)
    fewer, has = f"export OMP_NUM_THREADS={share}", f"{usable} core{'s' * (usable > 1)}"
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if usable < ranks:
        detail = f"{has} for {ranks} ranks, each of which keeps one busy"
        return Check("CPU threads", "slow", detail, f"give the job {ranks} cores (docker run --cpus, --cpus-per-task)")
    if given and not given.isdecimal():
        return Check("CPU threads", "slow", f"OMP_NUM_THREADS is {given!r}, which is no number", fewer)
    if given and int(given) * ranks > usable:
        detail = f"OMP_NUM_THREADS is {given}: {int(given) * ranks} threads of {ranks} ranks on {has}"
        return Check("CPU threads", "slow", detail, fewer)
    if not given and usable < cores:
        detail = f"a rank starts {cores} threads, and {has} may be used at once"
        return Check("CPU threads", "slow", detail, f"{fewer}, or start with zeroweave run, which does")
    return Check("CPU threads", "ok", f"{given or 1} for each rank, {has}")


def shared_memory(total: int | None, free: int | None) -> Check:
    """Whether /dev/shm, of so many bytes, has room; None: there is none."""
    if total is None or free is None:
        return Check("shared memory", "slow", "there is no /dev/shm", "mount -t tmpfs -o size=16g tmpfs /dev/shm")
    detail = f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB are free in /dev/shm"
    if total < ROOM:
        cure = "docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=16g /dev/shm"
        return Check("shared memory", "slow", f"{detail}: NCCL and workers of data loaders need more", cure)
    if free < ROOM:
        return Check("shared memory", "slow", f"{detail}: processes that ended have left files there", "ls -l /dev/shm")
    return Check("shared memory", "ok", detail)


def libraries(requirements: Iterable[str], installed: Callable[[str], str | None]) -> Iterator[Check]:
    """The libraries that zeroweave needs, and the optional ones that are here, against the versions that are tested.

    `requirements`: as a package's metadata has them. `installed`: the version of a name; None: not there.
    """
    tested = []
    for requirement in requirements:
        wanted, _, condition = (part.strip() for part in requirement.partition(";"))
        name = re.split(r"[^\w.-]", wanted)[0]
        version, optional = installed(name), "extra" in condition
        if name == "torch" or re.search(r"extra == .(test|lint)", condition):
            continue  # torch has a check of its own
        if version is None and not optional:
            yield Check(name, "failed", "not installed", f"pip install '{wanted}'")
        elif version is not None and not _within(version, wanted.removeprefix(name)):
            detail = f"{version} is not the tested {wanted.removeprefix(name).strip()}"
            yield Check(name, "limited" if optional else "failed", detail, f"pip install '{wanted}'")
        elif version is not None:
            tested.append(f"{name} {version}")
    yield Check("libraries", "ok", ", ".join(tested))


def _within(version: str, wanted: str) -> bool:
    """Is "2.8.1" in ">=2.8,<3"? Of the comparisons that zeroweave's own requirements use."""
    has = _numbers(version)
    for comparison, limit in re.findall(r"(>=|<=|==|<|>)\s*([\w.]+)", wanted):
        order = (has > _numbers(limit)) - (has < _numbers(limit))
        if order not in {">=": (0, 1), "<=": (-1, 0), "==": (0,), "<": (-1,), ">": (1,)}[comparison]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[\d.]*", version)
    numbers = [int(part) for part in (found[0] if found else "").split(".") if part]
    while numbers and not numbers[-1]:
        numbers.pop()  # 2.0 is 2
    return tuple(numbers)


def of_this_machine(gpus: int, cores: int) -> Iterator[Check]:
    """All of the above, here."""
    try:
        interfaces = [name for _, name in socket.if_nameindex()]
    except OSError:
        interfaces = []
    infiniband = Path("/sys/class/infiniband")
    yield from variables(os.environ, gpus, interfaces, infiniband.is_dir() and any(infiniband.iterdir()))
    yield threads(os.environ, cores, _quota(), max(1, gpus))
    memory = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    yield shared_memory(memory and memory.total, memory and memory.free)
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


def _quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores the container's limit is worth, in the second version of cgroups or the first; None: no limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            share, period = " ".join((cgroup / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        return None if share in ("max", "-1") else int(share) / int(period)
    return None

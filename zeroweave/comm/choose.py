"""Which gathers copy engines run, and why they run none."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.distributed as dist

from zeroweave.comm.copy_engine import CopyEngines
from zeroweave.errors import ConfigError
from zeroweave.ranks.control import Control

Asked = Literal["auto", "copy_engine", "kernel"]

OLDEST_NCCL: Final = (2, 28)
"""The first version that gathers by copy engines."""
LEAST: Final = 1 << 20
"""With "auto", copy engines gather flats of so many bytes and more.

Measured on H200s with NCCL 2.28, from 1 to 256 MiB (benchmarks/README.md): copy engines are faster than kernels while
matmuls run, and the matmuls lose less. `python -m benchmarks.gathers` measures it on another machine.
"""


@dataclass(frozen=True)
class Choice:
    """Copy engines gather buckets of `least` bytes and more; None: kernels gather all buckets. `why`: the reason."""

    why: str
    least: int | None = None

    def __str__(self) -> str:
        if self.least is None:
            return f"by kernel: {self.why}"
        size = f" from {self.least / (1 << 20):g} MiB on" if self.least >= LEAST else ""
        return f"by copy engine{size}: {self.why}"


def no_room(nbytes: int, why: str, key: str = "transport.gathers") -> str:
    """The warning for memory that cannot be registered. `key`: the key of the config that asks for it."""
    return (
        f"{key}: {nbytes / (1 << 20):g} MiB to gather in by copy engine could not be had ({why}): what has that size "
        "is gathered by kernel from now on, exact but slower"
    )


def refused(asked: Asked, control: Control, device: torch.device, largest: int, replicas: int = 1) -> str:
    """Why copy engines cannot gather, or need not; "" where they can. Collective where they might.

    `largest`: bytes of the largest flat. `replicas`: of buckets, see `layout`. ConfigError on all ranks where copy
    engines are asked for and cannot gather.
    """
    if asked == "kernel":
        return "transport.gathers is 'kernel'"
    if control.world == 1 or device.type != "cuda":
        why = "nothing is gathered in a world of 1" if control.world == 1 else f"ranks compute on {device.type}"
    elif replicas > 1:
        why = "the ranks of a group of sharding.group_size gather by kernel"
    elif asked == "auto" and largest < LEAST:
        return "no bucket has 1 MiB"
    else:
        why = _missing(control, device)
    if why and asked == "copy_engine" and control.world > 1:
        raise ConfigError(f"[ZW107] transport.gathers is 'copy_engine': {why}. Set it to 'auto' or 'kernel'")
    return why


def _missing(control: Control, device: torch.device) -> str:
    """Why NCCL cannot gather by copy engines between these ranks, or "". Collective."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    version = torch.cuda.nccl.version() if nccl is not None else (0,)
    mine = (socket.gethostname(), version, str(torch.cuda.get_device_properties(device).uuid))
    return why_not(control.all_gather_object(mine, "whether copy engines can gather"))


def why_not(ranks: Sequence[tuple[str, tuple[int, ...], str]]) -> str:
    """Why copy engines cannot gather between ranks of these (host, version of NCCL, uuid of the GPU), or ""."""
    gpus = [gpu for _, _, gpu in ranks]
    for rank, (host, version, gpu) in enumerate(ranks):
        if version[:2] < OLDEST_NCCL:
            return f"NCCL {'.'.join(map(str, version))} on rank {rank}: it needs {'.'.join(map(str, OLDEST_NCCL))}"
        if host != ranks[0][0]:
            return f"rank {rank} is on {host}, rank 0 on {ranks[0][0]}: it works inside one machine"
        if (first := gpus.index(gpu)) != rank:
            return f"ranks {first} and {rank} share a GPU"
    return ""


def choose(asked: Asked, engines: CopyEngines) -> Choice:
    """The choice where `refused` has no reason against copy engines. Collective."""
    if asked == "copy_engine":
        return Choice("transport.gathers is 'copy_engine'", least=1)
    memory = engines.make(LEAST)
    if memory is None:
        return Choice(f"memory cannot be registered ({engines.why_not})")
    memory.close()
    torch.cuda.empty_cache()
    return Choice("that is faster beside matmuls", LEAST)

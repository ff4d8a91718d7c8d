"""Which way gathers take: by kernel, or by copy engine from some size on. Asked for, or measured at the start."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from zeroweave._torch.distributed import all_gather
from zeroweave._torch.storages import lent
from zeroweave.comm.copy_engine import CopyEngines
from zeroweave.comm.everywhere import apart
from zeroweave.errors import ConfigError
from zeroweave.layout import ALIGN_BYTES
from zeroweave.ranks.control import Control

Asked = Literal["auto", "copy_engine", "kernel"]

OLDEST_NCCL: Final = (2, 28)
"""The first one that gathers by copy engines."""
SIZES: Final = tuple(mib << 20 for mib in (1, 4, 16, 64, 256))
"""Bytes of the flats whose gathers are measured."""
_ROUNDS: Final = 3
_GATHERS: Final = 4
"""So many in a row are timed."""
_SIDE: Final = 4096
"""Rows and columns of the matrices that are multiplied meanwhile."""
_LEAD: Final = 3
"""Products in front of what is timed, so that the host is ahead of the device."""


@dataclass(frozen=True)
class Cost:
    """What a gather of `nbytes` costs, in seconds: what matmuls beside it lose, and how long it takes there.

    `alone` is how long it takes with nothing beside it, which decides nothing; None: nobody has asked.
    """

    nbytes: int
    lost: float
    takes: float
    alone: float | None = None

    @property
    def total(self) -> float:
        return self.lost + self.takes


@dataclass(frozen=True)
class Choice:
    """What runs and why. Buckets of `least` bytes and more are gathered by copy engine; None: none is.

    `kernel`, `copy_engine`: what was measured, by size, the most of any rank; empty where nothing was.
    """

    why: str
    least: int | None = None
    kernel: tuple[Cost, ...] = ()
    copy_engine: tuple[Cost, ...] = ()

    def __str__(self) -> str:
        if self.least is None:
            return f"by kernel: {self.why}"
        if self.least < SIZES[0]:
            return f"by copy engine: {self.why}"
        return f"by copy engine from {self.least / (1 << 20):g} MiB on: {self.why}"

    def table(self) -> Iterator[tuple[str, ...]]:
        """What was measured: MiB, and ms of a gather alone, beside matmuls, and lost by these; by kernel, by copy."""
        for kernel, copy in zip(self.kernel, self.copy_engine, strict=True):
            times = [each for cost in (kernel, copy) for each in (cost.alone, cost.takes, cost.lost)]
            yield (f"{kernel.nbytes >> 20}", *("–" if each is None else f"{1e3 * each:.3f}" for each in times))


def no_room(nbytes: int, why: str, key: str = "transport.gathers") -> str:
    """What a warning says where memory to gather in cannot be had; `key` of the config asks for it."""
    return (
        f"{key}: {nbytes / (1 << 20):g} MiB to gather in by copy engine could not be had ({why}): what has that size "
        "is gathered by kernel from now on, exact but slower"
    )


def refused(asked: Asked, control: Control, device: torch.device, largest: int) -> str:
    """Why copy engines cannot gather, or need not; "" where they can. Collective where they might.

    `largest`: bytes of the largest flat. ConfigError on all ranks where they are asked for and cannot.
    """
    if asked == "kernel":
        return "transport.gathers is 'kernel'"
    if control.world == 1 or device.type != "cuda":
        why = "nothing is gathered in a world of 1" if control.world == 1 else f"ranks compute on {device.type}"
    elif asked == "auto" and largest < SIZES[0]:
        return "no bucket has 1 MiB"
    else:
        why = _missing(control, device)
    if why and asked == "copy_engine" and control.world > 1:
        raise ConfigError(f"transport.gathers is 'copy_engine': {why}. Set it to 'auto' or 'kernel'")
    return why


def _missing(control: Control, device: torch.device) -> str:
    """Why NCCL cannot gather by copy engines between these ranks, or "". Collective."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    version = torch.cuda.nccl.version() if nccl is not None else (0,)
    mine = (socket.gethostname(), version, str(torch.cuda.get_device_properties(device).uuid))
    ranks = control.all_gather_object(mine, "whether copy engines can gather")
    whys = apart([(host, gpu) for host, _, gpu in ranks])
    for rank, ((_, found, _), why) in enumerate(zip(ranks, whys, strict=True)):
        if found[:2] < OLDEST_NCCL:
            return f"NCCL {'.'.join(map(str, found))} on rank {rank}: it needs {'.'.join(map(str, OLDEST_NCCL))}"
        if why:
            return why
    return ""


def choose(
    asked: Asked,
    control: Control,
    device: torch.device,
    engines: CopyEngines,
    plain: dist.ProcessGroup,
    copying: Any,
    largest: int,
    alone: bool = False,
) -> Choice:
    """What all ranks take. Collective; ask `refused` before. `plain` and `copying` gather the two ways.

    `alone`: gathers are measured with nothing beside them as well.
    """
    if asked == "copy_engine":
        return Choice("transport.gathers is 'copy_engine'", least=1)
    sizes = [nbytes for nbytes in SIZES if nbytes <= largest]
    memory = engines.make(sizes[-1])
    if memory is None:
        return Choice(f"memory cannot be registered ({engines.why_not})")
    made: list[tuple[_Work, torch.Tensor]] = []
    both: list[tuple[Cost, ...]] = []
    if engines.done_by_all(
        lambda: made.append((_Work(device), torch.empty(sizes[-1], dtype=torch.uint8, device=device)))
    ):
        work, ordinary = made.pop()
        for group, target in ((plain, ordinary), (copying, memory.tensor())):
            target.random_(generator=work.random)
            mine = [_measure(control, work, group, target[:nbytes], alone) for nbytes in sizes]
            ranks = control.all_gather_object(mine, "what gathers cost")
            both.append(tuple(map(_most, zip(*ranks, strict=True))))
        del work, ordinary, target
    memory.close()
    torch.cuda.empty_cache()
    return decide(*both) if both else Choice(f"there is no memory to measure in ({engines.why_not})")


def decide(kernel: Sequence[Cost], copy_engine: Sequence[Cost]) -> Choice:
    """Copy engines gather from the size on from which they cost less, at each size that was measured."""
    least = None
    for ordinary, copy in zip(reversed(kernel), reversed(copy_engine), strict=True):
        if copy.total >= ordinary.total:
            break
        least = copy.nbytes
    why = "measured at the start" if least is not None else "it costs less, measured at the start"
    return Choice(why, least, tuple(kernel), tuple(copy_engine))


def _most(costs: Sequence[Cost]) -> Cost:
    """Of one size on all ranks."""
    lost, takes = max(cost.lost for cost in costs), max(cost.takes for cost in costs)
    alone = [cost.alone for cost in costs if cost.alone is not None]
    return Cost(costs[0].nbytes, lost, takes, max(alone, default=None))


class _Work:
    """Products of matrices, and streams to time them and what runs beside them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device, priority=-1)
        self.random = torch.Generator(device).manual_seed(0)  # the program's own goes on as if nothing had been drawn
        self._left = self._matrix(_SIDE, device)
        self._right, self._out = self._matrix(3 * _SIDE, device), self._matrix(3 * _SIDE, device)

    def _matrix(self, columns: int, device: torch.device) -> torch.Tensor:
        return torch.randn(_SIDE, columns, generator=self.random, dtype=torch.bfloat16, device=device)

    def products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def beside(self, count: int, gather: Callable[[], dist.Work] | None) -> tuple[float, float]:
        """Seconds that `count` products take, and seconds of `_GATHERS` gathers beside them."""
        current = torch.cuda.current_stream(self.device)
        times = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self.products(_LEAD)
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            times[0].record()
            if gather is not None:
                for work in [gather() for _ in range(_GATHERS)]:
                    work.wait()
            times[1].record()
        times[2].record()
        self.products(count)
        times[3].record()
        torch.cuda.synchronize(self.device)
        return 1e-3 * times[2].elapsed_time(times[3]), 1e-3 * times[0].elapsed_time(times[1])


def _measure(control: Control, work: _Work, group: Any, target: torch.Tensor, alone: bool) -> Cost:
    """What a gather of `target`, uint8 [bytes], costs in `group`: in place, as of masters that are cast. Collective.

    `alone`: with nothing beside it as well.
    """
    world, rank = group.size(), group.rank()
    unit = world * ALIGN_BYTES
    flat = target[: target.nbytes // unit * unit]
    mine = flat.view(world, -1)[rank]

    def gather() -> dist.Work:
        return all_gather(lent(flat), lent(mine), group)

    def timed(count: int, beside: Callable[[], dist.Work] | None) -> tuple[float, float]:
        """The median of some rounds, the first of which does not count."""
        rounds = []
        for _ in range(1 + _ROUNDS):
            control.barrier("before gathers are timed")
            rounds.append(work.beside(count, beside))
        products, gathers = zip(*rounds[1:], strict=True)
        return median_low(products), median_low(gathers)

    one = timed(1, gather)
    count = 2 + math.ceil(1.5 * one[1] / one[0])  # they last as long as the gathers beside them
    undisturbed, _ = timed(count, None)
    products, gathers = timed(count, gather)
    share = min(1.0, products / gathers)  # of the gathers that ran beside products
    lost = max(0.0, products - undisturbed) / (_GATHERS * share)
    return Cost(target.nbytes, lost, gathers / _GATHERS, timed(0, gather)[1] / _GATHERS if alone else None)

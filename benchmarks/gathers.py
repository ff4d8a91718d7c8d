"""What gathers cost on the GPUs of this machine, by kernel and by copy engine, alone and beside matmuls, by size.

    python -m benchmarks.gathers

Prints a table, and the size from which on copy engines cost less: `LEAST` of zeroweave.comm.copy_engine is to agree
with it. Exit code 1 where there are no two GPUs.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from json import dumps
from statistics import median_low
from typing import Any, Final

import torch
import torch.distributed as dist

from zeroweave._torch.distributed import all_gather
from zeroweave._torch.storages import lent
from zeroweave.comm.copy_engine import CopyEngines, refused
from zeroweave.comm.process_group import device_of
from zeroweave.layout import ALIGN_BYTES
from zeroweave.ranks.control import Control
from zeroweave.ranks.start import start_process_group
from zeroweave.report.launch import answer_of, on_ranks

HEAD = ("MiB", *(f"{way}: {what}" for way in ("kernel", "copy engine") for what in ("alone", "beside", "matmuls lose")))
SIZES: Final = tuple(mib << 20 for mib in (1, 4, 16, 64, 256))
"""Bytes of the flats."""
_MARK: Final = "gathers: "
_SECONDS: Final = 120.0
"""The most that the ranks may take."""
_ROUNDS: Final = 3
_GATHERS: Final = 4
"""So many in a row are timed."""
_SIDE: Final = 4096
"""Rows and columns of the matrices that are multiplied meanwhile."""
_LEAD: Final = 3
"""Products in front of what is timed, so that the host is ahead of the device."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a gather of `nbytes`: alone, beside matmuls, and how many the matmuls lose."""

    nbytes: int
    alone: float
    beside: float
    lost: float


def least(kernel: Sequence[Cost], copy_engine: Sequence[Cost]) -> int | None:
    """The size from which on copy engines cost less, at each size that was measured. None: at no size."""
    found = None
    for ordinary, copy in zip(reversed(kernel), reversed(copy_engine), strict=True):
        if copy.lost + copy.beside >= ordinary.lost + ordinary.beside:
            break
        found = copy.nbytes
    return found


def lines(kernel: Sequence[Cost], copy_engine: Sequence[Cost]) -> Iterator[str]:
    """From which size on copy engines cost less, and a Markdown table of milliseconds."""
    size = least(kernel, copy_engine)
    yield "by kernel" if size is None else f"by copy engine from {size >> 20} MiB on"
    yield ""
    rows = [
        (f"{a.nbytes >> 20}", *(f"{1e3 * each:.3f}" for c in (a, b) for each in (c.alone, c.beside, c.lost)))
        for a, b in zip(kernel, copy_engine, strict=True)
    ]
    for row in (HEAD, ("---",) * len(HEAD), *rows):
        yield f"| {' | '.join(row)} |"


class _Work:
    """Products of matrices, and streams to time them and what runs beside them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device, priority=-1)
        self._left, self._right = self._matrix(_SIDE), self._matrix(3 * _SIDE)
        self._out = self._matrix(3 * _SIDE)

    def _matrix(self, columns: int) -> torch.Tensor:
        return torch.randn(_SIDE, columns, dtype=torch.bfloat16, device=self.device)

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


def _measure(control: Control, work: _Work, group: Any, target: torch.Tensor) -> Cost:
    """The cost of a gather of `target`, uint8 [bytes], in place, in `group`. Collective."""
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
    count = 2 + math.ceil(1.5 * one[1] / one[0])  # products that last as long as the gathers beside them
    undisturbed, _ = timed(count, None)
    products, gathers = timed(count, gather)
    share = min(1.0, products / gathers)  # of the gathers that ran beside products
    lost = max(0.0, products - undisturbed) / (_GATHERS * share)
    return Cost(target.nbytes, timed(0, gather)[1] / _GATHERS, gathers / _GATHERS, lost)


def on_rank() -> None:
    """Measure with the other ranks. Rank 0 prints the costs, the largest of any rank, as JSON."""
    start_process_group(_SECONDS)
    device, plain = device_of(dist.group.WORLD), dist.group.WORLD
    control = Control.over(None, _SECONDS)
    if why := refused("copy_engine", control, device, SIZES[-1]):
        raise RuntimeError(why)
    engines = CopyEngines(control, device)
    own = engines.join(timedelta(seconds=_SECONDS))
    memory = engines.make(SIZES[-1])
    if memory is None:
        raise RuntimeError(engines.why_not)
    work, ordinary = _Work(device), torch.empty(SIZES[-1], dtype=torch.uint8, device=device)
    both: list[list[Cost]] = []
    for group, target in ((plain, ordinary), (own, memory.tensor())):
        target.random_()
        mine = [_measure(control, work, group, target[:nbytes]) for nbytes in SIZES]
        ranks = control.all_gather_object(mine, "what gathers cost")
        both.append(
            [
                Cost(
                    costs[0].nbytes,
                    *(max(getattr(cost, part) for cost in costs) for part in ("alone", "beside", "lost")),
                )
                for costs in zip(*ranks, strict=True)
            ]
        )
    if control.rank == 0:
        print(_MARK + dumps([[asdict(cost) for cost in costs] for costs in both]), flush=True)
    del target
    memory.close()
    engines.close()
    control.barrier("the end")
    control.close()
    dist.destroy_process_group()


def measured(ranks: int) -> tuple[list[Cost], list[Cost]]:
    """By kernel, and by copy engine, between so many ranks. RuntimeError where they fail."""
    kernel, copy_engine = answer_of(_MARK, *on_ranks("benchmarks.gathers", ranks, _SECONDS))
    return [Cost(**each) for each in kernel], [Cost(**each) for each in copy_engine]


def main() -> int:
    if "LOCAL_RANK" in os.environ:
        on_rank()
        return 0
    count = torch.cuda.device_count()
    if count < 2:
        print(f"there are {count} GPUs: nothing is gathered between them")
        return 1
    print(*lines(*measured(count)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

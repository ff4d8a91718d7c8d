"""Reduce buckets and reductions over a transport that records what it is asked for and when it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from zeroweave.comm.ledger import Gauge
from zeroweave.comm.transport import Parts, ReduceOp, Spread, lay_out
from zeroweave.dc.gradients import ReduceBuckets
from zeroweave.dc.targets import SharesLayout
from zeroweave.runtime.reductions import Reductions


@dataclass
class Pending:
    land: Callable[[], None]

    def wait(self) -> None:
        self.land()


class Slow:
    """One rank whose results arrive when they are waited for, not earlier."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.log: list[str] = []
        self.staged: list[torch.Tensor] = []
        self.broken = False

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        if self.broken:
            raise RuntimeError("no connection")
        number = len(self.staged)
        flat = torch.full((layout.numel,), float("nan"), dtype=out.dtype)
        lay_out(flat, parts, layout)
        self.staged.append(flat.clone())
        self.log.append(f"start {number}")

        def land() -> None:
            self.log.append(f"wait {number}")
            out.copy_(flat)

        return Pending(land)


class Bench:
    """Buckets of `size` elements whose results are kept by key, in the order of their arrival."""

    def __init__(self, size: int, depth: int = 2, dtype: torch.dtype | None = None) -> None:
        self.transport, self.gauge = Slow(), Gauge()
        self.reductions = Reductions(self.transport, "average", dtype, self.gauge)  # type: ignore[arg-type]
        self.buckets = ReduceBuckets(size, depth, self.reductions, self._start)
        self.issued: list[tuple[int, ...]] = []
        self.arrived: list[tuple[int, torch.Tensor]] = []
        self.in_use: list[int] = []
        """bytes of staging when each reduction was issued, its own included"""

    def _start(self, parts: dict[int, torch.Tensor]) -> None:
        ids, tensors = tuple(parts), list(parts.values())
        layout = SharesLayout(ids[0], tensors[0].itemsize, 1, [t.numel() for t in tensors], None)

        def then(result: torch.Tensor) -> None:
            for slot, at in layout.places(0).items():
                self.arrived.append((ids[slot], result[at : at + tensors[slot].numel()]))

        self.issued.append(ids)
        self.reductions.start(len(self.issued), dict(enumerate(tensors)), layout, tensors[0], then, whole=True)
        self.in_use.append(self.gauge.now)

    def add(self, *numels: int, dtype: torch.dtype = torch.float32, first: int = 0) -> None:
        for i, numel in enumerate(numels, start=first):
            self.buckets.add(i, torch.full((numel,), float(i + 1), dtype=dtype), kind=True)

    def finish(self) -> None:
        self.buckets.flush()
        self.reductions.settle_all()


def test_a_bucket_is_reduced_when_it_is_full_or_the_next_does_not_fit() -> None:
    bench = Bench(size=10)
    bench.add(4, 6, 3, 8, 2, 1)
    assert bench.issued == [(0, 1), (2,), (3, 4)]
    bench.finish()
    assert bench.issued[3:] == [(5,)]
    assert [key for key, _ in bench.arrived] == [0, 1, 2, 3, 4, 5]
    assert all(bool((value == key + 1).all()) for key, value in bench.arrived)


def test_a_gradient_above_the_size_goes_alone_and_leaves_nothing_behind() -> None:
    bench = Bench(size=10, depth=1)
    bench.add(4, 1000, 4)
    assert bench.issued == [(0,), (1,)] and bench.arrived[0][0] == 0
    assert bench.gauge.peak == 4 * 1024 == bench.in_use[1]  # the first was settled before
    bench.finish()
    assert bench.gauge.now == 0 and bench.issued == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("depth", "log"),
    [
        (1, "start 0, wait 0, start 1, wait 1, start 2, wait 2"),
        (2, "start 0, start 1, wait 0, start 2, wait 1, wait 2"),
    ],
)
def test_no_more_reductions_in_flight_than_buffers(depth: int, log: str) -> None:
    bench = Bench(size=4, depth=depth)
    bench.add(4, 4, 4)
    assert len(bench.reductions.in_flight) == depth and bench.gauge.now == depth * 128
    bench.finish()
    assert ", ".join(bench.transport.log) == log
    assert bench.gauge.peak == depth * 128 and bench.gauge.now == 0


def test_one_bucket_for_each_dtype_flushed_in_the_order_in_which_they_were_begun() -> None:
    bench = Bench(size=100)
    bench.add(3, dtype=torch.bfloat16)
    bench.add(3, first=1)
    bench.add(3, dtype=torch.bfloat16, first=2)
    bench.add(3, dtype=torch.float64, first=3)
    assert bench.issued == []
    bench.finish()
    assert bench.issued == [(0, 2), (1,), (3,)]
    assert [flat.dtype for flat in bench.transport.staged] == [torch.bfloat16, torch.float32, torch.float64]


def test_a_stated_dtype_is_that_of_every_reduction() -> None:
    bench = Bench(size=100, dtype=torch.float32)
    bench.add(3, dtype=torch.bfloat16)
    bench.finish()
    (flat,) = bench.transport.staged
    assert flat.dtype == torch.float32 and bench.gauge.peak == flat.nbytes


def test_padding_is_zero() -> None:
    """Not what the memory held before, of which the staging flat of `Slow` is full of NaN."""
    bench = Bench(size=100)
    bench.add(3, 40, 1)
    bench.finish()
    (flat,) = bench.transport.staged
    assert flat.numel() == 32 + 64 + 32 and flat.sum() == 3 * 1 + 40 * 2 + 1 * 3


def test_a_second_gradient_is_added_while_the_first_waits_and_neither_is_written() -> None:
    bench = Bench(size=100)
    first, second = torch.ones(3), torch.full((3,), 2.0)
    bench.buckets.add(5, first, kind=True)
    bench.buckets.add(5, second, kind=True)
    bench.finish()
    assert bench.issued == [(5,)] and bool((bench.arrived[0][1] == 3).all())
    assert bool((first == 1).all()) and bool((second == 2).all())


def test_what_is_dropped_never_arrives() -> None:
    bench = Bench(size=4)
    bench.add(4, 1)
    bench.buckets.abort()
    bench.reductions.abort()
    assert bench.transport.log == ["start 0", "wait 0"]  # its memory is free only then
    assert bench.gauge.now == 0 and bench.arrived == []
    bench.add(4)
    bench.finish()
    assert [key for key, _ in bench.arrived] == [0]


def test_a_reduction_that_cannot_be_issued_counts_no_bytes() -> None:
    bench = Bench(size=4)
    bench.transport.broken = True
    with pytest.raises(RuntimeError, match="no connection"):
        bench.add(4)
    assert bench.gauge.now == 0 and bench.reductions.in_flight == ()


def test_bytes_are_counted_until_the_result_is_there() -> None:
    """Never released while the reduction is pending."""
    bench = Bench(size=4)
    seen = []
    bench.transport.log = Log(lambda line: seen.append((line, bench.gauge.now)))
    bench.add(4, 4)
    bench.finish()
    assert seen == [("start 0", 0), ("start 1", 128), ("wait 0", 256), ("wait 1", 128)]


class Log(list[str]):
    """A list that tells of every line."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def append(self, line: str) -> None:
        super().append(line)
        self._tell(line)

"""Reduce buckets of a runtime over a transport that records what it is asked for and when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from zeroweave import dc
from zeroweave.comm.ledger import Gauge
from zeroweave.comm.transport import Parts, ReduceOp, Spread, Transport, lay_out
from zeroweave.comm.wrappers import Around


@dataclass
class Pending:
    land: Callable[[], None]

    def wait(self) -> None:
        self.land()


class Slow(Around):
    """One rank whose results arrive when they are waited for, not earlier. `gauge`: bytes of staging flats."""

    def __init__(self, inner: Transport, gauge: Gauge) -> None:
        super().__init__(inner)
        self.gauge = gauge
        self.log: list[str] = []
        self.in_use: list[int] = []
        """bytes of staging at each line of the log"""
        self.staged: list[torch.Tensor] = []
        self.broken = False

    def tell(self, line: str) -> None:
        self.log.append(line)
        self.in_use.append(self.gauge.now)

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:  # type: ignore[override]
        if self.broken:
            raise RuntimeError("no connection")
        number = len(self.staged)
        flat = torch.full((layout.numel,), float("nan"), dtype=out.dtype)
        lay_out(flat, parts, layout)
        self.staged.append(flat.clone())
        self.tell(f"start {number}")

        def land() -> None:
            self.tell(f"wait {number}")
            out.copy_(flat)

        return Pending(land)


class Bench:
    """A runtime with reduce buckets of `size` elements, in a backward."""

    def __init__(self, runtime: dc.Runtime) -> None:
        self.runtime, self.gauge = runtime, runtime.ledger.gauge("reduce buckets")
        self.transport: Slow
        runtime.transport.wrap(self._wrap)
        self.buffers: list[torch.Tensor] = []

    def _wrap(self, inner: Transport) -> Slow:
        self.transport = Slow(inner, self.gauge)
        return self.transport

    @property
    def issued(self) -> list[tuple[int, ...]]:
        """The parameters of each reduction: parameter i has a gradient of i + 1."""
        return [tuple(int(value) - 1 for value in flat.unique().tolist() if value) for flat in self.transport.staged]

    @property
    def arrived(self) -> list[int]:
        """Parameters whose gradient is in their buffer."""
        return [i for i, buffer in enumerate(self.buffers) if bool((buffer == i + 1).all())]

    def add(self, *numels: int, dtype: torch.dtype = torch.float32) -> None:
        """New parameters, with their gradients."""
        first = len(self.buffers)
        for i, numel in enumerate(numels, start=first):
            self.buffers.append(torch.full((numel,), float("nan")))
            self.runtime.register_param(i, [numel], torch.zeros(numel), self.buffers[i])
        self.runtime.register_graph_z2(first, range(first, len(self.buffers)))
        for i, numel in enumerate(numels, start=first):
            self.runtime.reduce_grad(torch.full((numel,), float(i + 1), dtype=dtype), first, i)

    def finish(self) -> None:
        self.runtime.end_backward(0)


@contextmanager
def bench(size: int, depth: int = 2, dtype: str | None = None) -> Iterator[Bench]:
    runtime = dc.Runtime(None, {"double_buffer": depth == 2, "reduce_dtype": dtype}, size)
    try:
        runtime.start_backward(True)
        yield Bench(runtime)
    finally:
        runtime.cleanup()


def test_a_bucket_is_reduced_when_it_is_full_or_the_next_does_not_fit() -> None:
    with bench(size=10) as found:
        found.add(4, 6, 3, 8, 2, 1)
        assert found.issued == [(0, 1), (2,), (3, 4)]
        found.finish()
        assert found.issued[3:] == [(5,)]
        assert found.arrived == [0, 1, 2, 3, 4, 5]


def test_a_gradient_above_the_size_goes_alone_and_leaves_nothing_behind() -> None:
    with bench(size=10, depth=1) as found:
        found.add(4, 1000, 4)
        assert found.issued == [(0,), (1,)] and found.arrived == [0]
        assert found.gauge.peak == 4 * 1024 == found.gauge.now  # the first was settled before
        found.finish()
        assert found.gauge.now == 0 and found.issued == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("depth", "log", "in_use"),
    [
        (1, "start 0, wait 0, start 1, wait 1, start 2, wait 2", [0, 1, 0, 1, 0, 1]),
        (2, "start 0, start 1, wait 0, start 2, wait 1, wait 2", [0, 1, 2, 1, 2, 1]),
    ],
)
def test_no_more_reductions_in_flight_than_buffers(depth: int, log: str, in_use: list[int]) -> None:
    """Their bytes are counted until the result is there: never released while the reduction is pending."""
    with bench(size=4, depth=depth) as found:
        found.add(4, 4, 4)
        assert found.gauge.now == depth * 128
        found.finish()
        assert ", ".join(found.transport.log) == log
        assert [nbytes // 128 for nbytes in found.transport.in_use] == in_use
        assert found.gauge.peak == depth * 128 and found.gauge.now == 0


def test_one_bucket_for_each_dtype_flushed_in_the_order_in_which_they_were_begun() -> None:
    with bench(size=100) as found:
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float64):
            found.add(3, dtype=dtype)
        assert found.issued == []
        found.finish()
        assert found.issued == [(0, 2), (1,), (3,)]
        assert [flat.dtype for flat in found.transport.staged] == [torch.bfloat16, torch.float32, torch.float64]


def test_a_stated_dtype_is_that_of_every_reduction() -> None:
    with bench(size=100, dtype="float32") as found:
        found.add(3, dtype=torch.bfloat16)
        found.finish()
        (flat,) = found.transport.staged
        assert flat.dtype == torch.float32 and found.gauge.peak == flat.nbytes


def test_padding_is_zero() -> None:
    """Not what the memory held before, of which the staging flat of `Slow` is full of NaN."""
    with bench(size=100) as found:
        found.add(3, 40, 1)
        found.finish()
        (flat,) = found.transport.staged
        assert flat.numel() == 32 + 64 + 32 and flat.sum() == 3 * 1 + 40 * 2 + 1 * 3


def test_a_second_gradient_is_added_while_the_first_waits_and_neither_is_written() -> None:
    with bench(size=100) as found:
        found.add(3)
        first, second = torch.ones(3), torch.full((3,), 2.0)
        found.runtime.reduce_grad(first, 0, 0)
        found.runtime.reduce_grad(second, 0, 0)
        found.finish()
        assert len(found.issued) == 1 and bool((found.buffers[0] == 4).all())
        assert bool((first == 1).all()) and bool((second == 2).all())


def test_what_is_dropped_never_arrives() -> None:
    with bench(size=4) as found:
        found.add(4, 1)
        found.runtime.zero_grad()
        assert found.transport.log == ["start 0", "wait 0"]  # its memory is free only then
        assert found.gauge.now == 0 and found.arrived == []
        found.runtime.start_backward(True)
        found.add(4)
        found.finish()
        assert found.arrived == [2]


def test_a_reduction_that_cannot_be_issued_counts_no_bytes() -> None:
    with bench(size=4) as found:
        found.transport.broken = True
        with pytest.raises(RuntimeError, match="no connection"):
            found.add(4)
        assert found.gauge.now == 0

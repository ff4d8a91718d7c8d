"""Two ways of gathering: which transport has what, and what of it is one launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.comm.recording import RecordedPending, RecordingTransport, layout
from zeroweave.comm.copy_engine import CopyEngineGathers
from zeroweave.comm.transport import Parts, ReduceOp, Spread
from zeroweave.layout import BucketLayout

PLACED, OTHER, SHARD, WHERE = torch.zeros(8), torch.ones(8), torch.empty(4), layout(2, 8)


class Noting(RecordingTransport):
    """Notes its name, and what it is asked for, in a list that it shares with others."""

    def __init__(self, name: str, noted: list[str]) -> None:
        super().__init__(rank=0, world=2)
        self._name, self._noted = name, noted

    @contextmanager
    def together(self) -> Iterator[None]:
        self._noted.append("(")
        yield
        self._noted.append(")")

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> RecordedPending:
        self._noted.append(self._name)
        return super().all_gather(flat, shard, layout)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> RecordedPending:
        self._noted.append(f"{self._name} reduces")
        return super().reduce_scatter(out, parts, layout, op)


def two_ways() -> tuple[CopyEngineGathers, list[str]]:
    noted: list[str] = []
    inner, engine = Noting("kernel", noted), Noting("copy", noted)
    return CopyEngineGathers(inner, engine, lambda flat: flat is PLACED), noted


def gather(transport: CopyEngineGathers, *flats: torch.Tensor) -> None:
    for flat in flats:
        transport.all_gather(flat, SHARD, WHERE)


def test_where_a_flat_lies_decides() -> None:
    transport, noted = two_ways()
    assert (transport.rank, transport.world) == (0, 2)
    gather(transport, OTHER, PLACED, OTHER)
    transport.reduce_scatter(SHARD, {}, WHERE, "average")
    assert noted == ["kernel", "copy", "kernel", "kernel reduces"]


def test_copies_lie_outside_of_launches() -> None:
    transport, noted = two_ways()
    with transport.together():
        gather(transport, PLACED, PLACED)
    with transport.together():
        gather(transport, OTHER, OTHER, PLACED, OTHER)
    with transport.together():
        transport.reduce_scatter(SHARD, {}, WHERE, "average")
    gather(transport, OTHER)
    assert noted == ["copy", "copy", *"( kernel kernel ) copy ( kernel )".split(), "(", "kernel reduces", ")", "kernel"]

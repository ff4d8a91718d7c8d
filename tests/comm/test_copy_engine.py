"""Two ways of gathering: which transport has what, and what of it is one launch."""

from __future__ import annotations

import torch

from tests.comm.recording import Noting, layout
from zeroweave.comm.copy_engine import CopyEngineGathers

PLACED, OTHER, SHARD, WHERE = torch.zeros(8), torch.ones(8), torch.empty(4), layout(2, 8)


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
    gather(transport, OTHER)
    assert noted == ["copy", "copy", *"( kernel kernel ) copy ( kernel ) kernel".split()]

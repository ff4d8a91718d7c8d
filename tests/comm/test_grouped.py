"""Collectives of several sharding groups, each through its group's transport."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.comm.recording import Noting, layout
from zeroweave.comm.process_group import LocalTransport
from zeroweave.comm.wrappers import Grouped

ALL = layout(world=4, numel=128)
EXPERTS = replace(ALL, group="experts", world=2, groups=2)


def grouped() -> tuple[Grouped, list[str]]:
    noted: list[str] = []
    return Grouped({name: Noting(name, noted, world) for name, world in (("world", 4), ("experts", 2))}), noted


def test_the_layout_decides() -> None:
    transport, noted = grouped()
    assert (transport.rank, transport.world) == (0, 4)
    flat, shard = torch.empty(128), torch.empty(32)
    for each in (ALL, EXPERTS, ALL):
        transport.all_gather(flat, shard, each)
        transport.reduce_scatter(shard, {}, each, "average")
    assert noted == ["world", "world reduces", "experts", "experts reduces", "world", "world reduces"]


def test_a_group_of_one_rank_divides_by_all_ranks() -> None:
    alone = replace(ALL, group="experts", world=1, groups=4)
    out = torch.empty(128)
    for op in ("average", "predivide"):
        LocalTransport(torch.device("cpu"), divisor=4).reduce_scatter(out, {0: torch.full((128,), 8.0)}, alone, op)
        assert out.eq(2.0).all()

"""Collectives of several sharding groups, each through its group's transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from tests.comm.recording import Noting, layout
from zeroweave.comm.grouped import Grouped
from zeroweave.comm.process_group import LocalTransport

ALL = layout(world=4, numel=128)
EXPERTS = replace(ALL, group="experts", world=2, groups=2)


class Named(Noting):
    """Notes whose launches they are."""

    @contextmanager
    def together(self) -> Iterator[None]:
        self._noted.append(f"{self._name} (")
        yield
        self._noted.append(f") {self._name}")


def grouped() -> tuple[Grouped, list[str]]:
    noted: list[str] = []
    return Grouped({name: Named(name, noted, world) for name, world in (("world", 4), ("experts", 2))}), noted


def test_the_layout_decides() -> None:
    transport, noted = grouped()
    assert (transport.rank, transport.world) == (0, 4)
    flat, shard = torch.empty(128), torch.empty(32)
    for each in (ALL, EXPERTS, ALL):
        transport.all_gather(flat, shard, each)
        transport.reduce_scatter(shard, {}, each, "average")
    assert noted == ["world", "world reduces", "experts", "experts reduces", "world", "world reduces"]


def test_a_launch_holds_gathers_of_one_group() -> None:
    transport, noted = grouped()
    flat, shard = torch.empty(128), torch.empty(32)
    with transport.together():
        for each in (ALL, ALL, EXPERTS, ALL):
            transport.all_gather(flat, shard, each)
    transport.all_gather(flat, shard, EXPERTS)
    launches = "world (, world, world, ) world, experts (, experts, ) experts, world (, world, ) world, experts"
    assert noted == launches.split(", ")


def test_a_launch_holds_reductions_of_one_group() -> None:
    transport, noted = grouped()
    with transport.together():
        for each in (ALL, EXPERTS, EXPERTS):
            transport.reduce_scatter(torch.empty(32), {}, each, "average")
    launches = "world (, world reduces, ) world, experts (, experts reduces, experts reduces, ) experts"
    assert noted == launches.split(", ")


def test_a_group_of_one_rank_divides_by_all_ranks() -> None:
    alone = replace(ALL, group="experts", world=1, groups=4)
    out = torch.empty(128)
    for op in ("average", "predivide"):
        LocalTransport(torch.device("cpu"), divisor=4).reduce_scatter(out, {0: torch.full((128,), 8.0)}, alone, op)
        assert out.eq(2.0).all()

"""Gathers in a registered buffer, whose memory and copy engines are doubles here: which way each goes, and values."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.support.dc_world import draw
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.registered import Slabs
from zeroweave import dc
from zeroweave.comm.copy_engine import CopyEngineGathers, no_room
from zeroweave.comm.process_group import ProcessGroupTransport
from zeroweave.comm.registered_buffers import RegisteredBuffers
from zeroweave.dc.registered_buffer import BufferedGathers
from zeroweave.notices import warn

SHAPES = ((7, 3), (5,), (2, 40))


class Doubles(Slabs):
    """What stands for the machine's: a process group for copy engines. There are `most` buffers."""

    def buffered(
        self, transport: Any, control: Any, device: Any, ledger: Any, ends: ExitStack, failed: Any
    ) -> BufferedGathers:
        engine = ProcessGroupTransport(transport.group, device, ledger, "world by copy engine", in_place=True)
        inner = CopyEngineGathers(transport, engine, self.registered)

        def tell(nbytes: int) -> None:
            warn(no_room(nbytes, "a test wants it", "symmetric_memory"), control.rank)

        made = BufferedGathers(
            inner, RegisteredBuffers(self.make, ledger.gauge("symmetric memory"), tell), control, device
        )
        ends.callback(made.close)
        return made


class Sharded:
    """Parameters of which each rank has a partition, in float32 and bfloat16."""

    def __init__(self, persistent: bool = False) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        dtypes = (torch.float32, torch.bfloat16, torch.float32)
        self.full = [draw(3, i, shape=s, dtype=d) for i, (s, d) in enumerate(zip(SHAPES, dtypes, strict=True))]
        self.shards = [F.pad(f.flatten(), (0, -f.numel() % world)).view(world, -1)[rank].clone() for f in self.full]
        self.persistent = persistent

    def register(self, *ids: int) -> None:
        for i in ids:
            dc.register_z3_param(i, SHAPES[i], self.shards[i], None, self.persistent)

    def right(self, graph_id: int, *ids: int, prefetch: bool = False) -> bool:
        """All are gathered before one is read: what the buffer held has been overwritten by then."""
        if prefetch:
            dc.prefetch_params_fused(graph_id, [self.shards[i] for i in ids], ids)
        full = [dc.wait_allgather(dc.allgather_param(self.shards[i], graph_id, i), graph_id, i) for i in ids]
        right = all(torch.equal(each, self.full[i]) for i, each in zip(ids, full, strict=True))
        for i in ids:
            dc.release_param(full.pop(0), graph_id, i)
        return right

    def update(self) -> None:
        for each in (*self.full, *self.shards):
            each.mul_(2)


def grown(persistent: bool) -> tuple[list[int], list[int], list[int]]:
    """Bytes of the buffer, buffers made, and gathers in it, after each event of a program."""
    doubles, found = Doubles(most=None), list[tuple[int, int, int]]()
    with patch("zeroweave.dc.runtime.buffered", doubles.buffered), warnings.catch_warnings(action="error"):
        runtime = dc.init(None, {"symmetric_memory": True})
        gauge = runtime.ledger.gauge("symmetric memory")

        def note(right: bool = True) -> None:
            assert right
            found.append((gauge.now, doubles.made, doubles.gathers))

        try:
            sharded = Sharded(persistent)
            dc.lazy_init_symm_memory()  # nothing is registered
            note()
            sharded.register(0, 1)
            if dist.get_rank() == 0:
                dc.register_z3_param(9, [25], torch.ones(13))  # in no graph, and of one rank only
            dc.register_graph_z3(0, [0, 1])
            note(sharded.right(0, 0, 1))  # no forward has begun
            dc.zero_grad()
            dc.start_forward()
            note(sharded.right(0, 0, 1))
            dc.lazy_init_symm_memory()
            dc.start_forward()
            note(sharded.right(0, 0, 1, prefetch=True))
            dc.zero_grad()
            sharded.register(2)
            dc.register_graph_z3(1, [2])
            note(sharded.right(1, 2))  # larger than the buffer, until the next forward
            dc.zero_grad()
            sharded.update()
            dc.enable_profiling(True)
            dc.start_forward()
            dc.zero_grad()
            dc.enable_profiling(False)
            note()
            dc.start_forward()
            note(sharded.right(1, 2) and sharded.right(0, 0, 1, prefetch=True))
        finally:
            dc.cleanup()
        assert gauge.now == 0
    sizes, made, gathers = zip(*found, strict=True)
    return list(sizes), list(made), list(gathers)


@daily("persistent", [False], [True])
def test_the_buffer_is_as_large_as_the_largest_parameter(pools: Pools, persistent: bool) -> None:
    """A slab is odd: 2 * number + 1 bytes larger than what was asked for."""
    small, large = 4 * 26 + 3, 4 * 80 + 5
    for sizes, made, gathers in pools(2).run(grown, persistent):
        assert sizes == [0, 0, small, small, small, small, large]
        assert made == [0, 0, 1, 1, 1, 1, 2]
        assert gathers == [0, 0, 2, 4, 4, 4, 7]


def refused() -> tuple[list[str], int]:
    doubles = Doubles(most=0)
    with patch("zeroweave.dc.runtime.buffered", doubles.buffered), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dc.init(None, {"symmetric_memory": True})
        try:
            sharded = Sharded()
            sharded.register(0, 1)
            dc.register_graph_z3(0, [0, 1])
            for _ in range(3):
                dc.start_forward()
                assert sharded.right(0, 0, 1)
                dc.lazy_init_symm_memory()
        finally:
            dc.cleanup()
    return [str(each.message) for each in told], doubles.gathers


def test_without_memory_kernels_gather_and_a_warning_says_so_once(pools: Pools) -> None:
    (told, first), (silent, second) = pools(2).run(refused)
    assert len(told) == 1 and "could not be had (a test wants it)" in told[0] and told[0].startswith("symmetric_memory")
    assert silent == [] and first == second == 0


def trained(settings: dict[str, Any]) -> tuple[list[Tensor], int]:
    """What each of several windows gathers, and how many gathers took the buffer."""
    doubles, seen = Doubles(most=None), []
    with patch("zeroweave.dc.runtime.buffered", doubles.buffered):
        dc.init(None, settings)
        try:
            sharded = Sharded()
            sharded.register(0, 1, 2)
            dc.register_graph_z3(0, [0, 1, 2])
            for window in range(3):
                dc.start_forward()
                assert sharded.right(0, *range(3), prefetch=window > 0)
                seen += [full.clone() for full in sharded.full]
                dc.start_backward(update=True)
                for i, full in enumerate(sharded.full):
                    dc.reduce_grad(torch.ones_like(full), 0, i)
                dc.end_backward(graph_id=0)
                dc.take_gradients().release()
                sharded.update()
        finally:
            dc.cleanup()
    return seen, doubles.gathers


def test_new_values_are_gathered_after_an_update_whatever_waits(pools: Pools) -> None:
    fences = dict.fromkeys(("sync_before_allgather", "sync_after_allgather", "check_every_step"), True)
    for settings in ({}, fences):
        for seen, gathers in pools(2).run(trained, {"symmetric_memory": True, **settings}):
            assert len(seen) == 9 and gathers == 9

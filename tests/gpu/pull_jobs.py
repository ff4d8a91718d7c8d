"""What the ranks do in the GPU tests of reductions by pulling."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.copy_engine_jobs import Late, state
from tests.gpu.jobs import SMALL, config, deterministic, join, start, step, tokens
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import make_transport
from zeroweave.comm.pulling.reductions import PulledReductions
from zeroweave.comm.pulling.room import Room
from zeroweave.comm.pulling.setup import pulling
from zeroweave.layout import BucketLayout, Slot
from zeroweave.ranks.control import Control

PULL: dict[str, Any] = {"transport": {"reductions": "pull"}}
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


def layout(number: int, numel: int, dtype: str) -> BucketLayout:
    """A bucket of two parameters, with some padding in the end."""
    world = dist.get_world_size()
    first = numel // 3 // 128 * 128
    slots = Slot("v", 0, first, (first,)), Slot("w", first, numel - first - 8, (numel - first - 8,))
    return BucketLayout(number, f"b{number}", dtype, DTYPES[dtype], True, "world", world, slots, numel)


def expected(flat: Tensor) -> Tensor:
    """This rank's part of the average: float32 sums in the order of the ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    all_of = flat.new_empty(world, len(flat))
    dist.all_gather_into_tensor(all_of.view(-1), flat)
    parts = all_of.view(world, world, -1)[:, rank].float()
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return (total * (1 / world)).to(flat.dtype)


def sums(dtype: str, rounds: int = 40) -> tuple[int, int, str]:
    """Reductions of several sizes, some of gradients that lie elsewhere, two in flight, by ranks that are late.

    How many were right of how many, and what is said.
    """
    device, draw = join(), random.Random(dist.get_rank())
    world = dist.get_world_size()
    unit = world * 128
    sizes = [unit * n for n in (1, 3, 517, 4096, 5000)]
    shapes = [layout(number, size, dtype) for number, size in enumerate(sizes)]
    control, ledger = Control.over(None), Ledger(world, dist.get_rank())
    inner = make_transport(dist.group.WORLD, device, ledger)
    kind = getattr(torch, dtype)
    torch.manual_seed(7 + dist.get_rank())
    made = pulling("pull", inner, control, device, ledger, [(sizes[-1], kind)])
    assert made.transport is not None and made.room is not None
    transport, flying, right = made.transport, [], 0
    for index in range(rounds):
        if index == 3:
            torch.cuda.empty_cache()  # whatever nobody keeps goes
        shape = shapes[index % len(shapes)]
        values = torch.randn(shape.numel, device=device).to(kind)
        values[-8:] = 0
        if index % 3 == 2:
            parts: Any = {n: values[s.offset : s.offset + s.numel] for n, s in enumerate(shape.slots)}
        else:
            parts = transport.flat(shape, kind)
            parts.copy_(values)
        if draw.random() < 0.3:
            time.sleep(0.01 * draw.random())
        if draw.random() < 0.3:
            torch.cuda._sleep(int(2e7 * draw.random()))
        out = torch.empty(shape.shard_numel, dtype=kind, device=device)
        flying.append((transport.reduce_scatter(out, parts, shape, "average"), out, values))
        del parts
        if len(flying) == 3:
            right += _landed(*flying.pop(0))
    right += sum(_landed(*each) for each in flying)
    calls = ledger.totals()["reduce_scatter"].calls
    control.close()
    return right, calls, made.why


def _landed(pending: Any, out: Tensor, values: Tensor) -> bool:
    pending.wait()
    return torch.equal(out, expected(values))


def stages(mode: str) -> list[tuple[list[float], str, str, int, bool]]:
    """Losses, parameters, what is said, departures, and whether all is pulled; stages 1, 2, 3, of late ranks, and 3."""
    device, found = join(), []
    for stage, late in ((1, False), (2, False), (3, True), (3, False)):
        settings = {**config(stage, mode, torch.bfloat16), **PULL}
        with deterministic(), start(SMALL, settings, torch.bfloat16) as engine:
            if late:
                engine._parts.transport.wrap(Late)
            losses = [step(engine, tokens(SMALL, device, index)) for index in range(20)]
            pulled = all(_pulls(engine, layout) for layout in engine.buckets)
            found.append((losses, state(engine), engine.stats.reductions, engine.stats.departures, pulled))
    return found


def _pulls(engine: Any, layout: BucketLayout) -> bool:
    made = engine._parts.transport._inner
    while not isinstance(made, PulledReductions):
        made = made._inner
    return made.pulls(layout, torch.bfloat16) or layout.nbytes > made.flats.nbytes


def room() -> tuple[int, int, int, bool]:
    """Multiprocessors that matmuls may use: in a room, in one inside of it, and behind both; and: are they right?"""
    import ctypes

    device = join()
    made, target = Room(device, 4), ctypes.c_int()

    def now() -> int:
        made._get(torch.cuda.current_blas_handle(), ctypes.byref(target))
        return target.value

    a = torch.randn(512, 512, device=device, dtype=torch.float64)
    made.begin()
    product, inside = a @ a, now()
    made.begin()
    both = now()
    made.end()
    made.end()
    return inside, both, now(), torch.allclose(product, a @ a)


def memory() -> tuple[int, int, int, int]:
    """Bytes in use more while an engine trains that pulls, and what it says that it has for that.

    Then the bytes of the GPU in use behind the end of an engine that does not pull, and of one that does.
    """
    device, more, left, told = join(), [], [], 0
    for way in ("kernel", "kernel", "pull"):  # the first one is for what a process has once
        settings = {**config(2, "aot_eager", torch.bfloat16), "transport": {"reductions": way}}
        before = torch.cuda.memory_allocated()
        with start(SMALL, settings, torch.bfloat16) as engine:
            step(engine, tokens(SMALL, device, 0))
            more.append(torch.cuda.memory_allocated() - before)
            told = engine.stats.memory.pulled
        del engine
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()
        free, total = torch.cuda.mem_get_info()
        left.append(total - free)
    return more[2] - more[1], told, left[1], left[2]

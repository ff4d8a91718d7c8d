"""What the ranks do in the GPU tests of reductions by copy engine."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from tests.gpu.copy_engine_jobs import layout
from tests.gpu.jobs import join
from zeroweave._torch.distributed import all_to_all
from zeroweave.comm.copy_engine import CopyEngines
from zeroweave.comm.exchange import Exchange, Outboxes
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import make_transport
from zeroweave.ranks.control import Control

NUMEL = 3 << 20


def means(dtype: torch.dtype, rounds: int = 12) -> tuple[list[float], bool]:
    """How far means of normal numbers are off those in float64, at most; and were flats written in outboxes?"""
    device = join()
    world, rank = dist.get_world_size(), dist.get_rank()
    ledger, control = Ledger(world, rank), Control.over(None)
    engines = CopyEngines(control, device, "reductions")
    found, boxed = [], False
    with ExitStack() as ends:
        ends.callback(control.close)
        ends.callback(engines.close)
        own = engines.join(timedelta(seconds=60))
        pieces = []
        for _ in range(4):
            memory = engines.make(NUMEL * dtype.itemsize)
            assert memory is not None
            ends.callback(memory.close)
            pieces.append(memory.tensor())
        inbox, copies, *rest = pieces
        outboxes = Outboxes(rest, only_captures=False)
        plain = make_transport(dist.group.WORLD, device, ledger)
        exchange = Exchange(plain, partial(all_to_all, own), inbox, copies, outboxes, ledger)
        shape = layout(0, NUMEL)
        values = [torch.empty(NUMEL, dtype=dtype, device=device) for _ in range(3)]
        results = [torch.empty(NUMEL // world, dtype=dtype, device=device) for _ in values]

        def work(turn: int) -> bool:
            """Reduces all values, two at once; were some of them in outboxes?"""
            flying, written = [], False
            for index, (value, out) in enumerate(zip(values, results, strict=True)):
                flat = value
                if (index + turn + rank) % 2:
                    flat = exchange.gradient_flat(shape, dtype).copy_(value)
                written |= outboxes.has(flat)
                flying.append(exchange.reduce_scatter(out, flat if flat is not value else {0: value}, shape, "average"))
                del flat
                if len(flying) == 2:
                    flying.pop(0).wait()
            for each in flying:
                each.wait()
            return written

        def renew(turn: int) -> None:
            torch.manual_seed(100 * turn + rank)
            for value in values:
                value.normal_()

        def worst() -> float:
            torch.cuda.synchronize()
            most = 0.0
            for value, out in zip(values, results, strict=True):
                every = [torch.empty_like(value) for _ in range(world)]
                dist.all_gather(every, value)
                start = rank * out.numel()
                parts = torch.stack([each[start : start + out.numel()] for each in every]).double()
                most = max(most, float((out.double() - parts.mean(0)).abs().max()))
            return most

        for turn in range(rounds):
            renew(turn)
            boxed |= work(turn)
            found.append(worst())
        side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work(0)
            torch.cuda.synchronize()
            control.barrier("before the capture")
            graph.capture_begin(capture_error_mode="thread_local")
            boxed &= work(1)
            graph.capture_end()
            for turn in range(rounds):
                renew(rounds + turn)
                graph.replay()
                found.append(worst())
                renew(2 * rounds + turn)
                boxed &= work(turn)  # between two replays, by the same memory
                found.append(worst())
        torch.cuda.synchronize()
        control.barrier("after the last replay")
        del graph
    return found, boxed

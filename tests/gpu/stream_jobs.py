"""What the ranks do in the GPU tests of streams: steps in which everything is late at random."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import zeroweave as zw
from tests.gpu.jobs import adamw, deterministic, join
from tests.gpu.schedule_jobs import Net, rows
from zeroweave.comm.transport import Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.comm.wrappers import Around
from zeroweave.layout import BucketLayout

MOST = 400_000
"""clock cycles of one delay: about 0.2 ms, a few times what the step computes between two collectives"""


def sides(transport: Any) -> list[torch.Stream]:
    """The streams beside the computation that a transport, and those inside of it, issue collectives on."""
    found = [transport._side.stream] if getattr(transport, "_side", None) is not None else []
    inside = [getattr(transport, name, None) for name in ("_inner", "_engine")]
    inside += getattr(transport, "_transports", {}).values()
    return found + [stream for each in inside if each is not None for stream in sides(each)]


class Late:
    """A collective whose result is waited for by a stream that is late."""

    def __init__(self, inner: Pending, delays: Delayed) -> None:
        self._inner, self._delays = inner, delays
        self.over = inner.over

    def wait(self) -> None:
        self._delays.compute()
        self._inner.wait()
        self._delays.compute()


class Delayed(Around):
    """Delays the computation, and what collectives are issued on, by random times, which differ between the ranks."""

    def __init__(self, inner: Transport, seed: int) -> None:
        super().__init__(inner)
        self._random, self._sides = random.Random(seed), sides(inner)

    def compute(self) -> None:
        if self._random.random() < 0.3:
            torch.cuda._sleep(self._random.randrange(MOST))

    def _delay(self) -> None:
        self.compute()
        for side in self._sides:
            if self._random.random() < 0.5:
                with side:
                    torch.cuda._sleep(self._random.randrange(MOST))

    def all_gather(self, flat: Tensor, shard: Tensor, layout: BucketLayout) -> Pending:
        self._delay()
        return Late(super().all_gather(flat, shard, layout), self)

    def reduce_scatter(self, out: Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        self._delay()
        return Late(super().reduce_scatter(out, parts, layout, op), self)


def trained(settings: dict[str, Any], steps: int, seed: int | None) -> tuple[list[Tensor], Tensor, bool]:
    """Losses, all parameters, and whether steps followed their schedule. `seed`: of delays; None: there are none."""
    device = join()
    with deterministic():
        torch.manual_seed(0)
        model = Net().to(device, torch.bfloat16)
        config = {**settings, "deadline_seconds": 120.0}
        with zw.initialize(model, adamw(model.parameters()), config) as engine:
            if seed is not None:
                engine._context.transport.wrap(lambda inner: Delayed(inner, 2 * seed + engine.rank))
            losses = []
            for index in range(steps):
                batch = rows(engine.rank, index % 16, device).bfloat16()
                loss = engine(batch).float().pow(2).mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            followed = not engine.stats.departures
            with engine.full_parameters():
                values = torch.cat([p.detach().float().reshape(-1).cpu() for p in model.parameters()])
    return [loss.cpu() for loss in losses], values, followed


def late(
    stage: int, nbytes: int, lower: str | None, changes: dict[str, Any], steps: int, gathers: str = "kernel"
) -> tuple[bool, bool, bool]:
    """Are losses and parameters bit-equal with and without delays, finite, and were schedules followed?"""
    compile_: dict[str, Any] = {"record_steps": 0, "prefetch": 1, **changes}
    compile_ |= {"enabled": False} if lower is None else {"lower": lower}
    settings = {"stage": stage, "bucket": {"bytes": nbytes}, "compile": compile_, "transport": {"gathers": gathers}}
    plain, delayed = trained(settings, steps, None), trained(settings, steps, stage)
    same = all(map(torch.equal, plain[0], delayed[0])) and torch.equal(plain[1], delayed[1])
    return same, bool(plain[1].isfinite().all()), plain[2] and delayed[2]


def on_a_stream_of_an_earlier_forward(lower: str | None) -> bool:
    """Are gradients bit-equal where a graph is kept whose forward ran on another stream, which is late?

    The graph's `AccumulateGrad` nodes belong to that stream, and a later backward delivers there.
    """
    device = join()
    compile_: dict[str, Any] = {"enabled": False} if lower is None else {"lower": lower}

    def gradients(keep: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Net().to(device)
        side, kept = torch.cuda.Stream(device), []
        with zw.initialize(model, adamw(model.parameters()), {"stage": 2, "compile": compile_}) as engine:
            if keep:
                with torch.cuda.stream(side):
                    kept.append(engine(rows(engine.rank, 0, device)))
                side.synchronize()
                engine.zero_grad()
            loss = engine(rows(engine.rank, 1, device)).pow(2).mean()
            if keep:
                with torch.cuda.stream(side):
                    torch.cuda._sleep(200 * MOST)
            engine.backward(loss)
            found = {name: value for name, value in engine.gradients().items() if value is not None}
            engine.step()
            kept.clear()
            return found

    with deterministic():
        plain, late = gradients(False), gradients(True)
    return bool(plain) and all(torch.equal(plain[name], late[name]) for name in plain)

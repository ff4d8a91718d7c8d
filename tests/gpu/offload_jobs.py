"""What the ranks do in the GPU tests of offload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.gpu.jobs import SMALL, WIDE, allocated, config, deterministic, join, start, step, tokens

OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {"optimizer": "all"},
    "params": {"params": True},
    "both": {"optimizer": "all", "params": True},
    "adaptive": {"optimizer": "adaptive", "memory_budget": 1 << 40},
}
COMPACT: dict[str, Any] = {"precision": {"params": "bfloat16", "optimizer": "compact"}}


def settings(stage: int, mode: str, dtype: torch.dtype, offload: str, **more: Any) -> dict[str, Any]:
    return {**config(stage, mode, dtype), "offload": OFFLOADS[offload], **more}


@dataclass(frozen=True)
class Course:
    losses: list[float]
    sums: dict[str, float]
    departures: int


def courses(stage: int, mode: str, dtype: torch.dtype, offloads: list[str], **more: Any) -> list[Course]:
    """Training with each offload, with deterministic kernels and new memory filled with NaN."""
    device, found = join(), []
    with deterministic():
        for offload in offloads:
            with start(SMALL, settings(stage, mode, dtype, offload, **more), dtype) as engine:
                losses = [step(engine, tokens(SMALL, device, index)) for index in range(9)]
                sums = {
                    f"{key} of {name}": float(engine.full(name, key).double().abs().sum())
                    for name, _ in engine.module.named_parameters()
                    for key in ("param", "exp_avg", "exp_avg_sq")
                }
                found.append(Course(losses, sums, engine.stats.departures))
    return found


def compact_courses(stage: int, mode: str, offloads: list[str]) -> list[Course]:
    return courses(stage, mode, torch.bfloat16, offloads, **COMPACT)


def pinned(tensors: list[Tensor]) -> list[bool]:
    assert all(tensor.is_cuda or tensor.is_pinned() for tensor in tensors)
    return [not tensor.is_cuda for tensor in tensors]


def homes(offload: str) -> tuple[list[bool], list[bool], list[bool]]:
    """What of moments, masters (or remainders), and what is gathered lies in pinned host memory, after three steps."""
    device = join()
    with start(SMALL, settings(3, "eager", torch.bfloat16, offload), torch.bfloat16) as engine:
        for index in range(3):
            step(engine, tokens(SMALL, device, index))
        moments = [value for state in engine.optimizer.state.values() for value in state.values() if value.dim()]
        homes = [bucket.home for bucket in engine._runtime.buckets.values()]
        assert moments and all(home.wider for home in homes)
        return pinned(moments), pinned([home.at_rest[-1] for home in homes]), pinned([home.source for home in homes])


def compact_homes(offload: str) -> tuple[list[bool], list[bool], list[bool]]:
    """The same of codes and scales, remainders, and what is gathered, of compact states."""
    device, more = join(), settings(3, "eager", torch.bfloat16, offload, **COMPACT)
    with start(SMALL, more, torch.bfloat16) as engine:
        for index in range(3):
            step(engine, tokens(SMALL, device, index))
        ids = [bucket.id for bucket in engine.buckets]
        homes = [engine._runtime.buckets[bucket].home for bucket in ids]
        held = [tensor for each in engine._context.optimizer.offload.compact.values() for tensor in each.tensors]
        assert len(held) == 4 * len(ids) and all(home.is_split for home in homes)
        return pinned(held), pinned([home.at_rest[1] for home in homes]), pinned([home.source for home in homes])


@dataclass(frozen=True)
class Peak:
    """Bytes: the peak of three steps, and what the engine says lies on the device and in host memory."""

    peak: int
    device: int
    host: int
    largest: int
    """masters and moments of the largest bucket"""


def peaks(offload: str, budget: int | None = None) -> Peak:
    device = join()
    before = allocated()
    more = settings(3, "inductor", torch.bfloat16, offload)
    more["compile"] = {**more["compile"], "record_steps": 0}
    if budget is not None:
        more["offload"] = {**more["offload"], "memory_budget": budget + before}
    with start(WIDE, more, torch.bfloat16) as engine:
        for _ in range(8):
            step(engine, tokens(WIDE, device))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step(engine, tokens(WIDE, device))
        torch.cuda.synchronize()
        memory = engine.stats.memory
        return Peak(
            peak=torch.cuda.max_memory_allocated() - before,
            device=memory.device,
            host=memory.host,
            largest=12 * max(bucket.shard_numel for bucket in engine.buckets),
        )


def runs_ahead(offload: str, more: dict[str, Any]) -> bool:
    """Was the device still busy with what was issued before a step when the host had finished it?"""
    device = join()
    with start(SMALL, settings(3, "inductor", torch.bfloat16, offload, **more), torch.bfloat16) as engine:
        batch = tokens(SMALL, device)
        for _ in range(9):  # compilation, the schedule, pinned memory
            step(engine, batch)
        a = torch.randn(16384, 16384, device=device, dtype=torch.bfloat16)
        b, c = torch.randn_like(a), torch.empty_like(a)
        torch.cuda.synchronize()
        for _ in range(160):  # more than a second; of many more launches the host would wait for the first
            torch.mm(a, b, out=c)
        event = torch.cuda.current_stream().record_event()
        engine.backward(engine(batch, batch))
        engine.step()
        busy = not event.query()
        torch.cuda.synchronize()
        return busy

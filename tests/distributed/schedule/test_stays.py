"""Frozen weights on several ranks: gathered once for all steps, and again on all ranks or on none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.support.counting import counted
from tests.support.harness import Pools
from tests.support.marks import MODES, daily, slow
from tests.support.parity import digest
from zeroweave.errors import EngineError

WIDTH = 8


class Gated(nn.Module):
    """A frozen layer, a trained change of it, and a frozen branch that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.gate = (nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2))
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.base(x) + self.up(self.down(x)))
        return y + self.gate(x) if self.use else y


@contextmanager
def adapted(stage: int, mode: str = "eager", **more: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), *(Gated() for _ in range(3)))
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 60.0, **more}
    with zw.initialize(model, torch.optim.AdamW(trained, lr=1e-2), config) as engine:
        yield engine


def step(engine: Any, index: int) -> float:
    for micro in range(engine.config.gradient_accumulation_steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * index + 10 * micro + engine.rank))
        loss = engine.train_step(x, lambda output, _: output.square().mean())
    return float(loss)


def values(engine: Any) -> str:
    return digest([engine.state_dict()])


def bytes_of(engine: Any, trained: bool) -> int:
    return sum(bucket.nbytes for bucket in engine.buckets if bucket.requires_grad == trained)


def counts(stage: int, mode: str, gas: int) -> tuple[list[int], int, int, list[int], str, float]:
    """Payload of each step's gathers, and of the buckets; what a step moved by the process group's own account."""
    with adapted(stage, mode, gradient_accumulation_steps=gas) as engine:
        payloads = []
        for index in range(6):
            with counted() as independent:
                loss = step(engine, index)
            gathers = engine.stats.last_step["all_gather"].payload
            payloads.append(gathers)
            assert gathers == 4 * sum(numel for kind, numel in independent if kind == "all_gather")
        assert engine.executed == engine.schedule.instructions and engine.stats.departures == 0
        size = {bucket.id: bucket.numel for bucket in engine.buckets}
        scheduled = [4 * size[bucket] for kind, bucket in engine.schedule.collectives() if kind == "all_gather"]
        found = bytes_of(engine, True), bytes_of(engine, False)
        return payloads, *found, scheduled, values(engine), loss


@slow("2-1-aot_eager")
@pytest.mark.parametrize("mode", MODES)
@daily(("stage", "gas"), [(2, 1)], [(1, 1), (1, 2), (2, 2)])
def test_from_the_second_step_on_only_what_is_trained_is_gathered(
    pools: Pools, stage: int, gas: int, mode: str
) -> None:
    both = pools(2).run(counts, stage, mode, gas)
    for payloads, trained, frozen, scheduled, _, _ in both:
        assert payloads == [trained + frozen] + [trained] * 5
        assert sum(scheduled) == trained
    plain = pools(2).run(counts, 3, mode, gas) if gas == 1 else both
    assert [each[4:] for each in plain] == [each[4:] for each in both]


def uneven(stage: int, mode: str) -> tuple[list[int], list[float], bool]:
    """Rank 0 never uses two frozen layers, and evaluates where rank 1 does not."""
    with adapted(stage, mode) as engine:
        for block in list(engine.module)[1:3]:
            block.use = engine.rank == 1
        calls, seen = [], []
        for index in range(6):
            step(engine, index)
            calls.append(engine.stats.last_step["all_gather"].calls)
            with torch.no_grad():
                engine(torch.ones(1, WIDTH))  # gathers on both ranks
                if engine.rank == index % 2:
                    seen.append(float(engine(torch.ones(1, WIDTH)).sum()))
                dist.barrier()
        return calls, seen, bool(engine.stats.memory.flats_peak == sum(b.nbytes for b in engine.buckets))


@daily(("stage", "mode"), [(1, "eager")], [(2, "eager"), (2, "aot_eager")])
def test_ranks_that_use_other_frozen_layers_gather_alike(pools: Pools, stage: int, mode: str) -> None:
    for calls, seen, whole in pools(2).run(uneven, stage, mode):
        # the first step gathers everything; the trained buckets of the later ones are there from the evaluation
        assert calls[0] == 7 and all(each <= 4 for each in calls[1:])
        assert len(set(seen)) == 3 and whole


def written(stage: int, how: str) -> tuple[str, str, str]:
    """Values behind a write that one rank makes, by an engine that keeps frozen weights and by one that does not."""
    found = []
    for keeps in (stage, 3):
        with adapted(keeps) as engine:
            for index in range(3):
                step(engine, index)
            with torch.no_grad():
                engine(torch.ones(1, WIDTH))
            with suppress(EngineError, KeyError), engine.full_parameters() as full, torch.no_grad():
                first = full["0.weight"]
                if how == "refused" and engine.rank == 0:
                    first.fill_(3.0)
                elif how == "the same value" and engine.rank == 0:
                    first.copy_(first.clone())
                elif how == "data":
                    first.data.fill_(0.5)
                elif how == "raises":
                    first.fill_(3.0)
                    raise KeyError
            with torch.no_grad():
                seen = float(engine(torch.ones(1, WIDTH)).sum())
            for index in range(2):
                step(engine, index)
            found.append(f"{seen} {values(engine)}")
    return found[0], found[1], how


@daily(("stage", "how"), [(2, "refused")], [(s, h) for s in (1, 2) for h in ("the same value", "data", "raises")])
def test_a_write_on_one_rank_leaves_all_ranks_alike(pools: Pools, stage: int, how: str) -> None:
    for one, other, _ in pools(2).run(written, stage, how):
        assert one == other


def profiled(stage: int) -> list[str]:
    """Ranks that try out unequally many steps, before and behind their first one."""
    found = []
    for steps in (0, 1):
        with adapted(stage) as engine, adapted(3) as plain:
            for index in range(3):
                if index == steps:
                    with engine.profiling():
                        for inside in range(engine.rank + 1):
                            step(engine, inside)
                step(engine, index)
                step(plain, index)
            found += [values(engine), values(plain)]
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2])
def test_steps_that_are_tried_out_leave_nothing(pools: Pools, stage: int) -> None:
    for one, other, third, fourth in pools(2).run(profiled, stage):
        assert one == other and third == fourth


def rescheduled(mode: str) -> tuple[list[int], list[str]]:
    """Gathers of the last of some steps with each setting of keep, at stage 3, and the values beside the plain ones."""
    calls, found = [], []
    with adapted(3, mode) as engine, adapted(3, mode) as plain:
        step(engine, 0)
        step(plain, 0)
        names = [bucket.name for bucket in engine.buckets if not bucket.requires_grad]
        for index, keep in enumerate(("none", "all", names[:2], "none")):
            engine.reschedule(keep=keep)
            for inside in range(2):
                step(engine, 10 * index + inside)
                step(plain, 10 * index + inside)
            calls.append(engine.stats.last_step["all_gather"].calls)
        found = [values(engine), values(plain)]
    return calls, found


@slow("aot_eager")
@pytest.mark.parametrize("mode", MODES)
def test_at_stage_3_keep_says_what_stays(pools: Pools, mode: str) -> None:
    for calls, (one, other) in pools(2).run(rescheduled, mode):
        assert one == other
        assert calls[0] == calls[3] > calls[2] > calls[1] == 3

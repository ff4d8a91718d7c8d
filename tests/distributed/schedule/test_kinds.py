"""Windows that alternate: each kind has a schedule of its own, and soon no window departs any more."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zeroweave as zw
from tests.distributed.schedule.test_rescheduling import Detour
from tests.support.harness import Pools
from tests.support.marks import MODES
from tests.support.parity import digest
from tests.support.zoo import rows

pytestmark = pytest.mark.matrix

Windows = Sequence[tuple[int, bool]]
"""Of each window: its micro-steps, and whether its blocks run backwards."""

COUNTS: Windows = [(2, False), (3, False)]
WAYS: Windows = [(1, False), (1, True)]
MIXED: Windows = [(1, False), (1, False), (2, True), (1, True)]


@contextmanager
def training(mode: str, stage: int, **settings: Any) -> Iterator[Any]:
    torch.manual_seed(3)
    module = Detour(3)
    config = {"stage": stage, "deadline_seconds": 200.0, "compile": {**MODES[mode], **settings}}
    with zw.initialize(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), config) as engine:
        yield engine


def window(engine: Any, count: int, backwards: bool) -> str:
    """A hash of its gradients."""
    engine.module.backwards = backwards
    for micro in range(count):
        last = micro == count - 1
        engine.set_gradient_accumulation_boundary(last)
        x, y = rows(engine.rank, engine.micro_steps)
        engine.backward(F.mse_loss(engine(x), y))
        found = digest([engine.gradients()]) if last else ""
        engine.step()
    return found


def alternating(windows: Windows, rounds: int, mode: str, stage: int) -> tuple[list[int], int, int]:
    """In which windows the engine departed, how many schedules were followed, and how many of them knew costs."""
    departed, followed = [], {}
    with training("eager", stage, prefetch=0, keep="none") as plain, training(mode, stage, record_steps=1) as engine:
        for index, (count, backwards) in enumerate([*windows] * rounds):
            before, schedule = engine.stats.departures, engine.schedule
            assert window(engine, count, backwards) == window(plain, count, backwards), index
            if engine.stats.departures > before:
                departed.append(index)
            elif schedule is not None:
                assert engine.executed == schedule.instructions
                followed[schedule.fingerprint, schedule.shape] = schedule.facts.costs is not None
        return departed, len(followed), sum(followed.values())


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("windows", [COUNTS, WAYS, MIXED], ids=["counts", "ways", "mixed"])
def test_windows_that_alternate_stop_departing(pools: Pools, windows: Windows, stage: int, mode: str) -> None:
    for departed, _, known in pools(2).run(alternating, windows, 8, mode, stage):
        assert all(index < 2 * len(windows) for index in departed), departed
        assert known >= len(set(windows)), "each kind has been measured"


def at_random(seed: int, mode: str, stage: int) -> tuple[int, int]:
    """Departures, and windows: of any kind, some given up, with other settings now and then, and evaluation between."""
    rng = random.Random(seed)
    windows = 0
    with training("eager", stage, prefetch=0, keep="none") as plain, training(mode, stage, record_steps=1) as engine:
        for index in range(40):
            count, backwards, event = rng.randint(1, 3), rng.random() < 0.3, rng.random()
            if event < 0.1:
                engine.reschedule(prefetch=rng.choice([0, 1, 2, "auto"]), keep=rng.choice(["none", "all", "auto"]))
            elif event < 0.2:
                x, _ = rows(engine.rank, index)
                with torch.no_grad():
                    assert torch.equal(engine(x), plain(x)), index
            elif event < 0.3:
                for each in (engine, plain):
                    each.set_gradient_accumulation_boundary(False)
                    x, y = rows(each.rank, index)
                    each.backward(F.mse_loss(each(x), y))
                    each.zero_grad()
            windows += 1
            assert window(engine, count, backwards) == window(plain, count, backwards), index
        return engine.stats.departures, windows


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("stage", "mode"), [(1, "aot_eager"), (2, "eager"), (3, "aot_eager"), (3, "eager")])
def test_windows_of_any_kind_in_any_order_are_exact(pools: Pools, stage: int, mode: str, seed: int) -> None:
    for departures, windows in pools(2).run(at_random, seed, mode, stage):
        assert 0 < departures <= windows

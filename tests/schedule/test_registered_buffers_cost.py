"""Gathers by copy engine run beside reductions and cost less: in predictions, measured steps, and choices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.schedule.measured import as_predicted
from tests.schedule.test_overlap import COMPUTE, GATHER, SIZE, blocks_of, costs_of_blocks
from tests.support.schedules import stack
from zeroweave.schedule import Costs, Schedule, compile_schedule, costs_of, dependencies, simulate
from zeroweave.schedule.passes.memory_by_event import price

BLOCKS = 6
REDUCE = 0.9
"""Seconds of a reduction: with a gather it takes longer than a call."""


def priced(schedule: Schedule, reduce: float = REDUCE) -> Costs:
    costs = costs_of_blocks(schedule.record, BLOCKS)
    return replace(costs, reductions=dict.fromkeys(range(BLOCKS), reduce), update=dict.fromkeys(range(BLOCKS), 0.0))


def scheduled(registered: bool, **settings: object) -> Schedule:
    plain = blocks_of(BLOCKS)
    buffers = frozenset(range(BLOCKS)) if registered else frozenset()
    facts = replace(plain.facts, registered=buffers, copied=buffers, costs=priced(plain), **settings)  # type: ignore[arg-type]
    return compile_schedule(stack(BLOCKS, 1, calls=1), facts)


def test_they_do_not_wait_for_reductions() -> None:
    kernels, copies = (scheduled(registered, prefetch=1) for registered in (False, True))
    assert kernels.instructions == copies.instructions
    slow, fast = (simulate(schedule, priced(schedule)) for schedule in (kernels, copies))
    assert fast.seconds < slow.seconds
    assert fast.copied == pytest.approx(fast.busy("all_gather")) and slow.copied == 0.0
    assert price(fast) - fast.seconds < price(slow) - slow.seconds


def test_prefetch_comes_as_late_as_that_allows() -> None:
    kernels, copies = scheduled(False, memory=10 * SIZE), scheduled(True, memory=10 * SIZE)
    slow, fast = (simulate(schedule, priced(schedule)) for schedule in (kernels, copies))
    assert fast.peak <= slow.peak and fast.seconds <= slow.seconds
    assert sum(fast.waits.values()) <= GATHER + REDUCE + 2 * COMPUTE, "nearly all is hidden"


def test_a_measured_step_knows_how_long_they_took() -> None:
    schedule = scheduled(True, prefetch=1)
    step = as_predicted(schedule).step
    gathers = [each.seconds for each in step.operations if each.kind == "all_gather"]
    assert gathers == pytest.approx([GATHER] * len(gathers))
    assert not [each.after for each in step.operations if each.kind == "all_gather" and "reduce_scatter" in each.after]
    assert costs_of([step]).gathers == pytest.approx(dict.fromkeys(range(BLOCKS), GATHER))


def test_the_graph_has_a_lane_for_them() -> None:
    schedule = scheduled(True, prefetch=1)
    gathers = schedule.gathers
    lanes = [(start, stop) for start, stop, reason in dependencies(schedule).edges if reason == "lane"]
    assert lanes and all((start in gathers) == (stop in gathers) for start, stop in lanes)
    mixed = [
        (start, stop) for start, stop, reason in dependencies(scheduled(False, prefetch=1)).edges if reason == "lane"
    ]
    assert any((start in gathers) != (stop in gathers) for start, stop in mixed)

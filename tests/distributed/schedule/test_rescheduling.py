"""Changing the schedule while it trains: on request, by itself, and what must not change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.parity import digest
from tests.support.zoo import Block, Stack, rows
from zeroweave.errors import AgreementError, ConfigError, EngineError, ScheduleError
from zeroweave.schedule import Reshard, Schedule, Unshard, Wait


class Detour(Stack):
    """Goes through its blocks in another order when told to."""

    def __init__(self, depth: int) -> None:
        super().__init__(lambda index: Block(), depth)
        self.backwards = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = block(x)
        return self.leave(x)


@contextmanager
def training(depth: int = 4, lower: str | None = "aot_eager", stage: int = 3, **settings: Any) -> Iterator[Any]:
    torch.manual_seed(3)
    module = Detour(depth)
    compile_ = {"enabled": False} if lower is None else {"lower": lower}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    config = {"stage": stage, "deadline_seconds": 200.0, "compile": compile_ | settings}
    with zw.initialize(module, optimizer, config) as engine:
        yield engine


def step(engine: Any) -> str:
    """Trains a step; a hash of its gradients."""
    x, y = rows(engine.rank, engine.global_steps)
    engine.backward(F.mse_loss(engine(x), y))
    found = digest([engine.gradients()])
    engine.step()
    return found


def side_by_side(engine: Any, plain: Any, steps: int) -> None:
    for _ in range(steps):
        assert step(engine) == step(plain)


def compilations(engine: Any) -> tuple[Any, ...]:
    """What has been compiled so far, as the engine and Dynamo count it."""
    return engine.stats.graphs, engine.stats.templates, dict(counters["stats"]), dict(counters["frames"])


def reschedule_32_blocks() -> tuple[int, int]:
    """Departures, and gathers on demand, while the schedule changes four times."""
    with training(32, prefetch=0) as plain, training(32, prefetch=1) as engine:
        side_by_side(engine, plain, 2)
        before = compilations(engine)
        assert before[0] > 0 and before[2]
        seen = set()
        for changes in (
            {"prefetch": 2},
            {"keep": "all"},
            {"keep": ["blocks.3", "blocks.31"]},
            {"depth": 1},
        ):
            made = engine.reschedule(**changes)
            assert made is engine.schedule
            side_by_side(engine, plain, 1)
            assert engine.executed == made.instructions
            seen.add(made.fingerprint)
        assert len(seen) == 4
        assert compilations(engine) == before
        assert engine.stats.eager_regions == {}
        return engine.stats.departures, engine.stats.on_demand_unshards


@pytest.mark.matrix
def test_another_schedule_compiles_nothing(pools: Pools) -> None:
    assert pools(2).run(reschedule_32_blocks) == [(0, 0)] * 2


def automatic() -> list[tuple[int, bool]]:
    """(fingerprint, has costs) of what each step followed."""
    followed = []
    with training(prefetch=0) as plain, training(memory_budget=1 << 20, record_steps=2) as engine:
        for _ in range(7):
            schedule = engine.schedule
            followed.append(
                (0, False) if schedule is None else (schedule.fingerprint, schedule.facts.costs is not None)
            )
            side_by_side(engine, plain, 1)
        assert engine.stats.departures == 0
        assert engine.executed == engine.schedule.instructions
        gathers = [b for kind, b in engine.schedule.collectives() if kind == "all_gather"]
        assert len(gathers) == len(set(gathers)), "there is room to keep everything"
    return followed


@pytest.mark.matrix
def test_the_schedule_improves_by_itself_after_the_recorded_steps(pools: Pools) -> None:
    one, other = pools(2).run(automatic)
    assert one == other
    prints = [fingerprint for fingerprint, _ in one]
    # on demand, one that is not timed, two that are, and then the better one
    assert prints[0] == 0 and len(set(prints[1:4])) == 1 and len(set(prints[4:])) == 1 and prints[3] != prints[4]
    assert [measured for _, measured in one] == [False] * 4 + [True] * 3


def automatic_after_a_request() -> bool:
    """An engine that never measured is told to decide by itself."""
    with training(prefetch=0, keep="none") as engine:
        for _ in range(2):
            step(engine)
        engine.reschedule(prefetch="auto", keep="auto", memory_budget=1 << 20)
        for _ in range(6):
            step(engine)
        return engine.schedule.facts.costs is not None


@pytest.mark.matrix
def test_auto_on_request_measures_first(pools: Pools) -> None:
    assert pools(2).run(automatic_after_a_request) == [True, True]


def departing() -> tuple[int, int]:
    with training(prefetch=0) as plain, training(memory_budget=1 << 20, record_steps=1) as engine:
        side_by_side(engine, plain, 4)
        assert engine.schedule.facts.costs is not None
        engine.module.backwards = plain.module.backwards = True
        side_by_side(engine, plain, 1)
        # recorded anew: nothing that was measured of the other order decides about this one
        assert engine.schedule.facts.costs is None
        departures = engine.stats.departures
        side_by_side(engine, plain, 3)
        assert engine.schedule.facts.costs is not None
        return departures, engine.stats.departures


@pytest.mark.matrix
def test_a_step_that_departs_is_exact_and_recorded_and_measured_anew(pools: Pools) -> None:
    assert pools(2).run(departing) == [(1, 1)] * 2


def three_phases() -> int:
    with training(prefetch=0) as plain, training(prefetch=1, keep="none") as engine:
        side_by_side(engine, plain, 1)
        with pytest.raises(EngineError, match="no step was recorded"), engine.record() as empty:
            side_by_side(engine, plain, 0)
            empty.operations  # noqa: B018
        with engine.record() as r:
            side_by_side(engine, plain, 2)
        assert [(o.kind, o.bucket) for o in r.operations] == list(engine.schedule.collectives())
        assert all(o.issued <= o.started <= o.over and o.exposed >= 0 for o in r.operations)
        sizes = {bucket.id: bucket.nbytes for bucket in engine.buckets}
        assert all(o.nbytes == sizes[o.bucket] and o.name and o.after for o in r.operations)
        assert r.graph.schedule is engine.schedule
        before = engine.schedule
        plan = engine.compile_schedule(r.operations, prefetch_ahead=2)
        assert engine.schedule is before and plan.schedule.facts.prefetch == 2
        with plan.execute() as followed:
            assert engine.schedule is followed is plan.schedule
            side_by_side(engine, plain, 2)
            assert engine.executed == plan.schedule.instructions
        assert engine.schedule is before
        side_by_side(engine, plain, 1)
        assert engine.executed == before.instructions
        engine.use(plan)
        side_by_side(engine, plain, 1)
        assert engine.executed == plan.schedule.instructions
        auto = engine.compile_schedule(r.operations, prefetch_ahead="auto", keep="auto", memory_budget=1 << 20)
        engine.use(auto)
        side_by_side(engine, plain, 1)
        engine.reschedule(memory_budget=0)  # by the costs that came with the plan
        assert engine.schedule.facts.costs is not None
        assert engine.schedule.fingerprint != auto.schedule.fingerprint
        side_by_side(engine, plain, 1)
        return engine.stats.departures


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2])
def test_the_three_phases(pools: Pools, world: int) -> None:
    assert pools(world).run(three_phases) == [0] * world


def profiled() -> int:
    """Steps without communication, more and other ones on one rank, in between and while steps are timed."""
    with training(prefetch=0) as plain, training(memory_budget=1 << 20, record_steps=1) as engine:
        side_by_side(engine, plain, 2)
        before = engine.schedule
        with engine.profiling():
            engine.module.backwards = engine.rank == 0
            for _ in range(1 + engine.rank):
                x, y = rows(0, 0)
                engine.backward(F.mse_loss(engine(x), y))
                engine.step()
            engine.module.backwards = False
        assert engine.schedule is before
        side_by_side(engine, plain, 1)  # the one that is timed
        assert engine.schedule.facts.costs is not None
        side_by_side(engine, plain, 1)
        return engine.global_steps


@pytest.mark.matrix
def test_profiling_decides_nothing(pools: Pools) -> None:
    assert pools(2).run(profiled) == [4, 4]


def late_drops(schedule: Schedule) -> Schedule:
    """Never drops anything before the updates."""
    drops = [i for i in schedule.instructions if isinstance(i, Reshard)]
    rest = [i for i in schedule.instructions if not isinstance(i, Reshard)]
    return replace(schedule, instructions=(*rest, *drops))


def no_waits(schedule: Schedule) -> Schedule:
    return replace(schedule, instructions=tuple(i for i in schedule.instructions if not isinstance(i, Wait)))


def fails(schedule: Schedule) -> Schedule:
    raise TypeError("mine")


def own_passes() -> None:
    with training(prefetch=0) as plain, training(passes=[f"{__name__}:late_drops"], prefetch=0) as engine:
        side_by_side(engine, plain, 2)
        instructions = engine.executed
        assert all(isinstance(i, Reshard) for i in instructions[-instructions.index(instructions[0]) - 2 :])
        gathers = sum(isinstance(i, Unshard) for i in instructions)
        assert sum(isinstance(i, Reshard) for i in instructions[-gathers:]) == gathers
        side_by_side(engine, plain, 1)
    with training(prefetch=1) as engine:
        with pytest.raises(
            EngineError, match="there is no pass 'nothing'; the passes are insert, offload, keep, prefetch"
        ):
            engine.register_pass(late_drops, after="nothing")
        step(engine)
        engine.register_pass(late_drops, after="prefetch")
        step(engine)
        assert not isinstance(engine.executed[-1], Reshard)  # not before the next schedule is made
        engine.reschedule()
        step(engine)
        assert isinstance(engine.executed[-1], Reshard)
        engine.register_pass(no_waits)
        with pytest.raises(ScheduleError, match=r"pass 'no_waits': instruction \d+, Run enter"):
            engine.reschedule(prefetch=0)
        step(engine)  # nothing has changed
        assert isinstance(engine.executed[-1], Reshard)
        engine.reschedule(prefetch=0)  # it was taken back
        step(engine)
        engine.register_pass(no_waits)
        with pytest.raises(EngineError, match="no registered pass of your own; these are: late_drops, no_waits"):
            engine.unregister_pass(step)
        engine.unregister_pass(no_waits)
        engine.unregister_pass(late_drops)
        engine.reschedule(prefetch=1)
        step(engine)
        assert not isinstance(engine.executed[-1], Reshard)
        engine.register_pass(fails)
        with pytest.raises(EngineError, match="TypeError: mine"):
            engine.reschedule(prefetch=0)
        engine.reschedule(prefetch=0)
        step(engine)


@pytest.mark.matrix
def test_passes_of_ones_own(pools: Pools) -> None:
    pools(2).run(own_passes)


def refused() -> None:
    for passes, message in (
        (["nowhere"], "must be functions as 'module:function', not 'nowhere'"),
        (["no.such.module:f"], "'no.such.module:f' cannot be imported: No module named 'no'"),
        ([f"{__name__}:missing"], "cannot be imported: .*has no attribute 'missing'"),
        ([":f"], "':f' cannot be imported"),
        ([f"{__name__}:__name__"], "must be functions as 'module:function', not"),
    ):
        with pytest.raises(ConfigError, match=message), training(passes=passes):
            pass
    with pytest.raises(ConfigError, match=r"compile\.keep names buckets that do not exist: \['blocks.9'\]; there are"):
        with training(keep=["blocks.9"]):
            pass
    module = Detour(1)
    for compile_ in ({"keep": ["blocks.9"]}, {"passes": [f"{__name__}:missing"]}):
        with pytest.raises(zw.ZeroweaveError):
            zw.initialize(module, None, {"compile": compile_})
    module(rows(0, 0)[0])  # still the user's own
    with training(prefetch=1) as engine:
        assert engine.schedule is None and engine.executed == ()
        step(engine)
        for changes, message in (
            ({"prefetch": -1}, "prefetch must be 'auto' or greater than or equal to 0, not -1"),
            ({"prefetch": 1.5}, "prefetch must be"),
            ({"prefetch": "far"}, "prefetch must be"),
            ({"depth": 0}, "depth must be greater than or equal to 1, not 0"),
            ({"memory_budget": "all"}, "memory_budget must be"),
            ({"keep": "some"}, "keep must be 'auto', 'none' or 'all' or a valid tuple, not 'some'"),
            ({"keep": ["blocks.0", "nothing"]}, r"keep names buckets that do not exist: \['nothing'\]"),
        ):
            with pytest.raises(EngineError, match=message):
                engine.reschedule(**changes)
        step(engine)
        x, y = rows(engine.rank, 0)
        loss = F.mse_loss(engine(x), y)
        with pytest.raises(EngineError, match="between two optimizer steps only"):
            engine.reschedule(prefetch=2)
        engine.backward(loss)
        with pytest.raises(EngineError, match="between two optimizer steps only"):
            engine.reschedule(prefetch=2)
        engine.step()
        assert engine.stats.departures == 0


@pytest.mark.matrix
def test_what_is_refused(pools: Pools) -> None:
    pools(2).run(refused)


def before_the_first_step() -> bool:
    with training(prefetch=0) as plain, training(prefetch=1) as engine:
        assert engine.reschedule(prefetch=2, keep="all") is None
        side_by_side(engine, plain, 2)
        gathers = [b for kind, b in engine.schedule.collectives() if kind == "all_gather"]
        return engine.schedule.facts.prefetch == 2 and len(gathers) == len(set(gathers))


@pytest.mark.matrix
def test_settings_changed_before_the_first_step_hold_for_it(pools: Pools) -> None:
    assert pools(2).run(before_the_first_step) == [True, True]


def other_settings() -> None:
    with training(prefetch=1) as engine:
        step(engine)
        with pytest.raises(
            AgreementError, match=r"the ranks made different schedules: at .*, rank 0 has .* and rank 1 has"
        ):
            engine.reschedule(prefetch=2 * engine.rank)
        engine.zero_grad()
        step(engine)


def test_other_settings_on_one_rank(pools: Pools) -> None:
    pools(2).run(other_settings)

"""The cost model on cases computed by hand: lines through measured times, simulated steps, measured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.schedule.measured import as_predicted
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    BucketFacts,
    Call,
    Costs,
    End,
    Entered,
    Facts,
    Instruction,
    Left,
    Line,
    Micro,
    Moment,
    Ready,
    Reduce,
    Reshard,
    Run,
    Schedule,
    Settle,
    Step,
    Unshard,
    Update,
    Wait,
    costs_of,
    dependencies,
    simulate,
    verify,
)

F, G = Call("f", "forward"), Call("g", "forward")
RECORD = (Entered(F, (0,)), Left(F), Entered(G, (1,)), Left(G), Ready(0), Ready(1), Micro())
FACTS = Facts(
    (BucketFacts(0, "a", 10, True), BucketFacts(1, "b", 20, True)),
    kept_by_stage=frozenset(),
    depth=2,
    prefetch=0,
    update_by_bucket=True,
)
TAIL = (Reduce(0), Reduce(1), Settle(0), Update(0), Settle(1), Update(1))
LATE = (Unshard(0), Wait(0), Run(F, (0,)), Reshard(0), Unshard(1), Wait(1), Run(G, (1,)), Reshard(1), *TAIL)
EARLY = (Unshard(0), Unshard(1), Wait(0), Run(F, (0,)), Reshard(0), Wait(1), Run(G, (1,)), Reshard(1), *TAIL)
COSTS = Costs(
    compute=(2.0, 3.0, 0.5, 0.0),
    update={0: 0.25, 1: 0.5},
    gathers={0: 1.0, 1: 4.0},
    reductions={0: 2.0, 1: 1.0},
    gather=Line(0.5, 0.25),
    reduce=Line(),
    activations=(1, 2, 3, 4),
)


def of(instructions: tuple[Instruction, ...]) -> Schedule:
    schedule = Schedule(instructions, RECORD, FACTS)
    verify(schedule)
    return schedule


def test_a_line_through_points_on_it() -> None:
    line = Line.fit([(0, 1.0), (10, 6.0), (20, 11.0)])
    assert line == Line(1.0, 0.5)
    assert line(100) == 51.0


def test_the_line_of_least_squares() -> None:
    assert Line.fit([(0, 0.0), (0, 2.0), (4, 4.0), (4, 6.0)]) == Line(1.0, 1.0)


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([], Line(0.0, 0.0)),
        ([(8, 2.0)], Line(0.0, 0.25)),  # one size tells nothing of the start-up
        ([(8, 1.0), (8, 3.0)], Line(0.0, 0.25)),
        ([(0, 3.0)], Line(3.0, 0.0)),
        ([(2, 5.0), (4, 3.0)], Line(4.0, 0.0)),  # falling: noise, so the size does not count
        ([(1, 0.0), (2, 3.0)], Line(0.0, 1.2)),  # cuts below zero: through the origin
    ],
)
def test_lines_have_no_negative_term(points: list[tuple[int, float]], line: Line) -> None:
    assert Line.fit(points) == line


def test_a_collective_of_unknown_time_lies_on_the_line() -> None:
    assert COSTS.seconds("all_gather", 1, 20) == 4.0
    assert COSTS.seconds("all_gather", 7, 20) == 0.5 + 0.25 * 20
    assert COSTS.seconds("reduce_scatter", 0, 10) == 2.0


def test_a_step_whose_gathers_are_late() -> None:
    """Gather 0: 0–1, run 1–3, gather 1: 3–7, run 7–10, reductions 10–12 and 12–13, compute to 10.5, updates."""
    prediction = simulate(of(LATE), COSTS)
    assert prediction.waits == {1: 1.0, 5: 4.0, 10: 1.5, 12: 0.75}
    assert prediction.seconds == 13.5
    assert sum(prediction.waits.values()) == 7.25
    gathers = [(s.start, s.stop) for s in prediction.spans if s.lane == "all_gather"]
    reductions = [(s.start, s.stop) for s in prediction.spans if s.lane == "reduce_scatter"]
    assert gathers == [(0.0, 1.0), (3.0, 7.0)] and reductions == [(10.0, 12.0), (12.0, 13.0)]
    assert prediction.busy("all_gather") == 5.0
    assert prediction.busy("compute") == 5.5 + 0.75
    assert prediction.memory == (10, 10, 11, 1, 21, 21, 22, 2, 13, 34, 24, 24, 4, 4)
    assert prediction.peak == 34


def test_a_step_whose_gathers_are_early() -> None:
    """The second gather runs 1–5 beside the first call 1–3: two seconds of it are hidden."""
    prediction = simulate(of(EARLY), COSTS)
    assert prediction.waits == {2: 1.0, 5: 2.0, 10: 1.5, 12: 0.75}
    assert prediction.seconds == 11.5
    assert prediction.memory[:8] == (10, 30, 30, 31, 21, 21, 22, 2)


def test_what_reductions_hold_beside_their_flats_goes_with_their_settling() -> None:
    """Gradients that were copied into the flat are there from the reduction to its settling, wherever that is."""
    costs = replace(COSTS, held=(0, 0, 7, 2))
    assert simulate(of(LATE), costs).memory[8:] == (20, 43, 26, 26, 4, 4)
    instructions = (*LATE[:9], Settle(0), Reduce(1), Settle(1), Update(0), Update(1))
    early = of(instructions)
    assert simulate(early, COSTS).memory[8:] == (13, 3, 24, 4, 4, 4)
    assert simulate(early, costs).memory[8:] == (20, 3, 26, 4, 4, 4)


def test_costs_of_another_record_are_refused() -> None:
    short = Costs((1.0,), {}, {}, {}, Line(), Line(), (0,))
    with pytest.raises(ScheduleError, match="1 events, the schedule has 4"):
        simulate(of(LATE), short)
    with pytest.raises(ScheduleError, match="the schedule has 4"):
        simulate(of(LATE), replace(COSTS, held=(1,)))
    with pytest.raises(ScheduleError, match="different records"):
        Costs.merge([COSTS, short])


def test_all_ranks_decide_by_the_worst_of_each() -> None:
    other = Costs(
        compute=(1.0, 4.0, 0.0, 1.0),
        update={0: 1.0},
        gathers={1: 5.0, 2: 1.0},
        reductions={0: 1.0},
        gather=Line(0.25, 0.5),
        reduce=Line(1.0, 0.0),
        activations=(4, 3, 2, 1),
        resident=3,
        filled=4,
    )
    assert (
        Costs.merge([COSTS, other])
        == Costs.merge([other, COSTS])
        == Costs(
            compute=(2.0, 4.0, 0.5, 1.0),
            update={0: 1.0, 1: 0.5},
            gathers={0: 1.0, 1: 5.0, 2: 1.0},
            reductions={0: 2.0, 1: 1.0},
            gather=Line(0.5, 0.5),
            reduce=Line(1.0, 0.0),
            activations=(4, 3, 3, 4),
            resident=3,
            filled=4,
        )
    )
    assert Costs.merge([COSTS]) == COSTS
    assert Costs.merge([replace(COSTS, held=(0, 0, 7, 2)), replace(other, held=(0, 0, 1, 3))]).held == (0, 0, 7, 3)


def measured(schedule: Schedule) -> Step:
    return as_predicted(replace(schedule, facts=replace(FACTS, costs=COSTS))).step


@pytest.mark.parametrize("instructions", [LATE, EARLY])
def test_the_memory_of_a_measured_step_is_told_apart(instructions: tuple[Instruction, ...]) -> None:
    costs = replace(COSTS, held=(0, 0, 7, -2))  # the second had no flat of its own, or a smaller one
    schedule = of(instructions)
    allocated = [100 + nbytes for nbytes in simulate(schedule, costs).memory]
    moments = [
        Moment(i, 0.0, 0.0, after, before=before if isinstance(i, Settle) else 0)
        for i, before, after in zip(instructions, [100, *allocated], allocated, strict=False)
    ]
    found = costs_of([Step.of(schedule, moments, [])])
    assert (found.held, found.activations) == (costs.held, costs.activations)
    uncounted = costs_of([Step.of(schedule, [Moment(i, 0.0, 0.0) for i in instructions], [])])
    assert (uncounted.held, uncounted.activations) == ((0,) * 4, (0,) * 4)


@pytest.mark.parametrize("instructions", [LATE, EARLY])
def test_the_costs_of_a_measured_step_are_those_it_was_made_of(instructions: tuple[Instruction, ...]) -> None:
    step = measured(of(instructions))
    found = costs_of([step])
    assert found.compute == COSTS.compute
    assert (found.update, found.gathers, found.reductions) == (COSTS.update, COSTS.gathers, COSTS.reductions)
    assert found.gather == Line.fit([(10, 1.0), (20, 4.0)])
    assert step.seconds == simulate(of(instructions), COSTS).seconds
    assert step.waits == simulate(of(instructions), COSTS).waits


def test_operations_say_what_they_waited_for() -> None:
    first, second, third, fourth = measured(of(LATE)).operations
    assert (first.kind, first.name, first.nbytes, first.index) == ("all_gather", "a", 10, 0)
    assert first.after == "the start of the step"
    assert (second.started, second.over, second.seconds, second.exposed) == (3.0, 7.0, 4.0, 4.0)
    assert second.after == "Run f forward [a]"
    assert (third.kind, third.after, third.exposed) == ("reduce_scatter", "Run g forward [b]", 1.5)
    assert fourth.after == "the reduce_scatter of a, which ran before it"


def test_a_step_that_did_other_things_is_refused() -> None:
    moments = [Moment(i, 0.0, 0.0) for i in EARLY]
    with pytest.raises(ScheduleError, match="did not follow"):
        Step.of(of(LATE), moments, [])
    with pytest.raises(ScheduleError, match="no step"):
        costs_of([])


def test_the_dependencies_of_a_step() -> None:
    graph = dependencies(of(LATE))
    assert all(start < stop for start, stop, _ in graph.edges)
    assert graph.before == {
        1: ((0, "values"),),
        2: ((1, "values"),),
        3: ((2, "storage"),),
        4: ((0, "lane"),),
        5: ((4, "values"),),
        6: ((2, "compute"), (5, "values")),
        7: ((6, "storage"),),
        8: ((6, "compute"), (4, "lane")),
        9: ((8, "compute"), (8, "lane")),
        10: ((8, "gradient"),),
        11: ((10, "gradient"), (9, "compute")),
        12: ((9, "gradient"),),
        13: ((12, "gradient"), (9, "compute")),
    }


def test_a_gather_needs_the_storage_that_its_bucket_gave_back() -> None:
    again = (Unshard(0), Wait(0), Run(F, (0,)), Reshard(0), Unshard(0), Wait(0), Run(F, (0,)), Reshard(0))
    graph = dependencies(Schedule(again, (), FACTS))
    assert graph.before[4] == ((3, "storage"), (0, "lane"))


def test_a_call_reads_until_its_end() -> None:
    nested = (Unshard(0), Wait(0), Run(F, (0,)), Run(G, ()), End(F), Reshard(0))
    assert dependencies(Schedule(nested, (), FACTS)).before[5] == ((4, "storage"),)


def test_the_critical_path() -> None:
    """Both gathers 0–5, the second call 5–8, the reductions 8–11, the last update 11–11.5."""
    for instructions in (LATE, EARLY):
        seconds, path = dependencies(of(instructions)).critical_path(COSTS)
        assert seconds == 11.5
        assert [instructions[index] for index in path] == [
            *(Unshard(0), Unshard(1), Wait(1), Run(G, (1,))),
            *(Reduce(0), Reduce(1), Settle(1), Update(1)),
        ]
    assert simulate(of(EARLY), COSTS).seconds == 11.5  # so nothing is left to improve
    assert dependencies(Schedule((), (), FACTS)).critical_path(COSTS) == (0.0, ())


def test_the_critical_path_of_a_step_that_computes_for_long() -> None:
    costs = replace(COSTS, compute=(2.0, 3.0, 8.0, 0.5))
    seconds, path = dependencies(of(EARLY)).critical_path(costs)
    assert seconds == 5.0 + 3.0 + 8.0 + 1.0 + 0.5  # the reduction of b begins when that computation is over
    assert [EARLY[index] for index in path][-3:] == [Reduce(1), Settle(1), Update(1)]

"""Moves of activations: the pass before and after, the verifier, the simulator, on a few lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.schedule.measured import as_predicted
from tests.support.schedules import stack, stack_facts, stack_with_needs
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    Call,
    Costs,
    Entered,
    Event,
    Instruction,
    Left,
    Line,
    Micro,
    Needed,
    Offload,
    Ready,
    Release,
    Reload,
    Run,
    Schedule,
    Step,
    Wait,
    build,
    compile_schedule,
    costs_of,
    simulate,
    verify,
)
from zeroweave.schedule.moves import moves_of
from zeroweave.schedule.passes import offload


def forward(block: int) -> Call:
    return Call(f"layers.{block}.0", "forward")


def backward(block: int) -> Call:
    return Call(f"layers.{block}.0", "backward")


def of(record: tuple[Event, ...], blocks: int = 1, wanted: bool = True) -> Schedule:
    """The plain schedule, whose blocks stay gathered: calls and little else."""
    facts = replace(stack_facts(blocks, 0), kept_by_stage=frozenset(range(blocks)), offload=wanted)
    return build(record, facts)


def calls(schedule: Schedule) -> list[Instruction]:
    """Calls and moves, in order."""
    return [i for i in schedule.instructions if isinstance(i, Run | Offload | Release | Reload)]


def around(*blocks: int) -> tuple[Event, ...]:
    """Forward calls of block 0 under several names, and their needs and backwards in reverse, in one window."""
    record: list[Event] = []
    for block in blocks:
        record += [Entered(forward(block), (0,)), Left(forward(block))]
    for place, block in reversed(list(enumerate(blocks))):
        record += [Needed(forward(block), blocks[:place].count(block), 8)]
        record += [Entered(backward(block), (0,)), Left(backward(block))]
    return (*record, Ready(0), Micro())


def run(call: Call) -> Run:
    return Run(call, (0,))


def test_all_calls_move_but_the_last_two() -> None:
    after = offload(of(around(0, 1, 2)))
    assert calls(after) == [
        *(run(forward(0)), Offload(forward(0)), run(forward(1)), Release(forward(0)), run(forward(2))),
        *(run(backward(2)), Reload(forward(0)), run(backward(1)), run(backward(0))),
    ]
    verify(after)


def test_eager_calls_ask_inside_and_get_it_a_call_ahead() -> None:
    """A need right behind its backward's beginning moves what one right before it does."""
    asked_before, asked_inside = around(0, 1, 2), list(around(0, 1, 2))
    for index, event in enumerate(asked_inside[:-1]):
        if isinstance(event, Needed):
            asked_inside[index : index + 2] = [asked_inside[index + 1], event]
    after = offload(of(tuple(asked_inside)))
    assert calls(after) == calls(offload(of(asked_before)))
    verify(after)


def test_the_next_copy_begins_when_the_memory_of_the_last_is_back() -> None:
    after = calls(offload(of(around(0, 1, 2, 3, 4))))
    assert after[3:7] == [Release(forward(0)), Offload(forward(1)), run(forward(2)), Release(forward(1))]
    moved = [i.call.name for i in after if isinstance(i, Reload)]
    assert moved == [f"layers.{block}.0" for block in (2, 1, 0)]


def test_equal_calls_are_told_apart_by_their_numbers() -> None:
    schedule = offload(of(around(7, 7, 7, 7)))
    assert [i.number for i in schedule.instructions if isinstance(i, Offload)] == [0, 1]
    assert [i.number for i in schedule.instructions if isinstance(i, Reload)] == [1, 0]
    text = schedule.text()
    assert "Offload layers.7.0 · " in text and "Reload layers.7.0 #1 · " in text
    assert any("Release" in line for line in schedule.of("layers.7"))


def test_moves_stand_in_front_of_what_prepares_a_call() -> None:
    record = stack_with_needs(4, 1)
    after = offload(build(record, replace(stack_facts(4, 0), offload=True)))
    at = after.instructions.index(Release(forward(0)))
    assert after.instructions[at + 1] == Offload(forward(1))
    assert after.instructions[at + 2 : at + 4] == (Wait(2), Run(forward(2), (2,)))


def test_what_eager_code_asks_for_in_the_middle_comes_back_one_call_ahead_as_well() -> None:
    """A backward of eager code begins, asks for what its forward saved, and hands its gradients over."""
    record: list[Event] = []
    for block in range(4):
        record += [Entered(forward(block), (block,)), Left(forward(block))]
    for block in reversed(range(4)):
        record += [
            Entered(backward(block), (block,)),
            Needed(forward(block), 0, 8),
            Ready(block),
            Left(backward(block)),
        ]
    after = offload(of((*record, Micro()), blocks=4))
    verify(after)
    runs = [Run(backward(block), (block,)) for block in reversed(range(4))]
    found = [i for i in after.instructions if i in runs or isinstance(i, Reload)]
    assert found == [runs[0], Reload(forward(1)), runs[1], Reload(forward(0)), *runs[2:]]


def test_a_call_with_calls_inside_leaves_when_it_is_over() -> None:
    """A parent's activations are those that were saved behind its last child."""
    inner, outer = forward(1), forward(0)
    record: tuple[Event, ...] = (
        *(Entered(outer, (0,)), Entered(inner, (0,)), Left(inner), Left(outer)),
        *(Entered(forward(2), (0,)), Left(forward(2)), Entered(forward(3), (0,)), Left(forward(3))),
        *(Entered(backward(3), (0,)), Left(backward(3)), Entered(backward(2), (0,)), Left(backward(2))),
        *(Needed(outer, 0, 8), Needed(inner, 0, 8), Entered(backward(0), (0,)), Left(backward(0)), Ready(0), Micro()),
    )
    after = offload(of(record))
    verify(after)
    moves = [i for i in after.instructions if isinstance(i, Offload | Release | Reload)]
    assert moves[:2] == [Offload(outer), Offload(inner)]
    assert after.instructions.index(Offload(inner)) < after.instructions.index(Run(forward(2), (0,)))


@pytest.mark.parametrize(
    "schedule",
    [
        of(around(0, 1, 2, 3), wanted=False),
        of(around(0, 1)),
        of(stack(4, 1, 1), blocks=4),
    ],
    ids=["not asked for", "the last two", "nothing is saved"],
)
def test_it_changes_nothing_elsewhere(schedule: Schedule) -> None:
    assert offload(schedule) is schedule


def test_it_does_nothing_twice() -> None:
    once = offload(of(around(0, 1, 2, 3)))
    assert offload(once) is once


def test_only_the_setting_is_part_of_the_fingerprint() -> None:
    """Ranks whose batches differ move different activations."""
    wanted, not_wanted = (replace(stack_facts(4, 1), offload=each) for each in (True, False))
    with_needs, without = stack_with_needs(4, 1), stack(4, 1, 1)
    mine, theirs = compile_schedule(with_needs, wanted), compile_schedule(without, wanted)
    assert mine.instructions != theirs.instructions
    assert (mine.fingerprint, mine.shape) == (theirs.fingerprint, theirs.shape)
    assert mine.fingerprint != compile_schedule(without, not_wanted).fingerprint


# ---------------------------------------------------------------------- the verifier
def edited(*names: str) -> tuple[Schedule, list[Instruction]]:
    schedule = offload(of(around(0, 1, 2, 3)))
    return schedule, list(schedule.instructions)


def refuse(schedule: Schedule, instructions: list[Instruction], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        verify(replace(schedule, instructions=tuple(instructions)))


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        (Offload(forward(0)), r"Release layers.0.0: nothing was copied that could be released"),
        (Release(forward(0)), r"Reload layers.0.0: nothing was released that could come back"),
        (Reload(forward(0)), r"Run layers.1.0 backward .*: what layers.0.0 has saved is needed behind this, and not"),
    ],
)
def test_a_move_that_is_missing(gone: Instruction, reason: str) -> None:
    schedule, instructions = edited()
    instructions.remove(gone)
    refuse(schedule, instructions, reason)


def test_a_reload_in_front_of_the_need_is_too_late() -> None:
    schedule, instructions = edited()
    instructions.remove(Reload(forward(0)))
    instructions.insert(instructions.index(run(backward(1))) + 1, Reload(forward(0)))
    refuse(schedule, instructions, "needed behind this")


@pytest.mark.parametrize("what", [Offload(forward(0)), Release(forward(0)), Reload(forward(0))])
def test_a_move_made_twice(what: Instruction) -> None:
    schedule, instructions = edited()
    instructions.insert(instructions.index(what) + 1, what)
    refuse(schedule, instructions, "twice|nothing was")


def test_what_was_brought_back_does_not_leave_again() -> None:
    schedule, instructions = edited()
    instructions.insert(instructions.index(Reload(forward(0))) + 1, Offload(forward(0)))
    refuse(schedule, instructions, "moved out twice")


def test_a_move_of_a_call_that_is_not_over_or_not_needed() -> None:
    schedule, instructions = edited()
    instructions.insert(0, Offload(forward(1)))
    refuse(schedule, instructions, "instruction 0, .*: the call is not over")
    schedule, instructions = edited()
    instructions.insert(instructions.index(run(forward(1))), Offload(forward(0), number=1))
    refuse(schedule, instructions, "the call is not over")
    record = tuple(event for event in around(0, 1, 2, 3) if event != Needed(forward(0), 0, 8))
    refuse(replace(schedule, record=record), list(schedule.instructions), "no backward needs")


def test_a_move_behind_its_need_or_never_back() -> None:
    schedule, instructions = edited()
    last = instructions.index(run(backward(0)))
    moves = (Offload(forward(3)), Release(forward(3)))
    refuse(schedule, [*instructions[:last], *moves, *instructions[last:]], "a backward has needed it before")
    record = (*around(0, 1, 2, 3)[:-2], Needed(forward(0), 0, 8), Ready(0), Micro())
    record = tuple(event for index, event in enumerate(record) if index == len(record) - 3 or event != record[-3])
    late = replace(schedule, record=record)
    verify(late)
    instructions.remove(Reload(forward(0)))
    at = instructions.index(run(backward(0)))
    refuse(late, instructions, "what layers.0.0 has saved is needed behind this")
    verify(replace(late, instructions=(*instructions[:at], Reload(forward(0)), *instructions[at:])))


def test_a_move_that_nobody_asked_for() -> None:
    schedule = offload(of(around(0, 1, 2, 3)))
    unwanted = replace(schedule, facts=replace(schedule.facts, offload=False))
    refuse(unwanted, list(unwanted.instructions), "nothing asks for activations to be moved")


# ---------------------------------------------------------------------- the simulator
def costs(copy: Line, activations: tuple[int, ...], seconds: float = 1.0) -> Costs:
    """Of `around` four blocks, where nothing else is said."""
    moves = moves_of(around(*range(len(activations) // 2)))
    return Costs((seconds,) * 9, {}, {}, {}, Line(), Line(), activations, copy=copy, moves=moves)


KEPT = (8, 16, 24, 32, 32, 24, 16, 8, 0)
"""What four blocks have saved, of 8 bytes each, at each of their calls and at the reduction."""


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_what_is_away_is_no_device_memory(seconds: float) -> None:
    """A copy that takes no longer than the call beside it exposes nothing."""
    plain, schedule = of(around(0, 1, 2, 3)), offload(of(around(0, 1, 2, 3)))
    spent = costs(Line(0.0, seconds / 8), KEPT)
    before, after = simulate(plain, spent), simulate(schedule, spent)
    last = schedule.instructions.index(run(forward(3)))
    assert before.peak == 1 + 32 and after.memory[last] == 1 + 16  # beside the flat
    assert after.peak == 1 + 24  # one comes back while the last backward runs
    assert after.seconds == before.seconds and not after.waits
    assert {span.lane for span in after.spans} == {"compute", "copy", "all_gather", "reduce_scatter"}


def test_a_slow_copy_is_waited_for_in_the_release_and_at_the_need() -> None:
    schedule = offload(of(around(0, 1, 2)))
    prediction = simulate(schedule, replace(costs(Line(3.0), (8, 16, 24, 24, 16, 8, 0)), compute=(1.0,) * 7))
    waits = {schedule.describe(schedule.instructions[i]): s for i, s in prediction.waits.items()}
    assert waits == {"Release layers.0.0": 2.0, "Run layers.0.0 backward [layers.0]": 2.0}


def measured(schedule: Schedule, wanted: Costs) -> Step:
    return as_predicted(replace(schedule, facts=replace(schedule.facts, costs=wanted)), before=1000).step


def test_costs_that_were_measured_while_activations_moved() -> None:
    """What a schedule has moved is counted back in, so that its costs hold for other schedules of the record."""
    schedule, wanted = offload(of(around(0, 1, 2, 3))), costs(Line(0.0, 0.125), KEPT)
    found = costs_of([measured(schedule, wanted)])
    assert found.copy(8) == pytest.approx(1.0) and found.activations == KEPT
    assert found.compute == pytest.approx(wanted.compute)
    assert Costs.merge([found, replace(found, copy=Line(2.0))]).copy(0) == 2.0


def test_ranks_whose_batches_differ_decide_alike_by_costs_that_were_agreed_on() -> None:
    """They ask for other bytes, at other moments, or for nothing of a call; each has its own record all the same."""
    facts = replace(stack_facts(1, 0), kept_by_stage=frozenset({0}), offload=True)
    some, many = around(0, 1, 2, 3), list(around(0, 1, 2, 3))
    less = tuple(event for event in some if event != Needed(forward(1), 0, 8))
    first = many.index(Needed(forward(0), 0, 8))
    many[first - 2 : first + 1] = [many[first], *many[first - 2 : first]]  # a call earlier
    more = tuple(replace(event, nbytes=24) if isinstance(event, Needed) else event for event in many)
    plain = [build(record, facts) for record in (less, more)]
    assert offload(plain[0]).instructions != offload(plain[1]).instructions
    agreed = Costs.merge([replace(costs(Line(0.0, 0.125), KEPT), moves=moves_of(each.record)) for each in plain])
    found = [compile_schedule(each.record, replace(facts, costs=agreed)) for each in plain]
    assert found[0].instructions == found[1].instructions
    assert simulate(found[0], agreed) == simulate(found[1], agreed)
    assert {i.call for i in found[0].instructions if isinstance(i, Offload)} == {forward(0), forward(1)}
    untils = [{move.key: move.until for move in moves} for moves in (agreed.moves, moves_of(more), moves_of(less))]
    assert untils[0][forward(0), 0] == untils[1][forward(0), 0] < untils[2][forward(0), 0]


def test_a_rank_that_moves_less_has_what_it_keeps_in_the_merged_costs() -> None:
    """By merged costs no rank takes more than is predicted, whatever has been moved."""
    record = around(0, 1, 2, 3)
    larger = tuple(replace(event, nbytes=24) if isinstance(event, Needed) else event for event in record)
    keeps, moves = costs(Line(), tuple(4 * each for each in KEPT)), costs(Line(), tuple(3 * each for each in KEPT))
    ranks = [replace(keeps, filled=1), replace(moves, filled=1, moves=moves_of(larger))]
    merged = Costs.merge(ranks)
    for schedule in (offload(of(record)), of(record)):
        memory = [simulate(schedule, each).memory for each in (merged, *ranks)]
        assert all(most >= max(rest) for most, *rest in zip(*memory, strict=True))


def test_a_release_that_waits_is_no_computation() -> None:
    schedule = offload(of(around(0, 1, 2)))
    step = measured(schedule, replace(costs(Line(3.0), (8, 16, 24, 24, 16, 8, 0)), compute=(1.0,) * 7))
    assert step.waits[schedule.instructions.index(Release(forward(0)))] == 2.0
    assert costs_of([step]).compute[1] == 1.0

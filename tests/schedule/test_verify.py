"""One illegal schedule for every rule of the verifier, each a few lines away from a legal one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    PASSES,
    BucketFacts,
    Call,
    End,
    Entered,
    Event,
    Facts,
    Free,
    Instruction,
    Left,
    Ready,
    Reduce,
    Reshard,
    Run,
    Schedule,
    Settle,
    Stage,
    Unshard,
    Update,
    Wait,
    compile_schedule,
    verify,
)

F, G, H = Call("f", "forward"), Call("g", "forward"), Call("h", "backward")
A, B = 0, 1  # both trainable
FROZEN = 2


def schedule(
    *instructions: Instruction,
    record: Iterable[Event] | None = None,
    keep: Iterable[int] = (),
    buckets: Iterable[int] = (A,),
    depth: int = 1,
    free: bool = True,
    stage: bool = False,
) -> Schedule:
    facts = tuple(BucketFacts(b, "abz"[b], 1, b != FROZEN) for b in buckets)
    if record is None:
        record = recorded(instructions)
    return Schedule(instructions, tuple(record), Facts(facts, frozenset(keep), depth, 1, False, free, stage=stage))


def recorded(instructions: Iterable[Instruction]) -> list[Event]:
    """A record that these instructions follow, so that nothing but the rule under test is broken."""
    instructions = tuple(instructions)
    with_end = {i.call for i in instructions if isinstance(i, End)}
    events: list[Event] = []
    for instruction in instructions:
        match instruction:
            case Run(call, uses):
                events.append(Entered(call, uses))
                if call not in with_end:
                    events.append(Left(call))
            case End(call):
                events.append(Left(call))
            case Reduce(bucket):
                events.append(Ready(bucket))
    return events


def use(bucket: int, call: Call = F) -> tuple[Instruction, ...]:
    return (Unshard(bucket), Wait(bucket), Run(call, (bucket,)), Reshard(bucket))


def gradient(bucket: int) -> tuple[Instruction, ...]:
    return (Reduce(bucket), Settle(bucket), Update(bucket))


LEGAL = {
    "plain": schedule(*use(A), *gradient(A)),
    "two uses": schedule(*use(A), *use(A), *gradient(A)),
    "two holds": schedule(Unshard(A), *use(A), Reshard(A), *gradient(A)),
    "nested": schedule(*(Unshard(A), Wait(A), Run(F, (A,)), Run(G, ()), End(F), Reshard(A)), *gradient(A)),
    "kept": schedule(*(Unshard(A), Wait(A), Run(F, (A,)), Run(G, (A,))), *gradient(A), Reshard(A), keep=[A]),
    "two in flight": schedule(
        *(Reduce(A), Reduce(B), Settle(B), Settle(A), Update(A), Update(B)), depth=2, buckets=(A, B)
    ),
    "staged": schedule(Stage(A), *use(A), *gradient(A), stage=True),
    "activations freed": schedule(*use(A), Reduce(A), Settle(A), Free(), Update(A)),
    "frozen": schedule(*use(FROZEN), *gradient(A), buckets=(A, FROZEN)),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    verify(LEGAL[name])


ILLEGAL = {
    "activations freed before a call": (
        schedule(Free(), *use(A), *gradient(A)),
        "instruction 1, Unshard a: the step is over: a Free has come before it",
    ),
    "activations freed during a call": (
        schedule(*(Unshard(A), Wait(A), Run(F, (A,)), Free(), End(F), Reshard(A)), *gradient(A)),
        "instruction 3, Free: a call is still running",
    ),
    "activations freed twice": (
        schedule(*use(A), Reduce(A), Settle(A), Free(), Free(), Update(A)),
        "instruction 7, Free: the step is over: a Free has come before it",
    ),
    "activations freed although nothing asks for it": (
        schedule(*use(A), Reduce(A), Settle(A), Free(), Update(A), free=False),
        "instruction 6, Free: nothing asks for activations to be freed",
    ),
    "never staged": (
        schedule(*use(A), *gradient(A), stage=True),
        "end of the schedule: a is never staged",
    ),
    "staged twice": (
        schedule(Stage(A), Stage(A), *use(A), *gradient(A), stage=True),
        "instruction 1, Stage a: staged twice",
    ),
    "staged although nothing asks for it": (
        schedule(Stage(A), *use(A), *gradient(A)),
        "instruction 0, Stage a: nothing asks for copies for checkpoints",
    ),
    "staged behind an update": (
        schedule(Stage(A), *use(A), *gradient(A), Stage(FROZEN), buckets=(A, FROZEN), stage=True),
        "instruction 8, Stage z: the step is over: an Update has come before it",
    ),
    "updated while another reduction is in flight": (
        schedule(*use(A), Reduce(A), Reduce(B), Settle(A), Update(A), Settle(B), Update(B), depth=2, buckets=(A, B)),
        "instruction 7, Update a: updated before all reductions were settled, and buckets are not updated one by one",
    ),
    "use before wait": (
        schedule(Unshard(A), Run(F, (A,)), Wait(A), Reshard(A), *gradient(A)),
        "instruction 1, Run f forward [a]: a is used before it was waited for",
    ),
    "use without unshard": (
        schedule(Run(F, (A,)), *gradient(A)),
        "instruction 0, Run f forward [a]: a is used but not unsharded",
    ),
    "use after reshard": (
        schedule(Unshard(A), Wait(A), Reshard(A), Run(F, (A,)), *gradient(A)),
        "instruction 3, Run f forward [a]: a is used but not unsharded",
    ),
    "a wait does not outlive its gather": (
        schedule(*use(A), Unshard(A), Run(G, (A,)), Reshard(A), *gradient(A)),
        "instruction 5, Run g forward [a]: a is used before it was waited for",
    ),
    "second bucket of a call missing": (
        schedule(Unshard(A), Wait(A), Run(F, (A, B)), Reshard(A), *gradient(A), buckets=(A, B)),
        "instruction 2, Run f forward [a, b]: b is used but not unsharded",
    ),
    "wait without unshard": (
        schedule(Wait(A), *use(A), *gradient(A)),
        "instruction 0, Wait a: nobody has unsharded",
    ),
    "hold not released": (
        schedule(Unshard(A), Wait(A), Run(F, (A,)), *gradient(A)),
        "instruction 6, end of the schedule: a is still unsharded",
    ),
    "second hold not released": (
        schedule(Unshard(A), *use(A), *gradient(A)),
        "instruction 8, end of the schedule: a is still unsharded",
    ),
    "hold released twice": (
        schedule(*use(A), Reshard(A), *gradient(A)),
        "instruction 4, Reshard a: no hold is left to drop",
    ),
    "reshard while in use": (
        schedule(Unshard(A), Wait(A), Run(F, (A,)), Run(G, ()), Reshard(A), End(F), *gradient(A)),
        "instruction 4, Reshard a: the last hold is dropped while the bucket is in use",
    ),
    "reshard while gathering": (
        schedule(Unshard(A), Reshard(A), *use(A), *gradient(A)),
        "instruction 1, Reshard a: the last hold is dropped while the bucket is being gathered",
    ),
    "end without run": (
        schedule(*use(A), End(G), *gradient(A), record=[Ready(A)]),
        "instruction 4, End g forward: the call is not running",
    ),
    "reduced twice": (
        schedule(*use(A), Reduce(A), *gradient(A), depth=2),
        "instruction 5, Reduce a: reduced again before the last reduction was settled",
    ),
    "depth exceeded": (
        schedule(Reduce(A), Reduce(B), Settle(A), Settle(B), Update(A), Update(B), buckets=(A, B)),
        "instruction 1, Reduce b: more than 1 reductions in flight",
    ),
    "gradient of a frozen bucket": (
        schedule(*gradient(FROZEN), *gradient(A), buckets=(A, FROZEN)),
        "instruction 0, Reduce z: the bucket is not trainable",
    ),
    "settle without reduce": (
        schedule(Settle(A), *gradient(A)),
        "instruction 0, Settle a: settled without a reduction in flight",
    ),
    "settled twice": (
        schedule(Reduce(A), Settle(A), Settle(A), Update(A)),
        "instruction 2, Settle a: settled without a reduction in flight",
    ),
    "reduction after an update": (
        schedule(*use(A), *gradient(A), Reduce(B), record=[], buckets=(A, B)),
        "instruction 7, Reduce b: the step is over",
    ),
    "never settled": (
        schedule(*gradient(A)[:1]),
        "instruction 1, end of the schedule: a reduction of a was never settled: its gradient is lost",
    ),
    "never reduced": (
        schedule(*use(A)),
        "instruction 4, end of the schedule: a was never reduced: its gradient is lost",
    ),
    "never updated": (
        schedule(Reduce(A), Settle(A)),
        "instruction 2, end of the schedule: a was never updated",
    ),
    "updated before settle": (
        schedule(Reduce(A), Update(A), Settle(A)),
        "instruction 1, Update a: updated before its reduction was settled",
    ),
    "updated without gradient": (
        schedule(Update(B), *gradient(A), buckets=(A, B)),
        "instruction 0, Update b: updated but never reduced",
    ),
    "updated twice": (
        schedule(*gradient(A), Update(A)),
        "instruction 3, Update a: updated twice",
    ),
    "gather after an update": (
        schedule(*gradient(A), *use(A)),
        "instruction 3, Unshard a: the step is over",
    ),
    "call after an update": (
        schedule(Unshard(A), Wait(A), *gradient(A), Run(F, (A,)), Reshard(A)),
        "instruction 5, Run f forward [a]: the step is over",
    ),
    "kept but gathered twice": (
        schedule(*use(A), *use(A), *gradient(A), keep=[A]),
        "instruction 4, Unshard a: the bucket is kept and must be gathered once",
    ),
    "kept but never gathered": (
        schedule(*gradient(A), keep=[A]),
        "instruction 3, end of the schedule: a is kept but was never gathered",
    ),
    "unknown bucket": (
        schedule(*use(B), *gradient(A)),
        "instruction 0, Unshard <unknown bucket 1>: unknown bucket 1",
    ),
    "unknown bucket in a call": (
        schedule(Run(F, (B,)), *gradient(A)),
        "instruction 0, Run f forward [<unknown bucket 1>]: unknown bucket 1",
    ),
    "a call too few": (
        schedule(*gradient(A), record=[*recorded(use(A)), Ready(A)]),
        "instruction 0, Reduce a: the record has Run f forward [a] here",
    ),
    "a call too many": (
        schedule(*use(A), *gradient(A), record=[Ready(A)]),
        "instruction 2, Run f forward [a]: the record has Reduce a here",
    ),
    "calls in another order": (
        schedule(*use(A, F), *use(A, G), *gradient(A), record=recorded([*use(A, G), *use(A, F), Reduce(A)])),
        "instruction 2, Run f forward [a]: the record has Run g forward [a] here",
    ),
    "a call with other buckets": (
        schedule(*use(A), *gradient(A), record=recorded([Run(F, (A, B)), Reduce(A)]), buckets=(A, B)),
        "end of the schedule: b was never reduced",
    ),
    "a call in another phase": (
        schedule(*gradient(A), record=[Ready(A), Entered(H, ()), Left(H)]),
        "instruction 3, end of the schedule: the record has Run h backward here",
    ),
    "an end too few": (
        schedule(Run(F, ()), Run(G, ()), *gradient(A), record=recorded([Run(F, ()), Run(G, ()), End(F), Reduce(A)])),
        "instruction 2, Reduce a: the record has End f forward here",
    ),
    "reductions in another order": (
        schedule(*gradient(A)[:2], *gradient(B), Update(A), record=[Ready(B), Ready(A)], buckets=(A, B)),
        "instruction 0, Reduce a: the record has Reduce b here",
    ),
    "a reduction too many": (
        schedule(Reduce(A), Settle(A), *gradient(A), record=[Ready(A)]),
        "instruction 2, Reduce a: the record has nothing more here",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name: str) -> None:
    wrong, message = ILLEGAL[name]
    with pytest.raises(ScheduleError) as caught:
        verify(wrong)
    assert message in str(caught.value)


def drop_the_waits(given: Schedule) -> Schedule:
    return replace(given, instructions=tuple(i for i in given.instructions if not isinstance(i, Wait)))


def forget_the_record(given: Schedule) -> Schedule:
    return replace(given, record=())


def take_more_depth(given: Schedule) -> Schedule:
    return replace(given, facts=replace(given.facts, depth=99))


def give_nothing(given: Schedule) -> None:
    return None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (drop_the_waits, "pass 'drop_the_waits': instruction 1, Run f forward [a]: a is used before it was waited for"),
        (
            forget_the_record,
            "pass 'forget_the_record' changes the record or the facts: it may change instructions only",
        ),
        (take_more_depth, "pass 'take_more_depth' changes the record or the facts: it may change instructions only"),
        (give_nothing, "pass 'give_nothing' returned NoneType, not a Schedule"),
    ],
)
def test_a_pass_that_breaks_the_schedule_is_named(wrong: Callable[[Schedule], Schedule], message: str) -> None:
    record = (*recorded(use(A)), Ready(A))
    with pytest.raises(ScheduleError) as caught:
        compile_schedule(record, LEGAL["plain"].facts, (*PASSES, wrong))
    assert str(caught.value) == f"[ZW702] {message}"

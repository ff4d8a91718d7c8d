"""Programs that graphs of calls must not change: all comes out as without them, bit for bit."""

from __future__ import annotations

from tests.support import programs
from tests.support.loops import Case, Program, compared, loop
from tests.support.marks import daily

LOOPS = [
    *(Case(stage, gas, loop, dropout=0.1) for stage in (1, 2, 3) for gas in (1, 4) for loop in ("train_step", "plain")),
    *(Case(stage, 2, "clipped", decay=True) for stage in (2, 3)),
    *(Case(3, gas, loop, overflow=20, clipping=0.1, decay=True) for gas in (1, 3) for loop in ("train_step", "plain")),
    *(Case(stage, 4, loop, dropout=0.1) for loop in ("coalesced", "no_sync") for stage in (3, 2, 1)),
    *(Case(stage, 3, "plain", frozen=True) for stage in (2, 1)),
    *(Case(stage, gas, "busy", steps=64, dropout=0.1) for stage in (1, 2, 3) for gas in (1, 3)),
    Case(2, 3, "busy", steps=64, dropout=0.1, frozen=True),
    Case(2, sizes=(4, 6)),
    Case(3, reads=True, dropout=0.1),
    Case(3, cycle=True),
    Case(2, 2, config={"precision": {"accumulate": "bfloat16"}, "reduce": {"depth": 1}}),
    Case(3, 2, "plain", dropout=0.1, config={"activations": {"free_threshold_bytes": 64}}),
]
DAILY = [Case(2, 2, "clipped", decay=True)]
PROGRAMS: list[tuple[Program, Case]] = [
    (programs.autocast, Case(dropout=0.1)),
    (programs.autocast_around, Case()),
    (programs.modes, Case(dropout=0.1)),
    (programs.total, Case()),
    (programs.shapes, Case()),
    (programs.seeded, Case(dropout=0.2)),
    *((programs.irregular, Case(stage, gas, dropout=0.1)) for stage in (1, 2, 3) for gas in (1, 2)),
]


def named(value: object) -> str:
    return getattr(value, "__name__", str(value))


@daily("case", DAILY, [case for case in LOOPS if case not in DAILY], ids=str)
def test_loops(case: Case) -> None:
    differs, told = compared(lambda engine: loop(engine, case), case)
    assert not differs
    assert told.launched > case.steps and told.launched > 2 * told.captures, told


@daily(("program", "case"), PROGRAMS[-1:], PROGRAMS[:-1], ids=named)
def test_programs(program: Program, case: Case) -> None:
    differs, told = compared(program, case)
    assert not differs
    assert told.launched > 2 * told.captures > 0, told

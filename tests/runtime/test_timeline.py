"""The memory of each instruction: what it leaves, and the most up to the end of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from zeroweave.comm.clock import Clock
from zeroweave.runtime.timeline import Timeline
from zeroweave.schedule import Free, Instruction, Schedule, Settle, Unshard, Update

STEP: tuple[Instruction, ...] = (Unshard(0), Settle(0), Free(), Update(0))


class Told(Clock):
    """`readings`: what is in use, and was at most since the one before."""

    def __init__(self, readings: list[tuple[int, int]]) -> None:
        super().__init__()
        self._readings = iter(readings)

    def take_used(self) -> tuple[int, int]:
        return next(self._readings)


def measured(*readings: tuple[int, int]) -> list[tuple[int, int, int]]:
    """(before, allocated, peak) of each instruction of a step. The second is looked at before and after."""
    timeline = Timeline(Told([(0, 900), *readings]))
    for instruction in STEP:
        timeline.add(instruction, timeline.mark(isinstance(instruction, Settle)))

    class Followed:
        instructions, facts = STEP, None
        sends: Mapping[int, tuple[str, int]] = {}
        producers: Mapping[int, int] = {}

        def describe(self, instruction: Instruction) -> str:
            return ""

    step = timeline.step(cast(Schedule, cast(Any, Followed())))
    return [(moment.before, moment.allocated, moment.peak) for moment in step.moments]


def test_what_was_computed_between_two_counts_for_the_first() -> None:
    found = measured((10, 10), (40, 50), (20, 40), (30, 30), (5, 40), (5, 60))
    # Behind the first 50 bytes were in use; the third took 10, and left them there; the last took 55 for itself.
    assert found == [(0, 10, 50), (40, 20, 20), (0, 30, 40), (0, 5, 60)]


def test_what_an_instruction_gives_back_was_there_before_it() -> None:
    found = measured((10, 10), (30, 30), (25, 35), (8, 25), (8, 8), (8, 8))
    assert found == [(0, 10, 35), (30, 25, 25), (0, 8, 8), (0, 8, 8)]


def test_without_a_count_there_is_nothing() -> None:
    assert measured(*[(0, 0)] * 6) == [(0, 0, 0)] * 4

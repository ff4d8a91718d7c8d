"""Fuse: the collectives of neighbouring small buckets are issued in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import is_event
from zeroweave.schedule.facts import Costs, Line
from zeroweave.schedule.instructions import (
    Fuse,
    Instruction,
    Phase,
    Reduce,
    Reshard,
    Run,
    Settle,
    Unshard,
    Update,
    boundaries,
)
from zeroweave.schedule.passes.prefetch import limit
from zeroweave.schedule.passes.room import Events, predict, price, within

SMALL: Final = 1 << 20
"""Bytes up to which a bucket is small where nothing was measured."""
SHARE: Final = 16
"""Where nothing was measured, what is pulled up in one launch is at most this part of the largest bucket."""

_Joins: TypeAlias = Callable[[int, int, int], bool]
"""May bytes be gathered at one index instead of at a later one? Takes the room for them."""


def fuse(schedule: Schedule) -> Schedule:
    """Pull the gather of a small bucket up to the gather before it, and put a ``Fuse`` in front of both.

    Reductions of small buckets that are due together likewise.

    Before:  Unshard 0 · Wait 0 · Run 0 · Unshard 1 · Wait 1 · Run 1
    After:   Fuse 2 · Unshard 0 · Unshard 1 · Wait 0 · Run 0 · Wait 1 · Run 1

    Before:  Settle 3 · Reduce 1 · Settle 2 · Reduce 0
    After:   Settle 3 · Settle 2 · Fuse 2 · Reduce 1 · Reduce 0

    Buckets are small where starting a collective takes longer than moving the bytes of all that join a launch. A
    gather goes never above its bucket's previous ``Reshard``, an ``Update``, or out of the forward or backward that
    needs it. By measured costs buckets join as far as the memory has room, if the step is predicted to gain by it,
    also where all are equal; without any costs only what is small against the largest bucket, so that it hardly
    counts as memory.

    Reductions are fused by measured costs only. A launch waits for the gradients of its last bucket: those join that
    no call lies between, where less is computed meanwhile than a start takes. All are in flight at once, so that
    ``depth`` is the most of them. Only where ``facts.fuse``.
    """
    if not schedule.facts.fuse:
        return schedule
    return _fuse_reductions(_fuse_gathers(schedule))


def _room(line: Line | None) -> int:
    """Bytes that take as long to move as a collective takes to start."""
    return SMALL if line is None or line.beta <= 0 else int(line.alpha / line.beta)


# ---------------------------------------------------------------------- gathers
def _fuse_gathers(schedule: Schedule) -> Schedule:
    costs = schedule.costs
    room = _room(None if costs is None else costs.gather)
    largest = max((bucket.nbytes for bucket in schedule.facts.buckets), default=0)
    narrow = _pulled_up(schedule, min(room, largest // SHARE), lambda nbytes, start, stop: True)
    if costs is None:
        return narrow
    most, events = limit(schedule, costs), Events(schedule, costs)

    def joins(nbytes: int, start: int, stop: int) -> bool:
        first, last = max(0, events.before[start] - 1), events.before[stop]
        if not events.fits(nbytes, first, last, most):
            return False
        events.take(nbytes, first, last)
        return True

    wide = _pulled_up(schedule, room, joins)
    choices = [schedule, within(schedule, narrow)]
    if predict(wide, costs).peak <= most:
        choices.append(wide)
    return _cheapest(choices, costs)


def _pulled_up(schedule: Schedule, small: int, joins: _Joins) -> Schedule:
    """Launches of gathers into which at most ``small`` bytes were pulled up."""
    sizes = schedule.facts.sizes
    instructions = schedule.instructions
    launches: dict[int, list[int]] = {}  # index of the first gather -> all of its launch
    lead: int | None = None
    room, since = 0, set[int]()  # bytes that may still join; buckets dropped since the launch
    phase: Phase | None = None
    for index, instruction in enumerate(instructions):
        match instruction:
            case Run(call, _):
                lead = lead if phase in (call.phase, None) else None
                phase = call.phase
            case Update():
                lead = None
            case Reshard(bucket):
                since.add(bucket)
            case Unshard(bucket) if index in schedule.gathers:
                nbytes = sizes[bucket]
                if lead is not None and bucket not in since and nbytes <= room and joins(nbytes, lead, index):
                    launches[lead].append(index)
                    room -= nbytes
                else:
                    lead, room, since = index, small, set()
                    launches[lead] = [index]
    return _launched(schedule, launches.values())


# ---------------------------------------------------------------------- reductions
def _fuse_reductions(schedule: Schedule) -> Schedule:
    costs = schedule.costs
    if costs is None:
        return schedule
    runs = _due_together(schedule, costs)
    buckets = [[schedule.instructions[index].bucket for index in run] for run in runs]  # type: ignore[union-attr]
    launches: dict[int, set[tuple[int, ...]]] = {}  # bucket -> what it is reduced with, over the window
    for members in buckets:
        for bucket in members:
            launches.setdefault(bucket, set()).add(tuple(members))
    same = [run for run, members in zip(runs, buckets, strict=True) if all(len(launches[b]) == 1 for b in members)]
    fused = _launched(schedule, same)
    if fused is schedule:
        return schedule
    return _cheapest([schedule, within(schedule, fused)], costs)


def _due_together(schedule: Schedule, costs: Costs) -> list[list[int]]:
    """The reductions, by index, in runs of those that may share a launch."""
    sizes = schedule.facts.sizes
    small, bounds = _room(costs.reduce), boundaries(schedule.record)
    runs: list[list[int]] = []
    members: set[int] = set()
    is_open, event, room = False, -1, 0
    for index, instruction in enumerate(schedule.instructions):
        event += is_event(instruction)
        match instruction:
            case Reduce(bucket):
                nbytes = sizes[bucket]
                # what is computed since the one before delays that one
                close = event not in bounds and costs.compute[event - 1] <= costs.reduce.alpha
                if is_open and close and len(members) < schedule.facts.depth and nbytes <= room:
                    runs[-1].append(index)
                else:
                    runs.append([index])
                    members, room = set(), small
                members.add(bucket)
                room -= nbytes
                is_open = True
            case Unshard() | Reshard() | Fuse():
                pass
            case Settle(bucket):
                is_open = is_open and bucket not in members
            case _:
                is_open = False
    return runs


# ---------------------------------------------------------------------- both
def _launched(schedule: Schedule, launches: Iterable[Sequence[int]]) -> Schedule:
    """With each of these, by index, issued as one launch in the place of its first."""
    instructions = schedule.instructions
    moved: dict[int, list[Instruction]] = {}
    taken: set[int] = set()
    for launch in launches:
        if len(launch) > 1:
            first = launch[0]
            # what is settled between reductions makes room for the later ones
            between = range(first, launch[-1]) if isinstance(instructions[first], Reduce) else ()
            settled = [n for n in between if isinstance(instructions[n], Settle)]
            moved[first] = [instructions[n] for n in settled]
            moved[first] += [Fuse(len(launch)), *(instructions[n] for n in launch)]
            taken.update(settled, launch)
    return schedule.rearranged(moved, taken)


def _cheapest(choices: Sequence[Schedule], costs: Costs) -> Schedule:
    """The first one of those that cost least."""
    return min(choices, key=lambda choice: price(predict(choice, costs)))

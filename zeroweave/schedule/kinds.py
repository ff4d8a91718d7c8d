"""Windows of several kinds, and which kind comes next.

A program may alternate: two micro-steps and three, two losses, training and distillation. Each kind of window has
its own record, its own costs and so its own schedule. Which kind comes next is known only when it has come. So it is
predicted from the past: the kind that followed most often after the same kinds in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeVar

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.instructions import Event, project
from zeroweave.schedule.record import Step

KINDS: Final = 8
"""The most kinds that are known; the one that has not come for longest is forgotten."""
_PAST: Final = 64
"""The windows that are remembered. Patterns of half as many are predicted."""

T = TypeVar("T")


class WindowKind:
    """Windows that compute and send the same: the `schedule` that they follow, and how it was found.

    `work`: a hash of what all ranks compute, 0 where they compute different things, None before such a window has come.
    """

    def __init__(
        self,
        schedule: Schedule,
        work: int | None = None,
        costs: Costs | None = None,
        measured: Schedule | None = None,
        followed: int = 0,
    ) -> None:
        self.schedule, self.work = schedule, work
        self.costs, self.measured = costs, measured
        """what the schedule was made from, and the schedule on which that was measured; None: nothing was"""
        self.followed = followed
        """windows that followed it"""
        self.steps: list[Step] = []
        """those of them that were timed, maybe by another record that sends the same"""
        self._known_as = {schedule.fingerprint}

    def is_of(self, schedule: Schedule, work: int) -> bool:
        """True if all ranks would follow this schedule after a window of this kind. The same on all ranks."""
        alike = work == self.work or (self.work is None and work != 0)
        return alike and schedule.fingerprint in self._known_as

    def came(self, candidate: Schedule, work: int, followed: bool) -> None:
        """One window more, which has `followed` the schedule or not; `candidate`: what would be followed after it."""
        self.work = work
        if candidate.fingerprint != self.schedule.fingerprint:
            self.followed, self.steps = 0, []
        if self.measured is not None and self.measured.shape != candidate.shape:
            self.costs = self.measured = None  # what was measured tells nothing about other work
        if candidate is not self.schedule and candidate != self.schedule:  # of equal ones the first: steps know it
            self.schedule = candidate
        self.followed += followed

    def timed(self, step: Step) -> None:
        """A window that followed the schedule was timed."""
        self.steps.append(step)

    def measure(self, costs: Costs) -> None:
        """All ranks have agreed on the costs of the schedule."""
        self.costs, self.measured = costs, self.schedule

    def revise(self, costs: Costs) -> None:
        """They are others now, of what was measured before."""
        self.costs = costs

    def forget_steps(self) -> None:
        """What was timed has been put to use."""
        self.steps = []

    def follow(self, schedule: Schedule) -> None:
        """From its next window on."""
        self.schedule = schedule
        self._known_as.add(schedule.fingerprint)


class WindowKinds:
    """The kinds of one engine's windows.

    Fingerprints and work are the same on all ranks, so kinds, their order and what is expected are. Schedules, records
    and measured steps are each rank's own.
    """

    def __init__(self) -> None:
        self._kinds: list[WindowKind] = []
        """the one that came last is the last"""
        self._past: list[WindowKind] = []

    def of(self, schedule: Schedule, work: int) -> WindowKind:
        """The kind of the window that has just ended; see `WindowKind.is_of`."""
        kind = next((each for each in self._kinds if each.is_of(schedule, work)), None)
        if kind is None:
            known = self.measured_on(schedule.record) if work and schedule.facts.costs is not None else None
            kind = WindowKind(schedule, work, *((None, None) if known is None else (known.costs, known.measured)))
        others = [each for each in self._kinds if each is not kind]
        self._kinds = [*others[1 - KINDS :], kind]
        self._past = [*(each for each in self._past[1 - _PAST :] if each in self._kinds), kind]
        return kind

    @property
    def upcoming(self) -> WindowKind:
        """The kind that the next window will probably be of; one has come."""
        return expected(self._past)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """What windows of the kinds that are known follow."""
        return tuple(kind.schedule for kind in self._kinds)

    def measured_on(self, record: tuple[Event, ...]) -> WindowKind | None:
        """The kind whose costs were measured on a record of the same work: costs belong to work."""
        work = project(record)
        return next((k for k in self._kinds if k.measured is not None and project(k.measured.record) == work), None)

    def restart(self, kind: WindowKind | None) -> None:
        """Only this one is known from here on."""
        self._kinds, self._past = [kind] if kind is not None else [], []


def expected(past: Sequence[T]) -> T:
    """What followed most often after the longest earlier run of windows in the order of the last ones.

    The latest decides between equals. Where the last window is the first of its kind, another one like it is expected.
    `past` has at least one.
    """
    back = past[::-1]
    if back.count(back[0]) == len(back):  # as in most programs: found out at no cost
        return back[0]
    alike = [_common(back, back[index:]) for index in range(1, len(back))]
    longest = max(alike, default=0)
    found = Counter(back[index] for index, count in enumerate(alike) if count == longest)
    return found.most_common(1)[0][0] if longest else back[0]


def _common(one: Sequence[T], other: Sequence[T]) -> int:
    """How many elements are equal from the start on."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))

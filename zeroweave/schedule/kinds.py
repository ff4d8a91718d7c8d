"""Windows of several kinds, and which kind comes next.

A program may alternate: two micro-steps and three, two losses, training and distillation. Each kind of window has a
record of its own, and so a schedule of its own, made from costs of its own. Which kind comes next is known only when
it has come. So it is told from the past: the kind that mostly followed when the same kinds had come in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeVar

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.instructions import Event
from zeroweave.schedule.record import Step

KINDS: Final = 8
"""So many are known at once; the one that has not come for longest is forgotten."""
_PAST: Final = 64
"""So many windows are remembered."""
_ALIKE: Final = 16
"""So many windows at most are compared with what came earlier."""

T = TypeVar("T")


class Kind:
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
        """those of them that were timed"""
        self._known_as = {schedule.fingerprint}

    def is_of(self, schedule: Schedule, work: int) -> bool:
        """Is this the kind of a window after which all ranks would follow this schedule? The same on all ranks."""
        return self.work in (None, work) and schedule.fingerprint in self._known_as

    def came(self, candidate: Schedule, work: int, followed: bool) -> None:
        """One window more, which has `followed` the schedule or not; `candidate`: what would be followed after it."""
        self.work = work
        if candidate.fingerprint != self.schedule.fingerprint:
            self.followed, self.steps = 0, []
        self.schedule = candidate
        self.followed += followed

    def timed(self, step: Step) -> None:
        """A window that followed the schedule was timed."""
        # Another record may send the same: then the ranks go on together, but not with those times.
        self.steps = [each for each in self.steps if each.schedule is step.schedule] + [step]

    def measure(self, costs: Costs) -> None:
        """All ranks have agreed on the costs of the schedule."""
        self.costs, self.measured = costs, self.schedule

    def follow(self, schedule: Schedule) -> None:
        """From the next window on, which is of this kind."""
        self.schedule, self.steps = schedule, []
        self._known_as.add(schedule.fingerprint)


class Kinds:
    """The kinds of one engine's windows. All ranks tell it the same, and so hear the same."""

    def __init__(self) -> None:
        self._kinds: list[Kind] = []
        """the one that came last is the last"""
        self._past: list[Kind] = []

    def of(self, schedule: Schedule, work: int) -> Kind:
        """The kind of the window that has just ended; see `Kind.is_of`."""
        kind = next((each for each in self._kinds if each.is_of(schedule, work)), None) or Kind(schedule, work)
        others = [each for each in self._kinds if each is not kind]
        self._kinds = [*others[1 - KINDS :], kind]
        self._past = [*(each for each in self._past[1 - _PAST :] if each in self._kinds), kind]
        return kind

    @property
    def upcoming(self) -> Kind:
        """The kind that the next window will probably be of."""
        return expected(self._past)

    def measured_on(self, record: tuple[Event, ...]) -> Kind | None:
        """The kind whose costs were measured on a schedule of this record."""
        return next((k for k in self._kinds if k.measured is not None and k.measured.record == record), None)

    def restart(self, kind: Kind | None) -> None:
        """Only this one is known from here on."""
        self._kinds, self._past = [kind] if kind is not None else [], []


def expected(past: Sequence[T]) -> T:
    """What has mostly followed where the longest possible run of windows came in the order of the last ones.

    This is the core of "prediction by partial matching" (Cleary and Witten, 1984), without its probabilities. The
    latest decides between equals. Where the last window is the first of its kind, another one like it is expected.
    """
    if past.count(past[-1]) == len(past):  # as in most programs: found out at no cost
        return past[-1]
    followed, longest = Counter([past[-1]]), 0
    for index in reversed(range(1, len(past))):
        alike = 0
        while alike < min(index, _ALIKE) and past[index - 1 - alike] == past[-1 - alike]:
            alike += 1
        if alike > longest:
            followed, longest = Counter(), alike
        if alike == longest > 0:
            followed[past[index]] += 1
    return followed.most_common(1)[0][0]

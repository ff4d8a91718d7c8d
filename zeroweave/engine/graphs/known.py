"""What is known of windows: those that were captured, those that must not be, and how often they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

from zeroweave.engine.agreements import Course
from zeroweave.engine.graphs.parts import CapturedWindow
from zeroweave.notices import Journal
from zeroweave.schedule import Schedule

_WINDOWS: Final = 8
"""So many windows, of other shapes, are captured at most; others run as ever."""
_OFTEN: Final = 2
"""A window is captured when windows that begin like it have come so often."""
_REMEMBERED: Final = 1024
"""So many first calls are counted."""
_ATTEMPTS: Final = 3
"""So many trials of windows that begin alike may come to nothing. So many windows may wait for their first replay."""
_WORTH: Final = 2
"""So many replays of one capture, and what had gone before it counts no more."""
_WORTH_OF_NUMBERS: Final = 8
"""The same for captures that go because a program has set a number: it does so again and again."""
_LONGEST_WAIT: Final = 64
"""Windows that run as ever at most between two trials of windows without an effect."""
_OBSTINATE: Final = 32
"""A reason is told that has come so often, with no replay in between."""


class Known:
    """The windows of one engine, by the key of their first call. `lasting`: why none can ever be captured."""

    def __init__(self, lasting: str | None, journal: Journal) -> None:
        self.windows: list[CapturedWindow] = []
        self.captured = 0
        """so far, with those that are gone"""
        self.uncaptured: Counter[str] = Counter()
        """why calls ran as ever that might have been replayed, and how many"""
        self._lasting, self._journal = lasting, journal
        # By the hashes of keys: those keep what they tell apart, such as what a loss function has at hand.
        self._seen: Counter[int] = Counter()
        self._attempts: Counter[int] = Counter()
        self._gone: Counter[int] = Counter()
        """how often windows that begin so had to go, none of them worth its capture"""
        self._replays: Counter[int] = Counter()
        """since the last one of these"""
        self._renumbered: Counter[int] = Counter()
        """how often in a row they had to go for a number, not worth their captures"""
        self._idle: Counter[int] = Counter()
        """how many trials have told nothing, as their window changed nothing"""
        self._waits: Counter[int] = Counter()
        """so many windows run as ever before the next one"""
        self._refused: dict[int, str] = {}
        self._used: list[CapturedWindow] = []
        """those of `windows` that were replayed"""
        self._wasted = 0
        """windows that went without a replay, since the last one of any"""
        self._since: Counter[str] = Counter()
        """as `uncaptured`, since the last replay"""
        self._told: set[str] = set()

    def follow(self, schedules: Collection[Schedule]) -> None:
        """Windows that follow none of these go: no other one comes again."""
        followed = set(map(id, schedules))
        if any(id(each.schedule) not in followed for each in self.windows):
            self._keep([each for each in self.windows if id(each.schedule) in followed])

    def find(self, key: object, schedule: Schedule | None) -> tuple[CapturedWindow | None, Course, str]:
        """The window that begins with this call and follows `schedule`, if there is one; else what may be done.

        Windows whose graphs would look for things that are not there any more go, and one that begins so and has other
        numbers at hand.
        """
        if len(self._seen) > _REMEMBERED:
            self._seen.clear()
        begins = hash(key)
        self._seen[begins] += 1
        gone = [each for each in self.windows if not each.whereabouts.hold()]
        found = [each for each in self.windows if each.schedule is schedule and each.parts[0].key == key]
        if renumbered := [each for each in found if each not in gone and not each.constants.hold()]:
            gone += renumbered
            worth = self._replays[begins] >= _WORTH_OF_NUMBERS
            self._renumbered[begins] = 0 if worth else self._renumbered[begins] + 1
        if gone:
            for went in {hash(each.parts[0].key) for each in gone}:
                self._gone[went] += 1
                self._replays.pop(went, None)
            self._keep([each for each in self.windows if each not in gone])
        if window := next((each for each in found if each not in gone), None):
            self._replays[begins] += 1
            if self._replays[begins] == _WORTH:
                self._gone.pop(begins, None)
            self._since.clear()
            self._wasted = 0
            if window not in self._used:
                self._used.append(window)
            return window, Course.REPLAY, ""
        if max(self._gone[begins], self._renumbered[begins]) >= _ATTEMPTS and begins not in self._refused:
            self.refuse(key, "what its graphs read, such as a number of a module, or options change every few steps")
        return None, *self._without(begins, schedule)

    def _without(self, begins: int, schedule: Schedule | None) -> tuple[Course, str]:
        """What may be done where no window that is known begins so."""
        if begins in self._refused:
            return Course.PLAIN, self._refused[begins]
        if self._waits[begins]:
            self._waits[begins] -= 1
            return Course.PLAIN, "its step changed nothing, so that no graph could be compared with it"
        if sum(each.schedule is schedule for each in self.windows) >= _WINDOWS:
            return Course.PLAIN, f"{_WINDOWS} windows of other shapes are captured, and no more"
        if self._seen[begins] <= _OFTEN:
            return (
                Course.PLAIN,
                "windows like it, in shapes, values beside tensors, loss_fn and hooks, are rare so far",
            )
        if self._wasted + len(self.windows) - len(self._used) >= _ATTEMPTS:
            return Course.PLAIN, f"of the windows that were captured, {_ATTEMPTS} have not come again so far"
        return Course.TRIAL, ""

    def _keep(self, windows: list[CapturedWindow]) -> None:
        """Others go."""
        self._wasted += sum(each not in windows and each not in self._used for each in self.windows)
        self.windows = windows
        self._used = [each for each in self._used if each in windows]

    def add(self, window: CapturedWindow) -> None:
        """In the place of one that is alike, and, where there are too many, of the oldest of another schedule."""
        new = window.schedule, window.parts[0].key
        kept = [each for each in self.windows if (each.schedule, each.parts[0].key) != new]
        if len(kept) >= _WINDOWS:
            oldest = next((each for each in kept if each.schedule is not window.schedule), kept[0])
            kept.remove(oldest)
        self._keep([*kept, window])
        self.captured += 1

    def clear(self) -> None:
        self._keep([])

    def idle(self, key: object) -> None:
        """A trial of a window that begins so has told nothing, as the window changed nothing; others may."""
        self._idle[hash(key)] += 1
        self._waits[hash(key)] = min(2 ** self._idle[hash(key)], _LONGEST_WAIT)

    def spoilt(self, key: object, why: str) -> None:
        """A trial of a window that begins so has come to nothing."""
        self._attempts[hash(key)] += 1
        if self._attempts[hash(key)] == _ATTEMPTS:
            self.refuse(key, why)

    def refuse(self, key: object, why: str) -> None:
        """Windows that begin so are not captured."""
        self._refused[hash(key)] = why
        self.tell(why)

    def tell(self, why: str) -> None:
        """A call runs as ever. Reasons that last, by what they are or by how often they come, are told once."""
        first = why not in self.uncaptured
        self.uncaptured[why] += 1
        self._since[why] += 1
        lasts = why in {self._lasting, *self._refused.values()} or self._since[why] >= _OBSTINATE
        if lasts and why not in self._told:
            self._told.add(why)
            self._journal.warn("fallback", f"compile.cuda_graphs: steps run without graphs, exact but slower: {why}")
        elif first:
            self._journal.tell("fallback", f"compile.cuda_graphs: a step runs without graphs: {why}")


def fits(window: CapturedWindow | None, at: int, key: object) -> bool:
    """Is this the key of the window's call number `at`?"""
    parts: Sequence[object] = () if window is None else window.parts
    return window is not None and at < len(parts) and window.parts[at].key == key

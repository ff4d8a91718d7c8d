"""The tape of a window's forward calls, and the way back over it, which a backward takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from zeroweave._torch.autograd import checkpoint_segment
from zeroweave.layout import SlotKey
from zeroweave.runtime.replay import Replay
from zeroweave.schedule import Call


@dataclass(slots=True, eq=False)
class Frame:
    """One execution of a call.

    `handles` counts the views of flats that its eager code saved for the backward, `unpacked` those that a backward
    off the tape has asked for; `parts` counts the compiled forwards in it that have a backward, `over` the backwards
    of those. `origin` is the forward call whose backward this is, or which it runs again. `number` is its place among
    the window's equal calls, from 0. `is_read`: eager code reads a parameter that no call announced. `covered`: another
    frame holds its buckets.

    On the tape: `saves`: its graph keeps values of parameters, which a backward that comes to it reads; `trains`: it
    has trained parameters, so its output has a gradient, and its graph keeps values of parameters if its input has one,
    too; `silent`: it keeps no graph, because it runs again in the backward, or has none. `segment`: see
    `_torch.autograd.checkpoint_segment`. `compiled`: True if it, or the call that it runs again, runs compiled; None:
    unknown.
    """

    call: Call
    uses: tuple[int, ...]
    replay: Replay
    parent: Frame | None = None
    origin: Frame | None = None
    number: int = 0
    announced: set[SlotKey] = field(default_factory=set)
    reads: list[Frame] = field(default_factory=list)
    handles: int = 0
    unpacked: int = 0
    parts: int = 0
    over: int = 0
    is_read: bool = False
    covered: bool = False
    saves: bool = False
    trains: bool = False
    silent: bool = False
    segment: object = None
    on_tape: bool = False
    compiled: bool | None = None

    def acquire(self) -> None:
        """The call begins: the values of its buckets are usable until it is left."""
        supposed = self.saves if self.call.phase == "backward" else None
        self.number = self.replay.entered(self.call, self.uses, supposed)

    def runs_again(self, origin: Frame) -> None:
        """It is a recomputation of `origin`, whose backward holds its buckets."""
        self.covered, self.origin = True, origin

    def runs(self, compiled: bool) -> None:
        """It is a region's, and runs compiled, or not."""
        self.compiled = compiled

    def put_on_tape(self, segment: object, saves: bool, silent: bool) -> None:
        """A backward may come to it."""
        self.on_tape, self.segment, self.saves, self.silent = True, segment, saves, silent

    def ran_compiled(self, reads: bool) -> None:
        """A compiled forward ran in it. `reads`: True if its backward reads values of parameters that it saved."""
        self.parts += 1
        self.saves = self.saves or reads

    def handed_out(self) -> None:
        """Its eager code has saved a view of a flat."""
        self.handles += 1
        self.saves = True

    def asked(self) -> None:
        """A backward off the tape has asked for such a view."""
        self.unpacked += 1

    def asked_for_all(self) -> None:
        """That backward is over; another one asks again."""
        self.unpacked = 0

    def backward_begins(self) -> None:
        """None of its compiled parts has run backward so far."""
        self.over = 0

    def part_over(self) -> bool:
        """One more of them has. True if it was the last."""
        self.over += 1
        return self.over == self.parts


class StepBack(NamedTuple):
    """A step of the way back: the backward of `frame` begins, or ends.

    `over`: the buckets that no call further back has used, so that no gradient of theirs is to come.
    """

    frame: Frame
    begins: bool
    over: tuple[int, ...] = ()


class Tape:
    """The forward calls of a window that no backward has passed, in the order in which they began and ended.

    Of the nodes that are left, autograd always runs the one that was made last. So a backward comes to the calls in the
    reverse of the order of the forward, and when it comes to one, it is done with all that began after its end. Which
    calls it comes to may differ between ranks, which need not use the same parameters; the forward's calls may not.
    So what a backward sends follows from the way back over the tape, whose steps all ranks take in one order:

        forward      begin A · end A · begin B · begin C · end C · end B
        way back     begins B · begins C · ends C · ends B · begins A · ends A
    """

    def __init__(self) -> None:
        self._marks: list[tuple[Frame, bool]] = []
        """(frame, True if it is its end), oldest first"""
        self._uses: Counter[int] = Counter()
        """bucket -> frames on the tape that use it"""
        self._ahead: set[Frame] = set()
        """frames whose backward can begin"""
        self._open: list[Frame] = []
        """frames whose backward has begun, oldest first"""
        self._trains = False
        """True if the input of the next call may have a gradient, for the calls before it"""
        self._before: list[tuple[Frame, bool]] = []
        """the marks that the last backward found"""

    @property
    def waiting(self) -> bool:
        """True while it has calls that no backward has passed."""
        return bool(self._marks)

    def entered(self, frame: Frame, silent: bool) -> None:
        """A forward call begins; `silent`: see `Frame`."""
        segment = checkpoint_segment()
        # A checkpoint keeps nothing itself; what it runs again does. And which calls lead back to trained parameters
        # may differ between steps, on some ranks only: a call that may lead back counts as one that does.
        saves = segment is not None or (frame.trains and self._trains)
        frame.put_on_tape(segment, saves, silent)
        self._trains = self._trains or frame.trains
        self._marks.append((frame, False))
        for bucket in frame.uses:
            self._uses[bucket] += 1

    def left(self, frame: Frame) -> None:
        """A call ends; it is noted only if its beginning was."""
        if not frame.on_tape:
            return
        self._marks.append((frame, True))
        self._ahead.add(frame)

    def begin_backward(self) -> None:
        """A backward begins. Where no call is left, it runs the last one's graph again."""
        if not self._marks:
            self._marks = list(self._before)
            self._ahead = {frame for frame, is_end in self._marks if is_end}
            self._uses = Counter(bucket for frame, is_end in self._marks if not is_end for bucket in frame.uses)
        self._before = list(self._marks)

    def knows(self, frame: Frame) -> bool:
        """True if a backward can come to this frame, or has come to it and is not done with it."""
        return frame in self._ahead or frame in self._open

    def last(self, name: str) -> Frame | None:
        """The call of this name that a backward comes to first, or is at."""
        for frame in reversed(self._open):
            if frame.call.name == name:
                return frame
        return next((f for f, is_end in reversed(self._marks) if is_end and f.call.name == name), None)

    def to(self, frame: Frame) -> Iterator[StepBack]:
        """The way back up to the beginning of the backward of `frame`; none if it has begun."""
        while frame in self._ahead:
            yield self._step()

    def to_recomputation(self, frame: Frame) -> Iterator[StepBack]:
        """The way back up to the point where a call runs forward again: to its backward, which then holds its buckets.

        A checkpoint over several calls runs all of them forward before the backward of the last: it leads up to its
        end. A reentrant one, whose calls are silent, runs its own backward after each: the way leads up to it.
        """
        if frame in self._ahead and not self._alone(frame):
            while not (self._marks[-1][1] and self._marks[-1][0].segment is frame.segment):
                yield self._step()
        elif frame.silent:
            while frame in self._ahead and self._marks[-1] != (frame, True):
                yield self._step()
        else:
            yield from self.to(frame)

    def _alone(self, frame: Frame) -> bool:
        """True if there is no other call in its checkpoint."""
        return frame.segment is None or sum(is_end and f.segment is frame.segment for f, is_end in self._marks) == 1

    def past(self, frame: Frame) -> Iterator[StepBack]:
        """The step that ends the backward of `frame`, if it is the next one."""
        if self._marks and self._marks[-1] == (frame, False):
            yield self._step()

    def rest(self) -> Iterator[StepBack]:
        """The way back up to the beginning."""
        while self._marks:
            yield self._step()
        self._trains = False

    def _step(self) -> StepBack:
        frame, is_end = self._marks.pop()
        if is_end:
            self._ahead.discard(frame)
            self._open.append(frame)
            return StepBack(frame, begins=True)
        if frame in self._open:  # else the forward of the frame did not end
            self._open.remove(frame)
        for bucket in frame.uses:
            self._uses[bucket] -= 1
        over = tuple(bucket for bucket in sorted(frame.uses, reverse=True) if not self._uses[bucket])
        return StepBack(frame, begins=False, over=over)

    def clear(self) -> None:
        """Nothing can be differentiated any more."""
        self._trains = False
        for held in (self._marks, self._uses, self._ahead, self._open, self._before):
            held.clear()

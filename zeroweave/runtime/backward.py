"""What a backward does with buckets: it goes back over the tape, and beside that holds what is asked for on demand."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.replay import Replay
from zeroweave.runtime.tape import Frame, StepBack, Tape
from zeroweave.schedule import Call


class Observer:
    """Whom the runtime tells about windows and outermost backwards, once each, and asks about them.

    This one minds nothing.
    """

    def window_began(self) -> None:
        """The first forward of a window begins."""

    def reduces(self) -> bool:
        """Does the backward that begins now reduce?"""
        return True

    def backward_began(self) -> None:
        """A backward begins. An exception from here leaves it."""

    def backward_ended(self, trained: bool) -> None:
        """It is over. One that accumulates into no parameter, such as `torch.autograd.grad`, has not `trained`."""


class WayBack:
    """The backwards of forward calls: which of them are open, and when the turns of buckets come.

    `leave(frame)` ends a backward that was acquired here. `tape` is noted by whoever runs forward calls.
    """

    def __init__(self, replay: Replay, leave: Callable[[Frame], None]) -> None:
        self._replay, self._leave = replay, leave
        self.tape = Tape()
        self.active = False
        """does a backward run that goes back over the tape? One inside a forward, or for other gradients, does not"""
        self._open: dict[Frame, Frame] = {}
        """a forward's frame -> its backward, which holds its buckets"""
        self._beside: dict[int, list[Frame]] = {}
        """bucket -> backwards of eager code that are no step of the way: of code outside of calls, of inner graphs"""

    # ------------------------------------------------------------------ its course
    def begin(self) -> None:
        """An outermost backward begins."""
        self.active = True
        self.tape.begin_backward()

    def finish(self) -> None:
        """The backward is over: whatever it has not come to is passed, because others may have."""
        self.leave_finished(everything=True)
        if self.active:
            for step in self.tape.rest():
                self._take(step)
        self.active = False
        self._beside.clear()

    def clear(self) -> None:
        """Forgets everything: after the step, or an exception."""
        self.active = False
        self.tape.clear()
        self._open.clear()
        self._beside.clear()

    # ------------------------------------------------------------------ what the program tells
    def enter(self, name: str, uses: tuple[int, ...]) -> Frame:
        """Compiled code runs, of the backward of the call `name`."""
        self.leave_finished()
        call = Call(name, "backward")
        if self.active and (origin := self.tape.last(name)) is not None and not origin.silent:
            missing = self._reach(origin, frozenset(uses))
            if not missing:
                return Frame(call, uses, self._replay, origin=origin, covered=True)
            uses = tuple(sorted(missing))
        frame = Frame(call, uses, self._replay, saves=True)
        frame.acquire()
        return frame

    def left(self, frame: Frame) -> None:
        """That code has run. Where a schedule says what comes next, the call is over with the last of its parts."""
        origin = frame.origin
        assert origin is not None
        if origin.part_over() and not origin.handles and self._replay.may_end(frame.call):
            for step in self.tape.past(origin):
                self._take(step)

    def use(self, bucket: Bucket, origin: Frame) -> None:
        """A node needs a tensor that the eager code of the call `origin` saved."""
        if self.active and self.tape.knows(origin) and not self._reach(origin, frozenset((bucket.id,))):
            return
        origin.asked()
        frames = self._beside.setdefault(bucket.id, [])
        if any(frame.origin is origin for frame in frames):
            return
        self.leave_finished()
        frame = Frame(Call(bucket.layout.name, "backward"), (bucket.id,), self._replay, origin=origin, saves=True)
        frame.acquire()
        frames.append(frame)

    def recompute(self, frame: Frame, again: bool) -> None:
        """A forward call begins. In a backward it may be one that runs again, which `again` says of some.

        What its backward holds already needs no further hold.
        """
        origin = self.tape.last(frame.call.name) if self.active and torch.is_grad_enabled() else None
        if origin is None or not (origin.silent or (again and origin.segment is not None)):
            return
        if origin.compiled is not None:
            frame.runs(origin.compiled)
        for step in self.tape.to_recomputation(origin):
            self._take(step)
        if (held := self._open.get(origin)) is not None and set(frame.uses) <= set(held.uses):
            frame.runs_again(origin)

    def leave_finished(self, everything: bool = False) -> None:
        """Leaves what stands beside the way and was asked for all that it had saved: its nodes have run."""
        for frames in self._beside.values():
            for frame in list(frames):
                origin = frame.origin
                assert origin is not None
                if everything or origin.unpacked >= origin.handles:
                    frames.remove(frame)
                    origin.asked_for_all()
                    self._leave(frame)

    # ------------------------------------------------------------------ steps
    def _reach(self, origin: Frame, needed: frozenset[int]) -> frozenset[int]:
        """The backward has come to a call and needs these buckets; returns those that it does not hold by that."""
        for step in self.tape.to(origin):
            self._take(step, needed if step.frame is origin else frozenset())
        return needed.difference(held.uses) if (held := self._open.get(origin)) is not None else needed

    def _take(self, step: StepBack, needed: frozenset[int] = frozenset()) -> None:
        """`needed`: the buckets that the program asks for where the step leads to."""
        self.leave_finished()
        if step.begins:
            self._begin(step.frame, needed)
            return
        if (ended := self._open.pop(step.frame, None)) is not None:
            self._leave(ended)
        for bucket in step.over:
            self._replay.turn(bucket)

    def _begin(self, frame: Frame, needed: frozenset[int]) -> None:
        """Makes usable what the forward has used, all or nothing: which of it a rank needs may depend on its batch.

        This rank's backward may not come to the call; others' may.
        """
        if frame.is_read or frame.silent:
            return  # the code that reads it lies anywhere behind it; what runs again announces itself
        frame.backward_begins()
        call = Call(frame.call.name, "backward")
        if frame.uses and (needed or self._replay.plans(call)):
            backward = Frame(call, frame.uses, self._replay, saves=bool(frame.saves or needed))
            self._open[frame] = backward
            backward.acquire()

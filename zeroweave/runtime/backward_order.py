"""What a backward does with buckets: it goes back over the tape, and also holds what is asked for on demand."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.replay import Replay
from zeroweave.runtime.tape import Frame, StepBack, Tape
from zeroweave.schedule import Call


class Observer:
    """The runtime tells it about each window and outermost backward, once, and asks whether to reduce.

    This one does nothing.
    """

    def window_began(self) -> None:
        """The first forward of a window begins."""

    def forward_began(self) -> None:
        """An outermost forward begins that is not in a backward."""

    def reduces(self) -> bool:
        """True if the backward that begins now reduces."""
        return True

    def backward_began(self) -> None:
        """A backward begins. An exception from here leaves it."""

    def backward_ended(self, trained: bool) -> None:
        """It is over. One that accumulates into no parameter, such as `torch.autograd.grad`, has not `trained`."""


class WayBack:
    """The backwards of forward calls: which of them are open, and when the turns of buckets come.

    `leave(frame)` ends a backward that was acquired here. The code that runs forward calls notes them on `tape`.
    """

    def __init__(self, replay: Replay, leave: Callable[[Frame], None]) -> None:
        self._replay, self._leave = replay, leave
        self.tape = Tape()
        self.active = False
        """True if a backward runs that goes back over the tape; one in a forward, or for other gradients, does not"""
        self._open: dict[Frame, Frame] = {}
        """a forward's frame -> its backward, which holds its buckets"""
        self._beside: dict[int, list[Frame]] = {}
        """bucket -> backwards of eager code that are off the tape: of code outside of calls, of inner graphs"""

    # ------------------------------------------------------------------ its course
    def begin(self) -> None:
        """An outermost backward begins."""
        self.active = True
        self.tape.begin_backward()

    def finish(self) -> None:
        """The backward is over: steps that it has not come to are taken, because other ranks may have come to them."""
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
        """Compiled code of the backward of the call `name` runs."""
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
        """That code has run. If a schedule says what comes next, the call is over with the last of its parts."""
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
        """A forward call begins. In a backward it may be one that runs again; `again`: True if that is known.

        Buckets that its backward holds already need no further hold.
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
        """Leaves backwards off the tape that were asked for all that was saved for them: their nodes have run."""
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
        """The backward has come to a call and needs these buckets; returns those that it does not hold then."""
        for step in self.tape.to(origin):
            self._take(step, needed if step.frame is origin else frozenset())
        return needed.difference(held.uses) if (held := self._open.get(origin)) is not None else needed

    def _take(self, step: StepBack, needed: frozenset[int] = frozenset()) -> None:
        """`needed`: the buckets that the program asks for in the call that the step leads to."""
        self.leave_finished()
        if step.begins:
            self._begin(step.frame, needed)
            return
        if (ended := self._open.pop(step.frame, None)) is not None:
            self._leave(ended)
        for bucket in step.over:
            self._replay.turn(bucket)

    def _begin(self, frame: Frame, needed: frozenset[int]) -> None:
        """Gathers all buckets that the forward call used, or none: the part that a rank needs may depend on its batch.

        This rank's backward may not come to the call; those of other ranks may.
        """
        if frame.is_read or frame.silent:
            return  # code that reads it may come anywhere after it; a call that runs again announces itself
        frame.backward_begins()
        call = Call(frame.call.name, "backward")
        if frame.uses and (needed or self._replay.plans(call)):
            backward = Frame(call, frame.uses, self._replay, saves=bool(frame.saves or needed))
            self._open[frame] = backward
            backward.acquire()

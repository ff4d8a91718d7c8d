"""Around everything collective: an exception that leaves it concerns all ranks, and so do the ranks' decisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from zeroweave.comm.alarm import Alarm
from zeroweave.comm.control import Agreement, Control, Decision, decide
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.skip import Skipping
from zeroweave.errors import AgreementError, EngineError, RankFailure


@dataclass
class Progress:
    """How far an engine is: optimizer steps, and collectives issued.

    The alarm's thread asks for it, and would keep an engine alive if it had to ask that.
    """

    ledger: Ledger
    step: int = 0

    def __call__(self) -> tuple[int, int]:
        return self.step, self.ledger.count


class Agreements:
    """What the ranks of one engine compare, and decide together.

    While `transport` skips communication, each decides as if the others had said what it says.
    """

    def __init__(self, control: Control, transport: Skipping, alarm: Alarm, progress: Progress) -> None:
        self._control, self._transport = control, transport
        self._alarm, self._progress = alarm, progress
        self._backwards = 0

    def step(self, had_gradient: bytes, candidate: int) -> Decision:
        """The agreement of an optimizer step; see `comm.control.Agreement`."""
        self._backwards = 0
        step, count = self._progress()
        mine = Agreement(step, count, self._progress.ledger.hash, had_gradient, candidate)
        if self._transport.skips:
            return decide([mine])
        self._alarm.post_counts(step, count)
        return self._control.agree(mine)

    def backward(self) -> None:
        """Raises `AgreementError` unless all ranks have issued the same collectives up to this end of a backward."""
        if self._transport.skips:
            return
        self._backwards += 1
        step, count = self._progress()
        place = f"the check after backward {self._backwards}"
        try:
            self._control.agree(Agreement(step, count, self._progress.ledger.hash, b""), place)
        except AgreementError as error:
            error.add_note(f"found in {place} of step {step}")
            raise


class Guard:
    """Tells the other ranks about exceptions, and refuses what cannot work after one.

    The same exception on all ranks leaves the engine `dirty`: only what is called with `clean=False`
    (`zero_grad`, `destroy`) works until it is cleaned. An exception on some ranks ends the others. An
    EngineError is a misuse that was refused before anything happened, and leaves the engine as it is.
    """

    def __init__(self, alarm: Alarm, progress: Progress) -> None:
        self.dirty = self.destroyed = False
        self._alarm, self._progress = alarm, progress
        self._active = False

    @contextmanager
    def __call__(self, place: str, clean: bool = True) -> Iterator[None]:
        """Guards the block called `place`; blocks inside it belong to it."""
        if self.destroyed:
            raise EngineError(f"{place} on a destroyed engine: make a new one with zeroweave.initialize")
        if self._active:
            yield
            return
        self._active = True
        try:
            if self._alarm.fatal is not None:
                raise RankFailure(self._alarm.fatal)
            if clean and self.dirty:
                raise EngineError(f"{place} after an exception: call engine.zero_grad() first, on all ranks")
            yield
        except BaseException as error:
            self.dirty = self.dirty or not isinstance(error, EngineError)
            if not self._alarm.failed(place, self._progress.step, error):
                error.add_note(f"Not all ranks failed alike, so the others are ended: {self._alarm.fatal}")
            raise
        finally:
            self._active = False

    def close(self) -> None:
        """The end of the engine: everything is refused from now on."""
        self.destroyed = True
        self._alarm.close()

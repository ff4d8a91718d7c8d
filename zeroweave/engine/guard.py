"""Around everything collective: an exception that leaves it concerns all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from zeroweave.comm.ledger import Ledger
from zeroweave.errors import AgreementError, EngineError, RankFailure
from zeroweave.ranks.alarm import Alarm

_INTERRUPTED: Final = "Ranks that are interrupted do not stop at one point, so this engine cannot go on"


@dataclass
class Progress:
    """How far an engine is: optimizer steps, with those that were skipped, and collectives issued.

    The alarm's thread asks for it, and would keep an engine alive if it had to ask that.
    """

    ledger: Ledger
    step: int = 0

    def step_ended(self) -> None:
        """After each optimizer step, and each that was skipped."""
        self.step += 1

    def resume(self, step: int) -> None:
        """Continues after that many steps."""
        self.step = step

    def __call__(self) -> tuple[int, int]:
        return self.step, self.ledger.count


class Guard(AbstractContextManager[None]):
    """Tells the other ranks about exceptions, and refuses what cannot work after one.

    The same exception on all ranks leaves the engine `dirty`: only what is called with `clean=False` (`zero_grad`,
    `destroy`) works until it is cleaned. An exception on some ranks ends the others, and after Ctrl-C several ranks
    cannot continue. An EngineError is a misuse that was refused before anything happened: the engine stays as it is.
    """

    def __init__(self, alarm: Alarm, progress: Progress) -> None:
        self.dirty = self.destroyed = False
        self.alarm, self.progress = alarm, progress
        self._active = False
        self._place, self._clean = "", True
        """of the block that is open, or was last"""
        self._told: BaseException | None = None
        """the last exception that the other ranks were told of inside a block of `around`"""
        self._around = False

    def __call__(self, place: str, clean: bool = True) -> AbstractContextManager[None]:
        """Guards the block called `place`; blocks inside it belong to it.

        An error about other ranks leaves it without the frames below this one.
        """
        if self.destroyed:
            raise EngineError(f"[ZW403] {place} on a destroyed engine: make a new one with zeroweave.initialize")
        if self._active:
            return nullcontext()
        self._place, self._clean = place, clean
        return self

    # No generator: its frames would stand in every error that a user reads.
    def __enter__(self) -> None:
        self._active = True
        try:
            self.progress.ledger.at(f"in {self._place}")
            if self.alarm.fatal is not None:
                raise RankFailure(self.alarm.fatal)
            if self._clean and self.dirty:
                raise EngineError(
                    f"[ZW404] {self._place} after an exception: call engine.zero_grad() first, on all ranks"
                )
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, RankFailure | AgreementError):
                error.__traceback__, error.__cause__ = None, None  # where in here it was noticed says nothing
            if error is not None:
                self._tell(self._place, error)
        finally:
            self._active = False
            self.progress.ledger.at(f"after {self._place}")

    @contextmanager
    def cleaning(self) -> Iterator[None]:
        """What is done inside makes the engine clean; until all of it is done, it is dirty."""
        self.dirty = True
        yield
        self.dirty = False

    @contextmanager
    def around(self, place: str) -> Iterator[None]:
        """Guards a block of the user's own code, in which the engine's methods are guarded by themselves."""
        self._around = True
        try:
            yield
        except BaseException as error:
            if error is not self._told:
                self._tell(place, error)
            raise
        finally:
            self._around, self._told = False, None

    def _tell(self, place: str, error: BaseException) -> None:
        self.dirty = self.dirty or not isinstance(error, EngineError)
        if self._around:
            self._told = error
        if not self.alarm.failed(place, self.progress.step, error) and self.alarm.fatal is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            why = _INTERRUPTED if interrupted else "Not all ranks failed alike, so the others are ended"
            error.add_note(f"{why}: {self.alarm.fatal}")

    def meet(self) -> None:
        """To be called in a guarded call that only some ranks might make, before its first collective. Collective."""
        place = self.progress.ledger.call
        self.alarm.meet(place.removeprefix("in "))

    @property
    def lost(self) -> bool:
        """True if a failure has not been shared by all ranks. Then nothing collective can succeed any more."""
        return self.alarm.fatal is not None

    def close(self) -> None:
        """The end of the engine: everything is refused from now on."""
        self.destroyed = True
        self.alarm.close()

"""Faults that a test asks for: one rank dies, hangs or is slow where a phase of a step begins.

See docs/failures.md, "Faults for tests".

    ZEROWEAVE_FAULT="kill:rank=1,step=7,phase=backward"

`ACTION:KEY=VALUE,…`: the actions are `kill` (by SIGKILL), `hang` and `slow` (which takes `seconds`), the phases those
of `PHASES`. Without `rank` it strikes all ranks, without `step` each step. `step` counts the optimizer steps before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any, Final, TypeVar, cast

from zeroweave.errors import ConfigError

VARIABLE: Final = "ZEROWEAVE_FAULT"
PHASES: Final = ("forward", "backward", "update", "stage", "write", "publish")
_ACTIONS: Final = ("kill", "hang", "slow")
_KEYS: Final = ("rank", "step", "phase", "seconds")
_FORM: Final = f"{VARIABLE} must be like 'kill:rank=1,step=7,phase=backward'"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Fault:
    """What is asked for; `rank` and `step` are None for all."""

    action: str
    phase: str
    rank: int | None = None
    step: int | None = None
    seconds: float = 0.0

    @classmethod
    def asked_for(cls, environment: Mapping[str, str] = os.environ) -> Fault | None:
        """None where nobody asks, and in a job that was started again. ConfigError for what means nothing."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        fault = cls._parsed(text)
        return None if int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0) else fault

    @classmethod
    def _parsed(cls, text: str) -> Fault:
        action, colon, rest = text.partition(":")
        pairs = [pair.split("=") for pair in rest.split(",")]
        if not colon or any(len(pair) != 2 for pair in pairs):
            raise ConfigError(f"{_FORM}, not {text!r}")
        given = dict(pairs)
        if action not in _ACTIONS:
            raise ConfigError(f"{_FORM}: the actions are {', '.join(_ACTIONS)}, not {action!r}")
        if unknown := [key for key in given if key not in _KEYS]:
            raise ConfigError(f"{_FORM}: the keys are {', '.join(_KEYS)}, not {unknown[0]!r}")
        if len(given) < len(pairs):
            raise ConfigError(f"{_FORM}: a key is given twice in {text!r}")
        if given.get("phase") not in PHASES:
            found = f"not {given['phase']!r}" if "phase" in given else "and one must be given"
            raise ConfigError(f"{_FORM}: the phases are {', '.join(PHASES)}, {found}")
        if (action == "slow") != ("seconds" in given):
            raise ConfigError(f"{_FORM}: 'slow' needs seconds, and nothing else has them")
        rank, step = (_whole(given[key], key) if key in given else None for key in ("rank", "step"))
        if given["phase"] == "publish" and rank:
            raise ConfigError(f"{_FORM}: rank 0 publishes checkpoints, not rank {rank}")
        return cls(action, given["phase"], rank, step, _seconds(given.get("seconds", "0")))

    def act(self) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        while self.action == "hang":
            time.sleep(3600.0)


def _whole(text: str, key: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{_FORM}: {key} must be a whole number, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ConfigError(f"{_FORM}: seconds must be a number from 0 on, not {text!r}")
    return seconds


class Faults:
    """Attaches a fault to what begins its phase on this rank, and to nothing else. `step()`: the steps so far."""

    def __init__(self, fault: Fault | None, rank: int, world: int, step: Callable[[], int]) -> None:
        if fault is not None and (fault.rank or 0) >= world:
            raise ConfigError(f"{_FORM}: there is no rank {fault.rank} among {world} ranks")
        mine = fault is not None and fault.rank in (None, rank)
        self._fault, self._step = fault if mine else None, step
        self._last: int | None = None  # the step that it struck last

    def before(self, target: _T, method: str, phase: str) -> _T:
        """`target`, whose `method` begins the phase."""
        if self._fault is None or self._fault.phase != phase:
            return target
        return cast(_T, _Before(target, method, self._strike))

    def amid(self, items: Iterable[_T], phase: str) -> Iterator[_T]:
        """The items; the phase begins behind the first."""
        rest = iter(items)
        yield from islice(rest, 1)
        if self._fault is not None and self._fault.phase == phase:
            self._strike()
        yield from rest

    def _strike(self) -> None:
        """Once in a step."""
        fault, step = self._fault, self._step()
        if fault is not None and step != self._last and fault.step in (None, step):
            self._last = step
            fault.act()


class _Before:
    """Stands for an object: all is its own, but something happens before one of its methods."""

    def __init__(self, target: Any, method: str, first: Callable[[], None]) -> None:
        self._target, self._method, self._first = target, method, first

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name != self._method:
            return found

        @wraps(found)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._first()
            return found(*args, **kwargs)

        return called

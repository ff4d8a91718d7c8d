"""Faults that a test asks for: one rank dies, hangs or is slow where a phase of a step begins.

See docs/failures.md, "Faults for tests".

    ZEROWEAVE_FAULT="kill:rank=1,step=7,phase=backward"

`ACTION:KEY=VALUE,…`: the actions are `kill` (by SIGKILL), `hang` and `slow` (which takes `seconds`), the phases those
of `PHASES`. Without `rank` it strikes all ranks, without `step` each step. `step` counts the optimizer steps before.
"""

from __future__ import annotations

import os
import re
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
_VALUES: Final = {"phase": "|".join(PHASES), "rank": r"\d+", "step": r"\d+", "seconds": r"\d+(\.\d+)?"}
"""Keys, and a pattern of what each may be."""
_FORM: Final = (
    f"{VARIABLE} must be like 'kill:rank=1,step=7,phase=backward': one of the actions {', '.join(_ACTIONS)}, and each "
    f"once at most phase (needed: {', '.join(PHASES)}; only rank 0 publishes), rank, step and seconds (only of 'slow', "
    "which needs them)"
)
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
        action, _, rest = text.partition(":")
        pairs = [(key, value) for key, _, value in (pair.partition("=") for pair in rest.split(","))]
        given = dict(pairs)
        known = action in _ACTIONS and "phase" in given and len(given) == len(pairs)
        if not known or any(key not in _VALUES or not re.fullmatch(_VALUES[key], value) for key, value in pairs):
            raise ConfigError(f"{_FORM}, not {text!r}")
        rank, step = (int(given[key]) if key in given else None for key in ("rank", "step"))
        if (action == "slow") != ("seconds" in given) or (given["phase"] == "publish" and rank):
            raise ConfigError(f"{_FORM}, not {text!r}")
        if int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0):
            return None
        return cls(action, given["phase"], rank, step, float(given.get("seconds", 0)))

    def act(self) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        while self.action == "hang":
            time.sleep(3600.0)


class Faults:
    """Attaches a fault to what begins its phase on this rank, and to nothing else. `step()`: the steps so far."""

    def __init__(self, fault: Fault | None, rank: int, world: int, step: Callable[[], int]) -> None:
        if fault is not None and (fault.rank or 0) >= world:
            raise ConfigError(f"{VARIABLE}: there is no rank {fault.rank} among {world} ranks")
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

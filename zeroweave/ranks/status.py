"""What a rank tells the coordinator about itself, and what the coordinator knows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeVar

from zeroweave.ranks.differ import Issued
from zeroweave.ranks.process import host_of

T = TypeVar("T")
_NAMED: Final = 8
"""Ranks that a message names, at most."""


class Trail(Protocol):
    """What a rank's ledger remembers; see `Ledger`."""

    call: str
    waiting: tuple[int, float] | None
    gathers_on_entry: bool

    @property
    def mark(self) -> tuple[int, int]: ...
    @property
    def marks(self) -> tuple[Issued, ...]: ...
    def hash_at(self, count: int) -> int | None: ...
    def text_at(self, count: int) -> str: ...
    def issued_at(self, count: int) -> Issued | None: ...


@dataclass(frozen=True)
class Failure:
    """An exception that left the engine on one rank; `final` if the others cannot share it.

    `count`: the collectives issued, `operations`: those of the control group, `begun`: those begun in the program's own
    process groups, by name. `missed`: a rank did not come before the deadline. `interrupted`: by Ctrl-C, which comes at
    any point of a call.
    """

    step: int
    place: str
    count: int
    error: str
    final: bool = False
    operations: int = 0
    missed: bool = False
    interrupted: bool = False
    begun: Mapping[str, int] = field(default_factory=dict)

    @property
    def spot(self) -> tuple[int, str, int, int]:
        """Where it happened. The counts belong to it: after different collectives ranks cannot go on."""
        return self.step, self.place, self.count, self.operations


@dataclass(frozen=True)
class Wait:
    """A collective that a rank waits for. `where`: in the program, and what to do."""

    number: int
    seconds: float
    text: str
    where: str


@dataclass(frozen=True)
class Status:
    """Where a rank is. It tells so each second.

    `issued`, `hash`: its collectives. `here`: where in the program the last of them was, and what to do. `call`: where
    it is, "in forward" or "after step"; `at`: the optimizer step. `left`: how it left, "" while it is there; it issues
    no collective after that. `begun`: see `Failure`.
    """

    issued: int = 0
    hash: int = 0
    here: str = ""
    call: str = ""
    at: int = 0
    waits: Wait | None = None
    left: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)


class Brought(NamedTuple):
    """What a rank brings to an operation: `label` says where it is, `kind` how the ranks' `data` become one answer.

    `issued`: its collectives so far, of which no rank issues another one before it comes here; None: ranks may.
    It travels as a plain tuple, like the answer: a pickle of that is read in half the time.
    """

    label: str
    kind: str
    data: bytes
    deadline: float
    issued: int | None = None


@dataclass
class Member:
    """A rank, as the coordinator sees it. Times are of its `RunningClock`.

    `heard`: when it told its status last, `changed`: when it told of another number of collectives. `looks`: how often
    nothing new had come from it. `gone`: its connection ended without a word. `parted`: it knows that rank 0 has left.
    `operations`: of the control group, of which the last was at `place`.
    """

    process: str = ""
    status: Status = Status()
    failure: Failure | None = None
    failed: float = 0.0
    heard: float = 0.0
    changed: float = 0.0
    looks: int = 0
    gone: bool = False
    parted: bool = False
    operations: int = 0
    place: str = "nowhere yet"

    def greets(self, process: str, now: float) -> None:
        """One of its connections is there."""
        self.process, self.heard = process, now

    def comes(self, place: str) -> None:
        """It has begun an operation of the control group."""
        self.operations += 1
        self.place = place

    def tells(self, status: Status, now: float) -> None:
        if status.issued != self.status.issued:
            self.changed = now
        self.status, self.heard, self.looks = status, now, 0

    def looked(self) -> None:
        """The coordinator has looked once more."""
        if self.there:
            self.looks += 1

    def fails(self, failure: Failure, now: float) -> None:
        self.failure, self.failed = failure, now

    def survives(self) -> None:
        """All ranks have failed alike, and go on."""
        self.failure = None

    def parts(self) -> None:
        """The connection of its alarm has ended."""
        self.gone = not self.status.left
        self.parted = True

    def knows(self) -> None:
        """It knows that rank 0 has left, or that it must end."""
        self.parted = True

    @property
    def there(self) -> bool:
        return not (self.status.left or self.gone)


def steady(read: Callable[[], T]) -> T:
    """What a thread reads in a `Trail` that another one writes: again, where that has come in between."""
    for _ in range(100):
        with suppress(RuntimeError):
            return read()
    return read()


def nodes(members: Sequence[Member]) -> list[str]:
    """Of each rank: " on " and its host, where ranks are on several; "" for all otherwise."""
    hosts = [host_of(member.process) for member in members]
    return [f" on {host}" if host and len({*hosts} - {""}) > 1 else "" for host in hosts]


def tell(rank: int, failure: Failure, node: str = "") -> str:
    return f"rank {rank}{node} failed in {failure.place} at step {failure.step}: {failure.error}"


def describe(error: BaseException, limit: int = 2000) -> str:
    """The type and the text of an exception."""
    return f"{type(error).__name__}: {error}"[:limit]


def names(ranks: Mapping[int, str]) -> str:
    """The first of these ranks, with what is said of each, and how many more there are."""
    told = [f"rank {rank}{said}" for rank, said in list(ranks.items())[:_NAMED]]
    return " and ".join(told) + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")

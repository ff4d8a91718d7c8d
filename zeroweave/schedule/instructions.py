"""The words of a schedule: calls, the instructions woven around them, and the events of a recorded step.

Buckets are named by their integer ids. Everything here is frozen and hashable and knows no torch.

Where a bucket is replicated, ``Reduce`` and ``Unshard`` stay inside a sharding group. ``ReduceAcross`` and
``GatherAcross`` go across groups.

An ``End`` is there only for a call inside which another event is (a call nested in it or overlapping it, a
``Reduce``), or while the same call is open twice, where one ``Run`` could not tell which of them ends.

Events are what the runtime records of one optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from zeroweave.errors import ScheduleError

Phase: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of a template or of an eager module; equal calls may occur several times in a step."""

    name: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class OfBucket:
    """An instruction about one bucket."""

    bucket: int


@dataclass(frozen=True, slots=True)
class OfCall:
    """An instruction about the ``number``-th, from 0, of the step's equal forward calls."""

    call: Call
    number: int = 0


class Unshard(OfBucket):
    """Takes a hold on the bucket; the first hold starts the all-gather."""


class Wait(OfBucket):
    """Makes the gathered values usable."""


class Reshard(OfBucket):
    """Drops a hold; the storage goes with the last one."""


class Reduce(OfBucket):
    """Starts the reduce-scatter of the bucket's gradients."""


class Settle(OfBucket):
    """Copies or adds the result of the oldest reduction in flight into the gradient shard."""


class ReduceAcross(OfBucket):
    """Starts the reduction of the window's sum across groups; a ``Settle`` of its own makes it usable."""


class GatherAcross(OfBucket):
    """Brings what an ``Update`` has changed to all groups."""


class Update(OfBucket):
    """Runs the optimizer on the bucket's fragments."""


class Stage(OfBucket):
    """Starts to copy what a checkpoint wants of the bucket into host memory. Nothing while none is being saved."""


class Offload(OfCall):
    """Starts to copy what the call has saved into host memory."""


class Release(OfCall):
    """Waits for that copy and frees the device memory."""


class Reload(OfCall):
    """Starts to bring it back."""


@dataclass(frozen=True, slots=True)
class Run:
    """Starts a call, which reads the buckets in ``uses``. Where nothing happens inside the call, it ends there, too."""

    call: Call
    uses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The end of a call."""

    call: Call


@dataclass(frozen=True, slots=True)
class Free:
    """Frees the activations that no backward has used up."""


Instruction: TypeAlias = (
    Unshard
    | Wait
    | Run
    | End
    | Reshard
    | Reduce
    | Settle
    | ReduceAcross
    | GatherAcross
    | Update
    | Free
    | Offload
    | Release
    | Reload
    | Stage
)


Prepares: TypeAlias = Wait | Reload | Release | Offload
"""What stands directly before a ``Run``. Everything that is issued ahead of the call goes before it."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A call starts and needs the values of the buckets in ``uses`` until it is left."""

    call: Call
    uses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """A call ends; of equal calls that are open at once, the one entered last."""

    call: Call


@dataclass(frozen=True, slots=True)
class Ready:
    """A bucket's gradients of this backward are complete and its turn to be reduced has come."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Micro:
    """The end of an outermost backward: the boundary between two micro-steps."""


@dataclass(frozen=True, slots=True)
class Needed:
    """A backward asks for what the ``number``-th of the step's equal calls, from 0, has saved.

    ``nbytes``: of what can be moved to host memory, without what later calls have saved as well.
    """

    call: Call
    number: int
    nbytes: int


Event: TypeAlias = Entered | Left | Ready | Micro | Needed


def is_event(instruction: Instruction) -> bool:
    """True if the instruction belongs to the record."""
    return isinstance(instruction, Run | End | Reduce)


def is_backward(event: Event) -> bool:
    """True if it happens in a backward, or after one."""
    if isinstance(event, Entered | Left):
        return event.call.phase == "backward"
    return not isinstance(event, Needed)


def ends(record: Iterable[Event]) -> frozenset[int]:
    """Indices of the ``Left`` events that become an ``End`` (see the module's text).

    Raises ScheduleError for a call that is left without being entered or never left.
    """
    marked: set[int] = set()
    open_calls: dict[Call, list[int]] = {}  # call -> number of events up to and including each of its Entered
    seen = 0
    for index, event in enumerate(record):
        if isinstance(event, Micro | Needed):
            continue
        seen += 1
        if isinstance(event, Entered):
            open_calls.setdefault(event.call, []).append(seen)
        elif isinstance(event, Left):
            started = open_calls.get(event.call)
            if not started:
                raise ScheduleError(f"[ZW704] record, event {index}: {event.call} is left but was not entered")
            nothing_inside = started.pop() == seen - 1
            if started or not nothing_inside:
                marked.add(index)
    for call, started in open_calls.items():
        if started:
            raise ScheduleError(f"[ZW704] record: {call} is entered but never left")
    return frozenset(marked)


def numbered(record: tuple[Event, ...]) -> Iterator[tuple[int, Event, bool]]:
    """Each event, how many instructions of ``project`` come before it, and whether it becomes one of them."""
    marked = ends(record)
    before = 0
    for index, event in enumerate(record):
        becomes = isinstance(event, Entered | Ready) or index in marked
        yield before, event, becomes
        before += becomes


def project(record: tuple[Event, ...]) -> tuple[Run | End | Reduce, ...]:
    """The ``Run``, ``End`` and ``Reduce`` instructions of every schedule of this record, in order."""
    out: list[Run | End | Reduce] = []
    for _, event, becomes in numbered(record):
        match event:
            case Entered(call, uses):
                out.append(Run(call, uses))
            case Left(call) if becomes:
                out.append(End(call))
            case Ready(bucket):
                out.append(Reduce(bucket))
    return tuple(out)


def reduce_order(record: Iterable[Event]) -> tuple[int, ...]:
    """The buckets in the order of their first reductions in the window's last reducing backward."""
    order: dict[int, None] = {}
    over = False
    for event in record:
        if isinstance(event, Micro):
            over = True
        elif isinstance(event, Ready):
            if over:
                order.clear()
                over = False
            order[event.bucket] = None
    return tuple(order)

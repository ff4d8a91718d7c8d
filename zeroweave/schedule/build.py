"""From the record of one optimizer step to its schedule, and the schedule itself.

``build`` makes the plainest schedule that is right: each call gathers what it uses when it is entered and
drops it when it is left. The passes improve it; ``verify`` checks the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import xxhash

from zeroweave.errors import ScheduleError
from zeroweave.schedule.instructions import (
    Call,
    End,
    Entered,
    Event,
    Free,
    Instruction,
    Left,
    Micro,
    Ready,
    Reduce,
    Reshard,
    Run,
    Settle,
    Unshard,
    Update,
    Wait,
    ends,
)


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """What a schedule needs to know of a bucket; ``nbytes`` is the full flat's, padding included."""

    id: int
    name: str
    nbytes: int
    trainable: bool


@dataclass(frozen=True)
class Facts:
    """What decides the schedule of a given record.

    keep: buckets that stay unsharded from their first use to the end of the step (stages 1 and 2: all).
    depth: reductions in flight at most, at least 1.
    prefetch: how many calls ahead gathers are issued, at least 0 (see passes/prefetch.py).
    update_by_bucket: update each bucket as soon as its last reduction has settled; possible where the
    optimizer needs nothing global (no clipping, no overflow check).
    free: let go of unused activations before the optimizer (see passes/free.py).
    """

    buckets: tuple[BucketFacts, ...]
    keep: frozenset[int]
    depth: int
    prefetch: int
    update_by_bucket: bool
    free: bool = False

    def __post_init__(self) -> None:
        if len(self.by_id) != len(self.buckets):
            raise ScheduleError("two buckets have the same id")
        if unknown := sorted(self.keep - self.by_id.keys()):
            raise ScheduleError(f"keep names unknown buckets: {unknown}")
        if self.depth < 1 or self.prefetch < 0:
            raise ScheduleError(f"depth must be at least 1 and prefetch at least 0, not {self.depth}, {self.prefetch}")

    @cached_property
    def by_id(self) -> dict[int, BucketFacts]:
        return {bucket.id: bucket for bucket in self.buckets}

    def name(self, bucket: int) -> str:
        return self.by_id[bucket].name if bucket in self.by_id else f"<unknown bucket {bucket}>"


@dataclass(frozen=True)
class Schedule:
    """The ordered instructions of one optimizer step, with the record and the facts they were made from."""

    instructions: tuple[Instruction, ...]
    record: tuple[Event, ...]
    facts: Facts

    def describe(self, instruction: Instruction) -> str:
        """One instruction in words, buckets by name: ``Run layers.0 forward [layers.0]``."""
        name = self.facts.name
        match instruction:
            case Run(call, uses):
                values = f" [{', '.join(map(name, uses))}]" if uses else ""
                return f"Run {call.name} {call.phase}{values}"
            case End(call):
                return f"End {call.name} {call.phase}"
            case Free():
                return "Free"
            case _:
                return f"{type(instruction).__name__} {name(instruction.bucket)}"

    @cached_property
    def _lines(self) -> tuple[tuple[Instruction, ...], ...]:
        """The instructions in groups, each closed by the Run, End, Reduce or Update it leads to."""
        lines: list[tuple[Instruction, ...]] = []
        line: list[Instruction] = []
        for instruction in self.instructions:
            line.append(instruction)
            if isinstance(instruction, Run | End | Reduce | Update):
                lines.append(tuple(line))
                line = []
        return (*lines, tuple(line)) if line else tuple(lines)

    def _spell(self, line: tuple[Instruction, ...]) -> str:
        return " · ".join(map(self.describe, line))

    def text(self) -> str:
        """The whole schedule; each line leads to one ``Run``, ``End``, ``Reduce`` or ``Update``."""
        return "\n".join(map(self._spell, self._lines))

    def of(self, name: str) -> tuple[str, ...]:
        """The lines of text() that touch a block: its calls, its buckets, and those of modules inside it."""

        def inside(other: str) -> bool:
            rest = other.removeprefix(name)
            return other.startswith(name) and not (rest[:1].isalnum() or rest[:1] == "_")

        def touches(instruction: Instruction) -> bool:
            if isinstance(instruction, Run | End):
                if inside(instruction.call.name):
                    return True
                return isinstance(instruction, Run) and any(inside(self.facts.name(b)) for b in instruction.uses)
            return not isinstance(instruction, Free) and inside(self.facts.name(instruction.bucket))

        return tuple(self._spell(line) for line in self._lines if any(map(touches, line)))

    def collectives(self) -> tuple[tuple[str, int], ...]:
        """What is issued, in order: ("all_gather" or "reduce_scatter", bucket)."""
        out: list[tuple[str, int]] = []
        holds: dict[int, int] = {}
        for instruction in self.instructions:
            match instruction:
                case Unshard(bucket):
                    if not holds.get(bucket, 0):  # a second hold gathers nothing
                        out.append(("all_gather", bucket))
                    holds[bucket] = holds.get(bucket, 0) + 1
                case Reshard(bucket):
                    holds[bucket] = holds.get(bucket, 0) - 1
                case Reduce(bucket):
                    out.append(("reduce_scatter", bucket))
        return tuple(out)

    def reduce_order(self) -> tuple[int, ...]:
        """The buckets in the order of their first reductions in the window's last reducing backward."""
        order: dict[int, None] = {}
        over = False
        for event in self.record:
            if isinstance(event, Micro):
                over = True
            elif isinstance(event, Ready):
                if over:
                    order.clear()
                    over = False
                order[event.bucket] = None
        return tuple(order)

    @cached_property
    def fingerprint(self) -> int:
        """64 bits, never 0, equal on ranks whose collectives (kind, bucket, order) and facts are equal."""
        facts = self.facts
        words = [f"{kind} {bucket}" for kind, bucket in self.collectives()]
        words += [f"{b.id} {b.name!r} {b.nbytes} {b.trainable}" for b in facts.buckets]
        words += [f"{sorted(facts.keep)} {facts.depth} {facts.prefetch} {facts.update_by_bucket} {facts.free}"]
        return xxhash.xxh3_64_intdigest("\n".join(words).encode()) or 1


def build(record: tuple[Event, ...], facts: Facts) -> Schedule:
    """The plain schedule of a record: no gather is shared between calls and none is issued early.

    Entered: ``Unshard`` every bucket used, ``Wait`` for each, ``Run``. A kept bucket is unsharded at its
    first use only; kept buckets that no call uses, once, before the first backward event, so that ranks which
    skip a branch gather the same. Left: ``Reshard`` what is not kept. Ready: ``Settle`` the oldest reductions
    until one more fits (``depth``, and none of this bucket in flight), ``Reduce``. At the end the rest
    settles, every reduced bucket is updated in the order of its last ``Settle``, and the kept buckets are
    dropped.

    Raises ScheduleError for a record that no schedule can fit: calls left and not entered or the reverse,
    unknown buckets, gradients of a bucket that is not trainable.
    """
    marked = ends(record)
    out: list[Instruction] = []
    open_calls: dict[Call, list[tuple[int, ...]]] = {}
    kept: dict[int, None] = {}  # kept buckets that are unsharded, in that order
    in_flight: deque[int] = deque()
    settled: dict[int, None] = {}  # in the order of each bucket's last Settle
    used = {bucket for event in record if isinstance(event, Entered) for bucket in event.uses}
    unused = sorted(facts.keep - used)  # kept, used by no call, not yet unsharded

    def unshard(buckets: Iterable[int]) -> None:
        needed = [bucket for bucket in buckets if bucket not in kept]
        kept.update((bucket, None) for bucket in needed if bucket in facts.keep)
        out.extend(map(Unshard, needed))
        out.extend(map(Wait, needed))

    def settle() -> int:
        bucket = in_flight.popleft()
        out.append(Settle(bucket))
        settled.pop(bucket, None)
        settled[bucket] = None
        return bucket

    for index, event in enumerate(record):
        if unused and _is_backward(event):
            unshard(unused)
            unused = []
        match event:
            case Entered(call, uses):
                if unknown := [bucket for bucket in uses if bucket not in facts.by_id]:
                    raise ScheduleError(f"record, event {index}: {call} uses unknown buckets {unknown}")
                distinct = tuple(dict.fromkeys(uses))
                unshard(distinct)
                out.append(Run(call, uses))
                open_calls.setdefault(call, []).append(distinct)
            case Left(call):
                if index in marked:
                    out.append(End(call))
                out.extend(Reshard(bucket) for bucket in open_calls[call].pop() if bucket not in facts.keep)
            case Ready(bucket):
                if bucket not in facts.by_id or not facts.by_id[bucket].trainable:
                    raise ScheduleError(
                        f"record, event {index}: gradients of {facts.name(bucket)}, not a trainable bucket"
                    )
                while len(in_flight) >= facts.depth or bucket in in_flight:
                    settle()
                out.append(Reduce(bucket))
                in_flight.append(bucket)
    unshard(unused)

    if facts.update_by_bucket:
        # What has settled is updated first: it hides the reductions still in flight.
        out.extend(Update(bucket) for bucket in settled if bucket not in in_flight)
        while in_flight:
            out.append(Update(settle()))
    else:
        while in_flight:
            settle()
        out.extend(map(Update, settled))
    out.extend(map(Reshard, kept))
    return Schedule(tuple(out), tuple(record), facts)


def _is_backward(event: Event) -> bool:
    if isinstance(event, Entered | Left):
        return event.call.phase == "backward"
    return True

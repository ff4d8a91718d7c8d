"""From the record of one optimizer step to its schedule, and the schedule itself.

``build`` makes the plainest schedule that is right: each call gathers what it uses when it is entered and
drops it when it is left. The passes improve it; ``verify`` checks the result.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from functools import cached_property

import xxhash

from zeroweave.errors import ScheduleError
from zeroweave.schedule.facts import Facts
from zeroweave.schedule.instructions import (
    Call,
    End,
    Entered,
    Event,
    Free,
    GatherAcross,
    Instruction,
    Left,
    Micro,
    OfCall,
    Ready,
    Reduce,
    ReduceAcross,
    Reshard,
    Run,
    Settle,
    Unshard,
    Update,
    Wait,
    ends,
    is_backward,
    numbered,
    project,
    reduce_order,
)
from zeroweave.schedule.listing import Listing
from zeroweave.schedule.save import read, write
from zeroweave.schedule.verify import verify


class Schedule(Listing):
    """A listing that can be printed, compared between ranks, and saved."""

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
            if isinstance(instruction, Run | End | OfCall):
                if inside(instruction.call.name):
                    return True
                return isinstance(instruction, Run) and any(inside(self.facts.name(b)) for b in instruction.uses)
            return not isinstance(instruction, Free) and inside(self.facts.name(instruction.bucket))

        return tuple(self._spell(line) for line in self._lines if any(map(touches, line)))

    @cached_property
    def reduce_order(self) -> tuple[int, ...]:
        """See `reduce_order`."""
        return reduce_order(self.record)

    @cached_property
    def micro_steps(self) -> tuple[int, ...]:
        """For each Run, End and Reduce, in order: the number of backwards of the window that have ended before it."""
        found: list[int] = []
        ended = 0
        for _, event, becomes in numbered(self.record):
            if becomes:
                found.append(ended)
            ended += isinstance(event, Micro)
        return tuple(found)

    @cached_property
    def fingerprint(self) -> int:
        """64 bits, never 0, equal on ranks whose collectives (kind, bucket, order) and facts are equal."""
        return xxhash.xxh3_64_intdigest("\n".join(self.words()).encode()) or 1

    @cached_property
    def shape(self) -> int:
        """64 bits that are equal where the records have equal events. What is sent between them does not count."""
        return xxhash.xxh3_64_intdigest("\n".join(map(self.describe, project(self.record))).encode())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a JSON file, with its record, its facts and what was measured."""
        write(path, self.instructions, self.record, self.facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """A schedule that was saved, equal to it and verified.

        Raises ScheduleError, naming the file and what is wrong in it, for a file of another version, another
        file, and a schedule that is not right.
        """
        file = read(path)
        schedule = cls(file.instructions, file.record, file.facts)
        try:
            verify(schedule)
        except ScheduleError as error:
            raise ScheduleError(f"[ZW703] {os.fspath(path)}: {error}") from None
        return schedule

    def words(self) -> list[str]:
        """What all ranks must have in common: collectives in order, buckets, settings."""
        facts = self.facts
        words = [f"{kind} {facts.name(bucket)}" for kind, bucket in self.collectives()]
        words += [f"{b.id} {b.name!r} {b.nbytes} {b.trainable}" for b in facts.buckets]
        words += [f"{sorted(facts.kept_by_stage)} {facts.depth} {facts.prefetch} {facts.update_by_bucket} {facts.free}"]
        words += [f"{facts.keep if facts.keep == 'auto' else sorted(facts.keep)} {facts.memory}"]
        words += ["activations are moved to host memory"] * facts.offload
        words += ["buckets are staged for checkpoints"] * facts.stage
        across = (each for each in self.instructions if isinstance(each, ReduceAcross | GatherAcross))
        words += [f"{type(each).__name__} {facts.name(each.bucket)}" for each in across]
        words += [f"{facts.name(bucket)} stays gathered" for bucket in sorted(self.stays)]
        words += [
            f"{facts.name(bucket)} is gathered in registered buffer {number}"
            for bucket, number in sorted(self.registered_buffers.items())
        ]
        words += [f"{facts.name(bucket)} is gathered by copy engine" for bucket in sorted(facts.copied)]
        return words


def build(record: tuple[Event, ...], facts: Facts) -> Schedule:
    """The plain schedule of a record: no gather is shared between calls and none is issued early.

    Entered: ``Unshard`` every bucket used, ``Wait`` for each, ``Run``. A kept bucket is unsharded at its
    first use only; kept buckets that no call uses, once, before the first backward event, so that ranks which
    skip a branch gather the same. Left: ``Reshard`` what is not kept. Ready: ``Settle`` the oldest reductions
    until one more fits (``depth``, and none of this bucket in flight), ``Reduce``. At the end the
    rest settles, every reduced bucket is updated in the order of its last ``Settle``, and the kept buckets are
    dropped, but for those that no update changes. Replicated buckets: after the last ``Settle`` a ``ReduceAcross``
    each, in the order of their reductions, and one more ``Settle`` before the update. Those that are spread: after all
    updates a ``GatherAcross`` each, in the order of the layout. A rank that has departed uses the same two orders,
    because other ranks may still follow the schedule.

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
    unused = sorted(facts.kept_by_stage - used)  # kept, used by no call, not yet unsharded
    at_once = len(facts.kept_by_stage) < len(facts.by_id)  # at stage 3: ranks may use these in their own calls

    def unshard(buckets: Iterable[int]) -> None:
        needed = [bucket for bucket in buckets if bucket not in kept]
        kept.update((bucket, None) for bucket in needed if bucket in facts.kept_by_stage)
        out.extend(map(Unshard, needed))
        out.extend(map(Wait, needed))

    def settle() -> int:
        bucket = in_flight.popleft()
        out.append(Settle(bucket))
        settled.pop(bucket, None)
        settled[bucket] = None
        return bucket

    for index, event in enumerate(record):
        if unused and (at_once or is_backward(event)):
            unshard(unused)
            unused = []
        match event:
            case Entered(call, uses):
                if unknown := [bucket for bucket in uses if bucket not in facts.by_id]:
                    raise ScheduleError(f"[ZW704] record, event {index}: {call} uses unknown buckets {unknown}")
                distinct = tuple(dict.fromkeys(uses))
                unshard(distinct)
                out.append(Run(call, uses))
                open_calls.setdefault(call, []).append(distinct)
            case Left(call):
                if index in marked:
                    out.append(End(call))
                out.extend(Reshard(bucket) for bucket in open_calls[call].pop() if bucket not in facts.kept_by_stage)
            case Ready(bucket):
                if bucket not in facts.by_id or not facts.by_id[bucket].trainable:
                    raise ScheduleError(
                        f"[ZW704] record, event {index}: gradients of {facts.name(bucket)}, not a trainable bucket"
                    )
                while bucket in in_flight or facts.load((*in_flight, bucket)) > facts.depth:
                    settle()
                out.append(Reduce(bucket))
                in_flight.append(bucket)
    unshard(unused)

    if facts.update_by_bucket and not facts.replicated:
        # What has settled is updated first: it hides the reductions still in flight.
        out.extend(Update(bucket) for bucket in settled if bucket not in in_flight)
        while in_flight:
            out.append(Update(settle()))
    else:
        while in_flight:
            settle()
        across = [bucket for bucket in reduce_order(record) if bucket in facts.replicated]
        out.extend(map(ReduceAcross, across))
        if facts.update_by_bucket:
            out.extend(each for bucket in across for each in (Settle(bucket), Update(bucket)))
        else:
            out.extend(map(Settle, across))
            out.extend(map(Update, settled))
    out.extend(GatherAcross(bucket) for bucket in sorted(facts.spread.intersection(settled)))
    out.extend(Reshard(bucket) for bucket in kept if facts.by_id[bucket].trainable)
    return Schedule(tuple(out), tuple(record), facts)

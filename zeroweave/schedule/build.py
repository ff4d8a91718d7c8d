"""From the record of one optimizer step to its schedule, and the schedule itself.

``build`` makes the plainest schedule that is right: each call gathers what it uses when it is entered and
drops it when it is left. The passes improve it; ``verify`` checks the result.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import xxhash

from zeroweave.errors import ScheduleError
from zeroweave.schedule.facts import Costs, Facts, Kind
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
    Offload,
    Prepares,
    Ready,
    Reduce,
    ReduceAcross,
    Release,
    Reload,
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
from zeroweave.schedule.moves import Move, moves_of
from zeroweave.schedule.save import read, write
from zeroweave.schedule.verify import verify


@dataclass(frozen=True)
class Schedule:
    """The ordered instructions of one optimizer step, with the record and the facts they were made from."""

    instructions: tuple[Instruction, ...]
    record: tuple[Event, ...]
    facts: Facts

    @cached_property
    def costs(self) -> Costs | None:
        """The measured costs of this record; None where nothing was measured, or another record."""
        costs = self.facts.costs
        events = sum(isinstance(i, Run | End | Reduce) for i in self.instructions)
        return costs if costs is not None and len(costs.compute) == events else None

    @cached_property
    def calls(self) -> dict[tuple[Call, int], tuple[int, int]]:
        """For each call, by number: the index of its Run, and that of its End, or of its Run again if it has none.

        An End closes the last open Run of its call.
        """
        found: dict[tuple[Call, int], tuple[int, int]] = {}
        begun: Counter[Call] = Counter()
        unmatched: dict[Call, list[int]] = {}
        for index, instruction in enumerate(self.instructions):
            if isinstance(instruction, Run):
                call, number = instruction.call, begun[instruction.call]
                found[call, number] = index, index
                unmatched.setdefault(call, []).append(number)
                begun[call] += 1
            elif isinstance(instruction, End) and unmatched.get(instruction.call):
                key = instruction.call, unmatched[instruction.call].pop()
                found[key] = found[key][0], index
        return found

    @cached_property
    def lasting(self) -> frozenset[int]:
        """Indices of the Runs whose calls last until an End."""
        return frozenset(run for run, end in self.calls.values() if run != end)

    @cached_property
    def gathers(self) -> frozenset[int]:
        """Indices of the Unshards that start a gather: those that take the first hold, unless the bucket stays."""
        return self._first_and_last_holds[0]

    @cached_property
    def drops(self) -> frozenset[int]:
        """Indices of the Reshards with which the storage goes: those that drop the last hold."""
        return self._first_and_last_holds[1]

    @cached_property
    def stays(self) -> frozenset[int]:
        """Buckets that are still held at the end: gathered once, and again only after what changes them."""
        held: Counter[int] = Counter(i.bucket for i in self.instructions if isinstance(i, Unshard))
        held.subtract(i.bucket for i in self.instructions if isinstance(i, Reshard))
        return frozenset((+held).keys())

    def by_copy_engine(self, kind: Kind, bucket: int) -> bool:
        """True if a collective runs in its own queue, concurrently with those by kernel."""
        return kind == "all_gather" and bucket in self.facts.copied and bucket in self.places

    @cached_property
    def _first_and_last_holds(self) -> tuple[frozenset[int], frozenset[int]]:
        first, last, holds = set(), set(), Counter(self.stays)
        for index, instruction in enumerate(self.instructions):
            match instruction:
                case Unshard(bucket):
                    holds[bucket] += 1
                    if holds[bucket] == 1:
                        first.add(index)
                case Reshard(bucket):
                    holds[bucket] -= 1
                    if not holds[bucket]:
                        last.add(index)
        return frozenset(first), frozenset(last)

    @cached_property
    def places(self) -> dict[int, int]:
        """The place, from 0, of each gathered bucket of ``facts.placed``: the memory in which it takes turns.

        Two that are gathered at the same time differ. A bucket that stays from step to step, because nothing changes
        it, has no place. A bucket has one place, however often it is gathered. A place is as large as the largest
        bucket in it, so the large buckets choose first, each the lowest place that it can have: they share what is
        large. Those of equal size choose in the order of their first gathers.
        """
        neighbours: dict[int, set[int]] = {}  # with which others a bucket is gathered at some time
        live: set[int] = set()
        for index, instruction in enumerate(self.instructions):
            match instruction:
                case Unshard(bucket) if index in self.gathers and bucket in self.facts.placed:
                    neighbours.setdefault(bucket, set()).update(live)
                    for other in live:
                        neighbours[other].add(bucket)
                    live.add(bucket)
                case Reshard(bucket) if index in self.drops:
                    live.discard(bucket)
        places: dict[int, int] = {}
        for bucket in sorted(neighbours, key=lambda each: -self.facts.sizes[each]):
            taken = {places[other] for other in neighbours[bucket] if other in places}
            places[bucket] = next(place for place in count() if place not in taken)
        return places

    @cached_property
    def place_sizes(self) -> dict[int, int]:
        """Bytes of each place, by number: those of the largest bucket in it."""
        sizes: dict[int, int] = {}
        for bucket, place in self.places.items():
            sizes[place] = max(sizes.get(place, 0), self.facts.sizes[bucket])
        return sizes

    @cached_property
    def moves(self) -> dict[tuple[Call, int], Move]:
        """What there is to move to host memory, by call: as all ranks have agreed, else what this record has."""
        agreed = moves_of(self.record) if self.costs is None else self.costs.moves
        return {move.key: move for move in agreed}

    def rearranged(self, moved: Mapping[int, Iterable[Instruction]], taken: Collection[int] = ()) -> Schedule:
        """With ``moved[i]`` before index i, and without the instructions at the indices ``taken``."""
        if not (moved or taken):
            return self
        out: list[Instruction] = []
        for index, instruction in enumerate(self.instructions):
            out.extend(moved.get(index, ()))
            if index not in taken:
                out.append(instruction)
        return replace(self, instructions=tuple(out))

    def slot(self, index: int) -> int:
        """The index before a ``Run`` and what prepares it; ``index`` itself for any other instruction."""
        if isinstance(self.instructions[index], Run):
            while index and isinstance(self.instructions[index - 1], Prepares):
                index -= 1
        return index

    def describe(self, instruction: Instruction) -> str:
        """One instruction in words, buckets by name: ``Run layers.0 forward [layers.0]``, ``Unshard layers.1 at 0``."""
        name = self.facts.name
        match instruction:
            case Run(call, uses):
                values = f" [{', '.join(map(name, uses))}]" if uses else ""
                return f"Run {call.name} {call.phase}{values}"
            case End(call):
                return f"End {call.name} {call.phase}"
            case Offload(call, number) | Release(call, number) | Reload(call, number):
                return f"{type(instruction).__name__} {call.name}" + (f" #{number}" if number else "")
            case Free():
                return "Free"
            case Unshard(bucket) if bucket in self.stays:
                return f"Unshard {name(bucket)} (stays)"
            case Unshard(bucket) if bucket in self.places:
                return f"Unshard {name(bucket)} at {self.places[bucket]}"
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
            if isinstance(instruction, Run | End | Offload | Release | Reload):
                if inside(instruction.call.name):
                    return True
                return isinstance(instruction, Run) and any(inside(self.facts.name(b)) for b in instruction.uses)
            return not isinstance(instruction, Free) and inside(self.facts.name(instruction.bucket))

        return tuple(self._spell(line) for line in self._lines if any(map(touches, line)))

    @cached_property
    def sends(self) -> dict[int, tuple[Kind, int]]:
        """The collectives (kind, bucket), by the index of the instruction that issues each, in order."""
        out: dict[int, tuple[Kind, int]] = {}
        for index, instruction in enumerate(self.instructions):
            if isinstance(instruction, Reduce):
                out[index] = "reduce_scatter", instruction.bucket
            elif isinstance(instruction, Unshard) and index in self.gathers:
                out[index] = "all_gather", instruction.bucket
        return out

    def collectives(self) -> tuple[tuple[str, int], ...]:
        """What is issued, in order: ("all_gather" or "reduce_scatter", bucket)."""
        return tuple(self.sends.values())

    @cached_property
    def producers(self) -> dict[int, int]:
        """By the index of each ``Wait`` and ``Settle``: that of the instruction that started what it waits for.

        A ``Wait`` for what stays from the step before has none.
        """
        found: dict[int, int] = {}
        gathers: dict[int, int] = {}  # bucket -> its last gather
        flying: dict[int, deque[int]] = {}  # bucket -> its reductions that are not settled
        for index, instruction in enumerate(self.instructions):
            match instruction:
                case Unshard(bucket) if index in self.gathers:
                    gathers[bucket] = index
                case Wait(bucket) if bucket in gathers:
                    found[index] = gathers[bucket]
                case Reduce(bucket) | ReduceAcross(bucket):
                    flying.setdefault(bucket, deque()).append(index)
                case Settle(bucket):
                    found[index] = flying[bucket].popleft()
        return found

    @cached_property
    def reductions(self) -> dict[int, int]:
        """By the index of each ``Settle`` of a ``Reduce``: that of the latter."""
        pairs = self.producers.items()
        return {settle: index for settle, index in pairs if isinstance(self.instructions[index], Reduce)}

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
        words += [f"{facts.name(bucket)} lies in place {place}" for bucket, place in sorted(self.places.items())]
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
    updates a ``GatherAcross`` each, in the order of the layout. Both orders are also those of a rank that has departed:
    ranks may depart alone.

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

"""The instructions of a schedule, and what follows from them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Self

from zeroweave.schedule.facts import Costs, Facts, Kind
from zeroweave.schedule.instructions import (
    Call,
    End,
    Event,
    Free,
    Instruction,
    OfCall,
    Prepares,
    Reduce,
    ReduceAcross,
    Reshard,
    Run,
    Settle,
    Unshard,
    Wait,
    is_event,
)
from zeroweave.schedule.moves import Move, moves_of


@dataclass(frozen=True)
class Listing:
    """The ordered instructions of one optimizer step, with the record and the facts they were made from."""

    instructions: tuple[Instruction, ...]
    record: tuple[Event, ...]
    facts: Facts

    @cached_property
    def costs(self) -> Costs | None:
        """The measured costs of this record; None where nothing was measured, or another record."""
        costs = self.facts.costs
        events = sum(map(is_event, self.instructions))
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
        return kind == "all_gather" and bucket in self.facts.copied and bucket in self.registered_buffers

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
    def registered_buffers(self) -> dict[int, int]:
        """The number, from 0, of the registered buffer in which each bucket of ``facts.registered`` is gathered.

        Two that are gathered at the same time differ. A bucket that stays from step to step, because nothing changes
        it, has none. A bucket has one, however often it is gathered. A buffer is as large as the largest bucket in it,
        so the large buckets choose first, each the lowest number that it can have: they share what is large. Those of
        equal size choose in the order of their first gathers.
        """
        neighbours: dict[int, set[int]] = {}  # with which others a bucket is gathered at some time
        live: set[int] = set()
        for index, instruction in enumerate(self.instructions):
            match instruction:
                case Unshard(bucket) if index in self.gathers and bucket in self.facts.registered:
                    neighbours.setdefault(bucket, set()).update(live)
                    for other in live:
                        neighbours[other].add(bucket)
                    live.add(bucket)
                case Reshard(bucket) if index in self.drops:
                    live.discard(bucket)
        numbers: dict[int, int] = {}
        for bucket in sorted(neighbours, key=lambda each: -self.facts.sizes[each]):
            taken = {numbers[other] for other in neighbours[bucket] if other in numbers}
            numbers[bucket] = next(number for number in count() if number not in taken)
        return numbers

    @cached_property
    def registered_sizes(self) -> dict[int, int]:
        """Bytes of each registered buffer, by number: those of the largest bucket in it."""
        sizes: dict[int, int] = {}
        for bucket, number in self.registered_buffers.items():
            sizes[number] = max(sizes.get(number, 0), self.facts.sizes[bucket])
        return sizes

    @cached_property
    def moves(self) -> dict[tuple[Call, int], Move]:
        """What there is to move to host memory, by call: as all ranks have agreed, else what this record has."""
        agreed = moves_of(self.record) if self.costs is None else self.costs.moves
        return {move.key: move for move in agreed}

    def rearranged(self, moved: Mapping[int, Iterable[Instruction]], taken: Collection[int] = ()) -> Self:
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
            case OfCall(call, number):
                return f"{type(instruction).__name__} {call.name}" + (f" #{number}" if number else "")
            case Free():
                return "Free"
            case Unshard(bucket) if bucket in self.stays:
                return f"Unshard {name(bucket)} (stays)"
            case Unshard(bucket) if bucket in self.registered_buffers:
                return f"Unshard {name(bucket)} at {self.registered_buffers[bucket]}"
            case _:
                return f"{type(instruction).__name__} {name(instruction.bucket)}"

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

"""The dependency graph of a schedule: which instruction must wait for which other one, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Literal, TypeAlias

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import collective_seconds, is_event
from zeroweave.schedule.facts import Costs, Kind
from zeroweave.schedule.instructions import (
    Call,
    End,
    GatherAcross,
    Reduce,
    ReduceAcross,
    Reshard,
    Run,
    Settle,
    Unshard,
    Update,
    Wait,
)

Reason: TypeAlias = Literal["compute", "values", "gradient", "storage", "lane"]
"""compute: the order of the record. values: a call needs its bucket
gathered. gradient: a reduction needs the gradient, its settling the result, the update what has settled. storage: a
gather needs what the drop before it freed, a drop the last call that reads. lane: collectives run in the order of their
issue, those by copy engine concurrently with the others."""

_End: TypeAlias = tuple[float, tuple[int, Reason] | None]


@dataclass(frozen=True)
class Graph:
    """Edges between the indices of a schedule's instructions; each leads from lower to higher."""

    schedule: Schedule
    edges: tuple[tuple[int, int, Reason], ...]

    @cached_property
    def before(self) -> Mapping[int, tuple[tuple[int, Reason], ...]]:
        """For each instruction: what must be over before it starts, and why."""
        found: dict[int, list[tuple[int, Reason]]] = {}
        for start, stop, reason in self.edges:
            found.setdefault(stop, []).append((start, reason))
        return {index: tuple(edges) for index, edges in found.items()}

    def critical_path(self, costs: Costs) -> tuple[float, tuple[int, ...]]:
        """The longest chain of instructions that wait for each other: its seconds, and their indices.

        No schedule of this record with these gathers is faster, however its instructions are moved in time.
        """
        # For each instruction when the compute stream is past it, and when the collective that it starts is over
        # (the former again, where it starts none); after each, which of these it waited for.
        past: list[_End] = []
        over: list[_End] = []
        for index, (compute, send) in enumerate(self._seconds(costs)):
            arrived: _End = (0.0, None)  # the compute stream's turn
            free: _End = (0.0, None)  # the lane's as well
            for other, reason in self.before.get(index, ()):
                end: _End = ((past if reason in ("compute", "storage") else over)[other][0], (other, reason))
                if reason != "lane":  # the compute stream continues while the collective before is under way
                    arrived = max(arrived, end, key=itemgetter(0))
                free = max(free, end, key=itemgetter(0))
            past.append((arrived[0] + compute, arrived[1]))
            over.append(past[-1] if send is None else (free[0] + send, free[1]))
        ends = [max(pair, key=itemgetter(0)) for pair in zip(past, over, strict=True)]
        if not ends:
            return 0.0, ()
        at = max(range(len(ends)), key=lambda index: ends[index][0])
        (longest, source), path = ends[at], [at]
        while source is not None:
            at, reason = source
            path.append(at)
            source = (past if reason in ("compute", "storage") else over)[at][1]
        return longest, tuple(reversed(path))

    def _seconds(self, costs: Costs) -> Iterator[tuple[float, float | None]]:
        """Seconds of the compute stream for each instruction, and of the collective that it starts, if any."""
        event = -1
        for index, instruction in enumerate(self.schedule.instructions):
            event += is_event(instruction)
            compute, send = costs.compute[event] if is_event(instruction) else 0.0, None
            match instruction:
                case Unshard() if index not in self.schedule.gathers:
                    pass
                case Unshard() | Reduce():
                    send = collective_seconds(self.schedule, index, costs)
                case Update(b):
                    compute = costs.update.get(b, 0.0)
            yield compute, send


def dependencies(schedule: Schedule) -> Graph:
    """The graph of a verified schedule."""
    edges: list[tuple[int, int, Reason]] = []
    event: int | None = None  # the last one
    gather: dict[int, int] = {}  # bucket -> the gather that made it what it is
    waited: dict[int, int] = {}
    read: dict[int, int] = {}  # bucket -> the start or the end of the last call that reads it
    begun: dict[Call, list[tuple[int, ...]]] = {}  # what calls use that may have an End
    dropped: dict[int, int] = {}
    settled: dict[int, int] = {}
    updated: dict[int, int] = {}
    collective: dict[bool, int] = {}  # the last one by kernel, and by copy engine

    def edge(start: int | None, stop: int, reason: Reason) -> None:
        if start is not None:
            edges.append((start, stop, reason))

    def queue(index: int, kind: Kind, bucket: int) -> None:
        """What is sent runs after what was sent before on the same lane."""
        copies = schedule.by_copy_engine(kind, bucket)
        edge(collective.get(copies), index, "lane")
        collective[copies] = index

    for index, instruction in enumerate(schedule.instructions):
        match instruction:
            case Unshard(bucket) if index in schedule.gathers:
                edge(dropped.get(bucket), index, "storage")
                queue(index, "all_gather", bucket)
                gather[bucket] = index
            case Wait(bucket):
                edge(schedule.producers.get(index), index, "values")
                waited[bucket] = index
            case Reshard(bucket):
                edge(read.get(bucket, gather.get(bucket)), index, "storage")
                dropped[bucket] = index
            case Settle(bucket):
                edge(schedule.producers[index], index, "gradient")
                settled[bucket] = index
            case ReduceAcross(bucket):
                edge(settled.get(bucket), index, "gradient")
            case GatherAcross(bucket):
                edge(updated.get(bucket), index, "values")
            case Update(bucket):
                edge(settled.get(bucket), index, "gradient")
                edge(event, index, "compute")
                updated[bucket] = index
            case _ if is_event(instruction):
                edge(event, index, "compute")
                event = index
                if isinstance(instruction, Run):
                    for bucket in instruction.uses:
                        edge(waited.get(bucket), index, "values")
                        read[bucket] = index
                    begun.setdefault(instruction.call, []).append(instruction.uses)
                elif isinstance(instruction, End):
                    read.update(dict.fromkeys(begun[instruction.call].pop(), index))
                elif isinstance(instruction, Reduce):
                    queue(index, "reduce_scatter", instruction.bucket)
    return Graph(schedule, tuple(edges))

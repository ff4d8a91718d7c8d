"""The dependency graph of a schedule: which instruction must wait for which other one, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Literal, TypeAlias

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import collective_seconds
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
    is_event,
)

Reason: TypeAlias = Literal["compute", "values", "gradient", "storage", "lane"]
"""compute: the order of the record. values: a call needs its bucket
gathered. gradient: a reduction needs the gradient, its settling the result, the update what has settled. storage: a
gather needs what the drop before it freed, a drop the last call that reads. lane: collectives run in the order of their
issue, those by copy engine concurrently with the others."""

_Chain: TypeAlias = tuple[int, "_Chain | None"]
"""An index, and those before it."""


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
        # (the former again, where it starts none); with the chain of instructions that lead there.
        past: list[tuple[float, _Chain | None]] = []
        over: list[tuple[float, _Chain | None]] = []
        event = -1
        for index, instruction in enumerate(self.schedule.instructions):
            arrived: tuple[float, _Chain | None] = (0.0, None)  # the compute stream's turn
            free = arrived  # the lane's as well
            for other, reason in self.before.get(index, ()):
                end = (past if reason in ("compute", "storage") else over)[other]
                if reason != "lane":  # the compute stream continues while the collective before is under way
                    arrived = max(arrived, end, key=itemgetter(0))
                free = max(free, end, key=itemgetter(0))
            seconds = 0.0
            if is_event(instruction):
                event += 1
                seconds = costs.compute[event]
            elif isinstance(instruction, Update):
                seconds = costs.update.get(instruction.bucket, 0.0)
            past.append((arrived[0] + seconds, (index, arrived[1])))
            if index in self.schedule.sends:
                over.append((free[0] + collective_seconds(self.schedule, index, costs), (index, free[1])))
            else:
                over.append(past[-1])
        longest, chain = max(past + over, key=itemgetter(0), default=(0.0, None))
        path: list[int] = []
        while chain is not None:
            index, chain = chain
            path.append(index)
        return longest, tuple(reversed(path))


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

"""What a schedule costs: measured times and memory of a record, and the simulator that applies them to a schedule.

All schedules of one record have the same sequence of ``Run``, ``End`` and ``Reduce``, its *events*. Times of
computation are kept between them: ``compute[i]`` is what the compute stream did from event i to event i + 1,
waiting for communication left out. Passes do not change them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Literal, TypeAlias

from zeroweave.errors import ScheduleError
from zeroweave.schedule.build import Schedule
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.instructions import (
    Call,
    End,
    Offload,
    Reduce,
    Release,
    Reload,
    Reshard,
    Run,
    Settle,
    Stage,
    Unshard,
    Update,
    Wait,
    is_event,
)
from zeroweave.schedule.moves import Move

Lane: TypeAlias = Literal["compute", "all_gather", "reduce_scatter", "copy"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that occupied a lane from ``start`` to ``stop``, seconds from the start of the step.

    ``index`` is that of the instruction in the schedule.
    """

    lane: Lane
    index: int
    start: float
    stop: float


@dataclass(frozen=True)
class Prediction:
    """What the simulator expects of a schedule.

    seconds: of the step. starts: when the compute stream comes to each instruction. waits: how long it waits for
    communication, for each instruction that waits at all, by index. memory: bytes of flats, reductions in flight and
    activations after each instruction. copied: seconds of the gathers by copy engine. over: when the result of each
    collective is there, by the index of the instruction that starts it.
    """

    seconds: float
    starts: tuple[float, ...]
    waits: dict[int, float]
    memory: tuple[int, ...]
    spans: tuple[Span, ...]
    copied: float = field(default=0.0, kw_only=True)
    over: dict[int, float] = field(default_factory=dict, kw_only=True)

    @cached_property
    def peak(self) -> int:
        """Bytes of flats, reductions in flight and activations at most."""
        return max(self.memory, default=0)

    def busy(self, *lanes: Lane) -> float:
        """Seconds in which the lanes work."""
        return sum(span.stop - span.start for span in self.spans if span.lane in lanes)


def reductions(schedule: Schedule) -> list[tuple[int, int, int]]:
    """Of each reduction: its event, by number, its index, and that of the ``Settle`` that makes its result usable."""
    events = list(accumulate(map(is_event, schedule.instructions)))
    pairs = schedule.producers.items()
    return [(events[at] - 1, at, settle) for settle, at in pairs if isinstance(schedule.instructions[at], Reduce)]


def _in_flight(schedule: Schedule, reduced: Iterable[tuple[int, int, int]]) -> list[int]:
    """After each instruction: bytes of reductions in flight, given as bytes, the index of each and of its settling."""
    changes = [0] * len(schedule.instructions)
    for nbytes, start, stop in reduced:
        changes[start] += nbytes
        changes[stop] -= nbytes
    return list(accumulate(changes))


def held_by_reductions(schedule: Schedule, held: Sequence[int]) -> list[int]:
    """After each instruction: bytes of ``held``, which is known of each event, for the reductions in flight."""
    return _in_flight(schedule, ((held[event], at, settle) for event, at, settle in reductions(schedule) if held))


def flats_of(schedule: Schedule) -> list[int]:
    """After each instruction, bytes of flats and gradient flats."""
    sizes, sends = schedule.facts.sizes, schedule.sends
    flying = _in_flight(schedule, ((sizes[sends[at][1]], at, settle) for _, at, settle in reductions(schedule)))
    return list(map(add, gathered_of(schedule, sizes), flying))


def gathered_of(schedule: Schedule, buckets: Container[int]) -> list[int]:
    """After each instruction, bytes of flats of these buckets, those that stay from the step before included."""
    sizes = schedule.facts.sizes
    now = sum(sizes[bucket] for bucket in schedule.stays if bucket in buckets)
    memory: list[int] = []
    for index, instruction in enumerate(schedule.instructions):
        match instruction:
            case Unshard(bucket) if index in schedule.gathers and bucket in buckets:
                now += sizes[bucket]
            case Reshard(bucket) if index in schedule.drops and bucket in buckets:
                now -= sizes[bucket]
        memory.append(now)
    return memory


def away_of(schedule: Schedule, moves: Iterable[Move]) -> list[int]:
    """After each instruction, bytes of activations that are in host memory only, if ``moves`` are moved."""
    nbytes, now = {move.key: move.nbytes for move in moves}, 0
    memory: list[int] = []
    for instruction in schedule.instructions:
        match instruction:
            case Release(call, number):
                now += nbytes.get((call, number), 0)
            case Reload(call, number):
                now -= nbytes.get((call, number), 0)
        memory.append(now)
    return memory


def most_by_event(schedule: Schedule, memory: Sequence[int]) -> list[int]:
    """For each event, the most of ``memory`` between it and the next. ``memory`` is known of each instruction."""
    most: list[int] = []
    for instruction, used in zip(schedule.instructions, memory, strict=True):
        if is_event(instruction):
            most.append(used)
        elif most:
            most[-1] = max(most[-1], used)
    return most


def collective_seconds(schedule: Schedule, index: int, costs: Costs) -> float:
    """How long the collective of an ``Unshard`` or a ``Reduce`` takes once it runs."""
    kind, bucket = schedule.sends[index]
    return costs.seconds(kind, bucket, schedule.facts.sizes[bucket])


def simulate(schedule: Schedule, costs: Costs) -> Prediction:
    """Plays a schedule on three lanes: the compute stream, the collectives in the order of their issue, and copies.

    Gathers by copy engine have their own lane. Collectives across sharding groups take no time.

    A collective starts when everything issued to the compute stream before it is done (its storage may have
    been in use until then) and the collective before it is; ``Wait`` and ``Settle`` hold the compute stream
    until theirs is done. What a ``Run`` computes comes before the instructions after it. ``End`` and ``Reduce``
    take no time: what the program computes after them comes after the instructions that wait for nothing.
    Copies of activations run in the order of their issue; ``Release`` waits for its copy, the event after the need of
    a call's activations for theirs. Costs must be the record's.
    """
    _check(schedule, costs)
    held = held_by_reductions(schedule, costs.held)
    flats, away = flats_of(schedule), away_of(schedule, costs.moves)
    now = copied = 0.0  # of the compute lane; seconds of gathers by copy engine
    free = {False: 0.0, True: 0.0}  # of the lanes of collectives: by kernel, by copy engine
    idle = 0.0  # of the lane of copies
    there: dict[tuple[Call, int], float] = {}  # when each call's last copy is done
    nbytes = {move.key: move.nbytes for move in costs.moves}
    needed: dict[int, list[tuple[Call, int]]] = {}  # by the event after the need
    for move in costs.moves:
        needed.setdefault(move.until, []).append(move.key)
    event = -1
    over: dict[int, float] = {}
    waits: dict[int, float] = {}
    memory: list[int] = []
    starts: list[float] = []
    spans: list[Span] = []
    behind: tuple[int, float] | None = None  # what is computed after an End or a Reduce: its index, seconds

    def compute(index: int, seconds: float) -> float:
        spans.append(Span("compute", index, now, now + seconds))
        return now + seconds

    def send(index: int) -> None:
        nonlocal copied
        lane, bucket = schedule.sends[index]
        copies = schedule.by_copy_engine(lane, bucket)
        start = max(now, free[copies])
        end = start + collective_seconds(schedule, index, costs)
        copied += (end - start) * copies
        spans.append(Span(lane, index, start, end))
        over[index] = free[copies] = end

    def wait(index: int, until: float) -> float:
        if until > now:
            waits[index] = until - now
        return max(now, until)

    for index, instruction in enumerate(schedule.instructions):
        if behind is not None and not isinstance(instruction, Unshard | Reshard | Reload | Stage):
            now, behind = compute(*behind), None
        if is_event(instruction):
            now = wait(index, max((there.get(call, 0.0) for call in needed.get(event + 1, ())), default=0.0))
        starts.append(now)
        match instruction:
            case Unshard() if index in schedule.gathers:
                send(index)
            case Wait() | Settle():
                if (producer := schedule.producers.get(index)) in over:
                    now = wait(index, over[producer])
            case Run() | End() | Reduce():
                if isinstance(instruction, Reduce):
                    send(index)
                event += 1
                if isinstance(instruction, Run):
                    now = compute(index, costs.compute[event])
                else:
                    behind = index, costs.compute[event]
            case Offload(call, number) | Reload(call, number):
                start = max(now, idle)
                idle = there[call, number] = start + costs.copy(nbytes.get((call, number), 0))
                spans.append(Span("copy", index, start, idle))
            case Release(call, number):
                now = wait(index, there[call, number])
            case Update(bucket):
                now = compute(index, costs.update.get(bucket, 0.0))
        activations = max(0, costs.activations[event] - away[index]) if event >= 0 else 0
        memory.append(flats[index] + held[index] + activations)
    if behind is not None:
        now = compute(*behind)
    seconds = max(now, *free.values())
    return Prediction(seconds, tuple(starts), waits, tuple(memory), tuple(spans), copied=copied, over=over)


def _check(schedule: Schedule, costs: Costs) -> None:
    events = sum(map(is_event, schedule.instructions))
    if len(costs.compute) != events or len(costs.activations) != events or len(costs.held) not in (0, events):
        raise ScheduleError(f"the costs tell of {len(costs.compute)} events, the schedule has {events}")

"""What decides the schedule of a given record: the buckets, the settings, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, linear_regression
from typing import Final, Literal, TypeAlias

from zeroweave.errors import ScheduleError
from zeroweave.schedule.moves import Move, merge

_SLIGHT: Final = 256
"""A bucket with less than 1/256 of the bytes of the largest one is slight; see `Facts.load`."""

Kind: TypeAlias = Literal["all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Line:
    """The α–β model of a collective: ``alpha`` seconds, and ``beta`` more for each byte of the full flat.

    After Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994).
    """

    alpha: float = 0.0
    beta: float = 0.0

    def __call__(self, nbytes: int) -> float:
        return self.alpha + self.beta * nbytes

    @classmethod
    def fit(cls, points: Iterable[tuple[int, float]]) -> Line:
        """The least-squares line through (bytes, seconds) with neither term negative; zero without points."""
        found = list(points)
        sizes, seconds = [x for x, _ in found], [y for _, y in found]
        if len(set(sizes)) > 1:
            beta, alpha = linear_regression(sizes, seconds)
            if beta < 0.0:
                return cls(fmean(seconds), 0.0)
            if alpha >= 0.0:
                return cls(alpha, beta)
        if any(sizes):  # through the origin, which is one of the points then: there may be no other
            return cls(0.0, linear_regression([0, *sizes], [0.0, *seconds], proportional=True).slope)
        return cls(fmean(seconds), 0.0) if found else cls()


@dataclass(frozen=True)
class Costs:
    """Measured costs of a record's events. Seconds and bytes.

    compute[i]: from event i to the next, or to the end of the step. update: the optimizer on each bucket. gathers,
    reductions: measured times by bucket; ``gather`` and ``reduce`` predict the others by size. activations[i]: bytes in
    use between event i and the next, less those at the start of the step. The model's state, flats and reductions in
    flight do not count; activations that are in host memory count as if they were not. copy: of such a move, by its
    bytes, no time where nothing was moved; moves: what any rank can move. filled: bytes of flats, reductions in flight
    and activations at most while it was measured; resident: of everything else, model state included; room: bytes that
    could be allocated at most; 0 where that is unknown. held[i]: bytes, without its gradient flat, that event i, if it
    is a reduction, has until it is settled; empty where that is unknown.
    """

    compute: tuple[float, ...]
    update: dict[int, float]
    gathers: dict[int, float]
    reductions: dict[int, float]
    gather: Line
    reduce: Line
    activations: tuple[int, ...]
    filled: int = 0
    resident: int = 0
    copy: Line = Line()
    moves: tuple[Move, ...] = ()
    room: int = 0
    held: tuple[int, ...] = ()

    @classmethod
    def merge(cls, ranks: Sequence[Costs]) -> Costs:
        """What all ranks decide by: the longest time, the most memory and the least room of any.

        By these costs no rank takes more memory than is predicted, with any schedule.
        """
        if len({len(rank.compute) for rank in ranks}) != 1:
            raise ScheduleError("costs of different records cannot be merged")

        def most(parts: Sequence[dict[int, float]]) -> dict[int, float]:
            return {b: max(part.get(b, 0.0) for part in parts) for b in sorted({b for part in parts for b in part})}

        def line(lines: Sequence[Line]) -> Line:
            return Line(max(one.alpha for one in lines), max(one.beta for one in lines))

        return cls(
            compute=tuple(map(max, zip(*(r.compute for r in ranks), strict=True))),
            update=most([r.update for r in ranks]),
            gathers=most([r.gathers for r in ranks]),
            reductions=most([r.reductions for r in ranks]),
            gather=line([r.gather for r in ranks]),
            reduce=line([r.reduce for r in ranks]),
            activations=tuple(map(max, zip(*(r.activations for r in ranks), strict=True))),
            filled=max(r.filled for r in ranks),
            resident=max(r.resident for r in ranks),
            copy=line([r.copy for r in ranks]),
            moves=merge([r.moves for r in ranks]),
            room=min(r.room for r in ranks),
            held=tuple(map(max, zip(*(r.held for r in ranks), strict=True))),
        )

    def higher(self, nbytes: int) -> Costs:
        """With so many bytes more in use with any schedule."""
        return replace(self, resident=self.resident + nbytes)

    @property
    def peak(self) -> int:
        """Bytes allocated at most while it was measured, by everything; 0 where that is unknown.

        Merged: no less than of any rank.
        """
        return self.filled + self.resident

    def seconds(self, kind: Kind, bucket: int, nbytes: int) -> float:
        """How long a collective takes once it runs."""
        known, line = (self.gathers, self.gather) if kind == "all_gather" else (self.reductions, self.reduce)
        return known[bucket] if bucket in known else line(nbytes)


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

    kept_by_stage: buckets that stay unsharded from their first use to the end of the step (stages 1 and 2: all).
    depth: reductions in flight at most, at least 1; see `load`.
    prefetch: how many calls ahead gathers are issued, at least 0; "auto": what measured times and memory
    allow, 1 where nothing was measured (see passes/prefetch.py).
    update_by_bucket: update each bucket as soon as its last reduction has settled; possible where the
    optimizer needs nothing global (no clipping, no overflow check).
    free: free unused activations before the optimizer (see passes/before_update.py).
    offload: keep activations in host memory until they are needed (see passes/offload.py).
    stage: begin to copy each bucket for a checkpoint before it is updated (see passes/before_update.py).
    keep: buckets that stay gathered from one use to the next; "auto": as many as the memory has room for (see
    passes/keep.py).
    registered: buckets that are gathered in registered buffers, each in its own or in one that it shares with others
    that are gathered at other times (see `Schedule.registered_buffers`).
    copied: those of the registered that copy engines gather.
    replicated: trainable buckets that several sharding groups have: reduced across groups once a step.
    spread: those of them whose shards lie in several groups: gathered across groups after their update.
    memory: bytes of flats, reductions in flight and activations that "auto" may reach; None: what the schedule with
    prefetch 1 reaches, and the largest bucket more.
    costs: what was measured; None before.
    """

    buckets: tuple[BucketFacts, ...]
    kept_by_stage: frozenset[int]
    depth: int
    prefetch: int | Literal["auto"]
    update_by_bucket: bool
    free: bool = False
    offload: bool = False
    stage: bool = False
    keep: frozenset[int] | Literal["auto"] = frozenset()
    registered: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()
    spread: frozenset[int] = frozenset()
    memory: int | None = None
    costs: Costs | None = None

    def __post_init__(self) -> None:
        if len(self.by_id) != len(self.buckets):
            raise ScheduleError("two buckets have the same id")
        for name in ("kept_by_stage", "keep", "registered", "copied", "replicated", "spread"):
            ids: frozenset[int] | Literal["auto"] = getattr(self, name)
            if ids != "auto" and (unknown := sorted(set(ids) - self.by_id.keys())):
                raise ScheduleError(f"{name} names unknown buckets: {unknown}")
        if self.depth < 1 or (self.prefetch != "auto" and self.prefetch < 0):
            raise ScheduleError(f"depth must be at least 1 and prefetch at least 0, not {self.depth}, {self.prefetch}")

    @cached_property
    def by_id(self) -> dict[int, BucketFacts]:
        return {bucket.id: bucket for bucket in self.buckets}

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of the full flats, by bucket."""
        return {bucket.id: bucket.nbytes for bucket in self.buckets}

    @cached_property
    def slight(self) -> frozenset[int]:
        """Trained buckets of which many may be reduced in the place of one."""
        return frozenset(b.id for b in self.buckets if b.trainable and _SLIGHT * b.nbytes < self._largest)

    @cached_property
    def _largest(self) -> int:
        """Bytes of the largest trained bucket."""
        return max((bucket.nbytes for bucket in self.buckets if bucket.trainable), default=0)

    def load(self, buckets: Iterable[int]) -> int:
        """What these buckets' reductions count towards ``depth`` while all are in flight: one each.

        Slight ones together count one for each time that they have the bytes of the largest bucket. A bucket of a norm
        alone would else take the place of a block, although its flat is small.
        """
        count = together = 0
        for bucket in buckets:
            if bucket in self.slight:
                together += self.sizes[bucket]
            else:
                count += 1
        return count + together // max(1, self._largest)

    def name(self, bucket: int) -> str:
        return self.by_id[bucket].name if bucket in self.by_id else f"<unknown bucket {bucket}>"

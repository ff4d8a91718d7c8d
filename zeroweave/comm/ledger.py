"""The ledger: what this rank's collectives were and what they moved.

It answers two questions. How much was moved: calls and bytes per kind, since the beginning and in this step.
Did all ranks issue the same collectives in the same order: one count and one rolling hash, which the ranks
compare once per step (`control`), because two collectives of equal size that pair up wrongly give wrong
numbers without an error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import xxhash

from zeroweave.layout import ACROSS, WORLD
from zeroweave.ranks.differ import Issued

_REMEMBERED = 4096
"""Collectives whose hashes are kept, for comparison with ranks that are a little behind."""
_TRIPS: dict[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1}
"""How often a kind sends the flat around; an all-reduce is a reduce-scatter and an all-gather."""


@cache
def dtype_name(dtype: object) -> str:
    """The ledger's name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Traffic:
    """Traffic of the collectives of one kind.

    `payload` is the size of the full flats, padding included; `wire` is what one rank sends for them when the
    ranks pass pieces around: payload x (N-1)/N, and twice that for an all-reduce. Of an all-to-all the payload is what
    all ranks have for all, and a rank sends payload x (N-1)/N^2 on average. All in bytes.
    """

    calls: int = 0
    payload: int = 0
    wire: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls - other.calls, self.payload - other.payload, self.wire - other.wire)


@lru_cache(4096)
def _hashed(kind: str, bucket: int, dtype: str, payload: int, group: str, world: int) -> tuple[bytes, int]:
    """A collective's part of the hash, and the bytes that one rank sends: `Traffic.wire`.

    Cached: steps issue the same ones.
    """
    sent = payload * (world - 1) // world**2 if kind == "all_to_all" else _TRIPS[kind] * payload * (world - 1) // world
    return f"{kind} {bucket} {dtype} {payload} {group}".encode(), sent


class _Mark(NamedTuple):
    """A remembered collective; like `Issued`, but not yet in words, which are rarely read."""

    number: int
    hash: int
    kind: str
    bucket: int
    dtype: str
    payload: int
    call: str
    module: str


@dataclass(slots=True)
class Gauge:
    """Bytes of memory in use at present and at most."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now

    def restart(self) -> None:
        """Restarts `peak`."""
        self.peak = self.now


class Ledger:
    """Counts the collectives that this rank issues. `names`: of buckets, by id, for people; more may be added.

    `gathers_on_entry`: whether this rank's collectives follow from the modules that it enters, as at stage 3.
    """

    def __init__(
        self, world: int, rank: int, names: Mapping[int, str] | None = None, gathers_on_entry: bool = False
    ) -> None:
        self.world, self.rank, self.gathers_on_entry = world, rank, gathers_on_entry
        self.names = dict(names or {})
        self._moved: dict[str, list[int]] = {}
        """of each kind calls, payload and wire, see `Traffic`"""
        self._at_begin: dict[str, Traffic] = {}
        self._gauges: dict[str, Gauge] = {}
        self.count = 0
        """collectives issued since the ledger was made"""
        self.hash = 0
        """64 bits, of all of them in order: the hash of the last one, seeded with that of those before it"""
        self._marks: deque[_Mark] = deque([_Mark(0, self.hash, "", -1, "", 0, "", "")], maxlen=_REMEMBERED)
        self.call = ""
        """where this rank is, for people: "in forward", "after step"; the guard says so"""
        self.module = ""
        """the module entered last, for people: "blocks.1" or "blocks.1 on the way back from end"; see `entering`"""
        self._turned = ""
        self.waiting: tuple[int, float] | None = None
        """number and time (`time.monotonic`) of the collective that this rank began to wait for last; None: it came

        On a device the end is not known to the host: the value stays.
        """

    def at(self, call: str) -> None:
        """This rank is there now; see `call`."""
        self.call = call

    def record(
        self, kind: str, bucket: int, dtype: str, payload: int, group: str = WORLD, world: int | None = None
    ) -> None:
        """Notes one collective when it is issued.

        `payload`: bytes of the full flat, padding included; see `Traffic`. `group`: the sharding group's name, `world`:
        its ranks (None: all); collectives across replicas have their own kind. This rank, and which of the groups of
        that name it is in, are no part of the hash.
        """
        words, wire = _hashed(kind, bucket, dtype, payload, group, self.world if world is None else world)
        kind_of = f"{kind} across" if group == ACROSS else kind
        moved = self._moved.get(kind_of) or self._moved.setdefault(kind_of, [0, 0, 0])
        moved[0] += 1
        moved[1] += payload
        moved[2] += wire
        self.count += 1
        self.hash = xxhash.xxh3_64_intdigest(words, self.hash)
        self._marks.append(_Mark(self.count, self.hash, kind, bucket, dtype, payload, self.call, self.module))

    def entering(self, module: str, back: bool = False) -> None:
        """The module of this name is entered; what is issued from now on may be for it.

        `back`: in a backward. It is told with the module that the forward entered last: where that is another one than
        on the other ranks, no collective of the backward may be for it.
        """
        if not back:
            self._turned = module
        turned = back and module != self._turned
        self.module = f"{module} on the way back from {self._turned}" if turned else module

    def waits(self, count: int) -> None:
        """This rank begins to wait for collective number `count`; see `waiting`."""
        self.waiting = count, time.monotonic()

    def came(self) -> None:
        """It has come."""
        self.waiting = None

    def name_of(self, bucket: int) -> str:
        """The bucket's name, for people; "" for a tensor that is in none."""
        if bucket in self.names:
            return self.names[bucket]
        return "" if bucket < 0 else f"bucket {bucket}"

    def gauge(self, name: str) -> Gauge:
        """The memory account of this name; made when it is first asked for."""
        return self._gauges.setdefault(name, Gauge())

    @property
    def mark(self) -> tuple[int, int]:
        """Count and hash that belong together. Read by the alarm's thread, too."""
        last = self._marks[-1]
        return last.number, last.hash

    def hash_at(self, count: int) -> int | None:
        """The hash after the first `count` collectives; None where it is too long ago or not yet."""
        mark = self._mark_at(count)
        return None if mark is None else mark.hash

    def text_at(self, count: int) -> str:
        """Collective number `count`, from 1, in words; "" where that is too long ago or not yet."""
        mark = self._mark_at(count)
        return "" if mark is None else self._spelled(mark)

    def issued_at(self, count: int) -> Issued | None:
        """Collective number `count`, from 1; None if it is no longer remembered or not yet issued."""
        mark = self._mark_at(count)
        return None if mark is None else self._told(mark)

    def texts(self, after: int) -> list[str]:
        """The collectives after number `after`, in words, if they are still remembered."""
        return [self._spelled(mark) for mark in self._marks if mark.number > after]

    @property
    def marks(self) -> tuple[Issued, ...]:
        """All that are remembered, the latest last; the first may be a placeholder. Read by the alarm's thread, too.

        There are thousands, which take Python some milliseconds: `issued_at` is for a single one.
        """
        return tuple(map(self._told, tuple(self._marks)))

    def _told(self, mark: _Mark) -> Issued:
        return Issued(mark.number, mark.hash, self._spelled(mark), mark.call, mark.module)

    def _spelled(self, mark: _Mark) -> str:
        name = self.name_of(mark.bucket)
        return mark.kind and f"{mark.kind}{name and f' {name}'}, {mark.payload} bytes of {mark.dtype}"

    def _mark_at(self, count: int) -> _Mark | None:
        last = (marks := tuple(self._marks))[-1].number
        index = count - last - 1
        return marks[index] if -len(marks) <= index < 0 else None

    def totals(self) -> dict[str, Traffic]:
        """Traffic per kind since the ledger was made; only the kinds that occurred."""
        return {kind: Traffic(*moved) for kind, moved in self._moved.items()}

    def begin_step(self) -> None:
        """Collectives from here on count as the step that `step()` reports."""
        self._at_begin = self.totals()

    def step(self) -> dict[str, Traffic]:
        """Traffic per kind since `begin_step()`; only the kinds that occurred."""
        parts = {kind: total - self._at_begin.get(kind, Traffic()) for kind, total in self.totals().items()}
        return {kind: part for kind, part in parts.items() if part.calls}

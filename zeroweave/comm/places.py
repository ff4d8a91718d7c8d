"""Places: pieces of memory in which flats take turns, because whoever gathers them has to know where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from zeroweave.comm.gauge import Gauge


class Memory(Protocol):
    """A piece of memory of `nbytes`, in which one storage lies at a time."""

    nbytes: int
    address: int

    def give(self, storage: torch.UntypedStorage) -> None:
        """`storage`, which has no bytes, gets all of it; it is free again when the storage is resized.

        Where that fails, the storage has no bytes still.
        """

    def close(self) -> None:
        """Nothing is gathered there any more. A storage that still lies there keeps it. Collective."""


class Tenant(Protocol):
    """Whose storage lies in a place."""

    storage: torch.UntypedStorage

    def leave(self) -> None:
        """Its storage lies somewhere else from now on, with the content that it has; says `Place.left`."""


class Place:
    """Some memory, and whose storage lies there."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._tenant: Tenant | None = None

    def take(self, tenant: Tenant) -> None:
        """The storage of `tenant`, which has no bytes, lies here from now on. Whoever else does, leaves."""
        self.vacate()
        self.memory.give(tenant.storage)
        self._tenant = tenant

    def left(self) -> None:
        """The storage that lay here was resized."""
        self._tenant = None

    def vacate(self) -> None:
        """Nobody lies here any more."""
        if self._tenant is not None:
            self._tenant.leave()


class Places:
    """The places of one engine, by number. `make(nbytes)` makes memory, of at least that; `gauge` counts its bytes.

    `make` is collective, and gives None on all ranks where one of them has none; `tell(nbytes)` is told so, once.
    Nothing is made where a place is large enough: what was made stays, so that windows of several kinds take turns.
    """

    def __init__(
        self,
        make: Callable[[int], Memory | None] = lambda nbytes: None,
        gauge: Gauge | None = None,
        tell: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._make, self._gauge, self._tell = make, gauge or Gauge(), tell
        self._places: list[Place | None] = []
        self.refused: int | None = None
        """as many bytes could not be had on some rank, and are not asked for again; None: all could"""

    def fit(self, sizes: Sequence[int]) -> list[Place | None]:
        """Places of at least these bytes each; None where there is no memory for one. Equally on all ranks."""
        self._places += [None] * (len(sizes) - len(self._places))
        return [self._fit(number, nbytes) for number, nbytes in enumerate(sizes)]

    def _fit(self, number: int, nbytes: int) -> Place | None:
        place = self._places[number]
        if place is not None and place.memory.nbytes >= nbytes:
            return place
        if self.refused is not None and nbytes >= self.refused:
            return None
        if place is not None:  # what is too small makes room for what is not
            place.vacate()
            self._close(place)
            place = self._places[number] = None
        memory = self._make(nbytes)
        if memory is None:
            if self.refused is None:
                self._tell(nbytes)
            self.refused = nbytes
            return None
        self._gauge.add(memory.nbytes)
        place = self._places[number] = Place(memory)
        return place

    def trim(self, count: int) -> None:
        """The places from number `count` on go, and whoever lies there leaves. Equally on all ranks."""
        for place in self._places[count:]:
            if place is not None:
                place.vacate()
                self._close(place)
        del self._places[count:]

    def _close(self, place: Place) -> None:
        self._gauge.add(-place.memory.nbytes)
        place.memory.close()

    @property
    def nbytes(self) -> int:
        """Of all places together."""
        return self._gauge.now

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where they begin: what a graph of a step knows of them."""
        return tuple(place.memory.address for place in self._places if place is not None)

    def close(self) -> None:
        """Gives all memory back, for good. Collective."""
        for place in self._places:
            if place is not None:
                self._close(place)
        self._places.clear()

"""What comes to single ranks, noted there until all ranks know of it and act together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Notes(Generic[K]):
    """The notes of one engine. `kinds`: what can be noted, eight things at most; the same on all ranks."""

    def __init__(self, kinds: Sequence[K]) -> None:
        if len(kinds) > 8:  # bits of a byte
            raise ValueError(f"eight things at most can be noted, and not {len(kinds)}")
        self._noted = dict.fromkeys(kinds, False)
        self._agreed: set[K] = set()

    def note(self, kind: K) -> None:
        """This rank has it."""
        self._noted[kind] = True

    @property
    def flags(self) -> bytes:
        """What this rank has noted: a bit each."""
        return bytes([sum(1 << bit for bit, noted in enumerate(self._noted.values()) if noted)])

    def agree(self, flags: bytes) -> None:
        """`flags` of any rank. What comes from now on is noted anew."""
        for bit, kind in enumerate(self._noted):
            if flags[0] >> bit & 1:
                self._noted[kind] = False
                self._agreed.add(kind)

    def take(self, kinds: Sequence[K]) -> frozenset[K]:
        """Which of these all ranks know of, once."""
        taken = self._agreed & set(kinds)
        self._agreed -= taken
        return frozenset(taken)

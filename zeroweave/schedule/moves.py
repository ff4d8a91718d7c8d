"""Moves: what of a step's activations can wait in host memory, and when a backward needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroweave.schedule.instructions import Call, Entered, Event, Needed, numbered


@dataclass(frozen=True, slots=True)
class Move:
    """What the ``number``-th of the step's equal calls has saved. Events are those of ``instructions.project``.

    until: how many events come before a backward asks for it. inside: true if it asks in the middle of a call in which
    nothing else happens, so that no event distinguishes its end from its beginning. nbytes: of what can be moved,
    without what later calls have saved as well.
    """

    call: Call
    number: int
    until: int
    inside: bool
    nbytes: int

    @property
    def key(self) -> tuple[Call, int]:
        return self.call, self.number


def moves_of(record: tuple[Event, ...]) -> tuple[Move, ...]:
    """Of each call that a backward needs activations of; in the order of the needs."""
    begun: Counter[Call] = Counter()
    found: dict[tuple[Call, int], Move] = {}
    inside = False
    for before, event, _ in numbered(record):
        match event:
            case Entered(call):
                begun[call] += 1
            case Needed(call, number, nbytes) if number < begun[call] and (call, number) not in found:
                found[call, number] = Move(call, number, before, inside, nbytes)
        if not isinstance(event, Needed):
            inside = isinstance(event, Entered)
    return tuple(found.values())


def merge(ranks: Sequence[tuple[Move, ...]]) -> tuple[Move, ...]:
    """The moves that all ranks decide by: each that some rank makes, up to the first event at which any rank needs it.

    Its bytes are the least of any rank, 0 where one has nothing to move. So no rank keeps more than is predicted.
    ``ranks``: in the same order on all of them.
    """
    known: dict[tuple[Call, int], list[Move]] = {}
    for each in (move for rank in ranks for move in rank):
        known.setdefault(each.key, []).append(each)
    merged = [
        replace(
            moves[0],
            until=min(each.until for each in moves),
            inside=any(each.inside for each in moves),
            nbytes=min(each.nbytes for each in moves) if len(moves) == len(ranks) else 0,
        )
        for moves in known.values()
    ]
    return tuple(sorted(merged, key=lambda each: each.until))

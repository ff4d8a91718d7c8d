"""Moves: what of a step's activations can wait in host memory, and when a backward needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroweave.schedule.instructions import Call, Entered, Event, Needed, numbered


@dataclass(frozen=True, slots=True)
class Move:
    """What the ``number``-th of the step's equal calls has saved. Events are those of ``instructions.project``.

    since: how many events come up to and including the call's ``Run``. until: how many come before a backward asks for
    it. inside: true if it asks in the middle of a call in which nothing else happens, so that no event distinguishes
    its end from its beginning. nbytes: of what can be moved, without what later calls have saved as well.
    """

    call: Call
    number: int
    since: int
    until: int
    inside: bool
    nbytes: int

    @property
    def key(self) -> tuple[Call, int]:
        return self.call, self.number


def moves_of(record: tuple[Event, ...]) -> tuple[Move, ...]:
    """Of each call that a backward needs activations of; in the order of the needs."""
    begun: Counter[Call] = Counter()
    since: dict[tuple[Call, int], int] = {}
    found: dict[tuple[Call, int], Move] = {}
    inside = False
    for before, event, _ in numbered(record):
        match event:
            case Entered(call):
                since[call, begun[call]] = before + 1
                begun[call] += 1
            case Needed(call, number, nbytes) if (call, number) in since and (call, number) not in found:
                found[call, number] = Move(call, number, since[call, number], before, inside, nbytes)
        if not isinstance(event, Needed):
            inside = isinstance(event, Entered)
    return tuple(found.values())


def merge(ranks: Sequence[tuple[Move, ...]]) -> tuple[Move, ...]:
    """What all ranks decide by: everything that any of them moves, the most of it, until the first of them needs it.

    ``ranks``: in the same order on all of them.
    """
    found: dict[tuple[Call, int], Move] = {}
    for each in (move for rank in ranks for move in rank):
        known = found.setdefault(each.key, each)
        found[each.key] = replace(
            known,
            until=min(known.until, each.until),
            inside=known.inside or each.inside,
            nbytes=max(known.nbytes, each.nbytes),
        )
    return tuple(sorted(found.values(), key=lambda each: each.until))


def beyond(most: tuple[Move, ...], own: tuple[Move, ...], events: int) -> list[int]:
    """While each event is the last: by how many bytes what ``most`` may move exceeds what a rank has of its ``own``.

    With so many bytes more of activations, a rank that moves less has as much left of them as it really has.
    """
    here, more = {move.key: move.nbytes for move in own}, [0] * events
    for move in most:
        for event in range(move.since, min(move.until, events)):
            more[event] += move.nbytes - here.get(move.key, 0)
    return more

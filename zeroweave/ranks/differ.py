"""Where two ranks' collectives began to differ, and what each was doing: for the error that ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

ADVICE = "all ranks must make the engine's calls together and in the same order, also those that only one rank needs"

MODULES = (
    "at stage 3 all ranks must enter the same modules in the same order, because each gathers its parameters on all "
    "ranks. Name modules that some ranks leave out in sharding.optional; what is used inside one region may differ "
    "(compile.regions makes a module one region), and at stages 1 and 2 the modules may differ, too"
)
_ALONE = (
    "make it on all ranks and equally often, with as many batches on each, or, so that one rank alone may, inside "
    "`with engine.full_parameters():`, which all ranks enter"
)
_FORWARD = (
    "at stages 1 and 2 the first forward behind a step() gathers the new weights, and needs all ranks for it: "
    f"{_ALONE}, or set gather_after_step to true, which gathers them in step()"
)
_FORWARD_ON_ENTRY = f"at stage 3 each forward gathers parameters, and needs all ranks for it: {_ALONE}"
_COLLECTIVE = "collective "
_UPDATES = ("agreement of step ", "the check after backward ")
"""Where a rank is that has issued all collectives of its step, or of a backward."""


@dataclass(frozen=True, slots=True)
class Issued:
    """What is remembered of a collective: its number, from 1, the hash of all up to it, and both in words.

    `call`: the engine's call that it was issued in, see `Ledger.call`; `module`: the last one that had been entered.
    """

    count: int
    hash: int
    text: str
    call: str
    module: str = ""


def next_collective(count: int, call: str, module: str, kind: str, name: str) -> str:
    """Where a rank is that is about to issue this collective; `call`, `module`: see `Ledger`."""
    return f"{_COLLECTIVE}{count}{call and f' {call}'}{module and f', having entered {module}'}: {kind} {name}".rstrip()


def same(one: str, two: str) -> bool:
    """Are these the same place? Of collectives that come next it is the collective, not how a rank came to it."""
    return _what(one) == _what(two)


def _what(place: str) -> tuple[str, ...]:
    if not place.startswith(_COLLECTIVE):
        return (place,)
    return place.removeprefix(_COLLECTIVE).partition(" ")[0].rstrip(":,"), place.rpartition(": ")[2]


def advice(one: str, two: str) -> str:
    """What to tell people of two ranks that are at these different places, behind the places; "" for nothing.

    Only ranks that gather on entry are at a `next_collective`.
    """
    collectives = [place.startswith(_COLLECTIVE) for place in (one, two)]
    if not any(collectives):
        return ""
    if all(collectives) or one.startswith(_UPDATES) or two.startswith(_UPDATES):
        return f": {MODULES}; {ADVICE}"
    return f": {ADVICE}"


def in_vain(issued: Issued, gathers_on_entry: bool = False) -> str:
    """In which call a rank waits for a collective to which others do not come, and what to do; "" where nobody knows.

    `gathers_on_entry`: see `Ledger`.
    """
    if not issued.call:
        return ""
    by_itself = issued.call.startswith("after ")
    where = f"{issued.call}, in a module that was called by itself" if by_itself else issued.call
    if issued.text.startswith("all_gather") and (by_itself or issued.call == "in forward"):
        return f"{where}: {_FORWARD_ON_ENTRY if gathers_on_entry else _FORWARD}"
    return f"{where}: {ADVICE}"


def first_difference(one: Sequence[str], two: Sequence[str], rank: int, other: int) -> str:
    """Where two ranks' lists begin to differ, in words."""
    for index, (mine, theirs) in enumerate(zip_longest(one, two, fillvalue="nothing more")):
        if mine != theirs:
            return f"at {index}, rank {rank} has '{mine}' and rank {other} has '{theirs}'"
    return f"ranks {rank} and {other} describe them alike"


def explain(
    rank: int, mine: Sequence[Issued], other: int, theirs: Sequence[Issued], gathers_on_entry: bool = False
) -> str:
    """The first collective that the ranks do not share, in words; "" if none is remembered on both.

    `gathers_on_entry`: see `Ledger`.

    Calls are told where they differ: those in which the ranks were when they last went different ways. Collectives of
    different calls may be equal for a while, because all gather the same buckets.
    """
    known = {mark.count: mark for mark in theirs}
    pairs = [(mark, known[mark.count]) for mark in mine if mark.count in known]
    first = next((n for n, (a, b) in enumerate(pairs) if a.hash != b.hash), None)
    if first is None:
        return ""
    begin = first
    while begin and pairs[begin - 1][0].call != pairs[begin - 1][1].call:
        begin -= 1
    one, two = pairs[first]
    told = f"their collective {one.count} was '{one.text}' on rank {rank}, '{two.text}' on rank {other}"
    if gathers_on_entry:
        entered = f"rank {rank} had entered {one.module or 'none'} last, rank {other} {two.module or 'none'}"
        told = f"{told}; {entered}: {MODULES}"
    here, there = (mark.call for mark in pairs[begin])
    if here == there:
        return told
    return f"rank {rank} was {here or 'outside'} where rank {other} was {there or 'outside'} ({ADVICE}); {told}"

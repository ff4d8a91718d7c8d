"""Where two ranks' collectives began to differ, and what each was doing: for the error that ends them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple

from zeroweave.comm.ledger import Mark

ADVICE = "all ranks must make the engine's calls together and in the same order, also those that only one rank needs"


def dump(marks: Sequence[Mark]) -> str:
    return json.dumps([astuple(mark) for mark in marks])


def parse(text: str) -> list[Mark]:
    return [Mark(*fields) for fields in json.loads(text or "[]")]


def explain(rank: int, mine: Sequence[Mark], other: int, theirs: Sequence[Mark]) -> str:
    """The first collective that the ranks do not share, in words; "" if none is remembered on both.

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
    here, there = (mark.call for mark in pairs[begin])
    if here == there:
        return told
    return f"rank {rank} was {here or 'outside'} where rank {other} was {there or 'outside'} ({ADVICE}); {told}"

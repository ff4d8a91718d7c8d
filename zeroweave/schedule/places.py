"""Places: which buckets take turns in one piece of memory, where copy engines gather them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count

from zeroweave.schedule.facts import Facts
from zeroweave.schedule.instructions import Instruction, Reshard, Unshard


def assign(
    instructions: Sequence[Instruction], gathers: Collection[int], drops: Collection[int], facts: Facts
) -> dict[int, int]:
    """The place, from 0, of each gathered bucket of ``facts.placed``. Two that are gathered at the same time differ.

    A bucket that stays from step to step, because nothing changes it, has no place.

    ``gathers``, ``drops``: indices of the Unshards that gather, and of the Reshards with which the storage goes.

    A bucket has one place, however often it is gathered. A place is as large as the largest bucket in it, so the large
    buckets choose first, each the lowest place that it can have: they share what is large. Those of equal size choose
    in the order of their first gathers.
    """
    neighbours: dict[int, set[int]] = {}  # with which others a bucket is gathered at some time
    live: set[int] = set()
    for index, instruction in enumerate(instructions):
        match instruction:
            case Unshard(bucket) if index in gathers and bucket in facts.placed:
                neighbours.setdefault(bucket, set()).update(live)
                for other in live:
                    neighbours[other].add(bucket)
                live.add(bucket)
            case Reshard(bucket) if index in drops:
                live.discard(bucket)
    places: dict[int, int] = {}
    for bucket in sorted(neighbours, key=lambda each: -facts.sizes[each]):
        taken = {places[other] for other in neighbours[bucket] if other in places}
        places[bucket] = next(place for place in count() if place not in taken)
    return places

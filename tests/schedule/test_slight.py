"""Reductions of slight buckets: many of them count as one among those in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.schedule.test_build import whole
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    BucketFacts,
    Facts,
    Micro,
    Ready,
    Reduce,
    Schedule,
    Settle,
    build,
    compile_schedule,
    verify,
)


def test_a_slight_bucket_does_not_count_among_the_reductions_in_flight() -> None:
    buckets = (
        BucketFacts(0, "block", 4096, True),
        BucketFacts(1, "norm", 15, True),
        BucketFacts(2, "head", 4096, True),
    )
    facts = Facts(buckets, frozenset(), 2, 1, False)
    assert facts.slight == {1}
    record = [*whole("all", "forward"), *whole("all", "backward"), Ready(2), Ready(1), Ready(0), Micro()]
    reduces = [Reduce(2), Reduce(1), Reduce(0)]
    assert [i for i in build(tuple(record), facts).instructions if isinstance(i, Reduce | Settle)] == [
        *reduces, Settle(2), Settle(1), Settle(0)
    ]  # fmt: skip
    again = build((*record[:-1], Ready(2), Micro()), facts)
    assert [i for i in again.instructions if isinstance(i, Reduce | Settle)] == [
        *reduces, Settle(2), Reduce(2), Settle(1), Settle(0), Settle(2)
    ]  # fmt: skip
    compile_schedule(tuple(record), facts)
    counts = replace(facts, buckets=(buckets[0], BucketFacts(1, "norm", 16, True), buckets[2]))
    assert not counts.slight
    assert not replace(facts, buckets=(*buckets[1:2], replace(buckets[0], trainable=False))).slight
    with pytest.raises(ScheduleError, match="more than 2 reductions in flight"):
        verify(Schedule(build(tuple(record), facts).instructions, tuple(record), counts))


def test_many_slight_buckets_count_as_one() -> None:
    buckets = (BucketFacts(0, "table", 2560, True), *(BucketFacts(1 + i, f"norm{i}", 9, True) for i in range(600)))
    facts = Facts(buckets, frozenset(), 1, 1, False)
    record = [*whole("all", "forward"), *whole("all", "backward"), *map(Ready, range(1, 601)), Ready(0), Micro()]
    in_flight: list[int] = []
    most = 0
    for each in build(tuple(record), facts).instructions:
        if isinstance(each, Reduce):
            in_flight.append(each.bucket)
        elif isinstance(each, Settle):
            assert in_flight.pop(0) == each.bucket
        most = max(most, 9 * len(in_flight))
    assert 2560 < most < 2 * 2560  # as many bytes as depth 2 would give the largest
    assert facts.load(range(1, 285)) == 0 and facts.load(range(1, 286)) == 1 and facts.load(range(286)) == 2

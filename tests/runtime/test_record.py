"""What a record supposes of its calls, until all ranks have said what they needed."""

from __future__ import annotations

from zeroweave.runtime.timeline import Record
from zeroweave.schedule import Call, Entered, Left, Ready

X, Y = Call("x", "backward"), Call("y", "backward")


def recorded(x: bool, y: bool) -> Record:
    record = Record()
    begin = record.add(Entered(X, (0,)))
    inside = record.add(Entered(Y, (1,)))
    record.suppose(inside, record.add(Left(Y)), y)
    record.suppose(begin, record.add(Left(X)), x)
    record.add(Ready(0))
    return record


def test_calls_are_told_in_the_order_in_which_they_began() -> None:
    assert recorded(True, False).needed() == b"\1\0"


def test_what_no_rank_needed_is_dropped_with_its_end() -> None:
    record = recorded(False, False)
    record.prune(b"\1\0")
    assert tuple(record) == (Entered(X, (0,)), Left(X), Ready(0))
    assert record.needed() == b"", "nothing is supposed any more"
    record = recorded(True, True)
    record.prune(b"\0\1")
    assert tuple(record) == (Entered(Y, (1,)), Left(Y), Ready(0))

"""Collectives that were issued in one launch."""

from __future__ import annotations

from zeroweave.comm.clock import Clock
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import _Launch, _Work


def test_what_is_one_launch_is_over_at_one_mark() -> None:
    """By which a measured step knows that it was one."""
    launch, clock = _Launch(), Clock()
    first, second = (_Work(launch, Ledger(2, 0), False) for _ in range(2))
    other = _Work(_Launch(), Ledger(2, 0), False)
    assert first.over(clock) is second.over(clock)
    assert other.over(clock) is not first.over(clock)

"""How ranks meet that share memory of their GPUs, as far as that can be tried without one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroweave._torch.peers import _Meeting, are_linked

pytestmark = pytest.mark.oldest


def met(store: Any, rank: int, before: int) -> list[bytes]:
    """Three exchanges as PyTorch makes them, whose process has had so many before."""
    meeting = _Meeting(store, rank, 60.0)  # C++ alone would not keep what is Python's of it
    through, found = dist.PrefixStore("symmetric memory", meeting), []
    for number in range(3):
        through.set(f"{before + number}/{rank}", f"{number} of {rank}")
        for other in (0, 1):
            through.wait([f"{before + number}/{other}"])
            found.append(through.get(f"{before + number}/{other}"))
    return found


def test_ranks_meet_whatever_they_have_exchanged_before() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda rank: met(store, rank, before=7 * rank), (0, 1)))
    assert found[0] == found[1] == [f"{number} of {rank}".encode() for number in range(3) for rank in (0, 1)]


def test_a_rank_that_does_not_come_is_told_and_nobody_is_held_up_meanwhile() -> None:
    meeting = _Meeting(dist.HashStore(), 0, 0.5)
    group: Any = dist.ProcessGroup(meeting, 0, 2)
    through, steps = dist.PrefixStore("symmetric memory", meeting), 0
    assert group.rank() == 0
    through.set("1/0", "here")

    def wait() -> str:
        with pytest.raises(RuntimeError) as caught:
            through.wait(["1/1"])
        return str(caught.value)

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait)
        while not waiting.done():
            steps += 1
            time.sleep(0.01)
        assert "rank 1 has not come within 0.5 s" in waiting.result()
    assert steps > 10, "other threads run while it waits"


def test_nobody_waits_for_a_rank_that_has_failed() -> None:
    store = dist.HashStore()
    meeting = _Meeting(store, 0, 600.0)
    meeting.set("1/0", "here")
    _Meeting(store, 1, 600.0).fail("it has no memory")
    with pytest.raises(RuntimeError, match=r"^rank 1: it has no memory$"):
        meeting.wait(["1/1"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has GPUs")
def test_links_are_asked_of_the_driver() -> None:
    try:
        found = are_linked([])
    except RuntimeError as error:
        assert str(error)  # there is no driver here
    else:
        assert found

"""The worker pool itself: values, tracebacks, deaths, deadlines and restarts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import DeadlineExceeded, JobFailed, Pools


def add(number: float) -> tuple[int, float, int]:
    total = torch.full((1,), number + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} refuses")
    return dist.get_rank()


def leave_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        print("leaving now", file=sys.stderr, flush=True)
        os._exit(code)


def break_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)


def wait_forever_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def leave_a_thread(name: str) -> int:
    threading.Thread(target=time.sleep, args=(1000,), name=name, daemon=True).start()
    return os.getpid()


def test_workers_are_kept_between_jobs(disposable: Pools) -> None:
    pool = disposable(2)
    first, second = pool.run(add, 1.0), pool.run(add, 2.0)
    assert [value[:2] for value in first] == [(0, 3.0), (1, 3.0)]
    assert [value[:2] for value in second] == [(0, 5.0), (1, 5.0)]
    assert [value[2] for value in first] == [value[2] for value in second]


def test_one_rank_raises(disposable: Pools) -> None:
    pool = disposable(2)
    with pytest.raises(JobFailed, match="rank 1 refuses"):
        pool.run(fail_on, 1)
    outcomes = pool.outcomes(fail_on, 0)
    assert [outcome.kind for outcome in outcomes] == ["ValueError", None] and outcomes[1].value == 1


def test_a_process_ends(disposable: Pools) -> None:
    pool = disposable(2)
    outcomes = pool.outcomes(leave_on, 0, 7)
    assert outcomes[0].exit_code == 7 and "leaving now" in outcomes[0].stderr
    assert pool.run(add, 0.0)[0][1] == 1.0


@pytest.mark.matrix
def test_a_process_that_a_signal_ends_says_where_it_was(disposable: Pools) -> None:
    with pytest.raises(JobFailed, match=r"Segmentation fault[\s\S]* in break_on"):
        disposable(2).run(break_on, 1)


def test_an_engine_that_is_left_running_is_not_met_by_the_next_job(disposable: Pools) -> None:
    pool = disposable(2)
    assert pool.run(leave_a_thread, "somebody's")[0] == pool.run(leave_a_thread, "zeroweave alarm")[0]
    first, again = pool.run(add, 1.0), pool.run(add, 1.0)
    assert pool.run(leave_a_thread, "somebody's")[0] == first[0][2] == again[0][2]


@pytest.mark.matrix
def test_a_deadline_shows_the_stacks_and_the_pool_starts_afresh(disposable: Pools) -> None:
    pool = disposable(2)
    pool.run(add, 0.0)  # the workers have imported this module when the deadline counts
    with pytest.raises(DeadlineExceeded, match="wait_forever_on"):
        pool.run(wait_forever_on, 1, deadline=2.0)
    assert pool.run(add, 0.0)[0][1] == 1.0

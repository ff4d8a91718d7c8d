"""The alarm between real processes: who is ended, when, and what it says."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import Pools
from tests.support.patience import patient
from zeroweave.comm.ledger import Ledger
from zeroweave.ranks import alarm, control
from zeroweave.ranks.alarm import Alarm
from zeroweave.ranks.control import Address, Agreement, Control, coordinate, listen
from zeroweave.ranks.process import own
from zeroweave.ranks.rules import ALIKE_SECONDS


class Engine:
    """As much of an engine as an alarm knows."""

    def __init__(self, deadline: float = 60.0) -> None:
        self.control = Control.over(None, deadline)
        self.step = 0
        self.rank = self.control.rank
        self.ledger = Ledger(self.control.world, self.rank)
        self.alarm = Alarm(self.control, self.ledger, lambda: self.step)

    def issue(self) -> None:
        self.ledger.record("all_reduce", 0, "float32", 16)

    def collective(self) -> None:
        self.issue()
        dist.all_reduce(torch.ones(4))

    def agree(self) -> None:
        self.control.agree(Agreement(self.step, self.ledger.count, 0, b""))
        self.step += 1

    def close(self) -> None:
        self.alarm.close()
        self.control.close()


@contextmanager
def engine(deadline: float = 60.0) -> Iterator[Engine]:
    made = Engine(deadline)
    try:
        yield made
    finally:
        made.close()


def raised(made: Engine, place: str, text: str) -> bool:
    return made.alarm.failed(place, made.step, ValueError(text))


def one_fails(culprit: int) -> tuple[bool, str | None, float]:
    with engine() as made:
        made.collective()
        made.agree()
        if made.rank != culprit:
            made.collective()
        time.sleep(0.5)  # the others are in the collective
        begin = time.time()
        shared = raised(made, "forward", "bad batch")
        assert not made.alarm.failed("backward", 1, ValueError("a second time"))
        return shared, made.alarm.fatal, begin


@pytest.mark.matrix
@pytest.mark.oldest
@pytest.mark.parametrize(("world", "culprit"), [pytest.param(2, 1, marks=pytest.mark.matrix), (3, 0)])
def test_ranks_that_wait_for_a_failed_one_are_ended(disposable: Pools, world: int, culprit: int) -> None:
    outcomes = disposable(world).outcomes(one_fails, culprit)
    shared, fatal, begin = outcomes[culprit].value
    assert not shared
    assert fatal is not None and f"rank {culprit} failed in forward at step 1" in fatal
    for outcome in outcomes[:culprit] + outcomes[culprit + 1 :]:
        assert outcome.exit_code == 1
        expected = f"zeroweave: [ZW503] rank {outcome.rank} is ended by its alarm: "
        assert f"{expected}rank {culprit} failed in forward at step 1: ValueError: bad batch" in outcome.stderr
        assert outcome.ended - begin < patient(1.5), "they have gone on, so nobody waits for them to fail alike"


def all_fail_alike(times: int) -> list[object]:
    with engine() as made:
        seen: list[object] = []
        for round in range(times):
            made.collective()
            time.sleep(0.3 * ((made.rank + round) % 2))
            begin = time.monotonic()
            seen.append((raised(made, "forward", f"round {round}"), time.monotonic() - begin < patient(1.0)))
            made.agree()
        time.sleep(1.8)
        made.collective()
        return [*seen, made.alarm.fatal]


@pytest.mark.matrix
@pytest.mark.oldest
def test_a_failure_on_all_ranks_is_survived(pools: Pools) -> None:
    outcomes = pools(2).outcomes(all_fail_alike, 2)
    assert [outcome.value for outcome in outcomes] == [[(True, True)] * 2 + [None]] * 2
    assert "zeroweave" not in "".join(outcome.stderr for outcome in outcomes)


def all_are_interrupted() -> tuple[bool, bool, str | None]:
    with engine() as made:
        made.collective()
        time.sleep(0.3 * made.rank)
        shared = made.alarm.failed("forward", made.step, KeyboardInterrupt())
        time.sleep(1.5)
        return shared, raised(made, "backward", "behind it"), made.alarm.fatal


@pytest.mark.matrix
@pytest.mark.oldest
def test_ranks_that_are_interrupted_at_one_place_do_not_go_on(pools: Pools) -> None:
    """Each has its own KeyboardInterrupt, and nobody is ended by an alarm."""
    outcomes = pools(2).outcomes(all_are_interrupted)
    for outcome in outcomes:
        shared, again, fatal = outcome.value
        assert (
            not shared
            and not again
            and f"rank {1 - outcome.rank} failed in forward at step 0: KeyboardInterrupt" in fatal
        )
    assert "zeroweave" not in "".join(outcome.stderr for outcome in outcomes)


def all_fail_alike_slowly(seconds: float) -> list[object]:
    with engine() as made:
        made.collective()
        time.sleep(seconds * made.rank)
        shared = raised(made, "forward", "no memory")
        made.agree()
        return [shared, made.alarm.fatal]


@pytest.mark.matrix
def test_how_fast_ranks_fail_alike_does_not_matter(pools: Pools) -> None:
    outcomes = pools(2).outcomes(all_fail_alike_slowly, ALIKE_SECONDS + 3.0)
    assert [outcome.value for outcome in outcomes] == [[True, None]] * 2
    assert "zeroweave" not in "".join(outcome.stderr for outcome in outcomes)


def one_fails_and_the_other_waits_elsewhere() -> tuple[bool, float]:
    with engine() as made:
        made.collective()
        begin = time.time()
        if made.rank == 0:
            dist.all_reduce(torch.ones(4))  # of the program's own
        return raised(made, "forward", "bad batch"), begin


@pytest.mark.matrix
def test_a_rank_that_waits_in_a_collective_of_the_programs_own_is_ended(disposable: Pools) -> None:
    first, second = disposable(2).outcomes(one_fails_and_the_other_waits_elsewhere)
    shared, begin = second.value
    assert not shared and first.exit_code == 1 and "rank 1 failed in forward at step 0" in first.stderr
    assert first.ended - begin < patient(ALIKE_SECONDS + 1.5)


def alarms(world: int) -> list[tuple[Alarm, list[str]]]:
    """All ranks of a world in this process, each with what its alarm would have ended it for."""
    listener, made = listen("127.0.0.1"), []
    address = Address("127.0.0.1", listener.getsockname()[1], "test", own(), b"secret")
    coordinator = coordinate(world, listener, b"secret", 3.0)
    for rank in range(world):
        control = Control(rank, world, 3.0, address, None if rank else coordinator)
        ends: list[str] = []
        made.append((Alarm(control, Ledger(world, rank), lambda: 0, ends.append), ends))
    return made


@pytest.mark.oldest
@pytest.mark.matrix
def test_four_ranks_fail_alike_and_then_three_of_them() -> None:
    made = alarms(4)
    with ThreadPoolExecutor(4) as threads:

        def fail(alarm: Alarm) -> bool:
            return alarm.failed("step", 7, ValueError("no"))

        assert list(threads.map(fail, [alarm for alarm, _ in made])) == [True] * 4
        assert list(threads.map(fail, [alarm for alarm, _ in made[:3]])) == [False] * 3
    time.sleep(0.5)
    for each, ends in made[:3]:
        assert not ends and "rank 3" not in (each.fatal or "") and "failed in step at step 7" in (each.fatal or "")
    assert len(made[3][1]) == 1 and "rank 0 failed in step at step 7: ValueError: no" in made[3][1][0]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(Alarm.close, [alarm for alarm, _ in made]))


@pytest.mark.matrix
def test_ranks_that_do_not_meet_for_a_process_group_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm, "BACKSTOP_SECONDS", 0.1)
    monkeypatch.setattr(control, "default_store", dist.HashStore)
    ranks = alarms(2)
    (first, _), (second, ends) = ranks
    for name in ("one", "two"):
        with second._control.meeting(name) as store:
            assert not store.check(["key"])
            store.set("key", "value")
    assert not ends
    with second._control.meeting("three"):
        while not ends:
            time.sleep(0.1)
    expected = "rank 1 is ended by its alarm: the ranks have not found each other within the deadline of 3 s"
    assert ends[0].startswith(expected)
    for each in (second, first):
        each.close()


class Slow(SimpleQueue[Any]):
    """Other threads than the first are slow to read what is in it."""

    def get(self, *arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(1.0)
        return super().get(*arguments, **named)


@pytest.mark.matrix
def test_the_first_verdict_counts_however_late_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which has one, too, leaves meanwhile."""
    monkeypatch.setattr(alarm, "SimpleQueue", Slow)
    (first, _), (second, ends) = alarms(2)
    with ThreadPoolExecutor(1) as threads:
        shared = threads.submit(second.failed, "forward", 1, ValueError("on 1"))
        assert not first.failed("forward", 0, ValueError("on 0"))
        first.close()
        assert not shared.result(60.0) and not ends
    assert second.fatal is not None and "rank 0 failed in forward at step 0: ValueError: on 0" in second.fatal
    second.close()


@pytest.mark.matrix
def test_a_failure_after_rank_0_has_left_is_known_at_once() -> None:
    (first, _), (second, ends) = alarms(2)
    first.close()
    with ThreadPoolExecutor(1) as threads:
        assert not threads.submit(second.failed, "forward", 0, ValueError("late")).result(patient(3.0))
    assert second.fatal is not None and "it closed its engine" in second.fatal and not ends
    second.close()


def fail_differently(how: str) -> tuple[bool, str | None, float]:
    with engine() as made:
        odd = made.rank == 1
        if how == "count" and odd:
            made.issue()
        made.step = 4 if how == "step" and odd else 3
        begin = time.monotonic()
        shared = raised(made, "backward" if how == "place" and odd else "forward", f"on {made.rank}")
        return shared, made.alarm.fatal, time.monotonic() - begin


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["place", "step", "count"])
def test_different_failures_are_fatal_and_known_at_once(pools: Pools, how: str) -> None:
    for outcome in pools(2).outcomes(fail_differently, how):
        shared, fatal, took = outcome.value
        other = 1 - outcome.rank
        assert not shared and took < patient(1.0)
        assert fatal is not None and f"ValueError: on {other}" in fatal and f"rank {outcome.rank} failed in" in fatal


def fail_with_a_broken_control() -> tuple[bool, str | None]:
    with engine(deadline=1.0) as made:
        made.agree()
        made.control.broken = "it was cut"
        return raised(made, "step", "lost"), made.alarm.fatal


@pytest.mark.matrix
def test_nothing_is_shared_without_a_control_group(pools: Pools) -> None:
    for shared, fatal in pools(2).run(fail_with_a_broken_control):
        assert not shared and fatal is not None and "failed in step at step 1" in fatal


def one_skips_a_collective() -> str:
    with engine() as made:
        made.collective()
        if made.rank == 1:
            made.collective()
        try:
            made.agree()
        except RuntimeError as error:
            return f"{error} | {raised(made, 'step', str(error))} | {made.alarm.fatal}"
    return "agreed"


@pytest.mark.matrix
@pytest.mark.oldest
def test_a_rank_in_a_collective_that_nobody_joins_is_ended(disposable: Pools) -> None:
    first, second = disposable(2).outcomes(one_skips_a_collective)
    assert second.exit_code == 1
    found = "rank 0 is at 'agreement of step 0' after 1 collectives; rank 1 has issued 2 and is in step 0"
    assert f"rank 1 is ended by its alarm: {found}" in second.stderr
    # The other one either sees its connection break, or is ended by what rank 1 found.
    assert found in (first.value or "") + first.stderr


def close_at_different_times(first: int) -> list[str]:
    made = Engine()
    for _ in range(3):
        made.collective()
        made.agree()
    if made.rank != first:
        time.sleep(1.5)
    begin = time.monotonic()
    made.close()
    made.close()
    took = time.monotonic() - begin
    dist.barrier()
    assert not any(thread.name == "zeroweave alarm" for thread in threading.enumerate())
    return ["slow" if took > patient(2.0) else "ok", "failed" if raised(made, "forward", "late") else "closed"]


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.matrix
def test_ranks_may_close_at_different_times(pools: Pools, first: int) -> None:
    outcomes = pools(2).outcomes(close_at_different_times, first)
    assert [outcome.value for outcome in outcomes] == [["ok", "closed"]] * 2
    assert [outcome.stderr for outcome in outcomes] == ["", ""]


def one_leaves_early() -> None:
    made = Engine()
    made.collective()
    if made.rank == 0:
        made.close()
        time.sleep(2.0)
    else:
        time.sleep(1.0)  # rank 0 has taken the coordinator with it
        made.collective()


@pytest.mark.matrix
def test_a_collective_after_a_rank_has_closed(disposable: Pools) -> None:
    first, second = disposable(2).outcomes(one_leaves_early)
    assert not first.failed
    assert second.exit_code == 1
    assert "rank 0 issues no collective after its 1: it closed its engine; this rank has issued 2" in second.stderr


def two_engines() -> list[bool]:
    with engine() as first, engine() as second:
        names = [thread.name for thread in threading.enumerate()].count("zeroweave alarm")
        shared = [
            raised(first, "forward", "x"),
            raised(second, "backward", "y"),
            raised(second, "forward", "z"),
        ]
        first.agree()
        second.agree()
    return [names == 2, *shared]


@pytest.mark.matrix
def test_two_engines(pools: Pools) -> None:
    assert pools(2).run(two_engines) == [[True] * 4] * 2


def rank_0_is_killed() -> None:
    alarm.LOST_SECONDS = 1.0
    made = Engine(deadline=3.0)
    made.agree()
    if made.rank == 0:
        time.sleep(0.5)  # the other one has the answer
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30.0)


@pytest.mark.matrix
def test_the_process_of_the_coordinator_is_killed(disposable: Pools) -> None:
    killed, ended = disposable(2).outcomes(rank_0_is_killed)
    assert killed.exit_code == -signal.SIGKILL
    assert ended.exit_code == 1 and "the process of rank 0 has gone without a word" in ended.stderr


def holds_the_interpreter(seconds: float) -> str:
    """A rank that keeps Python's lock, as a compiler may, is not taken for dead."""
    with engine() as made:
        if made.rank == 1:
            sys.setswitchinterval(1e6)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass
            sys.setswitchinterval(0.005)
        made.agree()
        return "agreed"


@pytest.mark.matrix
def test_a_busy_interpreter_is_not_dead(pools: Pools) -> None:
    assert pools(2).run(holds_the_interpreter, 2.0) == ["agreed"] * 2


def forks() -> int:
    with engine() as made:
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()  # what sys.exit would do in the child
            made.alarm.close()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        made.agree()
        time.sleep(0.5)
        made.agree()
        return os.waitstatus_to_exitcode(status)


@pytest.mark.matrix
def test_a_forked_child_does_not_speak_for_its_rank(pools: Pools) -> None:
    assert pools(2).run(forks) == [0, 0]


def test_a_world_of_one() -> None:
    alarm = Alarm(Control(), Ledger(1, 0), lambda: 0)
    assert alarm.failed("forward", 0, ValueError()) and alarm.fatal is None
    alarm.close()
    assert not any(thread.name == "zeroweave alarm" for thread in threading.enumerate())

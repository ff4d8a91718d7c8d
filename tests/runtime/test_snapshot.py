"""What tensors hold is read by another thread while they change, in host memory."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from zeroweave.runtime.copies import CopyStream
from zeroweave.runtime.executor import Staging
from zeroweave.runtime.transfers import Snapshot, Transfers

DELAYS = [0.0, 0.05]


def taken(tensors: list[torch.Tensor]) -> Snapshot:
    return Transfers(torch.device("cpu")).snapshot(tensors)


class Reader(threading.Thread):
    """Reads a snapshot, one tensor whenever it is told to, and looks at each only after `seconds`."""

    def __init__(self, snapshot: Snapshot, seconds: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.snapshot, self.seconds = snapshot, seconds
        self.go, self.found = threading.Semaphore(0), []
        self.holds = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.go.acquire()
            for tensor in self.snapshot.read():
                self.holds.release()
                self.go.acquire()
                time.sleep(self.seconds)
                self.found.append(tensor.clone())
        except BaseException as error:
            self.failure = error

    def read_all(self) -> list[float]:
        for _ in range(10):
            self.go.release()
        self.join()
        return [tensor[0].item() for tensor in self.found]


def numbered() -> list[torch.Tensor]:
    return [torch.full((4,), float(number)) for number in range(4)]


def test_it_is_read_where_it_lies() -> None:
    tensors = numbered()
    assert [t.data_ptr() for t in taken(tensors).read()] == [t.data_ptr() for t in tensors]


@pytest.mark.parametrize("seconds", DELAYS)
@pytest.mark.parametrize("read", range(5))
def test_what_it_held_is_read_whenever_it_changes(read: int, seconds: float) -> None:
    """`read`: so many tensors have been asked for when all of them change."""
    tensors = numbered()
    snapshot = taken(tensors)
    reader = Reader(snapshot, seconds)
    for _ in range(read):
        reader.go.release()
        reader.holds.acquire()
    snapshot.start()
    if read:
        reader.go.release()  # it reads this one while others change, and `arrive` waits for it
    snapshot.arrive()
    for tensor in tensors:
        tensor.fill_(-1.0)
    assert reader.read_all() == [0.0, 1.0, 2.0, 3.0]
    assert reader.failure is None


def test_it_arrives_a_second_time_and_behind_its_end() -> None:
    tensors = numbered()
    snapshot = taken(tensors)
    snapshot.arrive()
    snapshot.arrive()
    copies = list(snapshot.read())
    assert [t[0].item() for t in copies] == [0.0, 1.0, 2.0, 3.0]
    snapshot.start()
    snapshot.arrive()


def test_what_is_dropped_holds_nobody_up() -> None:
    snapshot = taken(numbered())
    reader = Reader(snapshot)
    reader.go.release()
    reader.holds.acquire()
    dropper = threading.Timer(0.05, snapshot.drop)
    dropper.start()
    snapshot.arrive()  # the reader has the first one, and does not come back
    reader.read_all()
    assert len(reader.found) == 1 and reader.failure is None


class Device(CopyStream):
    """Copies from tensors on "meta", which hold nothing, as from those of a device. `full`: is there no memory?

    `interrupted`: at which of its copies Ctrl-C comes, once; 0: when memory is asked for; None: it does not.
    """

    def __init__(self, full: bool = False, interrupted: int | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._full, self._left = full, interrupted

    def empty(self, nbytes: int) -> torch.Tensor:
        if self._full:
            raise RuntimeError("no memory")
        self._count()
        return super().empty(nbytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.fill_(5)
        self._count()

    def _count(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left == -1:
                raise KeyboardInterrupt


def test_what_is_copied_keeps_its_memory_until_that_can_be_used_again() -> None:
    tensors = [torch.empty(3, device="meta"), torch.ones(2), torch.empty(5, dtype=torch.int64, device="meta")]
    snapshot, source = Snapshot(tensors, Device()), weakref.ref(tensors[0])
    snapshot.start()
    tensors = []
    assert source() is not None
    snapshot.arrive()
    assert source() is None
    assert [t.tolist() for t in snapshot.read()] == [[5.0] * 3, [1.0] * 2, [5] * 5]


@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_between_copies_loses_it_and_nobody_waits_for_the_rest(at: int) -> None:
    snapshot = Snapshot([torch.empty(3, device="meta") for _ in range(3)], Device(interrupted=at))
    staging, reader = Staging(), Reader(snapshot)
    staging.begin({0: snapshot})
    with pytest.raises(KeyboardInterrupt):
        staging.arrive(0)
    staging.start_all()  # as the next save does, and `destroy`, before they wait for the reader
    staging.arrive_all()
    reader.go.release()
    reader.join(60)
    assert not reader.is_alive() and "KeyboardInterrupt while it was copied" in str(reader.failure)


def test_an_interrupt_before_it_begins_leaves_it_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, staging = Snapshot([torch.empty(3, device="meta")], Device()), Staging()
    staging.begin({0: snapshot})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(snapshot, "start", interrupt)
        staging.start(0)
    staging.start_all()
    reader = Reader(snapshot)
    for _ in range(2):
        reader.go.release()
    reader.join(60)
    assert not reader.is_alive() and [tensor.tolist() for tensor in reader.found] == [[5.0] * 3]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_where_there_is_no_memory_the_reader_is_told_and_nobody_else_stops() -> None:
    snapshot = Snapshot([torch.empty(3, device="meta")], Device(full=True))
    reader = Reader(snapshot)
    snapshot.start()
    snapshot.arrive()
    reader.read_all()
    assert str(reader.failure) == str(snapshot.lost()) == "no memory"


@pytest.mark.parametrize("read", [False, True])
def test_what_is_written_without_a_word_is_lost(read: bool) -> None:
    tensors = numbered()
    snapshot = taken(tensors)
    assert snapshot.lost() is None
    if read:
        Reader(snapshot).read_all()
    tensors[2][1:].zero_()
    snapshot.arrive()
    assert "not by the engine" in str(snapshot.lost())


def test_what_is_written_behind_it_is_not() -> None:
    tensors = numbered()
    snapshot = taken(tensors)
    snapshot.arrive()
    tensors[2].zero_()
    snapshot.arrive()
    assert snapshot.lost() is None


def test_staging_begins_and_ends_what_it_has() -> None:
    staging, done = Staging(), list[str]()

    class Noted(Snapshot):
        def __init__(self, name: str) -> None:
            super().__init__(numbered(), Transfers(torch.device("cpu")).snapshot([])._copies)
            self.name, self.begun = name, False

        def start(self) -> None:
            if not self.begun:  # as a snapshot does
                done.append(f"start {self.name}")
            self.begun = True

        def arrive(self) -> None:
            done.append(f"arrive {self.name}")

    def calls(of: Callable[[], None]) -> Iterator[str]:
        done.clear()
        of()
        yield from done

    staging.start(0)
    staging.arrive(0)
    staging.begin({0: Noted("a"), 2: Noted("b")})
    assert list(calls(lambda: staging.start(2))) == ["start b"]
    assert list(calls(lambda: staging.start(1))) == []
    assert list(calls(lambda: staging.arrive(0))) == ["start a", "arrive a"]
    assert list(calls(lambda: staging.start(2))) == [], "once for each save"
    assert list(calls(staging.start_all)) == []
    assert list(calls(staging.arrive_all)) == ["arrive a", "arrive b"]
    staging.begin({0: Noted("a"), 2: Noted("b")})
    assert list(calls(staging.arrive_all)) == ["start a", "start b", "arrive a", "arrive b"]
    staging.begin({})
    assert list(calls(staging.arrive_all)) == []

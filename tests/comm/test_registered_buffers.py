"""Registered buffers: which flat is there, which leaves, and what is made."""

from __future__ import annotations

import torch

from tests.comm.recording import layout
from tests.support.registered import Slab
from zeroweave.comm.ledger import Gauge, Ledger
from zeroweave.comm.process_group import LocalTransport
from zeroweave.comm.registered_buffers import RegisteredBuffer, RegisteredBuffers
from zeroweave.runtime.flat import ShardedFlat

CPU = torch.device("cpu")


class Maker:
    """Makes slabs of up to `most` bytes."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.most, self.sizes, self.closed = most, list[int](), 0

    def __call__(self, nbytes: int) -> Slab | None:
        self.sizes.append(nbytes)
        if nbytes > self.most:
            return None
        maker = self

        class Closing(Slab):
            def close(self) -> None:
                maker.closed += 1

        return Closing(nbytes, len(self.sizes))


def flats(count: int, gauge: Gauge) -> list[ShardedFlat]:
    transport = LocalTransport(CPU)
    return [ShardedFlat(layout(1, 64), torch.full((64,), float(n)), transport, gauge) for n in range(count)]


def is_in(flat: ShardedFlat, buffer: RegisteredBuffer) -> bool:
    return flat.storage.nbytes() == buffer.memory.nbytes


def test_buffers_are_made_once_and_grow() -> None:
    make, ledger = Maker(), Ledger(1, 0)
    buffers = RegisteredBuffers(make, ledger.gauge("symmetric memory"))
    first = buffers.fit({0: 100, 1: 50})
    assert make.sizes == [100, 50] and buffers.nbytes >= 150
    assert buffers.fit({0: 90}) == {0: first[0]} and buffers.fit({}) == {} and buffers.fit({0: 10, 1: 20}) == first
    again = buffers.fit({0: 100, 1: 200, 2: 10, ~7: 30})
    assert make.sizes == [100, 50, 30, 200, 10] and make.closed == 1
    assert again[0] is first[0] and again[1] is not first[1] and again.keys() == {0, 1, 2, ~7}
    buffers.close()
    assert make.closed == 5 and buffers.nbytes == 0


def test_what_cannot_be_had_is_not_asked_for_again() -> None:
    make, told = Maker(most=100), list[int]()
    buffers = RegisteredBuffers(make, tell=told.append)
    assert buffers.refused is None
    (one,) = buffers.fit({0: 50, 1: 500}).values()
    assert buffers.fit({0: 50, 1: 600}) == {0: one} and buffers.fit({0: 500}) == {}
    assert make.sizes == [50, 500] and told == [500] == [buffers.refused]
    assert buffers.fit({0: 50, 1: 200}) == {0: one} and told == [500] and buffers.refused == 200
    assert buffers.fit({0: 50, 1: 80}).keys() == {0, 1}, "less may be there"


def test_without_memory_nothing_has_a_buffer() -> None:
    assert RegisteredBuffers().fit({0: 1, 1: 2}) == {}


def test_who_lies_there_leaves_with_what_others_see() -> None:
    gauge = Gauge()
    (buffer,) = RegisteredBuffers(Maker()).fit({0: 256}).values()
    one, other = flats(2, gauge)
    for flat in (one, other):
        flat.assign(buffer)
    one.unshard()
    one.wait()
    view, version = one.flat[3:5], one.flat._version
    assert is_in(one, buffer)
    other.unshard()  # the schedule would have dropped the other one before
    other.wait()
    assert is_in(other, buffer) and one.storage.nbytes() == 256
    assert view.tolist() == [0.0, 0.0] and other.flat.eq(1.0).all()
    assert one.flat._version == version, "nobody has written it"
    assert gauge.now == 512
    other.reshard()
    assert not one.reshard(), "a view is left"
    one.unshard()  # it comes back, and the view with it
    assert is_in(one, buffer) and view.tolist() == [0.0, 0.0]
    one.wait()
    del view
    assert one.reshard() and gauge.now == 0 and not one.resident


def test_one_that_has_another_buffer_moves_or_has_none() -> None:
    here, there = RegisteredBuffers(Maker()).fit({0: 256, 1: 256}).values()
    (flat,) = flats(1, Gauge())
    views = []
    for buffer in (here, there, None, here):
        flat.assign(buffer)
        flat.unshard()
        flat.wait()
        views.append(flat.flat[:2])
        assert is_in(flat, buffer) if buffer is not None else flat.storage.nbytes() == 256
        assert not flat.reshard()
        assert all(view.tolist() == [0.0, 0.0] for view in views)


def test_who_lies_there_can_be_asked_to_leave() -> None:
    buffers = RegisteredBuffers(Maker())
    (buffer,) = buffers.fit({0: 256}).values()
    (flat,) = flats(1, Gauge())
    flat.assign(buffer)
    flat.unshard()
    buffer.vacate()
    assert not is_in(flat, buffer) and flat.flat.eq(0.0).all()
    buffer.vacate()
    flat.reshard()
    assert not flat.resident


def test_what_is_not_asked_for_is_given_back_where_somebody_wants_that() -> None:
    make, gauge = Maker(), Gauge()
    buffers = RegisteredBuffers(make, gauge)
    there = buffers.fit({0: 256, 1: 256, 2: 256, ~3: 256})
    one, other = flats(2, Gauge())
    for flat, number in ((one, 0), (other, 2)):
        flat.assign(there[number])
        flat.unshard()
        flat.wait()
    assert buffers.fit({0: 256}).keys() == {0} and make.closed == 0, "windows of several kinds take turns"
    buffers.spare()
    make.sizes.clear()
    again = buffers.fit({0: 256, 4: 300})
    assert make.closed == 3 and make.sizes == [300] and again[0] is there[0]
    assert gauge.now == again[0].memory.nbytes + again[4].memory.nbytes
    assert is_in(one, there[0]) and not is_in(other, there[2]) and other.storage.nbytes() and other.flat.eq(1.0).all()
    buffers.fit({})
    assert make.closed == 3, "it is asked for each time"

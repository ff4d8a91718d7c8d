"""Places: who lies there, who leaves, and what is made."""

from __future__ import annotations

import torch

from tests.comm.recording import layout
from tests.support.placed import Slab
from zeroweave.comm.ledger import Gauge, Ledger
from zeroweave.comm.places import Place, Places
from zeroweave.comm.process_group import LocalTransport
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


def is_in(flat: ShardedFlat, place: Place) -> bool:
    return flat.storage.nbytes() == place.memory.nbytes


def test_places_are_made_once_and_grow() -> None:
    make, ledger = Maker(), Ledger(1, 0)
    places = Places(make, ledger.gauge("symmetric memory"))
    first = places.fit({0: 100, 1: 50})
    assert make.sizes == [100, 50] and places.nbytes >= 150
    assert places.fit({0: 90}) == {0: first[0]} and places.fit({}) == {} and places.fit({0: 10, 1: 20}) == first
    again = places.fit({0: 100, 1: 200, 2: 10, ~7: 30})
    assert make.sizes == [100, 50, 30, 200, 10] and make.closed == 1
    assert again[0] is first[0] and again[1] is not first[1] and again.keys() == {0, 1, 2, ~7}
    places.close()
    assert make.closed == 5 and places.nbytes == 0


def test_what_cannot_be_had_is_not_asked_for_again() -> None:
    make, told = Maker(most=100), list[int]()
    places = Places(make, tell=told.append)
    assert places.refused is None
    (one,) = places.fit({0: 50, 1: 500}).values()
    assert places.fit({0: 50, 1: 600}) == {0: one} and places.fit({0: 500}) == {}
    assert make.sizes == [50, 500] and told == [500] == [places.refused]
    assert places.fit({0: 50, 1: 200}) == {0: one} and told == [500] and places.refused == 200
    assert places.fit({0: 50, 1: 80}).keys() == {0, 1}, "less may be there"


def test_without_memory_nothing_has_a_place() -> None:
    assert Places().fit({0: 1, 1: 2}) == {}


def test_who_lies_there_leaves_with_what_others_see() -> None:
    gauge = Gauge()
    (place,) = Places(Maker()).fit({0: 256}).values()
    one, other = flats(2, gauge)
    for flat in (one, other):
        flat.assign(place)
    one.unshard()
    one.wait()
    view, version = one.flat[3:5], one.flat._version
    assert is_in(one, place)
    other.unshard()  # the schedule would have dropped the other one before
    other.wait()
    assert is_in(other, place) and one.storage.nbytes() == 256
    assert view.tolist() == [0.0, 0.0] and other.flat.eq(1.0).all()
    assert one.flat._version == version, "nobody has written it"
    assert gauge.now == 512
    other.reshard()
    assert not one.reshard(), "a view is left"
    one.unshard()  # it comes back, and the view with it
    assert is_in(one, place) and view.tolist() == [0.0, 0.0]
    one.wait()
    del view
    assert one.reshard() and gauge.now == 0 and not one.resident


def test_one_that_has_another_place_moves_or_has_none() -> None:
    here, there = Places(Maker()).fit({0: 256, 1: 256}).values()
    (flat,) = flats(1, Gauge())
    views = []
    for place in (here, there, None, here):
        flat.assign(place)
        flat.unshard()
        flat.wait()
        views.append(flat.flat[:2])
        assert is_in(flat, place) if place is not None else flat.storage.nbytes() == 256
        assert not flat.reshard()
        assert all(view.tolist() == [0.0, 0.0] for view in views)


def test_who_lies_there_can_be_asked_to_leave() -> None:
    places = Places(Maker())
    (place,) = places.fit({0: 256}).values()
    (flat,) = flats(1, Gauge())
    flat.assign(place)
    flat.unshard()
    place.vacate()
    assert not is_in(flat, place) and flat.flat.eq(0.0).all()
    place.vacate()
    flat.reshard()
    assert not flat.resident


def test_what_is_not_asked_for_is_given_back_where_somebody_wants_that() -> None:
    make, gauge = Maker(), Gauge()
    places = Places(make, gauge)
    there = places.fit({0: 256, 1: 256, 2: 256, ~3: 256})
    one, other = flats(2, Gauge())
    for flat, number in ((one, 0), (other, 2)):
        flat.assign(there[number])
        flat.unshard()
        flat.wait()
    assert places.fit({0: 256}).keys() == {0} and make.closed == 0, "windows of several kinds take turns"
    places.spare()
    make.sizes.clear()
    again = places.fit({0: 256, 4: 300})
    assert make.closed == 3 and make.sizes == [300] and again[0] is there[0]
    assert gauge.now == again[0].memory.nbytes + again[4].memory.nbytes
    assert is_in(one, there[0]) and not is_in(other, there[2]) and other.storage.nbytes() and other.flat.eq(1.0).all()
    places.fit({})
    assert make.closed == 3, "it is asked for each time"

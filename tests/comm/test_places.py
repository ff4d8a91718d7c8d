"""Places: who lies there, who leaves, and what is made."""

from __future__ import annotations

import torch

from tests.comm.recording import layout
from tests.support.placed import Slab
from zeroweave.comm.gauge import Gauge
from zeroweave.comm.ledger import Ledger
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
    first = places.fit((100, 50))
    assert make.sizes == [100, 50] and places.nbytes >= 150
    assert places.addresses == (1, 2)
    assert places.fit((90,)) == first[:1] and places.fit(()) == [] and places.fit((10, 20)) == first
    again = places.fit((100, 200, 10))
    assert make.sizes == [100, 50, 200, 10] and make.closed == 1
    assert again[0] is first[0] and again[1] is not first[1]
    places.close()
    assert make.closed == 4 and places.nbytes == 0


def test_what_cannot_be_had_is_not_asked_for_again() -> None:
    make, told = Maker(most=100), list[int]()
    places = Places(make, tell=told.append)
    assert places.refused is None
    one, other = places.fit((50, 500))
    assert one is not None and other is None
    assert places.fit((50, 600)) == [one, None] and places.fit((500,)) == [None]
    assert make.sizes == [50, 500] and told == [500] == [places.refused]
    assert places.fit((50, 200)) == [one, None] and told == [500] and places.refused == 200
    assert places.fit((50, 80))[1] is not None, "less may be there"


def test_without_memory_nothing_has_a_place() -> None:
    assert Places().fit((1, 2)) == [None, None]


def test_who_lies_there_leaves_with_what_others_see() -> None:
    gauge = Gauge()
    (place,) = Places(Maker()).fit((256,))
    assert place is not None
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
    here, there = Places(Maker()).fit((256, 256))
    assert here is not None and there is not None
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
    (place,) = places.fit((256,))
    assert place is not None
    (flat,) = flats(1, Gauge())
    flat.assign(place)
    flat.unshard()
    place.vacate()
    assert not is_in(flat, place) and flat.flat.eq(0.0).all()
    place.vacate()
    flat.reshard()
    assert not flat.resident


def test_places_that_are_too_many_go_with_whoever_lies_there() -> None:
    make, gauge = Maker(), Gauge()
    places = Places(make, gauge)
    first, second, third = places.fit((256, 256, 256))
    assert first is not None and second is not None and third is not None
    one, other = flats(2, Gauge())
    for flat, place in ((one, first), (other, third)):
        flat.assign(place)
        flat.unshard()
        flat.wait()
    places.trim(1)
    assert make.closed == 2 and gauge.now == first.memory.nbytes
    assert is_in(one, first) and not is_in(other, third) and other.storage.nbytes()
    assert places.fit((256, 256))[0] is first and len(make.sizes) == 4
    places.trim(5)
    assert make.closed == 2

"""Reductions by pulling: which buckets, from which memory, and who has that meanwhile."""

from __future__ import annotations

import random
from collections import deque
from types import TracebackType
from typing import Any

import pytest
import torch

from tests.comm.recording import Noting
from zeroweave._torch.peers import Shared
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.pending import Beside
from zeroweave.comm.pulling.reductions import FLATS, PeerFlats, PulledReductions
from zeroweave.comm.pulling.setup import typical
from zeroweave.layout import BucketLayout, Slot

NUMEL = 64


def bucket(numel: int = NUMEL, group: str = "world") -> BucketLayout:
    half = numel // 2
    slots = Slot("v", 0, half - 4, (half - 4,)), Slot("w", half, half, (half,))
    return BucketLayout(0, "b", "float32", 4, True, group, 2, slots, numel)


class Event:
    """Notes which stream waits for which kernel."""

    def __init__(self, number: int, noted: list[str]) -> None:
        self._number, self._noted = number, noted

    def wait(self) -> None:
        self._noted.append(f"behind {self._number}")


class Side:
    """A stream, on a machine that has none: kernels are over at once."""

    def __init__(self, noted: list[str]) -> None:
        self._noted, self._kernels = noted, 0

    def __enter__(self) -> None:
        self._noted.append("(")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._noted.append(")")

    def pending(self, *alive: torch.Tensor) -> Beside:
        self._kernels += 1
        event: Any = Event(self._kernels - 1, self._noted)
        return Beside(event, *alive)


class Pulled:
    """A transport that pulls float32 buckets of 64 values, and of half of them; `pulled`: what kernels have read."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.gone = torch.zeros(1, dtype=torch.int32)
        memory = [Shared(torch.full((4 * NUMEL,), 255, dtype=torch.uint8), (), None) for _ in range(FLATS)]
        self.flats = PeerFlats(memory, Shared(torch.zeros(8, dtype=torch.uint8), (), None), self.gone)
        self.pulled: list[torch.Tensor] = []
        self.numbers: list[int] = []
        side: Any = Side(self.noted)
        pulls = {torch.float32: self._pull}
        inner = Noting("kernel", self.noted)
        self.transport = PulledReductions(inner, self.flats, pulls, Ledger(2, 0), side)

    def _pull(self, out: torch.Tensor, start: int, number: int) -> None:
        self.numbers.append(number)
        self.pulled.append(self.flats.view(number, 2 * len(out), out.dtype).clone())
        assert start == 0

    def flat(self, value: float, shape: BucketLayout | None = None) -> torch.Tensor:
        return self.transport.flat(shape or bucket(), torch.float32).fill_(value)

    def lies_there(self, flat: torch.Tensor) -> bool:
        return self.flats.number(flat) is not None

    def reduce(self, parts: Any, shape: BucketLayout | None = None, dtype: torch.dtype = torch.float32) -> Any:
        shape = shape or bucket()
        out = torch.empty(shape.shard_numel, dtype=dtype)
        return self.transport.reduce_scatter(out, parts, shape, "average")


def test_one_is_written_while_the_one_before_is_reduced() -> None:
    made = Pulled()
    first = made.flat(1)
    assert made.lies_there(first)
    assert not made.lies_there(made.flat(9)), "nothing would be left for copies"
    one = made.reduce(first)
    second = made.flat(2)
    two = made.reduce(second)
    assert [made.flats.number(flat) for flat in (first, second)] == [0, 1]
    assert "behind 0" not in made.noted
    third = made.flat(3)
    assert made.flats.number(third) == 0 and made.noted[-1] == "behind 0", "who writes there waits for the kernel"
    three = made.reduce(third)
    for pending in (one, two, three):
        pending.wait()
    assert [value.unique().tolist() for value in made.pulled] == [[1], [2], [3]]


def test_what_was_waited_for_is_free_at_once() -> None:
    made = Pulled()
    for value in range(4):
        made.reduce(made.flat(value)).wait()
    noted = len(made.noted)
    assert made.flats.number(made.flat(5)) == 0
    assert len(made.noted) == noted, "nobody waits again"


def test_gradients_that_lie_elsewhere_are_copied() -> None:
    made = Pulled()
    shape = bucket()
    made.reduce({1: torch.full((32,), 7.0)}).wait()
    assert made.pulled[0].tolist() == [0.0] * 32 + [7.0] * 32, "what is missing counts as zeros, and so does padding"
    made.reduce(torch.full((NUMEL,), 3.0)).wait()
    written = made.flat(4)
    made.reduce(torch.full((NUMEL,), 5.0), shape)
    made.reduce(torch.full((NUMEL,), 6.0), shape)
    assert written.unique().tolist() == [4], "nobody has written what is lent"
    made.reduce(written)
    assert [value.unique().tolist() for value in made.pulled[1:]] == [[3], [5], [6], [4]]
    assert made.numbers[2:] == [1, 1, 0]


def test_a_gradient_in_a_flat_that_was_given_up_is_copied_from_there() -> None:
    made = Pulled()
    kept = made.flat(8)[32:]  # another part was to come, and has not
    made.reduce({1: kept}).wait()
    assert made.numbers == [1] and made.pulled[0][32:].unique().tolist() == [8]


def test_what_nobody_will_wait_for_is_free() -> None:
    made = Pulled()
    flying = made.reduce(made.flat(1))
    del flying  # a capture has failed
    noted = len(made.noted)
    assert made.flats.number(made.flat(2)) == 0
    assert len(made.noted) == noted, "its event never comes"


@pytest.mark.parametrize(
    ("shape", "dtype", "pulled"),
    [
        (bucket(), torch.float32, True),
        (bucket(NUMEL // 2), torch.float32, True),
        (bucket(2 * NUMEL), torch.float32, False),
        (bucket(NUMEL // 4), torch.float32, True),
        (bucket(12), torch.float32, False),
        (bucket(), torch.float64, False),
        (bucket(group="experts"), torch.float32, False),
    ],
)
def test_all_else_is_reduced_as_ever(shape: BucketLayout, dtype: torch.dtype, pulled: bool) -> None:
    made = Pulled()
    assert made.lies_there(made.transport.flat(shape, dtype)) == pulled
    made.reduce(torch.zeros(shape.numel, dtype=dtype), shape, dtype)
    assert ("kernel reduces" in made.noted) == (not pulled)
    assert len(made.pulled) == pulled


def test_what_is_pulled_lies_outside_of_launches() -> None:
    made = Pulled()
    small = bucket(12)  # a part of which is no multiple of 16 bytes
    with made.transport.together():
        for shape in (small, small, bucket(), small):
            made.reduce(torch.zeros(shape.numel), shape)
    launches = "( kernel_reduces kernel_reduces ) ( ) ( kernel_reduces )"
    assert " ".join(word.replace(" ", "_") for word in made.noted) == launches


def test_behind_the_end_nothing_fits() -> None:
    made = Pulled()
    made.reduce(made.flat(1)).wait()
    made.flats.close()
    assert not made.lies_there(made.flat(1))
    made.reduce(torch.zeros(NUMEL))
    assert made.noted[-1] == "kernel reduces"


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_every_reduction_reads_what_was_written_for_it(seed: int, ordered: bool, held: bool) -> None:
    """Buckets are begun, left waiting, given up and reduced in any order, and waited for in any, or not at all.

    `held`: somebody keeps views of what was reduced.
    """
    made, draw = Pulled(), random.Random(seed)
    waiting: list[tuple[float, torch.Tensor]] = []
    flying: list[Any] = []
    kept: deque[torch.Tensor] = deque(maxlen=3)
    expected: list[float] = []
    there = 0
    for value in range(1, 150):
        action = draw.random()
        if action < 0.4 and len(waiting) < 3:
            flat = made.flat(value)
            there += made.lies_there(flat)
            waiting.append((value, flat))
        elif action < 0.5 and waiting:
            waiting.pop(draw.randrange(len(waiting)))
        elif action < 0.55:
            kept.clear()
        elif waiting:
            number, flat = waiting.pop(draw.randrange(len(waiting)))
            expected.append(number)
            halves = {0: flat[:28], 1: flat[32:]}
            flying.append(made.reduce(halves if draw.random() < 0.3 else flat))
            if held:
                kept.append(flat[:5])
            del halves
        flat = torch.empty(0)
        while len(flying) > draw.choice((0, 1, 2, 3)):
            pending = flying.pop(0 if ordered else draw.randrange(len(flying)))
            if ordered or draw.random() < 0.9:
                pending.wait()
        pending = None
        for number, flat in waiting:
            assert flat.unique().tolist() == [number]
    assert there > 5
    for number, read in zip(expected, made.pulled, strict=True):
        assert set(read.unique().tolist()) <= {number, 0.0} and number in read


def test_what_is_given_up_is_told_to_kernels() -> None:
    made = Pulled()
    made.flats.close()
    assert made.gone.item() == 0
    other = Pulled()
    other.flats.close(failed=True)
    assert other.gone.item() == 1


@pytest.mark.parametrize(
    ("sizes", "found"), [([], 0), ([5], 5), ([4] * 36 + [50, 50], 4), ([1, 1, 100], 100), ([3, 3, 3, 3, 12], 3)]
)
def test_memory_is_for_the_flats_that_hold_most(sizes: list[int], found: int) -> None:
    assert typical(sizes) == found

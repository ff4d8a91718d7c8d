"""Ctrl-C in a forward or backward, and gathers for which there is no memory: a rank that is alone trains on, exactly.

No parameter keeps older values: what failed is made again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.marks import slow
from tests.support.twins import SOME, Twins, loss_of, twins
from zeroweave.comm.process_group import LocalTransport
from zeroweave.runtime.flat import Flat

ENTRIES = ["hand_over", "__missing__", "reshard", "wait", "enter", "leave"]
"""Functions at whose entry Python may raise it: between what autograd accumulates, or a hold, and its note (the first
three), before a gather is waited for, at the begin and end of calls."""


class Failing:
    """`left`: of the calls up to the one that fails; 0: none does."""

    left = 0

    def called(self) -> bool:
        """Is it the one?"""
        self.left -= 1
        return self.left == 0

    @contextmanager
    def armed(self) -> Iterator[None]:
        yield


class Interrupt(Failing):
    """KeyboardInterrupt at one of the entries of functions called `name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == self._name and self.called():
            sys.setprofile(None)
            raise KeyboardInterrupt

    @contextmanager
    def armed(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


class Method(Failing):
    """In place of a method, of which one call fails, before or `behind` what it does."""

    def __init__(self, owner: type, name: str, error: type[BaseException], behind: bool) -> None:
        usual = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            fails = self.called()
            done = usual(*arguments) if not fails or behind else None
            if fails:
                raise error
            return done

        self.patch: AbstractContextManager[object] = patch.object(owner, name, call)


def calls_that_fail(pair: Twins, failing: Failing, error: type[BaseException]) -> int:
    """Trains on behind each call of a forward and a backward that can fail; one more than there are."""
    for _ in range(3):
        pair.assert_still_trains()
    for number in range(1, 100):
        failing.left = number
        try:
            with failing.armed():
                pair.engine.backward(loss_of(pair.engine))
        except error:
            pair.engine.zero_grad()
            pair.assert_still_trains()
        over, failing.left = failing.left > 0, 0
        if over:
            return number
    raise AssertionError("they have no end")


@slow(*(f"{name}-2-aot_eager" for name in ("__missing__", "reshard", "leave")))
@slow(*(f"{name}-3-eager" for name in ("hand_over", "wait", "enter")))
@SOME
@pytest.mark.parametrize("name", ENTRIES)
def test_training_goes_on_behind_an_interrupt(stage: int, mode: str, name: str) -> None:
    with twins(stage, mode) as pair:
        number = calls_that_fail(pair, Interrupt(name), KeyboardInterrupt)
    assert number > 2 or (name, stage) in (("reshard", 1), ("reshard", 2)), "each was interrupted, and there are some"


@slow(
    "Flat-_settle_in-MemoryError-False-2-aot_eager",
    "Flat-_settle_in-KeyboardInterrupt-False-3-eager",
    "Flat-_settle_in-KeyboardInterrupt-True-2-aot_eager",
    "LocalTransport-all_gather-MemoryError-False-3-eager",
    "LocalTransport-all_gather-KeyboardInterrupt-False-2-aot_eager",
    "LocalTransport-all_gather-KeyboardInterrupt-True-3-eager",
)
@SOME
@pytest.mark.usefixtures("flats_apart")
@pytest.mark.parametrize(
    ("error", "behind"), [(MemoryError, False), (KeyboardInterrupt, False), (KeyboardInterrupt, True)]
)
@pytest.mark.parametrize(("owner", "name"), [(Flat, "_settle_in"), (LocalTransport, "all_gather")])
def test_training_goes_on_behind_any_gather_that_failed(
    stage: int, mode: str, owner: type, name: str, error: type[BaseException], behind: bool
) -> None:
    failing = Method(owner, name, error, behind)
    with failing.patch, twins(stage, mode) as pair:
        number = calls_that_fail(pair, failing, error)
    assert number > 5, "each gather of a forward and a backward has failed once"

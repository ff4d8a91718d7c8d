"""Ctrl-C between two lines of a forward or backward: behind `zero_grad()` a rank that is alone trains on, exactly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from tests.support.marks import slow
from tests.support.twins import SOME, loss_of, twins

ENTRIES = ["hand_over", "__missing__", "reshard", "wait", "enter", "leave"]
"""Functions at whose entry Python may raise it: between what autograd accumulates, or a hold, and its note (the first
three), before a gather is waited for, at the begin and end of calls."""


class Interrupt:
    """Is raised at one of the entries of functions called `name`. `left`: of them, up to that one."""

    def __init__(self, name: str, left: int) -> None:
        self._name, self.left = name, left

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == self._name:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    @contextmanager
    def armed(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


@slow(*(f"{name}-2-aot_eager" for name in ("__missing__", "reshard", "leave")))
@slow(*(f"{name}-3-eager" for name in ("hand_over", "wait", "enter")))
@SOME
@pytest.mark.parametrize("name", ENTRIES)
def test_training_goes_on_behind_an_interrupt(stage: int, mode: str, name: str) -> None:
    with twins(stage, mode) as pair:
        for _ in range(3):
            pair.assert_still_trains()
        for number in range(1, 100):
            interrupt = Interrupt(name, number)
            try:
                with interrupt.armed():
                    pair.engine.backward(loss_of(pair.engine))
            except KeyboardInterrupt:
                pair.engine.zero_grad()
                pair.assert_still_trains()
            if interrupt.left > 0:
                break
        assert number > 2 or (name, stage) in (("reshard", 1), ("reshard", 2)), (
            "each was interrupted, and there are some"
        )
        assert number < 99

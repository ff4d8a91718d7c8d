"""A gather for which there is no memory, or that cannot be issued, is made again: no parameter keeps older values."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.support.twins import SOME, loss_of, twins
from zeroweave.comm.process_group import LocalTransport
from zeroweave.runtime.flat import Flat


class Failing:
    """Stands in for a method, of which one call fails."""

    def __init__(self, usual: Any) -> None:
        self._usual, self.left = usual, 0
        """of the calls up to that one"""

    def method(self) -> Any:
        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("no memory is left")
            return self._usual(*arguments)

        return call


@SOME
@pytest.mark.parametrize(("owner", "name"), [(Flat, "_settle_in"), (LocalTransport, "all_gather")])
def test_training_goes_on_behind_any_gather_that_failed(stage: int, mode: str, owner: type, name: str) -> None:
    failing, number = Failing(getattr(owner, name)), 0
    with patch.object(owner, name, failing.method()), twins(stage, mode) as pair:
        for _ in range(3):
            pair.assert_still_trains()
        over = False
        while not over:
            number += 1
            failing.left = number
            try:
                pair.engine.backward(loss_of(pair.engine))
            except MemoryError:
                pair.engine.zero_grad()
                pair.assert_still_trains()
            over, failing.left = failing.left > 0, 0
        assert number > 5, "each gather of a forward and a backward has failed once"

"""A gather for which there is no memory, or that cannot be issued, is made again: no parameter keeps older values.

So is one that Ctrl-C has interrupted, before it or behind it; a rank that is alone goes on.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.support.marks import slow
from tests.support.twins import SOME, loss_of, twins
from zeroweave.comm.process_group import LocalTransport
from zeroweave.runtime.flat import Flat

pytestmark = pytest.mark.usefixtures("flats_apart")


class Failing:
    """Stands in for a method, of which one call fails, before or `behind` what it does."""

    def __init__(self, usual: Any, error: type[BaseException], behind: bool) -> None:
        self._usual, self._error, self._behind, self.left = usual, error, behind, 0
        """of the calls up to that one"""

    def method(self) -> Any:
        def call(*arguments: Any) -> Any:
            self.left -= 1
            done = self._usual(*arguments) if self.left or self._behind else None
            if self.left == 0:
                raise self._error
            return done

        return call


@slow(
    "Flat-_settle_in-MemoryError-False-2-aot_eager",
    "Flat-_settle_in-KeyboardInterrupt-False-3-eager",
    "Flat-_settle_in-KeyboardInterrupt-True-2-aot_eager",
    "LocalTransport-all_gather-MemoryError-False-3-eager",
    "LocalTransport-all_gather-KeyboardInterrupt-False-2-aot_eager",
    "LocalTransport-all_gather-KeyboardInterrupt-True-3-eager",
)
@SOME
@pytest.mark.parametrize(
    ("error", "behind"), [(MemoryError, False), (KeyboardInterrupt, False), (KeyboardInterrupt, True)]
)
@pytest.mark.parametrize(("owner", "name"), [(Flat, "_settle_in"), (LocalTransport, "all_gather")])
def test_training_goes_on_behind_any_gather_that_failed(
    stage: int, mode: str, owner: type, name: str, error: type[BaseException], behind: bool
) -> None:
    failing, number = Failing(getattr(owner, name), error, behind), 0
    with patch.object(owner, name, failing.method()), twins(stage, mode) as pair:
        for _ in range(3):
            pair.assert_still_trains()
        over = False
        while not over:
            number += 1
            failing.left = number
            try:
                pair.engine.backward(loss_of(pair.engine))
            except error:
                pair.engine.zero_grad()
                pair.assert_still_trains()
            over, failing.left = failing.left > 0, 0
        assert number > 5, "each gather of a forward and a backward has failed once"

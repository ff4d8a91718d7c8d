"""Waits of the control group: an operation that ends while a wait for it gives up has ended well."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from zeroweave.errors import RankFailure
from zeroweave.ranks.control import Control


class Work:
    """Ends while the first wait gives up. `fails`: with an error."""

    def __init__(self, fails: bool) -> None:
        self._fails, self.waits = fails, 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits += 1
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self._fails:
            raise RuntimeError("Connection closed by peer")

    def is_completed(self) -> bool:
        return True


def waits(work: Work) -> Callable[[], None]:
    board = Mock()
    board.read.return_value = ["", ""]
    control = Control(cast(dist.ProcessGroup, object()), 0, 2, 5.0, board)
    return lambda: control._wait(lambda group: cast(Any, work), "a place")


def test_an_operation_that_ends_while_a_wait_gives_up_has_ended_well() -> None:
    work = Work(fails=False)
    waits(work)()
    assert work.waits == 2


def test_what_it_has_failed_with_is_told() -> None:
    with pytest.raises(RankFailure, match="lost each other at 'a place': Connection closed by peer"):
        waits(Work(fails=True))()

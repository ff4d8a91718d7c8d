"""Which way gathers take: what is measured decides, and what cannot be is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.support.harness import Pools
from zeroweave.comm.choose import SIZES, Asked, Choice, Cost, decide, refused
from zeroweave.errors import ConfigError
from zeroweave.ranks.control import Control

CPU = torch.device("cpu")
MIB = 1 << 20


def costs(*totals: float) -> tuple[Cost, ...]:
    return tuple(Cost(size, total / 4, 3 * total / 4, total) for size, total in zip(SIZES, totals, strict=False))


@pytest.mark.parametrize(
    ("kernel", "copies", "least"),
    [
        ((1, 2, 3, 4, 5), (9, 9, 2, 3, 4), 16 * MIB),
        ((1, 2, 3, 4, 5), (0, 0, 0, 0, 0), MIB),
        ((1, 2, 3, 4, 5), (0, 9, 0, 0, 0), 16 * MIB),
        ((1, 2, 3, 4, 5), (0, 0, 0, 0, 5), None),
        ((1, 2), (2, 1), 4 * MIB),
    ],
)
def test_copy_engines_gather_from_the_size_on_where_they_cost_less(
    kernel: Sequence[float], copies: Sequence[float], least: int | None
) -> None:
    choice = decide(costs(*kernel), costs(*copies))
    assert choice.least == least
    assert len(list(choice.table())) == len(kernel)


def test_it_says_what_was_chosen_and_why() -> None:
    assert str(decide(costs(2), costs(1))) == "by copy engine from 1 MiB on: measured at the start"
    assert str(decide(costs(1), costs(2))) == "by kernel: it costs less, measured at the start"
    assert str(Choice("it is asked for", 1)) == "by copy engine: it is asked for"
    assert str(Choice("ranks compute on cpu")) == "by kernel: ranks compute on cpu"
    by_kernel, by_copy = Cost(16 * MIB, 1e-4, 2e-4, 5e-5), Cost(16 * MIB, 1e-5, 3e-4, 4e-4)
    (row,) = Choice("", None, (by_kernel,), (by_copy,)).table()
    assert row == ("16", "0.050", "0.200", "0.100", "0.400", "0.300", "0.010")
    (row,) = Choice("", None, (Cost(MIB, 1e-4, 2e-4),), (by_copy,)).table()
    assert row == ("1", "–", "0.200", "0.100", "0.400", "0.300", "0.010")


def test_where_nothing_is_gathered_between_gpus_kernels_do() -> None:
    alone = Control(None, 0, 1)
    assert refused("kernel", alone, CPU, MIB) == "transport.gathers is 'kernel'"
    for asked in ("auto", "copy_engine"):
        assert refused(asked, alone, CPU, MIB) == "nothing is gathered in a world of 1"


def between_ranks(asked: Asked) -> str:
    control = Control.over(None)
    try:
        return refused(asked, control, CPU, MIB)
    except ConfigError as error:
        return str(error)
    finally:
        control.close()


def test_what_is_asked_for_and_cannot_be_is_an_error(pools: Pools) -> None:
    assert pools(2).run(between_ranks, "auto") == ["ranks compute on cpu"] * 2
    told = "transport.gathers is 'copy_engine': ranks compute on cpu. Set it to 'auto' or 'kernel'"
    assert pools(2).run(between_ranks, "copy_engine") == [told] * 2

"""Gradients that are exchanged and added up by each rank: the values of other reductions, wherever they lay before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.schedule.test_kinds import training, window
from tests.support.exchanged import exchanged
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.zoo import rows


def trained(stage: int, mode: str, stray: bool) -> list[str]:
    """Hashes of the gradients of some windows; `stray`: some with micro-steps that were not recorded."""
    found = []
    with training(mode, stage, **({"prefetch": 0} if stray else {"record_steps": 1})) as engine:
        for index in range(8):
            found.append(window(engine, 2 if stray and index in (4, 6) else 1, stray and index in (5, 6)))
        values = engine.state_dict()
        found += [str(float(value.double().sum())) for value in values.values()]
    return found


def both_ways(stage: int, mode: str, stray: bool, nbytes: int) -> tuple[bool, int, int]:
    """Are the bits the same? And swaps, and those from where backwards had written."""
    plain = trained(stage, mode, stray)
    found, swaps = exchanged(trained, stage, mode, stray, nbytes=nbytes)
    return found == plain, swaps.swaps, swaps.in_place


@daily(
    ("stage", "mode", "stray", "nbytes"),
    [(2, "eager", False, 1 << 20)],
    [
        (3, "aot_eager", True, 1 << 20),
        (1, "eager", True, 1 << 20),
        (1, "aot_eager", False, 1 << 20),
        (2, "aot_eager", True, 1 << 20),
        (3, "aot_eager", False, 4 << 10),
        (3, "eager", True, 1 << 20),
    ],
)
def test_the_bits_of_two_ranks_are_those_of_other_reductions(
    pools: Pools, stage: int, mode: str, stray: bool, nbytes: int
) -> None:
    for same, swaps, in_place in pools(2).run(both_ways, stage, mode, stray, nbytes):
        assert same and swaps, (same, swaps, in_place)


def written(outboxes: int) -> tuple[list[str], int, int]:
    """Hashes of the gradients of compiled windows, swaps, and those of flats that backwards had written into."""
    found, swaps = exchanged(trained, 2, "aot_eager", False, outboxes=outboxes)
    return found, swaps.swaps, swaps.in_place


def test_backwards_write_where_gradients_are_sent_from_as_far_as_there_is_room(pools: Pools) -> None:
    for (none, swaps, nowhere), (one, _, there), (two, _, everywhere) in zip(
        *(pools(2).run(written, outboxes) for outboxes in (0, 1, 4)), strict=True
    ):
        assert none == one == two
        assert 0 == nowhere < there <= everywhere <= swaps, (nowhere, there, everywhere, swaps)


def gradients(stage: int) -> list[torch.Tensor]:
    """Of one window, all of them."""
    with training("eager", stage) as engine:
        x, y = rows(engine.rank, 0)
        engine.backward(F.mse_loss(engine(x), y))
        return list(engine.gradients().values())


def on_three_ranks(stage: int, nbytes: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    """Gradients without and with swaps, and how many swaps."""
    plain = gradients(stage)
    found, swaps = exchanged(gradients, stage, nbytes=nbytes)
    return list(zip(plain, found, strict=True)), swaps.swaps


@pytest.mark.parametrize(("stage", "nbytes"), [(1, 1 << 20), (3, 1 << 20), (2, 8)])
def test_three_ranks_add_up_in_another_order_at_most(pools: Pools, stage: int, nbytes: int) -> None:
    """What does not fit is reduced as ever."""
    for pairs, swaps in pools(3).run(on_three_ranks, stage, nbytes):
        assert (swaps > 0) == (nbytes > 8)
        for plain, found in pairs:
            torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-8)

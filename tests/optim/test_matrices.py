"""Who sends what to whom, so that matrices are whole where they are updated."""

from __future__ import annotations

import random

import pytest
import torch

from zeroweave.layout import BucketLayout, ParameterSpec, build_layout, owners_of_whole
from zeroweave.optim.matrices import Cargo, Kind, Piece, message, route

GRADIENT, MASTER = Kind("gradient", None, torch.float32), Kind("master", None, torch.float32)
STATE = Kind("state", "momentum", torch.bfloat16)


def layout_of(sizes: list[tuple[int, int]], world: int) -> BucketLayout:
    specs = [ParameterSpec(f"w{index}", shape, "float32", 4, True, None) for index, shape in enumerate(sizes)]
    (layout,) = build_layout(specs, world, 1 << 30)
    return layout


def test_pieces_lie_one_behind_the_other_and_begin_where_any_dtype_may() -> None:
    layout = layout_of([(3, 5), (2, 2)], 1)
    pieces, nbytes = message(layout, [Cargo(0, (MASTER, STATE)), Cargo(1, (STATE,))], 0)
    assert [(p.slot, p.kind, p.fragment.numel, p.start) for p in pieces] == [
        (0, MASTER, 15, 0),
        (0, STATE, 15, 64),  # behind 60 bytes
        (1, STATE, 4, 96),  # behind 30
    ]
    assert nbytes == 112  # behind 8
    buffer, whole = torch.zeros(nbytes, dtype=torch.uint8), torch.arange(15.0).view(3, 5)
    pieces[0].of(buffer).copy_(pieces[0].part_of(whole))
    assert torch.equal(buffer[:60].view(torch.float32).view(3, 5), whole)


@pytest.mark.parametrize("seed", range(20))
def test_what_one_rank_sends_the_other_expects(seed: int) -> None:
    """Each element of each matrix comes to its owner exactly once, and messages are as long at either end."""
    dice = random.Random(seed)
    world = dice.randint(1, 5)
    layout = layout_of([(dice.randint(1, 9), dice.randint(1, 40)) for _ in range(dice.randint(1, 6))], world)
    slots = sorted(dice.sample(range(len(layout.slots)), dice.randint(1, len(layout.slots))))
    cargo = [Cargo(slot, (GRADIENT, MASTER, STATE)[: dice.randint(1, 3)]) for slot in slots]
    owners = owners_of_whole([layout], [(layout.id, slot) for slot in slots], world)
    routes = [route(layout, cargo, owners, rank, world) for rank in range(world)]
    for rank, mine in enumerate(routes):
        for other, theirs in enumerate(routes):
            assert mine.held[other] == theirs.owned[rank]
    assert {each.payload for each in routes} == {sum(n for each in routes for _, n in each.held)}
    for slot, kinds in cargo:
        came: list[Piece] = [
            piece for pieces, _ in routes[owners[layout.id, slot]].owned for piece in pieces if piece.slot == slot
        ]
        for kind in kinds:
            places = [p.fragment for p in came if p.kind == kind]
            covered = [i for f in places for i in range(f.offset, f.offset + f.numel)]
            assert covered == list(range(layout.slots[slot].numel))

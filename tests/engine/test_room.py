"""The multiprocessors that compiled backwards leave to reductions: only where there are some, and not for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from zeroweave.comm.pulling.setup import Pulling


class Room:
    """Counts its scopes, and who is inside."""

    def __init__(self) -> None:
        self.scopes = self.inside = 0

    def begin(self) -> None:
        self.scopes += 1
        self.inside += 1

    def end(self) -> None:
        self.inside -= 1
        assert self.inside >= 0


FAILS: list[bool] = []
"""Not empty: the next backward through `same` fails."""


@torch.library.custom_op("zeroweave_tests::back", mutates_args=())
def back(gradient: Tensor) -> Tensor:
    if FAILS:
        raise RuntimeError("a backward that fails")
    return gradient.clone()


@torch.library.custom_op("zeroweave_tests::same", mutates_args=())
def same(x: Tensor) -> Tensor:
    return x.clone()


back.register_fake(torch.empty_like)
same.register_fake(torch.empty_like)
same.register_autograd(lambda ctx, gradient: back(gradient))


class Block(nn.Module):
    """Calls compiled code whose backward calls `back`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(same(self.linear(x)))


def started(monkeypatch: pytest.MonkeyPatch, room: Room, **more: Any) -> Any:
    torch.manual_seed(0)
    monkeypatch.setattr("zeroweave.engine.assembly.reduce_by", lambda *arguments: Pulling("there is room", None, room))
    model = nn.Sequential(*(Block() for _ in range(3)))
    config: dict[str, Any] = {"compile": {"lower": "aot_eager"}, **more}
    return zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


@pytest.mark.parametrize(("stage", "reduced"), [(1, [False, True]), (2, [True, True]), (3, [True, True])])
def test_there_is_room_in_backwards_that_reduce(
    monkeypatch: pytest.MonkeyPatch, stage: int, reduced: list[bool]
) -> None:
    room = Room()
    with started(monkeypatch, room, stage=stage, gradient_accumulation_steps=2) as engine:
        for _ in range(3):
            for expected in reduced:
                loss = engine(torch.ones(2, 8)).sum()
                assert room.inside == 0
                before = room.scopes
                engine.backward(loss)
                assert room.scopes - before == (3 if expected else 0) and room.inside == 0
                engine.step()


def test_a_backward_that_fails_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room()
    with started(monkeypatch, room, stage=2) as engine:
        for fails in (False, True, False):
            FAILS[:] = [True] * fails
            before, loss = room.scopes, engine(torch.ones(2, 8)).sum()
            if fails:
                with pytest.raises(RuntimeError, match="a backward that fails"):
                    engine.backward(loss)
                engine.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
            assert room.scopes == before + (1 if fails else 3) and room.inside == 0

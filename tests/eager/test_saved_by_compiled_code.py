"""What compiled code saves for its backward goes past the engine's hooks where no flat is freed, and is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from zeroweave.eager.handles import SavedTensors

pytestmark = pytest.mark.oldest
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(Block(), nn.LayerNorm(WIDTH)) for _ in range(2)])


def rows(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def plain(steps: int) -> list[Tensor]:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(rows(step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def start(model: nn.Module, **settings: Any) -> zw.Engine:
    config = {"stage": 3, "compile": {"lower": "aot_eager"}, **settings}
    return zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what goes through the engine's hooks."""
    found: list[tuple[int, ...]] = []
    pack = SavedTensors._pack

    def noting(self: SavedTensors, tensor: Tensor) -> object:
        found.append(tuple(tensor.shape))
        return pack(self, tensor)

    monkeypatch.setattr(SavedTensors, "_pack", noting)
    return found


@pytest.mark.parametrize(
    ("settings", "past"),
    [({}, True), ({"activations": {"free_threshold_bytes": 1}}, False), ({"offload": {"activations": True}}, False)],
)
def test_only_what_the_engine_need_not_see_goes_past(
    settings: dict[str, Any], past: bool, packed: list[tuple[int, ...]]
) -> None:
    model = built()
    with start(model, **settings) as engine:
        for step in range(3):
            packed.clear()
            output = engine(rows(step))
            assert (not packed) == past
            engine.backward(output.pow(2).mean())
            engine.step()
    for mine, theirs in zip(model.parameters(), plain(3), strict=True):
        torch.testing.assert_close(mine.detach(), theirs)


@pytest.mark.usefixtures("flats_apart")
def test_where_flats_are_freed_all_goes_through(packed: list[tuple[int, ...]]) -> None:
    with start(built()) as engine:
        engine(rows(0))
        assert packed


def test_hooks_of_the_program_see_all(packed: list[tuple[int, ...]]) -> None:
    model = built()
    with start(model) as engine:
        for step in range(3):
            with torch.autograd.graph.save_on_cpu():
                output = engine(rows(step))
            engine.backward(output.pow(2).mean())
            engine.step()
        assert packed
    for mine, theirs in zip(model.parameters(), plain(3), strict=True):
        torch.testing.assert_close(mine.detach(), theirs)


def test_a_write_into_what_was_saved_is_an_error() -> None:
    with start(built()) as engine:
        x = rows(0)
        output = engine(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(output.sum())

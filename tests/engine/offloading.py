"""An engine whose activations wait in host memory, beside one whose do not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.support.marks import MODES
from tests.support.twins import WIDTH, Block

ROWS, BLOCKS = 512, 6
BYTES = ROWS * WIDTH * 4


class Net(nn.Module):
    """`between(index, x)` is called, eagerly, behind each block."""

    def __init__(self, between: Callable[[int, Tensor], Tensor] = lambda _, x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.between = between
        self.depth, self.backwards = BLOCKS, False

    def forward(self, x: Tensor) -> Tensor:
        blocks = list(self.blocks[: self.depth])
        for index, block in enumerate(reversed(blocks) if self.backwards else blocks):
            x = self.between(index, block(x))
        return x


def rows(index: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index + 1))


def engine_of(wanted: bool, mode: str = "eager", model: Net | None = None, stage: int = 3, **settings: Any) -> Any:
    torch.manual_seed(0)
    net = Net() if model is None else model
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    offload = {"activations": wanted, "activations_threshold_bytes": BYTES}
    config = {"stage": stage, "compile": MODES[mode], "offload": offload, **settings}
    return zw.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), config)


def train(engine: Any, index: int) -> Tensor:
    x = rows(index)
    loss = engine(x).pow(2).mean()
    engine.backward(loss)
    engine.step()
    return loss.detach()


def values(engine: Any) -> list[Tensor]:
    with engine.full_parameters() as full:
        return [p.detach().clone() for p in full.values()]


def in_both(course: Callable[[Any], list[Tensor]], mode: str = "eager", **settings: Any) -> Any:
    """Runs `course` where activations stay and where they move: all tensors are equal. The second one's stats."""
    results, stats = [], None
    for wanted in (False, True):
        between = settings.get("between")
        model = Net() if between is None else Net(between)
        rest = {key: value for key, value in settings.items() if key != "between"}
        with engine_of(wanted, mode, model, **rest) as engine:
            train(engine, 0)
            train(engine, 1)
            results.append([*course(engine), *values(engine)])
            stats = engine.stats
            hosts = engine._runtime.activations.offloading
            assert hosts is None or not hosts.host.now
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    return stats


def resident() -> int:
    """Bytes of the storages of activations that some Python object holds, copies in host memory left out."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is Tensor and each.dtype != torch.uint8]
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for nbytes in found.values() if nbytes >= BYTES)

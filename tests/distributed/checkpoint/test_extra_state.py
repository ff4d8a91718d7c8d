"""Extra state of modules on several ranks: each rank's own comes back to as many ranks, rank 0's to others."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools


class Peak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.peak = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.peak = torch.maximum(self.peak, x.detach().abs().max())
        return self.linear(x)

    def get_extra_state(self) -> Tensor:
        return self.peak

    def set_extra_state(self, state: Tensor) -> None:
        self.peak = state


def started() -> tuple[zw.Engine, Peak]:
    module = Peak()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return zw.initialize(module, optimizer, {"stage": 3, "compile": {"enabled": False}}), module


def saved(folder: str) -> tuple[float, float, bool]:
    engine, module = started()
    with engine:
        engine.backward(engine(torch.full((2, 4), 1.0 + engine.rank)).sum())
        engine.step()
        engine.save(folder)
        state = engine.state_dict()
        assert engine.rank or state["_extra_state"].item() == 1.0
        plain = Peak()
        plain.peak = torch.tensor(7.0)
        engine.load_state_dict(plain.state_dict() if engine.rank == 0 else {})
        given = module.peak.item()
        wrong = {**plain.state_dict(), "_extra_state": torch.tensor(9.0), "linear.bias": torch.ones(9)}
        try:
            engine.load_state_dict(wrong if engine.rank == 0 else {})
        except zw.ParameterError as error:
            refused = "size mismatch for linear.bias" in str(error) and module.peak.item() == 7.0
        return given, module.peak.item(), refused


def loaded(folder: str) -> float:
    engine, module = started()
    with engine:
        engine.load(folder)
        return module.peak.item()


def test_each_rank_goes_on_with_its_own(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(saved, str(tmp_path)) == [(7.0, 7.0, True)] * 2
    assert pools(2).run(loaded, str(tmp_path)) == [1.0, 2.0]
    assert not dist.is_initialized()
    assert loaded(str(tmp_path)) == 1.0

"""Saving decodes each moment of few bits once: which there are, and of what shapes, is known without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from zeroweave.engine.checkpoints import saved
from zeroweave.optim import state_offload
from zeroweave.optim.codes import Coded, decode

CONFIG = {
    "stage": 3,
    "compile": {"enabled": False},
    "precision": {"params": "bfloat16", "optimizer": "compact"},
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saving_decodes_once(tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def counted(coded: Coded) -> Tensor:
        decoded.append(coded.codes.numel())
        return decode(coded)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with zw.initialize(model, optimizer, CONFIG) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 40, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        wanted = {key: engine.full("1.weight", key) for key in ("exp_avg", "exp_avg_sq", "step")}
        for module in (saved, state_offload):
            monkeypatch.setattr(module, "decode", counted)
        engine.save(tmp_path, "a", asynchronous=asynchronous)
        engine.save(tmp_path, "b")  # which waits for the one before
        monkeypatch.undo()
        assert sum(decoded) == 2 * 2 * numel
        engine.set_full("1.weight", torch.zeros(40, 40), "exp_avg")
        engine.load(tmp_path)
        for key, value in wanted.items():
            found = engine.full("1.weight", key)
            assert found is not None and value is not None and torch.equal(found, value), key

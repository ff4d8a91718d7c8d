"""Saving and state dicts decode each moment of few bits once: which there are, and of what shapes, is known without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from zeroweave.engine.checkpoints import content
from zeroweave.optim import state_offload
from zeroweave.optim.quantize8 import Coded, decode

CONFIG = {
    "stage": 3,
    "compile": {"enabled": False},
    "precision": {"params": "bfloat16", "optimizer": "compact"},
}


@contextmanager
def counting() -> Iterator[list[int]]:
    """Inside, the elements that are decoded, of one moment after the other."""
    decoded: list[int] = []

    def counted(coded: Coded) -> Tensor:
        decoded.append(coded.codes.numel())
        return decode(coded)

    with pytest.MonkeyPatch.context() as patched:
        for module in (content, state_offload):
            patched.setattr(module, "decode", counted)
        yield decoded


@pytest.fixture(params=["none", "all"])
def engine(request: pytest.FixtureRequest) -> Iterator[zw.Engine]:
    """After two steps, with states on the device or in host memory."""
    torch.manual_seed(0)
    config = {**CONFIG, "offload": {"optimizer": request.param}}
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    with zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 40, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        yield engine


KEYS = ("exp_avg", "exp_avg_sq", "step")
NUMEL = 3 * (40 * 40 + 40)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saving_decodes_once(engine: zw.Engine, tmp_path: Path, asynchronous: bool) -> None:
    wanted = {key: engine.full("1.weight", key) for key in KEYS}
    with counting() as decoded:
        engine.save(tmp_path, "a", asynchronous=asynchronous)
        engine.save(tmp_path, "b")  # which waits for the one before
    assert sum(decoded) == 2 * 2 * NUMEL
    engine.set_full("1.weight", torch.zeros(40, 40), "exp_avg")
    engine.load(tmp_path)
    for key, value in wanted.items():
        found = engine.full("1.weight", key)
        assert found is not None and value is not None and torch.equal(found, value), key


def test_state_dicts_and_the_end_decode_once(engine: zw.Engine) -> None:
    wanted = {key: engine.full("1.weight", key) for key in KEYS}
    optimizer, weight = engine.optimizer, engine.module.get_parameter("1.weight")
    with counting() as decoded:
        state = optimizer.state_dict()["state"][2]
    assert sum(decoded) == 2 * NUMEL
    with counting() as decoded:
        engine.destroy()
    assert sum(decoded) == 2 * NUMEL
    for key, value in wanted.items():
        assert value is not None
        assert torch.equal(state[key], value) and torch.equal(optimizer.state[weight][key], value), key

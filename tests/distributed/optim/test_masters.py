"""Masters that are split into what is gathered and a remainder compute what float32 masters do, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.distributed.optim.low_precision import MLP, STAGES, loss_of, rows_of, settings
from tests.support.harness import Pools
from tests.support.marks import MODES
from tests.support.reference import build

MASTERS = ("split", "float32")
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "lion": lambda p: zw.Lion(p, lr=1e-3, weight_decay=0.1),
    "whole": lambda p: torch.optim.NAdam(p, lr=1e-3),
}
MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clipping": 0.05},
    "accumulated": {"gradient_accumulation_steps": 3},
    "offloaded": {"offload": {"optimizer": "all"}},
}


def tie(model: nn.Module) -> nn.Module:
    """Weights of which every other one lies in the middle between two bfloat16."""
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.data.view(-1).view(torch.int32)
            bits[::2] = (bits[::2] & ~0xFFFF) | 0x8000
    return model


def everything(engine: zw.Engine, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Masters and moments, whole."""
    found: dict[str, Tensor] = {}
    for name, _ in model.named_parameters():
        held = {what: engine.full(name, what) for what in ("param", *_KINDS.get(type(optimizer), ()))}
        found.update({f"{name} {what}": value.clone() for what, value in held.items() if value is not None})
    return found


_KINDS: dict[type, tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adagrad: ("sum",),
    zw.Lion: ("exp_avg",),
}


def trained(stage: int, mode: str, optimizer: str, more: str, steps: int, master: str) -> dict[str, Tensor]:
    """All that a run has in the end, and its losses."""
    model = tie(build(MLP))
    config = settings(stage, mode, precision={"params": "bfloat16", "master": master}, **MORE[more])
    made = OPTIMIZERS[optimizer](model.parameters())
    with zw.initialize(model, made, config) as engine:
        losses = []
        for index in range(steps * config.get("gradient_accumulation_steps", 1)):
            loss = loss_of(engine, index, torch.float32, 1.0)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return {"losses": torch.stack(losses), **everything(engine, model, made)}


def differing(stage: int, mode: str, optimizer: str, more: str, steps: int) -> list[str]:
    split, wide = (trained(stage, mode, optimizer, more, steps, master) for master in MASTERS)
    assert split.keys() == wide.keys()
    return [name for name in wide if not torch.equal(split[name], wide[name])]


@pytest.mark.parametrize(
    ("stage", "mode", "optimizer", "more"),
    rows_of([(3, "eager", "sgd", "plain")], STAGES, MODES, OPTIMIZERS, MORE),
)
def test_split_masters_are_float32_masters(pools: Pools, stage: int, mode: str, optimizer: str, more: str) -> None:
    steps = 200 if optimizer == "adamw" and more == "plain" else 20
    assert pools(2).run(differing, stage, mode, optimizer, more, steps) == [[], []]

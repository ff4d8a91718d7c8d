"""Optimizers whose `train()` and `eval()` move the parameters, compared with plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.support.harness import Pools


class Averaged(torch.optim.Optimizer):
    """Trains at y, evaluates at the mean x of all z; both modes are told by an option, as `schedulefree` has it."""

    def __init__(self, params: Any, lr: float = 0.2, beta: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "count": 0, "trains": False})

    @torch.no_grad()
    def _move(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        beta = group["beta"]
                        p.data.lerp_(self.state[p]["z"], 1 - beta if trains else 1 - 1 / beta)
                group["trains"] = trains

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not all(group["trains"] for group in self.param_groups):
            raise ValueError("call train() before step()")
        for group in self.param_groups:
            group["count"] += 1
            share = 1 / group["count"]
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, share).sub_(p.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - share)))
                z.sub_(p.grad, alpha=group["lr"])


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1))


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x.chunk(torch.distributed.get_world_size())[rank]


def distance(engine: Any, plain: nn.Module) -> float:
    pairs = [(engine.full(name), p.detach()) for name, p in plain.named_parameters()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def beside_plain(stage: int, more: dict[str, Any]) -> list[float]:
    """How far both are apart, in training and in evaluation, with calls in the middle of windows."""
    plain, model = net(), net()
    theirs, mine = Averaged(plain.parameters()), zw.element_wise(Averaged(model.parameters()))
    engine: Any = zw.initialize(
        model, mine, {"stage": stage, "compile": {"enabled": False}, "gradient_accumulation_steps": 2, **more}
    )
    found = []
    for step in range(5):
        for micro in (2 * step, 2 * step + 1):
            for each in (theirs, mine):
                each.train()
            (plain(batch(micro)).square().mean() / 2).backward()
            engine.backward(engine(batch(micro, engine.rank)).square().mean())
            if micro % 2:
                theirs.step()
                theirs.zero_grad()
            engine.step()
        found.append(distance(engine, plain))
        for each in (theirs, mine):
            each.eval()
        found.append(distance(engine, plain))
        with torch.no_grad():
            found.append(float((engine(batch(99)) - plain(batch(99))).abs().max()))
    exported = engine.state_dict()
    found += [float((exported[n] - p.detach()).abs().max()) for n, p in plain.named_parameters() if exported]
    engine.destroy()
    assert "eval" not in vars(mine)
    mine.train()
    theirs.train()
    return [
        *found,
        max(float((a - b).abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True)),
    ]


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        pytest.param(1, {}, marks=pytest.mark.matrix),
        (2, {"offload": {"optimizer": "all"}}),
        (3, {}),
        pytest.param(2, {"gather_after_step": True}, marks=pytest.mark.matrix),
    ],
)
def test_both_points_are_those_of_plain_pytorch(pools: Pools, stage: int, more: dict[str, Any]) -> None:
    for found in pools(2).run(beside_plain, stage, more):
        assert max(found) < 2e-6, found


def resumed(folder: Path) -> float:
    """Saved in evaluation, loaded by a new engine, whose optimizer then trains; a step in evaluation is refused."""

    def made() -> Any:
        model = net()
        return zw.initialize(
            model, zw.element_wise(Averaged(model.parameters())), {"stage": 2, "compile": {"enabled": False}}
        )

    def learn(engine: Any, steps: range) -> None:
        for step in steps:
            engine.optimizer.train()
            engine.backward(engine(batch(step, engine.rank)).square().mean())
            engine.step()
            engine.optimizer.eval()

    whole, saved, late = made(), made(), made()
    learn(whole, range(4))
    learn(saved, range(2))
    saved.save(folder)
    late.load(folder)
    learn(late, range(2, 4))
    apart = max(float((whole.full(n) - late.full(n)).abs().max()) for n, _ in net().named_parameters())
    late.backward(late(batch(9, late.rank)).square().mean())
    with pytest.raises(ValueError, match="call train"):
        late.step()
    late.zero_grad()
    return apart


def test_a_run_goes_on_from_a_checkpoint_of_the_evaluated_point(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(resumed, tmp_path) == [0.0, 0.0]

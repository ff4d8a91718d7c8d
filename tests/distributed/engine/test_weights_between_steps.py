"""Weights between steps: averaged, saved and loaded, and parts of the model called alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import MODES, SETTINGS
from tests.support.models import entry
from tests.support.reference import Expected, Plain, build, draw, judge
from tests.support.zoo import rows


def config(stage: int, mode: str, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "compile": MODES[mode], "deadline_seconds": 200.0, **more}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def step_of(engine: Any, index: int, name: str = "mlp") -> float:
    model = entry(name)
    draw(dist.get_rank(), index)
    loss = model.micro(engine, engine.module, model.batch(dist.get_rank(), index), engine.backward)
    engine.step()
    return float(loss)


def moving_average(stage: int, mode: str) -> tuple[tuple[float, str], tuple[float, str], int, int]:
    """An average of `full_parameters()` after each step and weights clamped there; both as in plain training."""
    plain, model = Plain(build(entry("mlp")), momentum), build(entry("mlp"))
    means = [{name: p.detach().clone() for name, p in net.named_parameters()} for net in (*plain.nets, model)]
    with zw.initialize(model, momentum(model.parameters()), config(stage, mode)) as engine:
        for index in range(5):
            step_of(engine, index)
            x, y = rows(dist.get_rank(), index)
            plain.each(lambda net, x, y: F.mse_loss(net(x), y).backward(), x, y)
            plain.average()
            plain.step()
            with engine.full_parameters() as full, torch.no_grad():
                for target, source in zip(
                    means, (*(dict(net.named_parameters()) for net in plain.nets), full), strict=True
                ):
                    for name, parameter in source.items():
                        target[name].lerp_(parameter, 0.25)
                    source["blocks.2.mlp.up.weight"].clamp_(-0.2, 0.2)
        with engine.full_parameters() as full:
            final = judge(full, plain.values())
        return (
            judge(means[2], Expected(*means[:2])),
            final,
            engine.stats.departures,
            engine.stats.on_demand_unshards,
        )


@pytest.mark.matrix
@SETTINGS
def test_an_average_of_the_weights(pools: Pools, stage: int, mode: str) -> None:
    for averages, final, departures, _ in pools(2).run(moving_average, stage, mode):
        assert averages[0] <= 1 and final[0] <= 1, (averages, final)
        assert departures == 0


def parts_between(stage: int, mode: str) -> list[bool]:
    """Submodules and the whole module called directly under no_grad between steps, in eval mode: the plain values."""
    plain, model = build(entry("decoder")), build(entry("decoder"))
    ids = torch.arange(8).view(2, 4)
    same = []
    with zw.initialize(model, momentum(model.parameters()), config(stage, mode)) as engine:
        for index in range(3):
            step_of(engine, index, "decoder")
            with engine.full_parameters() as full, torch.no_grad():
                for name, parameter in plain.named_parameters():
                    parameter.copy_(full[name])
            engine.eval()
            plain.eval()
            with torch.no_grad():
                hidden = plain.blocks[0](plain.embedding(ids))
                same.append(torch.equal(engine.module.blocks[0](engine.module.embedding(ids)), hidden))
                same.append(torch.equal(engine.module(ids), plain(ids)))
                outputs = Plain(plain).each(lambda net: {"output": net(ids)})
                same.append(judge({"output": engine(ids)}, Expected(*outputs))[0] <= 1)
            engine.train()
            plain.train()
    return same


@pytest.mark.matrix
@SETTINGS
def test_parts_called_alone(pools: Pools, stage: int, mode: str) -> None:
    for same in pools(2).run(parts_between, stage, mode):
        assert same == [True] * 9


def saved_and_loaded(stage: int, mode: str) -> tuple[list[str], int]:
    """Names that differ after loading an earlier state; how many tensors this rank received from `state_dict()`."""
    model = build(entry("batch_norm"))
    with zw.initialize(model, momentum(model.parameters()), config(stage, mode)) as engine:
        for index in range(2):
            step_of(engine, index, "batch_norm")
        saved = engine.state_dict()
        for index in range(2, 4):
            step_of(engine, index, "batch_norm")
        later = engine.state_dict()
        assert not saved or any(not torch.equal(saved[name], later[name]) for name in saved)
        engine.load_state_dict(saved)
        now = engine.state_dict()
        step_of(engine, 4, "batch_norm")
        return [name for name in saved if not torch.equal(saved[name], now[name])], len(saved)


@SETTINGS
def test_state_dict_and_back(pools: Pools, stage: int, mode: str) -> None:
    (different, names), (_, others) = pools(2).run(saved_and_loaded, stage, mode)
    assert different == [] and others == 0
    assert names == len(build(entry("batch_norm")).state_dict())

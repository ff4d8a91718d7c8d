"""With one rank the flat is the shard: nothing is gathered, copied or lost, and values are those of before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw

CONFIGS: list[dict[str, Any]] = [
    {},
    {"precision": {"params": "bfloat16"}},
    {"precision": {"params": "bfloat16", "optimizer": "compact"}},
    {"precision": {"params": "bfloat16", "optimizer": "compact"}, "offload": {"optimizer": "all"}},
    {"precision": {"params": "bfloat16"}, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2},
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def start(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> zw.Engine:
    torch.manual_seed(0)
    model = Model() if model is None else model
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    return zw.initialize(model, optimizer, {"compile": {"enabled": False}, **config, **more})


def train(engine: zw.Engine, steps: int = 4) -> None:
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).float().square().mean())
        engine.step()


def trained(config: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    with start(config, **more) as engine:
        train(engine)
        with torch.no_grad(), engine.full_parameters() as parameters:
            parameters["layers.1.weight"][0].fill_(0.1)
        with pytest.raises(ZeroDivisionError), torch.no_grad(), engine.full_parameters() as parameters:
            parameters["layers.2.weight"].fill_(9.0)
            parameters["layers.0.weight"].fill_(9.0)
            raise ZeroDivisionError
        train(engine)
        return engine.state_dict()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_values_are_those_of_flats_apart(config: dict[str, Any], stage: int, request: pytest.FixtureRequest) -> None:
    """Also where a program writes parameters, and where it raises while it does."""
    found = trained(config, stage=stage)
    request.getfixturevalue("flats_apart")
    wanted = trained(config, stage=stage)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_gathered(stage: int) -> None:
    with start({"precision": {"params": "bfloat16"}}, stage=stage) as engine:
        train(engine)
        with engine.full_parameters() as parameters:
            assert parameters["layers.1.weight"].dtype == torch.bfloat16
        assert engine.stats.memory.flats_peak == 0


class Halving(Model):
    """Writes a parameter in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[2].weight.mul_(0.5)
        out: Tensor = super().forward(x)
        return out


def test_a_write_in_a_forward_is_as_without_an_engine() -> None:
    torch.manual_seed(0)
    plain = Halving()
    optimizer = torch.optim.AdamW((p for p in plain.parameters() if p.requires_grad), lr=1e-2)
    torch.manual_seed(0)
    with start({"stage": 3}, Halving()) as engine:
        train(engine, 3)
        found = engine.state_dict()
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-6, atol=1e-7)


def test_an_array_that_shares_a_parameter_sees_what_is_written() -> None:
    with start({"stage": 3}) as engine:
        with engine.full_parameters() as parameters:
            array = parameters["layers.0.weight"].detach().numpy()
        train(engine, 1)
        assert torch.equal(torch.from_numpy(array), engine.state_dict()["layers.0.weight"])


@pytest.mark.parametrize("compiled", [False, True])
def test_the_end_has_no_bucket_twice(compiled: bool) -> None:
    """`destroy` frees what a bucket is computed with as soon as its parameters have values of their own."""
    compiling = {"enabled": compiled, "lower": "aot_eager"}
    with start({"precision": {"params": "bfloat16"}}, stage=3, compile=compiling) as engine:
        train(engine)
        buckets, wanted = [*engine._runtime.buckets.values()], engine.state_dict()
        assert all(bucket.resident for bucket in buckets)
    assert not any(bucket.resident for bucket in buckets)
    found = engine.module.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_behind_the_end_is_refused(compiled: bool) -> None:
    compiling = {"enabled": compiled, "lower": "aot_eager"}
    with start({"precision": {"params": "bfloat16"}}, stage=3, compile=compiling) as engine:
        train(engine)
        late = engine(torch.zeros(4, 8)).float().sum()
    with pytest.raises(zw.EngineError, match=r"ZW40[37]"):
        late.backward()


def test_the_end_leaves_memory_that_is_viewed() -> None:
    with start({"precision": {"params": "bfloat16"}}, stage=3) as engine:
        train(engine)
        with engine.full_parameters() as parameters:
            kept = {name: parameter.detach() for name, parameter in parameters.items()}
            wanted = {name: parameter.clone() for name, parameter in kept.items()}
    assert all(torch.equal(kept[name], wanted[name]) for name in kept)

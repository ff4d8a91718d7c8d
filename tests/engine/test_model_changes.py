"""What users do to a model beside its engine: compile its forward, resize it, wrap it, hook it, schedule its rates."""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import zeroweave as zw
from zeroweave.engine.calls import arguments_of
from zeroweave.errors import EngineError, ParameterError

EAGER = {"compile": {"enabled": False}}


class Block(nn.Module):
    """It updates a buffer in its forward, from what it computed and from a parameter, as moving averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) * self.scale
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.average.lerp_(self.scale, 0.1)
        return torch.tanh(y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def resize_token_embeddings(self, size: int) -> None:
        """As transformers does: new modules with the values of the old ones."""
        for name in ("embed", "head"):
            old, new = getattr(self, name), nn.Linear(8, size)
            new.weight.data[:8] = old.weight.data
            setattr(self, name, new)


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def initialized(model: nn.Module, **settings: Any) -> zw.Engine:
    return zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), {**EAGER, **settings})


# ---------------------------------------------------------------------- what an engine cannot follow
def test_a_compiled_forward_is_refused_before_anything_is_changed() -> None:
    model = made()
    model.layers[1].forward = torch.compile(model.layers[1].forward)  # type: ignore[method-assign]
    with pytest.raises(ParameterError, match=r"layers\.1: forward = torch\.compile\(\.\.\.\); leave that out"):
        initialized(model)
    model.layers[1].__dict__.pop("forward")
    with initialized(model) as engine:
        engine(torch.ones(4, 8))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["", "layers.0"])
def test_a_forward_that_is_compiled_under_an_engine_is_refused(stage: int, name: str) -> None:
    model = made()
    with initialized(model, stage=stage) as engine:
        module = model.get_submodule(name)
        module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
        with pytest.raises(ParameterError, match=f"{name or 'the model'}: forward was compiled with torch.compile"):
            engine(torch.ones(4, 8))
        del module.forward
        engine.zero_grad()
        train(model, engine)


@pytest.mark.parametrize("stage", [2, 3])
def test_resizing_under_an_engine_names_the_method(stage: int) -> None:
    model = made()
    with initialized(model, stage=stage) as engine:
        with pytest.raises(
            ParameterError, match=r"^\[ZW\d+\] resize_token_embeddings\(\.\.\.\) under an engine: .*engine\.destroy"
        ):
            model.resize_token_embeddings(16)
        train(model, engine)  # nothing was changed


@pytest.mark.parametrize("stage", [2, 3])
def test_modules_that_were_replaced_are_named(stage: int) -> None:
    model = made()
    with initialized(model, stage=stage) as engine:
        old = model.embed, model.head
        with engine.full_parameters():
            model.resize_token_embeddings(16)
        with pytest.raises(
            ParameterError, match=r"^\[ZW\d+\] embed, head: the module was replaced .*resize_token_embeddings"
        ):
            engine(torch.ones(4, 8))
        model.embed, model.head = old
        engine.zero_grad()
        train(model, engine)


def test_a_loss_that_is_none_is_told() -> None:
    model = made()
    with initialized(model) as engine:
        with pytest.raises(TypeError, match=r"needs a tensor as its loss; loss gave it something of .*NoneType"):
            engine.train_step(torch.ones(4, 8), lambda output, _: None)
        engine.zero_grad()
        model.head.register_forward_hook(lambda *_: SimpleNamespace(loss=1.0))
        with pytest.raises(TypeError, match=r"its loss; the output's .loss gave it something of .*float"):
            engine.train_step(torch.ones(4, 8))


def test_a_batch_is_arguments_by_its_kind() -> None:
    assert arguments_of(UserDict({"x": 1})) == ((), {"x": 1})
    assert arguments_of([1, 2]) == ([1, 2], {}) and arguments_of((1,)) == ((1,), {})
    alone = SimpleNamespace(x=1)
    assert arguments_of(alone) == ((alone,), {})


# ---------------------------------------------------------------------- what is no write to a parameter
def train(model: nn.Module, engine: zw.Engine | None = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if engine is None else None
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        x = torch.randn(16, 8, generator=generator)
        loss = (model if engine is None else engine)(x).square().mean()
        losses.append(loss.item())
        if engine is not None:
            engine.backward(loss)
            engine.step()
        elif optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def wrapped(module: Any) -> None:
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        module.average.data.add_(1.0)
        return inner(*args, **kwargs)

    module.forward = forward


def partial(module: Any) -> None:
    def run(inner: Callable[..., Any], buffer: Tensor, *args: Any) -> Any:
        buffer.add_(1.0)
        return inner(*args)

    module.forward = functools.update_wrapper(functools.partial(run, module.forward, module.average), module.forward)


def decorated(module: Any) -> None:
    module.forward = torch.autocast("cpu", torch.bfloat16)(module.forward)


def hooked(module: Any) -> None:
    def before(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        module.average.mul_(0.5)
        return (args[0].clone().mul_(0.5),)

    def after(buffer: Tensor, module: Any, args: Any, output: Tensor) -> Tensor:
        buffer.copy_(module.scale.detach())
        return output * 2.0

    module.register_forward_pre_hook(before)
    module.linear.register_forward_hook(lambda module, args, output: output.mul_(2.0))
    module.register_forward_hook(functools.partial(after, module.average))


@pytest.mark.parametrize("when", ["before", "under"])
@pytest.mark.parametrize(
    "settings",
    [EAGER, pytest.param({"compile": {"lower": "aot_eager"}}, marks=pytest.mark.matrix)],
    ids=["eager", "aot_eager"],
)
@pytest.mark.parametrize("change", [wrapped, partial, decorated, hooked])
def test_wrapped_and_hooked_modules_train(change: Callable[[Any], None], settings: dict[str, Any], when: str) -> None:
    plain, model = made(), made()
    for layer in plain.layers:
        change(layer)
    expected = train(plain)
    if when == "before":
        for layer in model.layers:
            change(layer)
    with initialized(model, **settings) as engine:
        if when == "under":
            for layer in model.layers:
                change(layer)
        assert train(model, engine) == expected
        late = change is hooked and when == "under" and settings is not EAGER
        assert set(engine.stats.eager_regions) == ({f"layers.{i}" for i in range(len(model.layers))} if late else set())
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        # Compiled, also without an engine, an interpolation may be rounded elsewhere.
        torch.testing.assert_close(mine, theirs, rtol=0.0 if settings is EAGER else 2**-23, atol=0.0)


@pytest.mark.usefixtures("flats_apart")
def test_what_is_a_write_is_still_refused() -> None:
    model = made()

    def write(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.scale.add_(1.0)

    model.layers[0].register_forward_pre_hook(write)
    engine = initialized(model)
    with pytest.raises(ParameterError, match=r"'layers\.0\.scale'"):
        train(model, engine)


# ---------------------------------------------------------------------- learning rates
def test_a_factory_is_called_with_the_optimizer() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with zw.initialize(model, optimizer, EAGER, lr_scheduler=lambda o: LambdaLR(o, lambda step: 0.5**step)) as engine:
        assert isinstance(engine.lr_scheduler, LambdaLR) and engine.lr_scheduler.optimizer is optimizer
        train(model, engine)
        assert optimizer.param_groups[0]["lr"] == 0.5**3


def test_both_may_be_factories() -> None:
    model = made()
    with zw.initialize(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        EAGER,
        lr_scheduler=functools.partial(StepLR, step_size=1, gamma=0.1),
    ) as engine:
        train(model, engine)
        assert engine.optimizer is not None and engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda optimizer: None, "what the callable made is of type NoneType"),
        (lambda optimizer: ReduceLROnPlateau(optimizer), "ReduceLROnPlateau needs a metric"),
        (0.1, "it is of type float"),
        ("cosine", "it is of type str"),
        (lambda optimizer: optimizer, "what the callable made is of type SGD"),
        (
            lambda _: StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 1),
            "of another optimizer than the one that was passed",
        ),
    ],
)
def test_what_is_no_scheduler_is_refused(given: Any, message: str) -> None:
    model = made()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(EngineError, match=message):
        zw.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), EAGER, lr_scheduler=given)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(EngineError, match="lr_scheduler needs an optimizer"):
        zw.initialize(model, None, EAGER, lr_scheduler=given)

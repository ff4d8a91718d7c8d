"""What `initialize` accepts and refuses: all or nothing, and by name."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.marks import MODES
from zeroweave.errors import ConfigError, EngineError, ParameterError, ZeroweaveError

EAGER = {"compile": MODES["eager"]}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def loss_of(call: Callable[[Tensor], Tensor], step: int = 0) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return F.mse_loss(call(x), x)


def trained(module: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    """The parameters after plain training of a copy."""
    module = copy.deepcopy(module)
    optimizer = sgd(module)
    for step in range(steps):
        loss_of(module, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(module.state_dict())


def assert_trains(module: nn.Module, expected: dict[str, Tensor], optimizer: Any = None, **settings: Any) -> Any:
    """Its traffic."""
    with zw.initialize(module, optimizer or sgd(module), {**EAGER, **settings}) as engine:
        for step in range(3):
            engine.backward(loss_of(engine, step))
            engine.step()
        state = engine.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    return engine.stats.total


def assert_untouched(module: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter and torch.equal(parameter.detach(), values[name]), name


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_an_earlier_forward_and_backward(stage: int) -> None:
    module = model()
    expected = trained(module)
    loss = loss_of(module)
    loss.backward()
    module.zero_grad()
    del loss
    assert_trains(module, expected, stage=stage)


def test_with_a_live_loss() -> None:
    module = model()
    expected, values = trained(module), values_of(module)
    loss = loss_of(module)
    with pytest.raises(ParameterError, match=r"2\.weight"):
        zw.initialize(module, sgd(module), EAGER)
    assert_untouched(module, values)
    loss.backward()  # the graph still works
    assert all(p.grad is not None for p in module.parameters())
    module.zero_grad()
    del loss
    assert_trains(module, expected)


def test_with_a_loss_that_lives_after_its_backward() -> None:
    module = model()
    expected, values = trained(module), values_of(module)
    loss = loss_of(module)
    loss.backward()
    module.zero_grad()
    try:
        assert_trains(module, expected)
    except ParameterError as error:
        assert all(name in str(error) for name in values), "every offender is named"
        assert_untouched(module, values)
    assert loss.isfinite()


def test_with_a_weak_reference() -> None:
    module = model()
    expected, values = trained(module), values_of(module)
    reference = weakref.ref(module.get_parameter("2.weight"))
    with pytest.raises(ParameterError, match=r"2\.weight") as caught:
        zw.initialize(module, sgd(module), EAGER)
    assert "0.weight" not in str(caught.value)
    assert_untouched(module, values)
    assert reference() is not None
    del reference
    assert_trains(module, expected)


def with_gradient(module: nn.Module) -> nn.Module:
    module.get_parameter("2.bias").grad = torch.ones(8)
    return module


def with_hook(module: nn.Module) -> nn.Module:
    module.get_parameter("2.bias").register_post_accumulate_grad_hook(lambda parameter: None)
    return module


class Marked(nn.Parameter):
    """A subclass, as quantisation libraries make them."""


def with_subclass(module: nn.Module) -> nn.Module:
    module[2].bias = Marked(torch.zeros(8))  # type: ignore[index]
    return module


def with_shared_buffer(module: nn.Module) -> nn.Module:
    module.register_buffer("alias", module.get_parameter("2.bias").detach())
    return module


def with_embedding(**settings: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda module: nn.ModuleDict({"2": nn.ModuleDict({"bias": nn.Embedding(4, 4, **settings)})})


BAD_MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "gradient": with_gradient,
    "hook": with_hook,
    "subclass": with_subclass,
    "shared with a buffer": with_shared_buffer,
    "sparse": with_embedding(sparse=True),
    "max_norm": with_embedding(max_norm=1.0),
}


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_parameter_that_cannot_be_sharded_is_named(kind: str) -> None:
    module = BAD_MODELS[kind](model())
    with pytest.raises(ParameterError, match=r"2\.bias"):
        zw.initialize(module, sgd(module), EAGER)
    assert all(isinstance(p.norm(), Tensor) for p in module.parameters())


def lbfgs(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(module.parameters())


def adafactor(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters())


def other_parameters(module: nn.Module) -> torch.optim.Optimizer:
    return sgd(model())


def partly_other_parameters(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*module.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


def with_state(module: nn.Module) -> torch.optim.Optimizer:
    """That of rows, which cannot be cut."""
    optimizer = sgd(module)
    loss_of(module).backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter in module.parameters():
        optimizer.state[parameter]["rows"] = torch.zeros(parameter.shape[0], 1)
    return optimizer


@pytest.mark.parametrize("make", [lbfgs, adafactor, other_parameters, partly_other_parameters, with_state])
def test_an_optimizer_that_cannot_be_sharded(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    module = model()
    optimizer = make(module)
    values = values_of(module)
    with pytest.raises(ZeroweaveError, match=r"(?i)optimizer|LBFGS|Adafactor"):
        zw.initialize(module, optimizer, EAGER)
    assert_untouched(module, values)


def test_an_optimizer_from_a_callable_and_none_at_all() -> None:
    module = model()
    expected = trained(module)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    assert_trains(module, expected, make)
    module = model()
    with torch.no_grad():
        right = module(torch.ones(2, 8))
    with zw.initialize(module, None, EAGER) as engine:
        with torch.no_grad():
            assert torch.equal(engine(torch.ones(2, 8)), right)
        engine.backward(loss_of(engine))
        with pytest.raises(EngineError, match="optimizer"):
            engine.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_in_no_group_stays_as_it_is_and_is_named(stage: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[2].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([model[0].weight, model[1].weight], lr=0.1)
    config = {"stage": stage, "gradient_clipping": 1.0, **EAGER}
    with pytest.warns(UserWarning, match=r"stays as it is: 0.bias, 1.bias, 2.weight\. Its gradients") as told:
        engine = zw.initialize(model, optimizer, config)
    assert [warning.filename for warning in told] == [__file__]
    with engine:
        reference = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        reference.load_state_dict(before)
        reference[2].bias.requires_grad_(False)
        inputs = torch.arange(8.0).view(2, 4)
        reference(inputs).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        engine.train_step(inputs, lambda output, _: output.square().mean())
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        moved = {name for name, value in engine.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"0.weight", "1.weight"}


def test_the_optimizer_keeps_its_identity_and_groups() -> None:
    module = model()
    weights = [p for p in module.parameters() if p.dim() > 1]
    biases = [p for p in module.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.2)
    with zw.initialize(module, optimizer, EAGER) as engine:
        engine.backward(loss_of(engine))
        engine.step()
        assert engine.optimizer is optimizer
        for group, parameters in zip(optimizer.param_groups, (weights, biases), strict=True):
            assert all(a is b for a, b in zip(group["params"], parameters, strict=True))
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"stge": 3}, "stage"),
        ({"gradient_accumulation": 3}, "gradient_accumulation_steps"),
        ({"reduce": {"dept": 3}}, "depth"),
        ({"compile": {"lower": "llvm"}}, "inductor"),
        ({"stage": 3, "gather_after_step": True}, "gather_after_step"),
    ],
)
def test_a_wrong_config_says_what_is_right(config: dict[str, Any], words: str) -> None:
    module = model()
    values = values_of(module)
    with pytest.raises(ConfigError, match=words):
        zw.initialize(module, sgd(module), config)
    assert_untouched(module, values)


@pytest.mark.matrix
def test_a_model_that_is_wrapped_already() -> None:
    module = model()
    with zw.initialize(module, sgd(module), EAGER), pytest.raises(ZeroweaveError, match="engine"):
        zw.initialize(module, None, EAGER)
    compiled = torch.compile(model())
    with pytest.raises(ZeroweaveError, match="compile"):
        zw.initialize(compiled, None, EAGER)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("lower", MODES)
def test_a_world_of_one_trains_without_collectives(stage: int, lower: str) -> None:
    module = model()
    expected = trained(module)
    traffic = assert_trains(module, expected, stage=stage, compile=MODES[lower])
    assert sum(each.wire for each in traffic.values()) == 0
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_over_nothing_but_frozen_parameters(stage: int) -> None:
    """As a training script has it that only evaluates: outputs are the plain module's, and steps change nothing."""
    module = model().requires_grad_(False)
    x, before = torch.randn(3, 8), copy.deepcopy(module.state_dict())
    expected = module(x)
    with zw.initialize(
        module, torch.optim.AdamW(module.parameters(), weight_decay=0.5), {**EAGER, "stage": stage}
    ) as e:
        assert e(x).equal(expected)
        e.backward(e(x.requires_grad_()).sum())
        e.step()
        assert e.optimizer is not None and not e.optimizer.state_dict()["state"]
        assert all(value.equal(before[name]) for name, value in e.state_dict().items())

"""Values of single parameters, read and written; state dicts that are streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.models import entry
from tests.support.reference import SEED, build, draw
from tests.support.zoo import WIDTH, Backward, Entry, rows


class Small(nn.Module):
    """Tied weights, a frozen bias, a scalar, and vectors that lie on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.leave.weight = self.enter.weight
        self.middle.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.middle(self.enter(x)) * self.gain))


def squared(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    x, y = batch
    loss = F.mse_loss(call(x).float(), y)
    backward(loss)
    return loss.detach()


SMALL = Entry("small", Small, rows, squared)
MLP = replace(entry("mlp"), micro=squared)
STAGE_PRECISION = [(1, None), (2, "bfloat16"), (3, "float16"), (3, None)]


def started(model: Entry, stage: int, params: str | None = None, **more: Any) -> Any:
    module = build(model, SEED + dist.get_rank())
    precision = {"params": params, **({"initial_loss_scale": 4.0} if params == "float16" else {})}
    config = {"stage": stage, "compile": {"enabled": False}, "deadline_seconds": 200.0, "precision": precision, **more}
    trained = [p for p in module.parameters() if p.requires_grad]
    return zw.initialize(module, torch.optim.AdamW(trained, lr=1e-2), config)


def backward(engine: Any, model: Entry, index: int) -> None:
    draw(dist.get_rank(), index)
    model.micro(engine, engine.module, model.batch(dist.get_rank(), index), engine.backward)


def joined(engine: Any, name: str, what: str) -> Tensor:
    """The fragments of all ranks, side by side."""
    mine = (engine.local(name, what), engine.fragment(name).offset)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return torch.cat([part for part, _ in sorted(ranks, key=lambda each: each[1]) if part.numel()])


def reads(stage: int, params: str | None) -> int:
    """Whole values beside an unsharded AdamW that is fed with the engine's gradients; fragments beside whole values."""
    model = SMALL
    plain = build(model)
    unsharded = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    compared = 0
    with started(model, stage, params) as engine:
        for index in range(2):
            backward(engine, model, index)
            gradients = engine.gradients()
            for parameter_name, parameter in plain.named_parameters():
                if not parameter.requires_grad:
                    continue
                gradient = engine.full(parameter_name, "grad")
                assert (gradient is None) == (gradients[parameter_name] is None)
                assert engine.local(parameter_name, "grad") is not None or gradient is None
                parameter.grad = gradient
                if gradient is not None:
                    assert gradient.dtype == torch.float32 and torch.equal(gradient, gradients[parameter_name])
                    assert torch.equal(joined(engine, parameter_name, "grad"), gradient.view(-1))
            engine.step()
            unsharded.step()
        for parameter_name, parameter in plain.named_parameters():
            whole = engine.full(parameter_name)
            assert torch.equal(joined(engine, parameter_name, "param"), whole.view(-1))
            if not parameter.requires_grad:
                continue
            assert whole.dtype == torch.float32 and torch.equal(whole, parameter)
            for key, value in unsharded.state[parameter].items():
                assert torch.equal(engine.full(parameter_name, key), value), (parameter_name, key)
                if key != "step":
                    assert torch.equal(joined(engine, parameter_name, key), value.view(-1)), (parameter_name, key)
                else:
                    assert torch.equal(engine.local(parameter_name, key), value)
                compared += 1
        assert engine.stats.departures == 0
    return compared


@pytest.mark.matrix
@pytest.mark.oldest
@pytest.mark.parametrize(("stage", "params"), STAGE_PRECISION)
def test_reads(pools: Pools, stage: int, params: str | None) -> None:
    for world in (2, 3):
        assert pools(world).run(reads, stage, params) == [5 * 3] * world  # keys of five trained parameters


def writes(stage: int, params: str | None) -> None:
    """Every kind of value is replaced, whole and by fragments, and training goes on as the unsharded AdamW does."""
    model = MLP
    plain = build(model)
    unsharded = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(7)
    name = "blocks.1.mlp.up.weight"
    changed = dict(plain.named_parameters())[name]

    def drawn() -> Tensor:
        return torch.rand(changed.shape, generator=random) + 0.5

    def part(value: Tensor) -> Tensor:
        place = engine.fragment(name)
        return value.reshape(-1)[place.offset : place.offset + place.numel]

    def write(value: Tensor, what: str, whole: bool) -> None:
        if whole:
            engine.set_full(name, value, what)
        else:
            engine.set_local(name, part(value), what)
        assert torch.equal(engine.full(name, what), value)

    with started(model, stage, params) as engine:
        for index in range(4):
            backward(engine, model, index)
            for parameter_name, parameter in plain.named_parameters():
                parameter.grad = engine.full(parameter_name, "grad")
            if index > 1:
                changed.grad = drawn()
                write(changed.grad, "grad", whole=index == 2)
                assert torch.equal(engine.gradients()[name], changed.grad)
            engine.step()
            unsharded.step()
            if index > 0:
                value = drawn()
                with torch.no_grad():
                    changed.copy_(value)
                write(value, "param", whole=index == 1)
                for key in ("exp_avg", "exp_avg_sq"):
                    value = drawn()
                    unsharded.state[changed][key].copy_(value)
                    write(value, key, whole=index == 2)
                unsharded.state[changed]["step"].fill_(index + 10)
                engine.set_full(name, torch.tensor(index + 10), "step")
                assert engine.full(name, "step") == index + 10
            with engine.full_parameters() as full:
                for parameter_name, parameter in plain.named_parameters():
                    assert torch.equal(engine_value(full, parameter_name), parameter.to(full[parameter_name].dtype))
        assert engine.stats.departures == 0


def engine_value(full: Mapping[str, nn.Parameter], name: str) -> Tensor:
    return full[name].detach()


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "params"), STAGE_PRECISION)
def test_writes(pools: Pools, stage: int, params: str | None) -> None:
    pools(2).run(writes, stage, params)


def a_clipped_gradient_is_replaced() -> None:
    """What is written counts as it is: the clipping of the others is over."""
    model = MLP
    with started(model, 2, "float16") as engine:
        backward(engine, model, 0)
        engine.clip_grad_norm_(1e-3)
        before = engine.gradients()
        value = torch.full_like(engine.full("enter.bias", "grad"), 0.25)
        engine.set_full("enter.bias", value, "grad")
        after = engine.gradients()
        assert torch.equal(after["enter.bias"], value)
        for name, gradient in before.items():
            if name != "enter.bias":
                assert torch.equal(after[name], gradient), name
        engine.step()


def test_a_clipped_gradient_is_replaced(pools: Pools) -> None:
    pools(2).run(a_clipped_gradient_is_replaced)


def a_gradient_is_written_in_half() -> None:
    """What is written may be narrower than what it is kept in: the loss scale does not overflow in its dtype."""
    with started(MLP, 3, "float16", precision={"params": "float16", "loss_scale": 65536.0}) as engine:
        backward(engine, MLP, 0)
        value = torch.full_like(engine.full("enter.bias", "grad"), 3.0)
        for write in (engine.set_full, engine.set_local):
            whole = value if write == engine.set_full else engine.local("enter.bias", "grad").fill_(3.0)
            write("enter.bias", whole.half(), "grad")
            assert torch.equal(engine.full("enter.bias", "grad"), value)
        engine.step()


def test_a_gradient_is_written_in_half(pools: Pools) -> None:
    pools(2).run(a_gradient_is_written_in_half)


def references() -> None:
    """A parameter is found by each of its names, by the user's object, and by what the module shows."""
    model = entry("tied")
    module = build(model)
    user = module.embedding.weight
    config = {"stage": 2, "compile": {"enabled": False}, "gather_after_step": True, "deadline_seconds": 200.0}
    with zw.initialize(module, torch.optim.AdamW(module.parameters()), config) as engine:
        expected = engine.full("embedding.weight")
        assert engine.fragment("head.weight") == engine.fragment("embedding.weight") == engine.fragment(user)
        for reference in ("head.weight", user, module.head.weight):
            assert torch.equal(engine.full(reference), expected)
        engine.set_full("head.weight", expected + 1)
        assert torch.equal(module.embedding.weight, expected + 1), "what is open shows the new values"


def test_references(pools: Pools) -> None:
    pools(2).run(references)


def full_on_rank_0(stage: int, opens: bool) -> list[str]:
    """Rank 0 alone reads the module while the other waits; then training goes on as if nothing had been."""
    errors = []
    with started(SMALL, stage, gather_after_step=opens) as engine:
        backward(engine, SMALL, 0)
        engine.step()
        expected = {name: value.clone() for name, value in engine.state_dict().items()}
        with engine.full_on_rank_0() as state:
            assert state.keys() == expected.keys() and (dist.get_rank() == 0) == bool(state)
            if state or opens:
                found = engine.module.state_dict()
                assert all(torch.equal(found[name], value) for name, value in expected.items())
                assert engine.module.leave.weight is engine.module.enter.weight
                assert not engine.module.middle.bias.requires_grad
            else:
                with pytest.raises(zw.ParameterError):
                    engine.module.state_dict()
            if not opens and dist.get_rank() == 0:
                with pytest.raises(zw.EngineError) as refused:
                    engine.module(rows(0, 0)[0])
                errors.append(str(refused.value))
        if opens:
            engine.module.enter.weight.sum().item()
        else:
            with pytest.raises(zw.ParameterError):
                engine.module.enter.weight.sum()
        backward(engine, SMALL, 1)
        engine.step()
        assert engine.global_steps == 2
    return errors


@pytest.mark.parametrize(("stage", "opens"), [(3, False), (2, True)])
def test_rank_0s_module_is_full_for_code_that_saves_it(pools: Pools, stage: int, opens: bool) -> None:
    first, second = pools(2).run(full_on_rank_0, stage, opens)
    assert second == [] and [("a forward inside" in error) for error in first] == [True] * (not opens)


def refusals() -> list[str]:
    model = entry("frozen_inside")
    errors = []

    def refused(action: Callable[[], object]) -> None:
        try:
            action()
        except zw.ZeroweaveError as error:
            errors.append(f"{type(error).__name__}: {str(error).partition('] ')[2]}")

    with started(model, 3) as engine:
        refused(lambda: engine.full("enter.wieght"))
        refused(lambda: engine.full(nn.Parameter(torch.ones(2, 3))))
        refused(lambda: engine.full("enter.weight", "exp_avg"))
        refused(lambda: engine.full("blocks.0.mlp.up.weight", "grad"))
        refused(lambda: engine.set_full("enter.weight", torch.ones(16, 16), "grad"))
        assert engine.full("enter.weight", "grad") is None
        backward(engine, model, 0)
        refused(lambda: engine.set_full("enter.weight", torch.ones(16, 16)))
        engine.step()
        refused(lambda: engine.full("enter.weight", "momentum_buffer"))
        refused(lambda: engine.set_full("enter.weight", torch.ones(16)))
        refused(lambda: engine.set_full("enter.weight", torch.ones(2), "step"))
        refused(lambda: engine.set_full("enter.weight", [[1.0]]))
        with engine.full_parameters():
            refused(lambda: engine.full("enter.weight"))
        with engine.profiling():
            refused(lambda: engine.full("enter.weight"))
        backward(engine, model, 1)  # nothing was harmed
        engine.step()
    return errors


def test_refusals(pools: Pools) -> None:
    for errors in pools(2).run(refusals):
        assert errors == [
            "EngineError: the model has no parameter 'enter.wieght'; did you mean 'enter.weight'?",
            "EngineError: a parameter of shape [2, 3] is none of the model's",
            "EngineError: the optimizer holds no 'exp_avg' of 'enter.weight'; it holds nothing of it before its "
            "first step with a gradient",
            "EngineError: full(): 'blocks.0.mlp.up.weight' is frozen and has no 'grad'",
            "EngineError: there is no gradient of 'enter.weight' to be replaced: call it after the backward",
            "EngineError: writing 'enter.weight' while gradients wait: call it after the step() that ends the window, "
            "or zero_grad()",
            "EngineError: the optimizer holds no 'momentum_buffer' of 'enter.weight'; it holds exp_avg, exp_avg_sq, "
            "step",
            "EngineError: 'param' of 'enter.weight' has the shape [16, 16], and not [16]",
            "EngineError: 'step' of 'enter.weight' has the shape [], and not [2]",
            "EngineError: set_full() takes a tensor, and not a list",
            "EngineError: full() inside `with engine.full_parameters():`, which keeps writes: leave it first",
            "EngineError: full() inside `with engine.profiling():`, where values mean nothing: leave it first",
        ]


# ---------------------------------------------------------------------- state dicts
class FromFile(Mapping[str, Tensor]):
    """Reads a tensor when it is asked for, and knows how many of its tensors are alive."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values
        self.reads = 0

    def __getitem__(self, name: str) -> Tensor:
        self.reads += 1
        return self._values[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def streamed(name: str, stage: int) -> tuple[list[str], int]:
    """The streamed state dict equals the whole one; who leaves early hurts nobody; a lazy mapping is loaded."""
    model = SMALL if name == "small" else entry(name)
    with started(model, stage) as engine:
        backward(engine, model, 0)
        engine.step()
        whole = engine.state_dict()
        names = []
        for key, value in engine.stream_state_dict():
            names.append(key)
            assert torch.equal(value, whole[key]) and value.untyped_storage().nbytes() == value.nbytes
        assert sorted(names) == sorted(whole)
        gathers = engine.stats.total["all_gather"].calls
        for _ in engine.stream_state_dict():
            break
        assert engine.stats.total["all_gather"].calls - gathers == len(engine.buckets)
        for key, _ in engine.module.named_parameters():
            engine.set_full(key, torch.zeros_like(engine.full(key)))
        lazy = FromFile(whole)
        engine.load_state_dict(lazy)
        again = engine.state_dict()
        assert again.keys() == whole.keys() and all(torch.equal(again[key], whole[key]) for key in whole)
        if dist.get_rank() == 0:
            named = [key for key, _ in engine.module.named_parameters(remove_duplicate=False)]
            assert [key for key in whole if key in named] == named
        backward(engine, model, 1)
        engine.step()
        return names, lazy.reads


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["small", "batch_norm"])
def test_state_dicts_are_streamed(pools: Pools, name: str, stage: int) -> None:
    first, second = pools(2).run(streamed, name, stage)
    assert second == ([], 0) and first[1] <= 2 * len(first[0])
    assert ("leave.weight" if name == "small" else "blocks.0.norm.running_mean") in first[0]

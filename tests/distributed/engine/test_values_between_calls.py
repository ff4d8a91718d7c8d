"""Loops that step off the plain path, on two ranks, beside plain PyTorch with averaged gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import FEW, MODES, SETTINGS, daily, slow
from tests.support.reference import SEED, Expected, Plain, judge
from tests.support.zoo import WIDTH, Block, Stack, rows

DEADLINE = 200.0
LR = 0.1
Difference = tuple[float, str]


class Reading(Stack):
    """Its forward multiplies by parameters of its parts, outside of any region."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block(), depth=3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.enter.weight[0].sum() * self.leave.bias


def twins(
    stage: int, mode: str, build: Callable[[], nn.Module] = Reading, lr: float = LR, **more: Any
) -> tuple[Any, Plain]:
    """An engine, whose model rank 0 decides, and the same model in plain PyTorch."""
    torch.manual_seed(SEED)
    plain = build()
    model = copy.deepcopy(plain)
    if dist.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": DEADLINE, **more}
    return zw.initialize(model, torch.optim.SGD(model.parameters(), lr), config), Plain(plain, by_sgd(lr))


def by_sgd(lr: float = LR) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr)


def loss_of(call: Callable[[Tensor], Tensor], index: int) -> Tensor:
    x, y = rows(dist.get_rank(), index)
    return (call(x) - y).pow(2).mean()


def penalty(parameters: Iterable[Tensor]) -> Tensor:
    return 0.1 * torch.stack([p.pow(2).sum() for p in parameters]).sum()


def values_differ(engine: Any, plain: Plain) -> Difference:
    with engine.full_parameters() as full:
        return judge(full, plain.values())


def penalised(stage: int, mode: str, gather: bool) -> list[Difference]:
    """A penalty on views, reads in the root, and gradients of inputs before the backward, for three steps."""
    engine, plain = twins(stage, mode, gather_after_step=gather)
    differences = []
    with engine:
        for step in range(3):
            x = rows(dist.get_rank(), 100 + step)[0].requires_grad_()
            torch.autograd.grad(engine(x).sum(), x)
            if gather:
                engine.backward(loss_of(engine, step) + penalty(engine.module.parameters()))
            else:
                with engine.full_parameters() as full:
                    engine.backward(loss_of(engine, step) + penalty(full.values()))
                del full
            plain.each(lambda net, step: (loss_of(net, step) + penalty(net.parameters())).backward(), step)
            differences.append(judge(engine.gradients(), plain.average()))
            engine.step()
            plain.step()
        differences.append(values_differ(engine, plain))
        assert mode == "eager" or engine.stats.compiled_calls > 0
    return differences


@daily(
    ("stage", "mode", "gather"),
    [(2, "aot_eager", True), (3, "eager", False)],
    [(1, "eager", True), (1, "aot_eager", False), (3, "aot_eager", False)],
)
def test_terms_that_read_parameters(pools: Pools, stage: int, mode: str, gather: bool) -> None:
    for differences in pools(2).run(penalised, stage, mode, gather):
        assert max(differences)[0] <= 1, differences


def loaded(stage: int, mode: str, gather: bool) -> list[Difference]:
    """Rank 0's values after a step and an evaluation: outputs, gradients and values of all ranks follow them."""
    engine, plain = twins(stage, mode, gather_after_step=gather)
    differences = []
    with engine:
        for step in range(3):
            engine.backward(loss_of(engine, step))
            engine.step()
            with torch.no_grad():
                engine(rows(0, 0)[0])
            torch.manual_seed(SEED + step)
            values = {name: torch.randn_like(value) / WIDTH for name, value in plain.nets[0].state_dict().items()}
            for net in plain.nets:
                net.load_state_dict(values)
            engine.load_state_dict(values if engine.rank == 0 else {})
            if gather:
                assert all(torch.equal(p, values[name]) for name, p in engine.module.named_parameters())
            with torch.no_grad():
                outputs = plain.each(lambda net, x: {"output": net(x)}, rows(0, 0)[0])
                differences.append(judge({"output": engine(rows(0, 0)[0])}, Expected(*outputs)))
            engine.backward(loss_of(engine, step))
            plain.each(lambda net, step: loss_of(net, step).backward(), step)
            differences.append(judge(engine.gradients(), plain.average()))
            engine.step()
            plain.step()
            differences.append(values_differ(engine, plain))
    return differences


@slow("3-aot_eager-False")
@daily(
    ("stage", "mode", "gather"),
    [(1, "eager", True), (3, "aot_eager", False)],
    [(2, "aot_eager", True), (2, "eager", False)],
)
def test_what_is_loaded_is_what_the_next_forward_sees(pools: Pools, stage: int, mode: str, gather: bool) -> None:
    for differences in pools(2).run(loaded, stage, mode, gather):
        assert max(differences)[0] <= 1, differences


def written(stage: int, mode: str) -> list[Difference]:
    """A write between backward and step: the gradients stay, and the step starts from what was written."""
    engine, plain = twins(stage, mode)
    differences = []
    with engine:
        for step in range(3):
            engine.backward(loss_of(engine, step))
            plain.each(lambda net, step: loss_of(net, step).backward(), step)
            with engine.full_parameters() as full, torch.no_grad():
                for parameters in (full, *(dict(net.named_parameters()) for net in plain.nets)):
                    parameters["blocks.1.mlp.up.weight"].mul_(0.5)
            differences.append(judge(engine.gradients(), plain.average()))
            engine.step()
            plain.step()
            differences.append(values_differ(engine, plain))
    return differences


@FEW
def test_a_write_between_backward_and_step(pools: Pools, stage: int, mode: str) -> None:
    for differences in pools(2).run(written, stage, mode):
        assert max(differences)[0] <= 1, differences


def in_float64(stage: int, mode: str) -> float:
    """The largest difference of a gradient, summed over four micro-steps and two ranks, from the plain one."""
    steps, largest = 4, 0.0
    engine, plain = twins(stage, mode, lambda: Reading().double(), lr=1.0, gradient_accumulation_steps=steps)
    exact = plain.nets[1]
    with engine:
        with engine.full_parameters() as full:
            before = {name: p.detach().clone() for name, p in full.items()}
        del full
        for index in range(steps):
            x = rows(dist.get_rank(), index)[0].double() / 3
            engine.backward(engine(x).pow(2).mean())
            (exact(x).pow(2).mean() / steps).backward()
            engine.step()
        with engine.full_parameters() as full:
            for name, parameter in exact.named_parameters():
                assert parameter.grad is not None and full[name].dtype == torch.float64
                dist.all_reduce(parameter.grad)
                gradient = before[name] - full[name].detach()  # what SGD applied at a learning rate of 1
                largest = max(largest, float((gradient - parameter.grad / dist.get_world_size()).abs().max()))
    return largest


@FEW
def test_float64_accumulates_in_float64(pools: Pools, stage: int, mode: str) -> None:
    assert max(pools(2).run(in_float64, stage, mode)) <= 1e-12


def given_back(stage: int, mode: str) -> tuple[dict[str, torch.dtype], dict[str, Tensor], dict[str, Tensor]]:
    """A model trained in bfloat16 after `destroy`: dtypes and values; and what `state_dict()` said before."""
    engine, _ = twins(stage, mode, precision={"params": "bfloat16"})
    module = engine.module
    for index in range(2):
        engine.backward(loss_of(lambda x: engine(x).float(), index))
        engine.step()
    saved = engine.state_dict()
    engine.destroy()
    return {name: p.dtype for name, p in module.named_parameters()}, dict(module.state_dict()), saved


@SETTINGS
def test_destroy_gives_the_masters_back(pools: Pools, stage: int, mode: str) -> None:
    first, second = pools(2).run(given_back, stage, mode)
    saved = first[2]
    for dtypes, values, _ in (first, second):
        assert set(dtypes.values()) == {torch.float32}
        assert values.keys() == saved.keys() and all(torch.equal(values[name], saved[name]) for name in saved)
        assert any(not torch.equal(value, value.bfloat16().float()) for value in values.values())

"""The reference of every parity test: the same model, eager and unsharded, its gradients averaged by all-reduce.

It is trained twice, in fp32 and in float64, because two right fp32 programs differ by what their kernels round, which
depends on the machine. `judge` holds the engine's error to what plain fp32 PyTorch makes of the same computation:

    error <= 2 * max(plain error, typical error) + one ulp

All are Euclidean norms for one tensor, distances to the float64 reference. The typical error is the tensor's norm times
the median over the model's tensors of plain error by norm: two roundings of few elements differ by any factor, so a
tensor that plain PyTorch happens to get right (often one of a single element) is not held to that luck, but to what
its model's tensors lose as a rule. One ulp is the distance if each element were off by its last fp32 bit, 2^-23 of
the norm. The norm of a tensor counts as at least 1e-3 of the median norm: gradients that are zero in theory are noise.

No bound is ever loosened. What must be equal in every bit (stages, schedules, offloading) is compared with `worst`.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map_only

from tests.support.zoo import Entry

T = TypeVar("T")
SEED = 20_240
ULP = torch.finfo(torch.float32).eps
"""2^-23: the last bit of an fp32 number relative to it, at most."""
NORM = 8 * ULP
"""Of a norm relative to that in float64: half an ulp for each level of a pairwise sum of up to 2^14 numbers, one for
the root and the norms' norm."""
CHECKED = 3
"""First steps of a run, taken with learning rate 0: all of their gradients are compared, so that recording,
adopting and replaying a schedule are each held to the bound for gradients."""
TRAINED = 5
"""SGD-momentum steps after that; the parameters are compared at the end."""

Gradients = dict[str, Tensor | None]
Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Expected:
    """Tensors by name as plain PyTorch computes them in fp32, and the same in float64."""

    plain: Tensors
    exact: Tensors

    def __post_init__(self) -> None:
        assert self.plain.keys() == self.exact.keys()
        for name, value in self.plain.items():
            other = self.exact[name]
            assert shape(value) == shape(other) and (other is None or other.dtype == torch.float64), name

    @classmethod
    def alone(cls, plain: Tensors) -> Expected:
        """Of a program that rounds on purpose, as low precision does: what it says is right, up to one ulp."""
        return cls(plain, {name: None if value is None else value.double() for name, value in plain.items()})

    def map(self, function: Callable[[Tensors], Tensors]) -> Expected:
        return Expected(function(self.plain), function(self.exact))

    def __getitem__(self, name: str) -> Expected:
        """Of one tensor alone."""
        return self.map(lambda tensors: {name: tensors[name]})


def judge(got: Tensors, expected: Expected, roundings: int = 1) -> tuple[float, str]:
    """The largest part of the allowed error that a tensor uses up, and its name: up to 1 is right.

    `roundings`: how often a value was rounded to fp32 after all else was computed, an ulp each: for parameters that
    training began at zero, once in each step, because nothing else in them is large enough to hide it.
    Infinite where one side lacks a tensor, or where something is not finite.
    """
    present = {name: value for name, value in expected.exact.items() if value is not None and value.numel()}
    norms = {name: float(value.detach().norm()) for name, value in present.items()}
    floor = 1e-3 * statistics.median(norms.values()) if norms else 0.0
    norms = {name: max(norm, floor) for name, norm in norms.items()}
    errors = {name: distance(expected.plain[name], value) for name, value in present.items()}
    typical = (
        statistics.median(errors[name] / norms[name] for name in norms if norms[name]) if any(norms.values()) else 0.0
    )
    result = (0.0, "")
    for name, value in expected.exact.items():
        other = got.get(name)
        if shape(other) != shape(value):
            return float("inf"), f"{name}: got {describe(other)}, expected {describe(value)}"
        if value is None or other is None or not value.numel():
            continue
        error, norm = distance(other, value), norms[name]
        allowed = 2 * max(errors[name], typical * norm) + roundings * ULP * norm
        used = error / allowed if allowed else (float("inf") if error else 0.0)
        told = f"{name}: {error:.3g} off, {allowed:.3g} allowed, plain fp32 {errors[name]:.3g}, norm {norm:.3g}"
        result = max(result, (used if used == used else float("inf"), told))
    return result


def judge_numbers(got: Iterable[float], expected: tuple[Iterable[float], Iterable[float]]) -> tuple[float, str]:
    """`judge` of a sequence of numbers, such as a run's losses, as one tensor; what is expected in fp32 and float64."""
    plain, exact = (torch.tensor(list(each), dtype=torch.float64) for each in expected)
    return judge(
        {"numbers": torch.tensor(list(got), dtype=torch.float64)}, Expected({"numbers": plain}, {"numbers": exact})
    )


def distance(a: Tensor | None, b: Tensor) -> float:
    assert a is not None
    return float((a.detach().double() - b.detach()).norm())


class Exactly(TorchFunctionMode):
    """Runs a program that was written for fp32 in float64.

    Where it asks for fp32 it gets float64, and where an fp32 tensor meets one in float64 it is converted first.
    """

    IDENTITY = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
    """These mean the very tensors that they are given."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if function in self.IDENTITY:
            return function(*given[0], **given[1])
        if function is Tensor.float:
            function = Tensor.double
        given = tree_map_only(torch.dtype, lambda d: torch.float64 if d == torch.float32 else d, given)
        if tree_any(lambda value: isinstance(value, Tensor) and value.dtype == torch.float64, given):
            given = doubled(given)
        return function(*given[0], **given[1])


def doubled(values: T) -> T:
    """A nest of tensors, the fp32 ones in float64."""
    return tree_map_only(Tensor, lambda t: t.double() if t.dtype == torch.float32 else t, values)


class Plain:
    """A plain model and its equal in float64, trained side by side on the same data and the same random numbers.

    `make` builds each one's optimizer from its parameters.
    """

    def __init__(
        self, module: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    ) -> None:
        self.nets = (module, copy.deepcopy(module).double())
        self.optimizers = tuple(make(list(net.parameters())) for net in self.nets) if make else ()

    def each(self, function: Callable[..., T], *data: Any) -> tuple[T, T]:
        """What `function(model, *data)` gives for the model in fp32 and for that in float64, data included."""
        state = torch.get_rng_state()
        first = function(self.nets[0], *data)
        torch.set_rng_state(state)
        with Exactly():
            return first, function(self.nets[1], *doubled(data))

    def average(self) -> Expected:
        """Replace the gradients of both by the ranks' means; collective."""
        return Expected(*(average(net.named_parameters()) for net in self.nets))

    def gradients(self) -> Expected:
        """Copies of the gradients of both as they are."""
        return Expected(
            *({n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()} for net in self.nets)
        )

    def values(self) -> Expected:
        """Copies of the parameters of both."""
        return Expected(*({n: p.detach().clone() for n, p in net.named_parameters()} for net in self.nets))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for net in self.nets:
            net.zero_grad()


@dataclass(frozen=True)
class Run:
    """What a training run computed: a loss per micro-step, the gradients of the first steps, the final parameters."""

    losses: list[float]
    gradients: list[Gradients]
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """The same of the reference, in fp32 and float64."""

    losses: tuple[list[float], list[float]]
    gradients: list[Expected]
    parameters: Expected


def build(entry: Entry, seed: int = SEED) -> nn.Module:
    torch.manual_seed(seed)
    return entry.build().train()


def draw(rank: int, index: int) -> None:
    """Seed the random numbers of one micro-step: the same for the engine and the reference, different on every rank."""
    torch.manual_seed(SEED + 7919 * index + 31 * rank)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def set_lr(optimizer: torch.optim.Optimizer, step: int, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if step < CHECKED else lr


def average(named: Iterable[tuple[str, nn.Parameter]]) -> Gradients:
    """Replace every gradient by the ranks' mean, in fp32 or float64; absent on some ranks: zero there, on all: None."""
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    present = torch.tensor([parameter.grad is not None for _, parameter in trainable], dtype=torch.int32)
    own = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in trainable]
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in own) else torch.float32
    flat = torch.cat([gradient.detach().to(dtype).flatten() for gradient in own])
    dist.all_reduce(present)
    dist.all_reduce(flat)
    means = (flat / dist.get_world_size()).split([parameter.numel() for _, parameter in trainable])
    gradients: Gradients = {}
    for (name, parameter), count, mean in zip(trainable, present.tolist(), means, strict=True):
        gradients[name] = mean.view(parameter.shape).clone() if count else None
        parameter.grad = mean.view(parameter.shape).to(parameter.dtype) if count else None
    return gradients


class Masters:
    """fp32 copies of low-precision parameters under the optimizer; others are there themselves."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.pairs = [
            (name, p, p if p.dtype in (torch.float32, torch.float64) else nn.Parameter(p.detach().float()))
            for name, p in module.named_parameters()
            if p.requires_grad
        ]
        self.sums: Gradients = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [master for _, _, master in self.pairs]

    def collect(self) -> None:
        """Add the low-precision gradients of one micro-step to the fp32 sums, as `precision.accumulate` does."""
        for name, parameter, master in self.pairs:
            if master is not parameter and parameter.grad is not None:
                old = self.sums.get(name)
                self.sums[name] = parameter.grad.float() if old is None else old + parameter.grad.float()
                parameter.grad = None

    def average(self) -> Gradients:
        for name, parameter, master in self.pairs:
            if master is not parameter:
                master.grad = self.sums.pop(name, None)
        return average((name, master) for name, _, master in self.pairs)

    def write_back(self) -> None:
        with torch.no_grad():
            for _, parameter, master in self.pairs:
                if master is not parameter:
                    parameter.copy_(rounded(master, parameter.dtype))


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As masters are: bfloat16 is the nearest one, and of two equally near the one farther from zero."""
    nearest = values.to(dtype)
    if dtype != torch.bfloat16:
        return nearest
    farther = torch.nextafter(nearest, torch.full_like(nearest, math.inf).copysign(nearest))
    exact = values.double()
    tie = (farther.double() - exact).abs() == (exact - nearest.double()).abs()
    return torch.where(tie, farther, nearest)


def train_reference(
    entry: Entry,
    gas: int,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd,
    steps: int = CHECKED + TRAINED,
) -> Reference:
    """Train the unsharded model on this rank's data, in fp32 and in float64; collective.

    A model with low-precision parameters rounds where its author said so, which in float64 it would not: there the fp32
    run itself is exact, and an engine may be one ulp beside it.
    """
    plain = train_plain(entry, gas, make, steps, build(entry))
    if any(p.dtype != torch.float32 for p in build(entry).parameters()):
        gradients = [Expected.alone(each) for each in plain.gradients]
        return Reference((plain.losses, plain.losses), gradients, Expected.alone(plain.parameters))
    wide = build(entry).double()
    with Exactly():
        exact = train_plain(entry, gas, make, steps, wide)
    gradients = [Expected(*pair) for pair in zip(plain.gradients, exact.gradients, strict=True)]
    return Reference((plain.losses, exact.losses), gradients, Expected(plain.parameters, exact.parameters))


def train_plain(
    entry: Entry, gas: int, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int, module: nn.Module
) -> Run:
    """One training run of the reference, in the dtypes of `module`; collective."""
    rank = dist.get_rank()
    masters = Masters(module)
    optimizer = make(masters.parameters)
    run = Run([], [], {})

    def backward(loss: Tensor, retain_graph: bool = False) -> None:
        (loss / gas).backward(retain_graph=retain_graph)

    for step in range(steps):
        set_lr(optimizer, step, entry.lr)
        for index in range(step * gas, (step + 1) * gas):
            draw(rank, index)
            run.losses.append(float(entry.micro(module, module, entry.batch(rank, index), backward)))
            masters.collect()
        gradients = masters.average()
        if step < CHECKED:
            run.gradients.append(gradients)
        optimizer.step()
        optimizer.zero_grad()
        masters.write_back()
    run.parameters.update({name: p.detach().clone() for name, p in module.named_parameters()})
    return run


def worst(got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> tuple[float, str]:
    """The largest relative difference of two runs and what it belongs to; infinite where one side lacks a tensor.

    Relative to norms as `judge` has them. For runs that are equal in every bit (it is 0 then), or far apart.
    """
    norms = {
        name: float(value.double().norm()) for name, value in expected.items() if value is not None and value.numel()
    }
    floor = 1e-3 * statistics.median(norms.values()) if norms else 0.0
    result = (0.0, "")
    for name, value in expected.items():
        other = got.get(name)
        if (value is None) != (other is None) or (
            value is not None and other is not None and value.shape != other.shape
        ):
            return float("inf"), f"{name}: got {describe(other)}, expected {describe(value)}"
        if value is not None and other is not None and value.numel():
            difference = float((other.double() - value.double()).norm())
            ratio = difference / max(norms[name], floor, 1e-30)
            result = max(result, (ratio if ratio == ratio else float("inf"), name))
    return result


def shape(value: Tensor | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.shape)


def describe(value: Tensor | None) -> str:
    return f"{shape(value)}"

"""The reference of every parity test: the same model, eager and unsharded, its gradients averaged by all-reduce.

Bounds (never loosened): a gradient differs by at most `tolerance * max(|g|, 1e-3 * median |g| over parameters)` in
Euclidean norms, because gradients that are zero in theory are noise; parameters after training likewise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.zoo import Entry

SEED = 20_240
CHECKED = 3
"""First steps of a run, taken with learning rate 0: all of their gradients are compared, so that recording,
adopting and replaying a schedule are each held to the bound for gradients."""
TRAINED = 5
"""SGD-momentum steps after that; the parameters are compared at the end."""

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Run:
    """What a training run computed: a loss per micro-step, the gradients of the first steps, the final parameters."""

    losses: list[float]
    gradients: list[Gradients]
    parameters: dict[str, Tensor]


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
    """Replace every gradient by the ranks' mean in fp32; absent on some ranks: zero there, on all: None."""
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    present = torch.tensor([parameter.grad is not None for _, parameter in trainable], dtype=torch.int32)
    own = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in trainable]
    flat = torch.cat([gradient.detach().float().flatten() for gradient in own])
    dist.all_reduce(present)
    dist.all_reduce(flat)
    means = (flat / dist.get_world_size()).split([parameter.numel() for _, parameter in trainable])
    gradients: Gradients = {}
    for (name, parameter), count, mean in zip(trainable, present.tolist(), means, strict=True):
        gradients[name] = mean.view(parameter.shape).clone() if count else None
        parameter.grad = mean.view(parameter.shape).to(parameter.dtype) if count else None
    return gradients


class Masters:
    """fp32 copies of the parameters under the optimizer; for an fp32 model the parameters themselves."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.pairs = [
            (name, p, p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()))
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
                    parameter.copy_(master)


def train_reference(
    entry: Entry,
    gas: int,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd,
    steps: int = CHECKED + TRAINED,
) -> Run:
    """Train the unsharded model on this rank's data; collective."""
    rank = dist.get_rank()
    module = build(entry)
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
    """The largest bounded relative difference and what it belongs to; infinite where one side lacks a tensor."""
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


def describe(value: Tensor | None) -> str:
    return "None" if value is None else f"{tuple(value.shape)}"

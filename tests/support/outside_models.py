"""Models that compute with parameters outside of their forward, or whose ranks enter different modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroweave as zw
from tests.support.zoo import (
    VOCABULARY,
    WIDTH,
    Backward,
    Block,
    Entry,
    Stack,
    generator,
    rows,
    tokens,
)

Call = Callable[..., Any]
ADAPTED = 2.0
"""The scale of an adapter on the head."""


class Hidden(nn.Module):
    """A decoder that returns hidden states; its head is for the loss to read, tied to the embedding if asked."""

    def __init__(self, tied: bool = False, adapted: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if adapted:
            self.head.weight.requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h)
        return h


def split(call: Call, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [n, WIDTH] and labels [n]."""
    return call(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()


def in_chunks(call: Call, module: nn.Module, batch: Tensor, backward: Backward) -> Tensor:
    """Cross-entropy over chunks, each computed again in the backward, as in losses for large vocabularies."""
    hidden, labels = split(call, batch)
    weight: Any = module.head.weight

    def part(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ w.t(), y, reduction="sum")

    parts = zip(hidden.split(5), labels.split(5), strict=True)
    loss = torch.stack([checkpoint(part, x, weight, y, use_reentrant=False) for x, y in parts]).sum() / len(labels)
    backward(loss)
    return loss.detach()


class FusedLoss(torch.autograd.Function):
    """Cross-entropy that computes its gradients in the forward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = hidden @ weight.t()
        wrong = (logits.softmax(-1) - F.one_hot(labels, weight.shape[0])) / len(labels)
        ctx.save_for_backward(wrong @ weight, torch.zeros_like(weight) + wrong.t() @ hidden)
        return F.cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        of_hidden, of_weight = ctx.saved_tensors
        return grads[0] * of_hidden, grads[0] * of_weight, None


class LateLoss(torch.autograd.Function):
    """Cross-entropy that reads the weight in its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        return F.cross_entropy(hidden @ weight.t(), labels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, labels = ctx.saved_tensors
        wrong = ((hidden @ weight.t()).softmax(-1) - F.one_hot(labels, weight.shape[0])) / len(labels)
        return grads[0] * (wrong @ weight), grads[0] * (wrong.t() @ hidden), None


def by_function(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    def micro(call: Call, module: nn.Module, batch: Tensor, backward: Backward) -> Tensor:
        hidden, labels = split(call, batch)
        loss: Tensor = function.apply(hidden, module.head.weight, labels)
        backward(loss)
        return loss.detach()

    return micro


def adapted_head(call: Call, module: Any, batch: Tensor, backward: Backward) -> Tensor:
    """The head's frozen weight and both matrices of its adapter are read, twice: for two terms of the loss."""
    hidden, labels = split(call, batch)
    weights = [module.head.weight + ADAPTED * (module.up.weight @ module.down.weight) for _ in range(2)]
    loss = F.cross_entropy(hidden @ weights[0].t(), labels) + 0.1 * (hidden @ weights[1].t()).square().mean()
    backward(loss)
    return loss.detach()


def weighed(call: Call, module: Any, batch: Any, backward: Backward) -> Tensor:
    """Two losses weighed by the gradients that each has for the last layer."""
    x, y = batch
    output = call(x)
    near, far = F.mse_loss(output, y), (output - y).abs().mean()
    last = [module.leave.weight, module.leave.bias]
    one, two = (torch.autograd.grad(loss, last, retain_graph=True) for loss in (near, far))
    ratio = one[0].norm() / two[0].norm() + one[1].norm() / two[1].norm()
    loss = near + 0.1 * ratio.detach() * far
    backward(loss)
    return loss.detach()


def penalised(call: Call, module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    x, y = batch
    loss = F.mse_loss(call(x), y) + 0.01 * torch.stack([p.square().sum() for p in module.parameters()]).sum()
    backward(loss)
    return loss.detach()


class Encoder(Stack):
    """Its methods use parameters of its own; `encode` is called as often as forward is."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        zw.mark_forward(self, "encode")

    def encode(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(self.scale * x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + 1


def both_ways(call: Call, module: Any, batch: Any, backward: Backward) -> Tensor:
    x, y = batch
    with torch.no_grad():
        target = module.encode(x + 1)
    loss = F.mse_loss(module.encode(x), y) + F.mse_loss(call(x), target)
    backward(loss)
    return loss.detach()


class Towers(Stack):
    """A tower that some batches leave out, experts of which a batch has one, and an early exit."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, image: Tensor | None, expert: int, depth: int) -> Tensor:
        h = self.enter(x)
        if image is not None:
            for block in self.tower:
                image = block(image)
            h = h + image
        h = self.experts[expert](h)
        for block in self.blocks[:depth]:
            h = block(h)
        return self.leave(h)


def choices(rank: int, index: int) -> tuple[Any, ...]:
    """Each rank leaves out something else in each micro-step."""
    x, y = rows(rank, index)
    image = torch.randn(x.shape, generator=generator(rank, index)) if (rank + index) % 2 else None
    return x, y, image, (rank + index) % 3, 2 + (rank + index) % 3


def later_choices(rank: int, index: int) -> tuple[Any, ...]:
    """As `choices`, without experts, once a first step of up to four micro-steps has entered every module."""
    x, y, image, _, depth = choices(rank, index)
    return (x, y, x, 0, 4) if index < 4 else (x, y, image, 0, depth)


def with_choices(call: Call, module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    x, y, *others = batch
    loss = F.mse_loss(call(x, *others), y)
    backward(loss)
    return loss.detach()


OPTIONAL = {"sharding": {"optional": ["tower.*", "experts.*", "blocks.[23]"]}}

OUTSIDE_MODELS = (
    Entry("loss_in_chunks", Hidden, tokens, in_chunks),
    Entry("loss_in_chunks_tied", lambda: Hidden(tied=True), tokens, in_chunks),
    Entry("loss_by_function", Hidden, tokens, by_function(FusedLoss)),
    Entry("loss_by_function_tied", lambda: Hidden(tied=True), tokens, by_function(LateLoss)),
    Entry("loss_with_adapter", lambda: Hidden(adapted=True), tokens, adapted_head),
    Entry("gradients_of_losses", lambda: Stack(lambda index: Block()), rows, weighed),
    Entry("penalty", lambda: Stack(lambda index: Block()), rows, penalised),
    Entry("marked_method", Encoder, rows, both_ways),
    Entry("optional_modules", Towers, choices, with_choices, config=OPTIONAL, stages=(3,)),
    # What is kept needs no order of calls; without one, ranks that enter different calls adopt no schedule.
    Entry("optional_modules_kept", Towers, choices, with_choices, config=OPTIONAL, stages=(1, 2), steady=False),
    Entry("left_out_later", Towers, later_choices, with_choices, stages=(3,)),
    # Ranks at stages 1 and 2 depart from the schedule instead of passing over calls: exact, with gathers on demand.
    Entry("left_out_later_kept", Towers, later_choices, with_choices, stages=(1, 2), steady=False),
)

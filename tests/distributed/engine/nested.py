"""Backwards that run inside something else: a custom function's forward, a hook of another backward, a model's head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.engine.coalescing import Setting, initialize, window
from tests.support.reference import CHECKED, TRAINED, build, draw, judge, judge_numbers, set_lr, train_reference
from tests.support.zoo import Block, Entry, Stack, rows

CHUNKS = 2


class Eager(torch.autograd.Function):
    """The loss of a call, whose backward has been run when the forward returns: `backward` scales nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for inputs, targets in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            with torch.enable_grad():
                loss = F.mse_loss(call(inputs), targets) / CHUNKS
            loss.backward()
            total += loss.detach()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * 4


def in_a_forward(call: Callable[[Tensor], Tensor], batch: Any, backward: Callable[[Tensor], None]) -> Tensor:
    x, y = batch
    return Eager.apply(torch.zeros((), requires_grad=True), call, x, y).detach()


def in_a_hook(call: Callable[[Tensor], Tensor], batch: Any, backward: Callable[[Tensor], None]) -> Tensor:
    """The backward of a loss of cached outputs runs, from a hook, one backward for each chunk."""
    x, y = batch
    with torch.no_grad():
        cached = torch.cat([call(part) for part in x.chunk(CHUNKS)])
    cached.requires_grad_()
    loss = F.mse_loss(cached, y)
    (gradient,) = torch.autograd.grad(loss, cached)
    stand_in = loss.detach().requires_grad_()

    def run(scale: Tensor) -> None:
        with torch.enable_grad():
            for part, wanted in zip(x.chunk(CHUNKS), gradient.chunk(CHUNKS), strict=True):
                (call(part) * wanted * scale).sum().backward()

    stand_in.register_hook(run)
    backward(stand_in)
    return loss.detach()


class TiledLoss(torch.autograd.Function):
    """A head and its loss in tiles, each differentiated at once: the head's gradients come while the model runs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: nn.Module, y: Tensor) -> Tensor:
        total, gradients = torch.zeros(()), []
        for tile, targets in zip(hidden.detach().chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            with torch.enable_grad():
                tile = tile.requires_grad_()
                loss = F.mse_loss(head(tile), targets) / CHUNKS
            loss.backward()
            gradients.append(tile.grad)
            total += loss.detach()
        ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        return hidden * gradients[0], None, None


class Tiled(Stack):
    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.tiled = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return TiledLoss.apply(x, self.leave, y) if self.tiled else F.mse_loss(self.leave(x), y)


def plain(call: Callable[..., Tensor], module: nn.Module, batch: Any, backward: Any) -> Tensor:
    x, y = batch
    loss = call(x, y) if isinstance(module, Tiled) else F.mse_loss(call(x), y)
    backward(loss)
    return loss.detach()


def untiled() -> nn.Module:
    model = Tiled()
    model.tiled = False
    return model


def tiled(call: Callable[..., Tensor], batch: Any, backward: Callable[[Tensor], None]) -> Tensor:
    x, y = batch
    loss = call(x, y)
    backward(loss)
    return loss.detach()


WAYS = {"forward": in_a_forward, "hook": in_a_hook, "head": tiled}


def nested(setting: Setting, way: str, coalesce: bool) -> tuple[list[Any], Any, set[float]]:
    """One window a step, its backwards run inside something else, beside the reference's ordinary one."""
    model = Entry("nested", untiled if way == "head" else lambda: Stack(lambda i: Block()), rows, plain)
    expected = train_reference(model, 1)
    differences, losses, reductions = [], [], []
    module = build(model)
    if way == "head":
        module.tiled = True
    with initialize(module, setting.config()) as engine:
        buckets = len(engine.buckets)
        for step in range(CHECKED + TRAINED):
            set_lr(engine.optimizer, step, model.lr)
            with window(engine, coalesce):
                draw(engine.rank, step)
                loss = WAYS[way](engine, model.batch(engine.rank, step), engine.backward)
            losses.append(float(loss))
            if step < CHECKED:
                differences.append(judge(engine.gradients(), expected.gradients[step]))
            engine.step()
            reductions.append(engine.stats.last_step["reduce_scatter"].calls / buckets)
        with engine.full_parameters() as full:
            differences.append(judge_numbers(losses, expected.losses))
            return differences, judge(full, expected.parameters), set(reductions)

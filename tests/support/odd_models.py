"""The zoo: models that do what naive ZeRO implementations get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.support.zoo import (
    MLP,
    ROWS,
    VOCABULARY,
    WIDTH,
    Backward,
    Block,
    Entry,
    Stack,
    next_token,
    regression,
    rows,
    sequences,
    stack_of,
    tokens,
)


class Unused(Stack):
    """A layer that no step uses, beside the blocks and inside each."""

    def __init__(self) -> None:
        super().__init__(UnusedBlock)
        self.spare = nn.Linear(WIDTH, WIDTH)


class UnusedBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(WIDTH))


class Branching(Stack):
    """`extra` is entered by rank 0 only."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.extra = Block()

    def forward(self, x: Tensor, detour: bool) -> Tensor:
        h = self.enter(x)
        if detour:
            h = self.extra(h)
        for block in self.blocks:
            h = block(h)
        return self.leave(h)


def detour_rows(rank: int, index: int) -> tuple[Tensor, Tensor, bool]:
    return *rows(rank, index), rank == 0


def detour_regression(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    x, y, detour = batch
    loss = F.mse_loss(call(x, detour), y)
    backward(loss)
    return loss.detach()


class Small(Stack):
    """Parameters smaller than the world and of no size, in a block and in the root."""

    def __init__(self) -> None:
        super().__init__(SmallBlock)
        self.scale = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.ones(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.nothing.sum(0)


class SmallBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.gate


def offset_rows(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Targets far from the outputs, so that the gradient of a scalar is no difference of large numbers."""
    x, y = rows(rank, index)
    return x, y + 3


class BreakingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        torch._dynamo.graph_break()
        return x + self.mlp(h)


class IndexedBlock(Block):
    """Reads its own layer index: Dynamo compiles every block anew."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) * (1 + self.index / 16)


LIMIT = 8
BEYOND_LIMIT = frozenset(f"blocks.{index}" for index in range(LIMIT, 12))
"""Blocks of `layer_index` past its limit of variants of one code object."""


class DisabledMLP(MLP):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class DisabledBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = DisabledMLP()


class Repeated(Stack):
    """The first block is called three times."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for _ in range(3):
            h = self.blocks[0](h)
        return self.leave(self.blocks[1](h))


class TwoHeadsBlock(nn.Module):
    """Both heads' outputs, biases and an extra vector receive one and the same gradient node."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.left(x) + self.right(x) + self.shift


class AddingBlock(Block):
    """`h + w` of equal shape: the input's gradient and the weight's are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x + self.w)) + (x + self.w)


class EarlyTranspose(Stack):
    """The root takes a view of a block's weight first and uses it two layers later."""

    def forward(self, x: Tensor) -> Tensor:
        early = self.blocks[0].mlp.up.weight.t()  # type: ignore[union-attr]
        h = self.blocks[1](self.blocks[0](self.enter(x)))
        h = h + (h @ early)[:, :WIDTH]
        return self.leave(self.blocks[3](self.blocks[2](h)))


class FusedBlock(nn.Module):
    """A fused projection whose weight is chunked in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (F.linear(h, weight) for weight in self.qkv.chunk(3))
        return x + F.scaled_dot_product_attention(q, k, v)


class AuxiliaryBlock(Block):
    """Leaves a loss on itself, which the training loop adds."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.norm(x))
        self.auxiliary = h.pow(2).mean()
        return x + h


def with_auxiliary(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    x, y = batch
    loss = F.mse_loss(call(x), y)
    loss = loss + 0.1 * sum(block.auxiliary for block in module.blocks)  # type: ignore[union-attr]
    backward(loss)
    return loss.detach()


class ReturnsParameter(Stack):
    """Returns a parameter of its own, a view of another one, and a block that returns one as well."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.vector = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x), self.vector, self.leave.weight[:2].t()


class ReturningBlock(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.mlp.down.bias


class BlocksReturnParameters(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, biases = self.enter(x), []
        for block in self.blocks:
            x, bias = block(x)
            biases.append(bias)
        return self.leave(x), biases[0], biases[-1]


def with_parameters(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    x, y = batch
    out, one, other = call(x)
    loss = F.mse_loss(out, y) + 0.1 * one.pow(2).sum() + 0.1 * (other + 1).pow(2).sum()
    backward(loss)
    return loss.detach()


def part_alone(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    """Calls submodules directly: once without a graph, once as a term of the loss."""
    x, y = batch
    with torch.no_grad():
        target = module.blocks[1](x)  # type: ignore[index]
    loss = F.mse_loss(call(x), y) + 0.1 * F.mse_loss(module.enter(x), target)  # type: ignore[operator]
    backward(loss)
    return loss.detach()


class RootParameters(Stack):
    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale + self.shift) + self.shift


class ReadsChildren(nn.Module):
    """The root computes with the weights of children, one of which it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(F.linear(x, self.mix.weight, self.mix.bias), self.embedding.weight) / 4


class CalledInParts(Stack):
    """The root calls each block's children and never the block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block.mlp(block.norm(x))  # type: ignore[operator]
        return self.leave(x)


class CalledOutside(Stack):
    """The root calls blocks, and behind them a part of the first one, as DiT does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x + self.blocks[0].mlp(x))  # type: ignore[operator]


class TwoTypesBlock(nn.Module):
    """fp32 norm, bf16 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x).to(torch.bfloat16)).float()


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class TwoOutputs(Stack):
    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        return self.leave(h), self.second(h)


def two_losses(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    """Two backwards through one forward."""
    x, y = batch
    one, other = call(x)
    first, second = F.mse_loss(one, y), (other - x).abs().mean()
    backward(first, retain_graph=True)
    backward(second)
    return (first + second).detach()


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = Stack(lambda index: Block(), 2)
        self.discriminator = Stack(lambda index: Block(), 2)

    def forward(self, x: Tensor, real: Tensor, detached: bool) -> tuple[Tensor, Tensor]:
        made = self.generator(x)
        return self.discriminator(real), self.discriminator(made.detach() if detached else made)


def alternating_rows(rank: int, index: int) -> tuple[Tensor, Tensor, bool]:
    return *rows(rank, index), index // 2 % 2 == 0


def adversarial(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    """Turns in which no gradient reaches the generator, though its forward recorded a graph."""
    x, y, detached = batch
    real, made = call(x, y, detached)
    loss = (real - 1).pow(2).mean() + (made + 1).pow(2).mean() if detached else (made - 1).pow(2).mean()
    backward(loss)
    return loss.detach()


ODD_MODELS = (
    Entry("unused", Unused, rows, regression),
    Entry("branch_on_one_rank", Branching, detour_rows, detour_regression, stages=(1, 2), steady=False),
    Entry("small_parameters", Small, offset_rows, regression, lr=0.005),
    Entry("graph_break", stack_of(BreakingBlock), rows, regression),
    Entry(
        "layer_index",
        lambda: Stack(IndexedBlock, 12),
        rows,
        regression,
        eager_regions=BEYOND_LIMIT,
        config={"compile": {"recompile_limit": LIMIT}},
    ),
    Entry("disabled_mlp", stack_of(DisabledBlock), rows, regression),
    Entry("repeated_layer", lambda: Repeated(lambda index: Block(), 2), rows, regression),
    Entry("two_heads", stack_of(TwoHeadsBlock), rows, regression),
    Entry("equal_shape_add", stack_of(AddingBlock), rows, regression),
    Entry("early_transpose", lambda: EarlyTranspose(lambda index: Block()), rows, regression),
    Entry("fused_chunk", stack_of(FusedBlock), sequences, regression),
    Entry("auxiliary_loss", stack_of(AuxiliaryBlock), rows, with_auxiliary),
    Entry("returns_parameter", ReturnsParameter, rows, with_parameters),
    Entry(
        "blocks_return_parameters",
        lambda: BlocksReturnParameters(lambda index: ReturningBlock()),
        rows,
        with_parameters,
    ),
    Entry("part_alone", stack_of(Block), rows, part_alone),
    Entry("root_parameters", RootParameters, rows, regression),
    Entry("reads_children", ReadsChildren, tokens, next_token),
    Entry("called_in_parts", lambda: CalledInParts(lambda index: Block()), rows, regression, compiles=False),
    Entry("called_outside", lambda: CalledOutside(lambda index: Block()), rows, regression),
    Entry("two_types", stack_of(TwoTypesBlock), rows, regression, config={"precision": {"reduce": "float32"}}),
    Entry("weight_norm", stack_of(NormedBlock), rows, regression),
    Entry("two_losses", TwoOutputs, rows, two_losses),
    Entry("partial_backward", Adversarial, alternating_rows, adversarial, steady=False),
)

"""The zoo: ordinary models (here), odd ones (`odd_models.py`) and transformers' (`hf_models.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective

from tests.support.hf_models import HF_MODELS
from tests.support.odd_models import ODD_MODELS
from tests.support.outside_models import OUTSIDE_MODELS
from tests.support.shaped_models import SHAPED_MODELS
from tests.support.zoo import (
    VOCABULARY,
    WIDTH,
    Backward,
    Block,
    Entry,
    Stack,
    images,
    next_token,
    regression,
    rows,
    sequences,
    stack_of,
    tokens,
    uneven_tokens,
)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class DecoderBlock(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A small decoder; `tied` shares the embedding with the head, `way` names a form of checkpointing."""

    def __init__(self, block: Callable[[], nn.Module] = DecoderBlock, tied: bool = False, way: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(4)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.way = way
        if tied:
            self.head.weight = self.embedding.weight
            nn.init.normal_(self.head.weight, std=1 / math.sqrt(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = self._checkpointed(block, x) if self.way else block(x)
        return self.head(self.norm(x))

    def _checkpointed(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.way != "selective":
            return checkpoint(block, x, use_reentrant=self.way == "reentrant")
        return checkpoint(block, x, use_reentrant=False, context_fn=partial(selective, [torch.ops.aten.mm.default]))


class DropoutBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mlp(self.norm(x)), 0.25, self.training)


class TokenDropoutBlock(DecoderBlock):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.25, self.training)


class CheckpointingBlock(DecoderBlock):
    """Recomputes a part of itself, dropout included; `way` names a form of checkpointing."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.reentrant = way == "reentrant"

    def forward(self, x: Tensor) -> Tensor:
        def mlp(x: Tensor) -> Tensor:
            h = self.mlp_norm(x)
            return F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), 0.25, self.training)

        x = x + self.attention(self.attention_norm(x))
        return x + checkpoint(mlp, x, use_reentrant=self.reentrant)


class BatchNormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Recurrent(nn.Module):
    """An LSTM between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.lstm(torch.tanh(self.enter(x)))[0])


class Convolutional(nn.Module):
    """No lists and no repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(3, 12)
        self.head = nn.Linear(12 * 16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.second(F.gelu(self.first(x))))).flatten(1))


class ConvolutionalInParts(nn.Module):
    """No lists either, but composite children."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Convolutional()
        self.tail = MLPHead()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


class MLPHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class MixingBlock(nn.Module):
    """nn.MultiheadAttention, which reads its weights without calling its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.mix(h, h, h, need_weights=False)[0]


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def low_rank() -> nn.Module:
    model = Stack(lambda index: Block())
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.mlp.up = LowRank(block.mlp.up)  # type: ignore[assignment]
    return model


def frozen_layers() -> nn.Module:
    """The input layer and the first two blocks are frozen."""
    model = Stack(lambda index: Block())
    for module in (model.enter, *model.blocks[:2]):
        module.requires_grad_(False)
    return model


def frozen_inside() -> nn.Module:
    """Every block has a frozen layer."""
    model = Stack(lambda index: Block())
    for block in model.blocks:
        assert isinstance(block, Block)
        block.mlp.up.requires_grad_(False)
    return model


class LeafList(nn.Module):
    """A list whose repeated members are leaves: one region itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def evaluate_then_train(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    """A forward under no_grad in train mode, then the step itself."""
    with torch.no_grad():
        call(batch[0] + 1)
    return regression(call, module, batch, backward)


PLAIN_MODELS = (
    Entry("mlp", stack_of(Block), rows, regression),
    Entry("decoder", Decoder, tokens, next_token),
    Entry("lstm", Recurrent, sequences, regression),
    Entry("batch_norm", stack_of(BatchNormBlock), rows, regression),
    Entry("dropout", stack_of(DropoutBlock), rows, regression),
    Entry("tied", lambda: Decoder(tied=True), tokens, next_token),
    Entry("frozen_layers", frozen_layers, rows, regression),
    Entry("frozen_inside", frozen_inside, rows, regression),
    Entry("lora", low_rank, rows, regression),
    Entry("convolutional", Convolutional, images, regression),
    Entry("convolutional_parts", ConvolutionalInParts, images, regression),
    Entry("leaf_list", LeafList, rows, regression),
    Entry("attention_module", stack_of(MixingBlock), sequences, regression),
    Entry("checkpoint", lambda: Decoder(TokenDropoutBlock, way="plain"), tokens, next_token),
    Entry("checkpoint_selective", lambda: Decoder(TokenDropoutBlock, way="selective"), tokens, next_token),
    Entry("checkpoint_reentrant", lambda: Decoder(TokenDropoutBlock, way="reentrant"), tokens, next_token),
    Entry("checkpoint_inside", lambda: Decoder(lambda: CheckpointingBlock("plain")), tokens, next_token),
    Entry("checkpoint_inside_reentrant", lambda: Decoder(lambda: CheckpointingBlock("reentrant")), tokens, next_token),
    Entry("no_grad_between", stack_of(DropoutBlock), rows, evaluate_then_train),
    Entry("uneven_lengths", Decoder, uneven_tokens, next_token),
)

ZOO = PLAIN_MODELS + ODD_MODELS + SHAPED_MODELS + OUTSIDE_MODELS + HF_MODELS


def entry(name: str) -> Entry:
    return next(each for each in ZOO if each.name == name)

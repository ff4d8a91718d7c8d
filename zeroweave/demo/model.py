"""A small Llama-style decoder: RMSNorm, rotary positions, causal attention, SwiGLU, untied embeddings.

It is an ordinary PyTorch model and knows nothing of zeroweave. It is called as Hugging Face's are called:
`model(input_ids, labels)` returns an object with `.loss` and `.logits`, and the model itself shifts the
labels by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes. The defaults make 0.87 million parameters, for text as bytes."""

    vocabulary: int = 256
    width: int = 128
    hidden: int = 352
    layers: int = 4
    heads: int = 4
    max_length: int = 128
    rotary_base: float = 10_000.0


class Output(NamedTuple):
    """What `Llama` returns: the mean loss over all predicted tokens (with labels) or the logits [batch,
    length, vocabulary].
    """

    loss: Tensor | None
    logits: Tensor | None


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Final norm, projection to the vocabulary and, with labels, the loss: one module, so that it is compiled
    as one.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.out = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None) -> Output:
        logits = self.out(self.norm(x))
        if labels is None:
            return Output(None, logits)
        predicted = logits[:, :-1].flatten(0, 1).float()
        return Output(F.cross_entropy(predicted, labels[:, 1:].flatten()), None)


class Llama(nn.Module):
    """`model(input_ids, labels)`: both int64 [batch, length]; labels are the input itself."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig | None = None) -> None:
        super().__init__()
        config = config or LlamaConfig()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        cos, sin = rotary_table(config.max_length, config.width // config.heads, config.rotary_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        length = input_ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(x, labels)


def rotary_table(length: int, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, each float32 [length, size]."""
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + size/2) of x [batch, heads, length, size] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)

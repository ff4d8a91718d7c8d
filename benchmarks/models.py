"""The decoder that every implementation trains: Qwen3-shaped, with embedding, blocks and tail as modules.

Attention is causal by flag and never by an explicit mask, which would lose the fast kernels. Rotary tables
are made once per forward, outside the blocks. Weights depend on nothing but a parameter's name and shape and
are rounded to bfloat16, so that an implementation that keeps fp32 masters and one that starts from bfloat16
weights start equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. `heads` and `kv_heads` are counts, `head_dim` is one head's width.

    `transformers` is the type of transformers' model of this shape.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    transformers: str = "qwen3"


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 16, 512),
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, "llama"),
    "small": Shape(1024, 3072, 8, 16, 8, 64, 32000),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, 151936),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 128, 151936),
    "qwen3-14b": Shape(5120, 17408, 40, 40, 8, 128, 151936),
}


def rotary_tables(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [length, head_dim]; the angles are computed in fp32."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), 1e6**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Embed(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens)
        return embedded


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.hidden, width, bias=False)
        self.key = nn.Linear(shape.hidden, kv_width, bias=False)
        self.value = nn.Linear(shape.hidden, kv_width, bias=False)
        self.out = nn.Linear(width, shape.hidden, bias=False)
        self.query_norm = nn.RMSNorm(shape.head_dim, eps=1e-6)
        self.key_norm = nn.RMSNorm(shape.head_dim, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        s = self.shape
        query = self.query_norm(self.query(x).view(batch, length, s.heads, s.head_dim)).transpose(1, 2)
        key = self.key_norm(self.key(x).view(batch, length, s.kv_heads, s.head_dim)).transpose(1, 2)
        value = self.value(x).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        grouped = s.heads != s.kv_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x


class Tail(nn.Module):
    """Final norm, head and loss: mean fp32 cross entropy of predicting `labels[:, 1:]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        return F.cross_entropy(flat, labels[:, 1:].reshape(-1))


class Decoder(nn.Module):
    """`decoder(tokens, labels)`, both int64 [batch, length], gives the scalar fp32 loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embed(shape)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.tail = Tail(shape)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = rotary_tables(tokens.shape[1], self.shape.head_dim, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        loss: Tensor = self.tail(x, labels)
        return loss


def initial_value(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """fp32 values that bfloat16 holds exactly: ones for vectors, N(0, 0.02) by the name for matrices."""
    if len(shape) < 2:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
    value = torch.empty(shape, device=device).normal_(0.0, 0.02, generator=generator)
    return value.to(torch.bfloat16).float()


@torch.no_grad()
def initialize_weights(model: nn.Module) -> None:
    """Writes the initial values; a DTensor receives its shard of them, without communication."""
    for name, parameter in model.named_parameters():
        full = initial_value(name, parameter.shape, parameter.device)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None))
        else:
            parameter.copy_(full)


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder with its initial weights, in training mode."""
    with torch.device("meta"):
        model = Decoder(shape)
    model.to(dtype).to_empty(device=device)
    initialize_weights(model)
    return model.train()


def batches(shape: Shape, micro_batch: int, length: int, rank: int, device: torch.device) -> Iterator[Tensor]:
    """This rank's endless random tokens, int64 [micro_batch, length], the same for every implementation."""
    generator = torch.Generator(device=device).manual_seed(1234 + rank)
    while True:
        yield torch.randint(0, shape.vocabulary, (micro_batch, length), device=device, generator=generator)


@cache
def parameter_count(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(shape).parameters())


def step_flops(shape: Shape, tokens: int, length: int, frozen: bool = False) -> float:
    """Floating-point operations of the model in one forward and backward of `tokens` tokens.

    Six for each weight that takes part in a matmul (the embedding's look-up does none), or four if it is `frozen`.
    And, because attention is causal, half of 12 · layers · heads · head_dim · length for each token.
    """
    weights = parameter_count(shape) - shape.vocabulary * shape.hidden
    return tokens * ((4.0 if frozen else 6.0) * weights + 6.0 * shape.layers * shape.heads * shape.head_dim * length)

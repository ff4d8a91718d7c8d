"""Models that plans are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroweave.demo import Llama, LlamaConfig


def llama(micro_batch: int, seq: int) -> tuple[nn.Module, Any]:
    """A decoder of two blocks, and tokens with labels."""
    tokens = torch.zeros(micro_batch, seq, dtype=torch.long)
    model = Llama(LlamaConfig(vocabulary=50, width=24, hidden=36, layers=2, heads=2, max_length=seq))
    return model, {"input_ids": tokens, "labels": tokens}


class Language(nn.Module):
    """A language model whose logits take more than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(2000, 16), nn.Linear(16, 2000, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))

    def get_output_embeddings(self) -> nn.Linear:
        return self.out

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.out(hidden)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def language(micro_batch: int, seq: int) -> tuple[nn.Module, Any]:
    return Language(), torch.zeros(micro_batch, seq, dtype=torch.long)


class Recomputed(nn.Module):
    """Attention whose backward recomputes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False)  # type: ignore[no-any-return]


class Mean(nn.Sequential):
    """A loss of what its modules make."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


def recomputed(micro_batch: int, seq: int) -> tuple[nn.Module, Any]:
    return Mean(nn.Linear(16, 16), Recomputed(), Recomputed()), torch.zeros(micro_batch, 2, seq, 16)


class Peeking(nn.Module):
    """Asks for a value to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) if x.sum().item() > 0 else x


def peeking(micro_batch: int, seq: int) -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(4, 4), Peeking()), torch.zeros(micro_batch, 4)


def only_a_module(micro_batch: int, seq: int) -> nn.Module:
    return nn.Linear(4, 4)

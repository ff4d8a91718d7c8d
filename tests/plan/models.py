"""Models that plans are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeroweave.demo import Llama, LlamaConfig


def llama(micro_batch: int, seq: int) -> tuple[nn.Module, Any]:
    """A decoder of two blocks, and tokens with labels."""
    tokens = torch.zeros(micro_batch, seq, dtype=torch.long)
    model = Llama(LlamaConfig(vocabulary=50, width=24, hidden=36, layers=2, heads=2, max_length=seq))
    return model, {"input_ids": tokens, "labels": tokens}


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

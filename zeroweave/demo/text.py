"""Text to train on without a network: the topics of Python's own help(), 466 kB of English prose, as bytes."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor


class Text:
    """Batches of byte sequences, the same on every run: an endless iterator of {"input_ids", "labels"}.

    Step k draws `batch` random places of the text from a generator seeded with (seed, k); rank r of `world`
    takes the r-th equal part of them. So the global batch does not depend on the number of ranks. Both
    entries are one int64 tensor [batch / world, length] of values 0…255 on `device`; the models shift the labels
    themselves.
    """

    def __init__(
        self,
        length: int = 128,
        batch: int = 16,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch % world:
            raise ValueError(f"a batch of {batch} sequences cannot be split evenly over {world} ranks")
        self.length, self.batch, self.rank, self.world, self.seed = length, batch, rank, world, seed
        self.device = device
        text = "\n\n".join(pydoc_data.topics.topics.values()).encode()
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def step(self, k: int) -> dict[str, Tensor]:
        """This rank's part of the batch of step k."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + k)
        starts = torch.randint(len(self.data) - self.length + 1, (self.batch,), generator=generator)
        mine = starts.view(self.world, -1)[self.rank]
        tokens = self.data[mine.unsqueeze(1) + torch.arange(self.length)].long().to(self.device)
        return {"input_ids": tokens, "labels": tokens}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.step, count())

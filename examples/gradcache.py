"""Contrastive training with batches larger than memory: cached embeddings, one backward for each chunk.

    python examples/gradcache.py
    zeroweave run --nproc-per-node 2 examples/gradcache.py --stage 3 [--each] [--lower aot_eager|inductor]

The loss compares every text of a batch with every other, so a batch cannot be split as for gradient accumulation.
Instead (the pattern of GradCache, and of the cached losses of sentence-transformers):

1. each chunk is embedded without gradients, in train mode; the state of the random generators before it is kept;
2. the loss of all embeddings gives the gradient of each embedding;
3. each chunk is embedded again, with the same random numbers and so the same dropout masks, and differentiated with
   its embeddings' gradients: one backward for each chunk.

Those backwards make one optimizer step. Reduced one by one they send the model's gradient once for each chunk; inside
`engine.coalesce_grad_reduction()` once, with the same result; `--each` shows the difference.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw

VOCABULARY, LENGTH, WIDTH, HEADS, DEPTH = 64, 12, 32, 4, 3
TEMPERATURE = 0.1
BATCHES = 4
"""of different texts, over and over"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class Encoder(nn.Module):
    """Token ids [batch, length] -> embeddings [batch, WIDTH] of norm 1."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.head(x.mean(1)), dim=-1)


def pairs(batch: int, step: int, rank: int) -> Tensor:
    """Token ids [2 * batch, LENGTH]: texts, then their paraphrases: other orders with some words replaced."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    texts = torch.randint(VOCABULARY, (batch, LENGTH), generator=random)
    order = torch.rand(batch, LENGTH, generator=random).argsort(1)
    noise = torch.randint(VOCABULARY, (batch, LENGTH), generator=random)
    replaced = torch.rand(batch, LENGTH, generator=random) < 0.5
    return torch.cat([texts, torch.where(replaced, noise, texts.gather(1, order))])


def contrast(embeddings: Tensor) -> Tensor:
    """Each text's paraphrase among those of all texts of this rank: the cross-entropy of their similarities."""
    texts, paraphrases = embeddings.chunk(2)
    scores = texts @ paraphrases.T / TEMPERATURE
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class RandomState:
    """The state that the random generators of the CPU and of `device` have now."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._states = torch.get_rng_state(), [torch.cuda.get_rng_state(each) for each in self._devices]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, random numbers repeat those that were drawn since; afterwards they go on as if they had not."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def cached_step(engine: zw.Engine, tokens: Tensor, chunk: int, coalesce: bool) -> tuple[Tensor, float]:
    """One optimizer step on the contrastive loss of all `tokens`; the loss, and how far the two passes differ."""
    chunks, states, embedded = tokens.split(chunk), [], []
    with torch.no_grad():
        for part in chunks:
            states.append(RandomState(engine.device))
            embedded.append(engine(part))

    embeddings = torch.cat(embedded).requires_grad_()
    loss = contrast(embeddings)
    (gradient,) = torch.autograd.grad(loss, embeddings)

    drift = 0.0
    with engine.coalesce_grad_reduction() if coalesce else contextlib.nullcontext():
        for index, part in enumerate(chunks):
            engine.set_gradient_accumulation_boundary(index == len(chunks) - 1)
            with states[index].again():
                output = engine(part)
            drift = max(drift, float((output.detach() - embedded[index]).abs().max()))
            engine.backward((output * gradient.split(chunk)[index]).sum(), scale_wrt_gas=False)
    engine.set_gradient_accumulation_boundary(None)
    engine.step()
    return loss.detach(), drift


@dataclass(frozen=True)
class Run:
    losses: list[float]
    drift: float
    weights: dict[str, Tensor]
    """on rank 0"""
    collectives: dict[str, int]
    """those of the last step, by kind"""


def train(config: dict[str, Any], coalesce: bool, steps: int, batch: int, chunk: int) -> Run:
    torch.manual_seed(0)
    model = Encoder().train()
    losses, drifts = [], []
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), config) as engine:
        torch.manual_seed(engine.rank)  # each rank has dropout masks of its own
        for step in range(steps):
            tokens = pairs(batch, step % BATCHES, engine.rank).to(engine.device)
            loss, drift = cached_step(engine, tokens, chunk, coalesce)
            losses.append(float(loss))
            drifts.append(drift)
        sent = {kind: traffic.calls for kind, traffic in engine.stats.last_step.items() if traffic.calls}
        return Run(losses, max(drifts), engine.state_dict(), sent)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--batch", type=int, default=16, help="pairs of each rank and step")
    parser.add_argument("--chunk", type=int, default=8, help="texts that are differentiated at once")
    parser.add_argument("--each", action="store_true", help="reduce in each backward, to compare")
    parser.add_argument("--lower", choices=("aot_eager", "inductor"), default="aot_eager")
    options = parser.parse_args()

    config = {"stage": options.stage, "compile": {"lower": options.lower}}
    run = train(config, not options.each, options.steps, options.batch, options.chunk)
    if run.weights:  # on rank 0
        chunks = 2 * options.batch // options.chunk
        print(f"loss {run.losses[0]:.6f} -> {run.losses[-1]:.6f}; the two passes differ by {run.drift:.1e} at most")
        print(f"collectives of a step with {chunks} backwards: {run.collectives}")


if __name__ == "__main__":
    main()

"""A small language model whose experts lie on different ranks.

    python examples/moe.py
    zeroweave run --nproc-per-node 4 examples/moe.py --parallel-size 2 --stage 3 [--lower aot_eager|inductor]

A router sends each token to two of four experts. With `--parallel-size` 2 each rank has two of them and exchanges
tokens with its neighbour; gradients of an expert are reduced over the ranks that have the same one, all others over all
ranks. That takes three things:

1. `zw.expert_group(parallel_size)` is the process group that the model's all-to-all runs in;
2. each rank builds its own share of the experts;
3. the engine's config names their parameters and says how many ranks have different ones.

The same training with all experts on all ranks has the same losses and ends at the same weights; the script runs both.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw

VOCABULARY, LENGTH, WIDTH, HEADS, DEPTH = 32, 16, 32, 4, 2
EXPERTS, CHOSEN = 4, 2
BATCH = 16
"""sequences of all ranks together"""


class Exchange(torch.autograd.Function):
    """Rows [sum of `sent`, ...] to the ranks of a group, `sent[i]` to the i-th; those of the others in return.

    Its gradient goes the same way back, so all ranks of the group take part in the backward as well.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = (received, sent, group)
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(*gradients, *ctx.back), None, None, None


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Tokens [tokens, WIDTH] -> the weighted sum of what `CHOSEN` experts make of each.

    `group`: the ranks that exchange tokens, of which the i-th has the i-th share of the experts; None: this rank alone.
    No token is dropped: whatever was sent to an expert, it works on.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        self.share = EXPERTS // self.ranks
        self.router = nn.Linear(WIDTH, EXPERTS)
        experts = [Expert() for _ in range(EXPERTS)]  # all of them, so that each has the same weights wherever it is
        self.experts = nn.ModuleList(experts[rank * self.share :][: self.share])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        chosen, order = chosen.flatten().sort(stable=True)
        rows = self.compute(x.repeat_interleave(CHOSEN, 0)[order], chosen)
        return (rows[order.argsort()].view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)

    @torch.compiler.disable  # how many rows go where is known when they are there; see docs/experts.md
    def compute(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """What the experts `chosen` [rows], in ascending order, make of `rows` [rows, WIDTH]."""
        sent = chosen.bincount(minlength=EXPERTS).view(self.ranks, self.share)
        received = sent
        if self.group is not None:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
            there, here = sent.sum(1).tolist(), received.sum(1).tolist()
            rows = Exchange.apply(rows, there, here, self.group)
        parts = list(rows.split(received.flatten().tolist()))  # by rank, then by expert
        for index, expert in enumerate(self.experts):
            mine = parts[index :: self.share]
            # An expert is called even where nobody sent it anything, and has gradients of zero then.
            parts[index :: self.share] = expert(torch.cat(mine)).split([len(each) for each in mine])
        rows = torch.cat(parts)
        return rows if self.group is None else Exchange.apply(rows, here, there, self.group)


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(group)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.mixture(self.norms[1](x).flatten(0, 1)).view(x.shape)


class Model(nn.Module):
    """Token ids [batch, length + 1] -> the loss of predicting each from those before it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(group) for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def sentences(step: int, rank: int, world: int) -> Tensor:
    """This rank's part of a batch, int64 [BATCH / world, LENGTH + 1]: sequences that count in steps of 1, 3, 5 or 7."""
    random = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=random)
    stride = 1 + 2 * torch.randint(4, (BATCH, 1), generator=random)
    return ((first + stride * torch.arange(LENGTH + 1)) % VOCABULARY).chunk(world)[rank]


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the engine for a model with all experts: "experts.i...@p" is expert i of the p-th share."""
    shares = 1 + max((int(name.split("@")[1]) for name in state if "@" in name), default=0)

    def rename(name: str) -> str:
        found = re.fullmatch(r"(.*\.experts\.)(\d+)(.*)@(\d+)", name)
        if found is None:
            return name
        before, index, after, share = found.groups()
        return f"{before}{int(share) * EXPERTS // shares + int(index)}{after}"

    return {rename(name): value for name, value in state.items()}


@dataclass(frozen=True)
class Run:
    losses: list[float]
    """of all ranks, step by step"""
    weights: dict[str, Tensor]
    """on rank 0"""


def train(config: dict[str, Any], parallel_size: int, steps: int) -> Run:
    """Trains from the same weights on the same data, whatever `parallel_size` is."""
    experts = {"parameters": ["*.experts.*"], "parallel_size": parallel_size}
    torch.manual_seed(0)
    model, losses = Model(zw.expert_group(parallel_size)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with zw.initialize(model, optimizer, {**config, "experts": experts}) as engine:
        for step in range(steps):
            loss = engine(sentences(step, engine.rank, engine.world).to(engine.device))
            engine.backward(loss)
            engine.step()
            loss = loss.detach()
            if engine.world > 1:
                dist.all_reduce(loss)
            losses.append(float(loss) / engine.world)
        return Run(losses, whole(engine.state_dict()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--parallel-size", type=int, help="default: 2, on one rank 1")
    parser.add_argument("--lower", choices=("aot_eager", "inductor"), default="aot_eager")
    options = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:  # the experts' group is made before the engine
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_size = options.parallel_size or (2 if world > 1 else 1)
    config = {"stage": options.stage, "compile": {"lower": options.lower}}
    run, same = (train(config, size, options.steps) for size in (parallel_size, 1))
    if run.weights:  # on rank 0
        for step in range(0, options.steps, 10):
            print(f"step {step:3}  loss {run.losses[step]:.4f}, with all experts on all ranks {same.losses[step]:.4f}")
        far = max(float((run.weights[name] - value).norm() / value.norm()) for name, value in same.weights.items())
        print(f"{EXPERTS // parallel_size} of {EXPERTS} experts on each of {world} ranks; weights differ by {far:.1e}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

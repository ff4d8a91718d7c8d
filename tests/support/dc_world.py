"""Parameters whose gradients go through a `dc.Runtime` by name, beside copies that plain data parallelism trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.reference import Expected, judge
from zeroweave import dc

SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (7,), (3, 50), (), (1, 3))
"""Cut evenly, the third straddles two of two ranks and three of three."""
SMALL = 40
"""Elements of a reduce bucket: some parameters share one, one is larger."""
Use = tuple[int, int]
"""(graph_id, ds_id)"""


class Named(torch.autograd.Function):
    """The identity on a parameter; its backward hands the gradient over by name, as a compiled graph does."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, runtime: dc.Runtime, use: Use) -> Tensor:
        ctx.runtime, ctx.use = runtime, use
        return p.view_as(p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.runtime.reduce_grad(grad, *ctx.use)
        return None, None, None


class Ends(torch.autograd.Function):
    """The identity on a segment's input; the end of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end: Callable[[], None]) -> Tensor:
        ctx.end = end
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.end()
        return grad, None


def draw(*seeds: int, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on the seeds (below 1,000) only."""
    seed = 0
    for each in seeds:
        seed = 1000 * seed + each
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut(numels: Sequence[int], rank: int, world: int) -> list[tuple[int, int]]:
    """Per parameter (first element, elements) of a rank's even part of all parameters, one after the other."""
    size = -(-sum(numels) // world)
    first, last, offset, shares = rank * size, (rank + 1) * size, 0, []
    for numel in numels:
        start, stop = max(offset, first), min(offset + numel, last)
        shares.append((start - offset, stop - start) if stop > start else (0, 0))
        offset += numel
    return shares


def mean_of(tensors: Sequence[Tensor], world: int) -> Expected:
    """The sum of tensors over ranks and micro-steps, divided by the ranks, under the name ""."""
    plain, exact = torch.zeros_like(tensors[0]), torch.zeros_like(tensors[0], dtype=torch.float64)
    for each in tensors:
        plain, exact = plain + each, exact + each
    return Expected({"": plain / world}, {"": exact / world})


class World:
    """`stage` 1 to 3; `held`: what of the gradients this rank's buffers hold.

    "whole": all; "cut": a part of all parameters one after the other (straddling ranks); "taken": no buffers;
    the gradients are taken as one partition. Stage 3 has a buffer for each partition ("cut") or none ("taken").
    """

    def __init__(
        self,
        stage: int,
        held: str = "cut",
        config: Any = None,
        bucket: int = SMALL,
        group: dist.ProcessGroup | None = None,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        shares: Sequence[tuple[int, int]] | None = None,
        graphs: dict[int, Iterable[int]] | None = None,
        buffer_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.stage, self.held, self.group = stage, held, group
        self.runtime = dc.Runtime(group, config, bucket)
        self.rank, self.world = self.runtime.rank, self.runtime.world
        self.ledger = self.runtime.ledger
        self.mine = [nn.Parameter(draw(i, shape=shape)) for i, shape in enumerate(shapes)]
        self.plain = [nn.Parameter(p.detach().clone()) for p in self.mine]
        self.exact = [nn.Parameter(p.detach().double()) for p in self.mine]
        self.buffers: list[Tensor | None] = []
        self.shares = list(shares or cut([p.numel() for p in self.mine], self.rank, self.world))
        for i, p in enumerate(self.mine):
            self._register(i, p, buffer_dtype)
        self.graphs = {0: range(len(shapes))} if graphs is None else graphs
        self.register_graphs()

    def _register(self, i: int, p: nn.Parameter, dtype: torch.dtype) -> None:
        offset = 0
        if self.stage == 3:
            size = -(-p.numel() // self.world)
            self.shares[i] = (min(self.rank * size, p.numel()), max(0, min(size, p.numel() - self.rank * size)))
            padded = torch.zeros(size * self.world)
            padded[: p.numel()] = p.detach().flatten()
            shard = padded.view(self.world, size)[self.rank].clone()
        elif self.held == "whole":
            self.shares[i], size, offset = (0, p.numel()), p.numel(), 1000 * i
        elif self.held == "cut":
            offset, size = self.shares[i]
        # What a window leaves unwritten shows.
        self.buffers.append(None if self.held == "taken" else torch.full((size,), float("nan"), dtype=dtype))
        if self.stage == 3:
            self.runtime.register_z3_param(i, p.shape, shard, self.buffers[i])
        else:
            self.runtime.register_param(i, p.shape, p, self.buffers[i], offset)

    def register_graphs(self) -> None:
        names = {1: "register_graph_z1", 2: "register_graph_z2", 3: "register_graph_z3"}
        for graph_id, ids in self.graphs.items():
            getattr(self.runtime, names[self.stage])(graph_id, ids)

    def recompile(self) -> None:
        self.runtime.reset()
        self.register_graphs()

    @property
    def everything(self) -> list[Use]:
        """Every parameter of every graph, once."""
        return [(graph_id, i) for graph_id, ids in self.graphs.items() for i in ids]

    def loss(
        self, micro: int, uses: Sequence[Use] | None = None, among: Sequence[nn.Parameter] | None = None
    ) -> Tensor:
        """Depends on each parameter that is used, on the rank and on the micro-step; by name unless `among` others."""
        total = torch.zeros(())
        for place, use in enumerate(self.everything if uses is None else uses):
            p = Named.apply(self.mine[use[1]], self.runtime, use) if among is None else among[use[1]]
            x = draw(1 + self.rank, micro, place, shape=p.shape).to(p.dtype)
            total = total + torch.tanh(p * x + 0.5).pow(2).sum()
        return total

    def micro_step(self, micro: int, update: bool, uses: Sequence[Use] | None = None, end: bool | None = None) -> None:
        """A forward and a backward of both copies; `end`: is it ended by name? By default where it updates."""
        self.runtime.start_forward()
        loss = self.loss(micro, uses)
        self.runtime.end_forward()
        self.runtime.start_backward(update)
        loss.backward()
        if update if end is None else end:
            self.runtime.end_backward(next(iter(self.graphs)))
        self.plain_backward(micro, uses)

    def plain_backward(self, micro: int, uses: Sequence[Use] | None = None) -> None:
        """The backward of the copies, in fp32 and in float64."""
        for copies in (self.plain, self.exact):
            self.loss(micro, uses, copies).backward()

    def gradients(self) -> list[Tensor]:
        """This rank's part of each reduced gradient; its partition is released."""
        if self.held != "taken":
            kept = [b for b in self.buffers if b is not None]
            assert all(not b[n:].any() for b, (_, n) in zip(kept, self.shares, strict=True)), "padding is not zero"
            return [b[:n].clone() for b, (_, n) in zip(kept, self.shares, strict=True)]
        partition = self.runtime.take_gradients()
        self.shares = [partition.slices[i][1:] for i in range(len(self.mine))]
        taken = [partition.view(i).clone() for i in range(len(self.mine))]
        assert partition.flat.untyped_storage().nbytes() == self.ledger.gauge("gradients").now
        partition.release()
        assert self.ledger.gauge("gradients").now == self.ledger.gauge("reduce buckets").now == 0
        return taken

    def forget(self) -> None:
        """Drop the gradients of the copies."""
        for p in (*self.plain, *self.exact):
            p.grad = None

    def assign(self, i: int, grad: Tensor) -> None:
        """What the copies of parameter `i` have as their gradient."""
        self.plain[i].grad, self.exact[i].grad = grad.clone(), grad.double()

    def difference(self) -> float:
        """What `judge` says of the window's gradients beside the all-reduced ones; ends the copies' window."""
        expected: list[dict[str, Tensor | None]] = []
        got = self.gradients()
        for copies in (self.plain, self.exact):
            found: dict[str, Tensor | None] = {}
            for i, p in enumerate(copies):
                wanted = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = None
                dist.all_reduce(wanted, group=self.group)
                start, numel = self.shares[i]
                found[str(i)] = wanted.flatten()[start : start + numel] / self.world
            expected.append(found)
        return judge({str(i): each.float() for i, each in enumerate(got)}, Expected(*expected))[0]

    def close(self) -> None:
        self.runtime.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Worlds of N ranks without processes: N sharded optimizers over the slices of the same buckets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn

from zeroweave.comm.process_group import LocalTransport
from zeroweave.layout import BucketLayout, ParameterSpec, build_layout
from zeroweave.optim.rules import Kernels
from zeroweave.optim.scaler import Scaled
from zeroweave.optim.states import describe, take
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.shard import Shard
from zeroweave.runtime.transfers import Transfers

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class View:
    """What a bucket shows of itself to the optimizer."""

    layout: BucketLayout
    rank: int
    home: Shard
    shard = Bucket.shard
    views, slice, fragment = Bucket.views, Bucket.slice, Bucket.fragment


class Net(nn.Module):
    """Sizes that spread unevenly: large, odd, smaller than the world, one element, none; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.tiny = nn.Parameter(torch.randn(2))
        self.scalar = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 4))
        self.frozen = nn.Parameter(torch.randn(17), requires_grad=False)


def build_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def layouts_of(model: nn.Module, world: int, dtype: torch.dtype = torch.float32) -> tuple[BucketLayout, ...]:
    specs = [
        ParameterSpec(
            name=name,
            shape=tuple(p.shape),
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            requires_grad=p.requires_grad,
            block=name.rpartition(".")[0] if name.startswith("layers.") else None,
        )
        for name, p in model.named_parameters()
    ]
    return build_layout(specs, world, 1 << 30)


class Rank:
    """One rank: a copy of the model, the user's optimizer over it, and its sharded form."""

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        rank: int,
        world: int,
        dtype: torch.dtype,
        offload: str = "",
        kernels: Kernels | None = None,
        compact: bool = False,
        split: bool = False,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make(self.model)
        named = dict(self.model.named_parameters())
        self.views: dict[int, View] = {}
        slot_of: dict[int, tuple[int, int]] = {}
        transfers, transport = Transfers(torch.device("cpu")), LocalTransport(torch.device("cpu"))
        off = bool(offload), offload == "params"
        remainder = torch.int8 if compact else torch.int16 if split or kernels is not None else None
        for layout in layouts_of(model, world, dtype):
            full = flat_of(layout, {name: p.detach() for name, p in named.items()})
            start, stop = layout.shard_range(rank)
            home = Shard(layout, dtype, transport, transfers, *off, remainder=remainder)
            home.put(full[start:stop].clone())
            self.views[layout.id] = View(layout, rank, home)
            slot_of.update({id(named[slot.name]): (layout.id, i) for i, slot in enumerate(layout.slots)})
        views, device = list(self.views.values()), torch.device("cpu")
        states = take(
            self.optimizer.state, views, named, [describe(self.optimizer, named)], transport, device, lambda _: device
        )
        self.sharded = ShardedOptimizer(
            self.optimizer,
            views,
            slot_of,
            transfers,
            states,
            bool(offload),
            kernels=kernels,
            compact=compact,
        )


class World:
    """All ranks, given the same full gradients."""

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        world: int,
        dtype: torch.dtype = torch.float32,
        offload: str = "",
        kernels: Kernels | None = None,
        compact: bool = False,
        split: bool = False,
    ) -> None:
        """`offload`: "" for none, "optimizer", or "params", which is both. `kernels`, `split`: masters are split.

        `compact`: states have few bits.
        """
        self.ranks = [Rank(model, make, rank, world, dtype, offload, kernels, compact, split) for rank in range(world)]
        self.layouts = layouts_of(model, world, dtype)

    def shards(self, gradients: Mapping[str, torch.Tensor], rank: int) -> dict[int, torch.Tensor]:
        """This rank's slice of every trainable bucket's gradient."""
        result = {}
        for layout in self.layouts:
            if layout.trainable:
                start, stop = layout.shard_range(rank)
                result[layout.id] = flat_of(layout, gradients)[start:stop].clone()
        return result

    def absent(self, gradients: Mapping[str, torch.Tensor]) -> dict[int, Set[int]]:
        return {
            layout.id: frozenset(i for i, slot in enumerate(layout.slots) if slot.name not in gradients)
            for layout in self.layouts
        }

    def step(
        self, gradients: Mapping[str, torch.Tensor], coefficient: torch.Tensor | None = None, at_once: bool = False
    ) -> None:
        """`at_once`: all buckets have their turn together."""
        for rank, one in enumerate(self.ranks):
            shards = self.shards(gradients, rank)
            if coefficient is not None:
                for shard in shards.values():
                    shard.mul_(coefficient)
            absent = self.absent(gradients)
            order = sorted(shards, reverse=True)
            scaled = {id: Scaled(shard) for id, shard in shards.items()}
            update = one.sharded.in_turn(scaled.get, {bucket: absent[bucket] for bucket in order}, order)
            for turn in [order] if at_once else [[bucket] for bucket in order]:
                update(turn)

    def full(self, of: Callable[[Rank], Mapping[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Whole tensors, by parameter name, from what every rank holds of each bucket."""
        result = {}
        for layout in self.layouts:
            if layout.id in of(self.ranks[0]):
                flat = torch.cat([of(rank)[layout.id] for rank in self.ranks])
                for piece in layout.pieces:
                    if piece.slot < 0:
                        assert not flat.narrow(0, piece.offset, piece.numel).any(), "padding must stay zero"
                for slot in layout.slots:
                    result[slot.name] = flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
        return result

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.full(lambda rank: {id: view.home.values() for id, view in rank.views.items()})


def flat_of(layout: BucketLayout, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The fp32 flat of a bucket, zeros where `tensors` has nothing."""
    flat = torch.zeros(layout.numel)
    for slot in layout.slots:
        if slot.name in tensors:
            flat[slot.offset : slot.offset + slot.numel] = tensors[slot.name].reshape(-1)
    return flat


def random_gradients(model: nn.Module, seed: int, without: Set[str] = frozenset()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
        if p.requires_grad and name not in without
    }


def unsharded_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: Mapping[str, torch.Tensor],
    coefficient: torch.Tensor | None = None,
) -> None:
    """The reference: the same optimizer on whole parameters."""
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name)
        if gradient is not None:
            gradient = gradient.clone() if coefficient is None else gradient * coefficient
        parameter.grad = gradient
    optimizer.step()


def assert_equal(ours: Mapping[str, torch.Tensor], reference: nn.Module) -> None:
    """Bit for bit, for every trainable parameter."""
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(ours[name], parameter.detach()), name

"""The user's model on its way into shards: what it consists of, the same on all ranks, and its values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from zeroweave.compile.regions import find_units
from zeroweave.config import Config
from zeroweave.engine.state_dict import share
from zeroweave.errors import EngineError
from zeroweave.experts import GROUP as EXPERTS
from zeroweave.layout import WORLD, ParameterSpec
from zeroweave.parameters.foreign import foreign_parameters
from zeroweave.parameters.weights import FileWeights, Weights
from zeroweave.ranks.control import Control
from zeroweave.runtime.runtime import Runtime


def specs_of(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    experts: frozenset[int],
    settings: Config,
    optimizer: torch.optim.Optimizer | None,
) -> list[ParameterSpec]:
    """`experts`: `id` of each parameter that not all ranks share. `optimizer`: its groups are adjacent."""
    groups = [] if optimizer is None else optimizer.param_groups
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}

    def computed(p: nn.Parameter) -> str:
        """The dtype that it is computed with."""
        wanted = settings.precision.params
        return wanted if wanted is not None and p.is_floating_point() else str(p.dtype).removeprefix("torch.")

    block_of: dict[int, str] = {}
    for name, block in find_units(model, settings.compile.regions):
        for p in block.parameters():
            block_of.setdefault(id(p), name)
    return [
        ParameterSpec(
            name=name,
            shape=tuple(p.shape),
            dtype=computed(p),
            itemsize=getattr(torch, computed(p)).itemsize,
            requires_grad=p.requires_grad,
            block=block_of.get(id(p)),
            group=EXPERTS if id(p) in experts else WORLD,
            together=group_of.get(id(p), len(groups)),
        )
        for name, p in named.items()
    ]


def agree_on(control: Control, model: nn.Module, specs: list[ParameterSpec], settings: Config) -> None:
    """EngineError unless all ranks have the same model, config and PyTorch. Collective."""
    foreign = foreign_parameters(model).items()
    parameters = [*map(_spelled, specs), *(f"parameter {name!r} {what}" for name, what in foreign)]
    buffers = [f"buffer {name!r} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    mine = (parameters, buffers, settings.model_dump(), torch.__version__)
    for rank, theirs in enumerate(control.all_gather_object(mine)):
        if mine[3] != theirs[3]:
            raise EngineError(
                f"[ZW504] the ranks run different versions of PyTorch: {mine[3]} on rank {control.rank}, {theirs[3]} "
                f"on rank {rank}; install the same one on all machines"
            )
        for kind, ours, others in (("parameters", parameters, theirs[0]), ("buffers", buffers, theirs[1])):
            counts = f"{len(ours)} {kind}", f"{len(others)} {kind}"
            for a, b in (*zip(ours, others, strict=False), counts):
                if a != b:
                    raise EngineError(
                        f"[ZW504] ranks built different models: {a} on rank {control.rank}, {b} on rank {rank}"
                    )
        if mine[2] != theirs[2]:
            differing = sorted(key for key in mine[2] if mine[2][key] != theirs[2][key])
            raise EngineError(
                f"[ZW504] the config differs between ranks {control.rank} and {rank}: {', '.join(differing)}"
            )


def _spelled(spec: ParameterSpec) -> str:
    """What ranks have to have alike, for people. The optimizer's groups are compared with its options."""
    trained = "trained" if spec.requires_grad else "frozen"
    block = "in no block" if spec.block is None else f"in block {spec.block!r}"
    group = "" if spec.group == WORLD else f", of the group {spec.group!r}"
    return f"parameter {spec.name!r} {list(spec.shape)} of {spec.dtype}, {trained}, {block}{group}"


@torch.no_grad()
def fill(runtime: Runtime, named: Mapping[str, nn.Parameter], weights: Weights) -> None:
    """Gives every shard its first values: what it needs of files, else those of the first rank of its group.

    Not rounded to the dtype of the computation where it is a master.
    """
    for bucket in runtime.buckets.values():
        layout = bucket.layout
        if isinstance(weights, FileWeights):
            shard = torch.zeros(layout.shard_numel, dtype=bucket.shard.dtype, device="cpu")
            for index, slot in enumerate(layout.slots):
                if (held := layout.fragment(index, bucket.rank)).numel:
                    part = weights.part(slot.name, held.offset, held.numel)
                    bucket.fragment(shard, index).copy_(part)
            bucket.put(shard.to(bucket.device))
            continue
        widest = max((named[slot.name].dtype for slot in layout.slots), key=lambda dtype: dtype.itemsize)
        full = torch.zeros(layout.numel, dtype=widest, device=bucket.device)
        if layout.number(runtime.transport.rank) == runtime.transport.rank:
            for view, slot in zip(bucket.views(full), layout.slots, strict=True):
                view.copy_(weights.whole(slot.name))
        runtime.transport.broadcast(full, group=layout.everywhere)
        bucket.put(bucket.slice(full))


def share_buffers(model: nn.Module, device: torch.device, runtime: Runtime) -> None:
    shared: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in shared:
                shared[buffer] = buffer.to(device)
                share(shared[buffer], runtime)
            if buffer is not None:
                module._buffers[name] = shared[buffer]

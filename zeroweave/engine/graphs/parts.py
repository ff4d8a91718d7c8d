"""The parts of a window: the calls of a training loop that a graph can stand in for, one after the other.

train_step                          a micro-step as a whole
forward · backward · step           a micro-step of the ordinary loop; `clip` may come in front of `step`
reduce                              the end of a coalesced block
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zeroweave._torch.storages import at_address
from zeroweave.comm.ledger import Collective
from zeroweave.engine.graphs.attributes import Constants
from zeroweave.engine.graphs.capturer import Graph
from zeroweave.engine.graphs.contents import Whereabouts
from zeroweave.engine.graphs.nest import Nest, copy
from zeroweave.optim.scaler import Scaler
from zeroweave.runtime.gradients import Gradients
from zeroweave.runtime.runtime import Runtime
from zeroweave.schedule import Instruction, Schedule

Kind = Literal["train_step", "forward", "backward", "reduce", "clip", "step"]


class Outputs(Nest):
    """What a call has returned. Uncapturable for what cannot be made again in a replay."""

    def __init__(self, result: Any) -> None:
        super().__init__(result, "the model returns")

    @property
    def trained(self) -> list[int]:
        """The indices of the tensors that a backward can come to."""
        return [index for index, tensor in enumerate(self.tensors) if tensor.requires_grad]

    def detached(self) -> Outputs:
        """The same without a way back."""
        return Outputs(self.of([tensor.detach() for tensor in self.tensors]))


def gradients_key(gradients: Sequence[torch.Tensor | None]) -> tuple[object, ...]:
    """Which outputs a backward has gradients of, and what they are like."""
    return tuple(g if g is None else (tuple(g.shape), g.dtype) for g in gradients)


@dataclass(frozen=True)
class _Memory:
    """Where a tensor lies in the memory of the graphs. Nobody owns that while they are not replayed."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        assert tensor.is_contiguous()
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor.device)

    def tensor(self) -> torch.Tensor:
        """What lies there now."""
        return at_address(self.address, self.shape, self.dtype, self.device)


@dataclass(frozen=True)
class Left:
    """What a part leaves, in the memory of the graphs: gradients of each bucket, see `Account`, and gathered buckets.

    `unreduced`: do the gradients have to be reduced?
    """

    flats: Mapping[int, _Memory]
    """of the buckets that the stage keeps to the end of the window"""
    shards: Mapping[int, _Memory]
    sums: Mapping[int, _Memory]
    had_gradient: Mapping[int, frozenset[int]]
    unreduced: bool
    coefficient: _Memory | None
    """of a clipping"""

    @classmethod
    def of(cls, runtime: Runtime, scaler: Scaler) -> Left:
        gradients = runtime.gradients
        accounts = gradients.accounts.items()
        kept = [runtime.buckets[bucket] for bucket in sorted(runtime.replay.kept_by_stage)]
        return cls(
            {each.id: _Memory.of(each.flat) for each in kept if each.resident and not each.standing},
            {bucket: _Memory.of(each.shard) for bucket, each in accounts if each.shard is not None},
            {bucket: _Memory.of(each.local) for bucket, each in accounts if each.local is not None},
            {bucket: frozenset(each.had_gradient) for bucket, each in accounts},
            gradients.unreduced,
            None if scaler.coefficient is None else _Memory.of(scaler.coefficient),
        )

    def gathered(self) -> dict[int, torch.Tensor]:
        """The gathered buckets, by id: values [numel], which are there until the last call of the window."""
        return {bucket: memory.tensor() for bucket, memory in self.flats.items()}

    def take_up(self, gradients: Gradients, scaler: Scaler) -> None:
        """The accounts gain copies of the gradients."""
        if self.coefficient is not None:
            scaler.gain(self.coefficient.tensor().clone())
        for bucket, account in gradients.accounts.items():
            shard, local = self.shards.get(bucket), self.sums.get(bucket)
            account.gain(
                None if shard is None else shard.tensor().clone(),
                None if local is None else local.tensor().clone(),
                self.had_gradient[bucket],
            )
        gradients.go_on(self.unreduced)

    def put_back(self, gradients: Gradients, scaler: Scaler) -> None:
        """What has added up in the accounts goes there, as if graphs had left it."""
        if self.coefficient is None:
            scaler.settle_clipping()
        elif scaler.coefficient is not None:
            self.coefficient.tensor().copy_(scaler.coefficient)
            scaler.gain(None)
        gradients.reductions.settle_all()
        for bucket, account in gradients.accounts.items():
            for memory, held in ((self.shards.get(bucket), account.shard), (self.sums.get(bucket), account.local)):
                if memory is not None:
                    there = memory.tensor()
                    _ = there.zero_() if held is None else there.copy_(held)
        gradients.go_away()


@dataclass(frozen=True)
class Part:
    """One call as a graph, which reads `inputs` and leaves `outputs`; None: nothing happens on the device.

    `key`: what it stands in for. `collectives`: those that it issues. `left`: what there is of gradients behind it.
    """

    kind: Kind
    key: Any
    graph: Graph | None
    inputs: Sequence[torch.Tensor]
    outputs: Outputs
    collectives: Sequence[Collective]
    left: Left | None
    trained: Sequence[int]
    """of a forward: the indices of the outputs that a backward can come to"""

    def replay(self, tensors: Sequence[torch.Tensor]) -> None:
        """Runs it with these."""
        copy(self.inputs, tensors)
        if self.graph is not None:
            self.graph.replay()

    def results(self) -> list[torch.Tensor]:
        """What it has left, in memory of its own."""
        return [tensor.clone() for tensor in self.outputs.tensors]


def zeros_for(part: Part) -> list[torch.Tensor | None]:
    """What a backward is given where nothing has come: zeros where gradients came in the capture."""
    inputs = iter(part.inputs)
    return [None if each is None else torch.zeros_like(next(inputs)) for each in part.key[1]]


@dataclass(frozen=True, eq=False)
class CapturedWindow:
    """A window that follows `schedule`, of what lies at these `whereabouts` and has these `constants` at hand."""

    schedule: Schedule
    whereabouts: Whereabouts
    constants: Constants
    parts: Sequence[Part]
    executed: tuple[Instruction, ...]
    norm: torch.Tensor | None
    """where clipping by the config leaves the norm"""
    buffers: Sequence[torch.Tensor]
    """those that it changes"""

    @property
    def holds(self) -> bool:
        """Would its graphs find what the captured window found?"""
        return self.whereabouts.hold() and self.constants.hold()

"""What is registered with a runtime by name: parameters, their gradient buffers, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zeroweave.comm.ledger import dtype_name
from zeroweave.dc.targets import Share, agree_on_shares, even_shares
from zeroweave.errors import EngineError, ParameterError, ZeroweaveError
from zeroweave.layout import WORLD, BucketLayout, Slot
from zeroweave.ranks.control import Control
from zeroweave.runtime.flat import ShardedFlat


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredParameter:
    """One registered parameter, for all graphs that have it. What the ranks agree on later makes another object."""

    id: int
    shape: tuple[int, ...]
    buffer: torch.Tensor | None = None
    """where its reduced gradient goes; None: into the window's partition"""
    offset: int = 0
    flat: ShardedFlat | None = None
    """of a sharded parameter"""
    persistent: bool = False
    grad_dtype: torch.dtype | None = None
    """to which its gradients are cast; None: they keep their own"""
    shares: tuple[Share, ...] | None = None
    """what each rank holds of the gradient; None: all of it"""
    agreed: bool = False
    """True once all ranks know the shares"""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        return f"parameter {self.id} {list(self.shape)}"


@dataclass(frozen=True)
class RegisteredGraph:
    ids: frozenset[int]
    reduces_always: bool
    """ZeRO-2 and 3; ZeRO-1 reduces only when the backward updates"""


class Registry:
    """Parameters and graphs by id. `make_flat(layout, shard)` makes the flat of a sharded parameter."""

    def __init__(
        self, control: Control, device: torch.device, make_flat: Callable[[BucketLayout, torch.Tensor], ShardedFlat]
    ) -> None:
        self._control, self.device, self._make_flat = control, device, make_flat
        self.rank, self.world = control.rank, control.world
        self.parameters: dict[int, RegisteredParameter] = {}
        self.graphs: dict[int, RegisteredGraph] = {}

    def register_param(self, parameter: RegisteredParameter, ds_tensor: torch.Tensor) -> None:
        self._check_new(parameter, ds_tensor)
        offset = parameter.offset
        if tuple(ds_tensor.shape) != parameter.shape:
            raise ParameterError(f"{parameter.name}: ds_tensor has the shape {list(ds_tensor.shape)}")
        held = parameter.numel if parameter.buffer is None else parameter.buffer.numel()
        if 0 < held != parameter.numel and not 0 <= offset <= parameter.numel - held:
            raise ParameterError(
                f"{parameter.name}: grad_buffer reaches from element {offset} to {offset + held} "
                f"of a gradient of {parameter.numel}"
            )
        self.parameters[parameter.id] = parameter

    def register_z3_param(self, parameter: RegisteredParameter, ds_tensor: torch.Tensor) -> None:
        self._check_new(parameter, ds_tensor)
        size = ds_tensor.numel()
        if size * self.world < parameter.numel or not ds_tensor.is_contiguous():
            raise ParameterError(
                f"{parameter.name}: ds_tensor must be this rank's contiguous partition of at least "
                f"{-(-parameter.numel // self.world)} elements, not {list(ds_tensor.shape)}"
            )
        if parameter.buffer is not None and parameter.buffer.numel() != size:
            raise ParameterError(
                f"{parameter.name}: grad_buffer has {parameter.buffer.numel()} elements, its partition {size}"
            )
        name, dtype, numel = parameter.name, dtype_name(ds_tensor.dtype), size * self.world
        slots = (Slot(name, 0, parameter.numel, parameter.shape),)
        layout = BucketLayout(parameter.id, name, dtype, ds_tensor.itemsize, True, WORLD, self.world, slots, numel)
        self.parameters[parameter.id] = replace(
            parameter,
            flat=self._make_flat(layout, ds_tensor.detach().view(-1)),
            shares=even_shares(parameter.numel, self.world, size),
            agreed=True,
        )

    def _check_new(self, parameter: RegisteredParameter, ds_tensor: torch.Tensor) -> None:
        if parameter.id in self.parameters:
            raise ParameterError(f"a parameter with ds_id {parameter.id} is registered already")
        if parameter.buffer is not None:
            self.check_tensor(parameter, "grad_buffer", parameter.buffer)
        self.check_tensor(parameter, "ds_tensor", ds_tensor)

    def check_tensor(self, parameter: RegisteredParameter, what: str, tensor: torch.Tensor) -> None:
        """ParameterError unless `tensor` is dense, of floating point, and on the runtime's kind of device.

        A `grad_buffer` must be contiguous, too.
        """
        device = self.device.type
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.device.type != device:
            raise ParameterError(
                f"{parameter.name}: {what} must be a dense floating-point tensor on {device}, "
                f"not {tensor.dtype} ({tensor.layout}) on {tensor.device}"
            )
        if what == "grad_buffer" and not tensor.is_contiguous():
            raise ParameterError(f"{parameter.name}: grad_buffer must be contiguous")

    def update_param_grad_buffer(self, ds_id: int, grad_buffer: torch.Tensor) -> None:
        """Another buffer for the same elements; what the old one holds stays there."""
        parameter = self.parameter(ds_id)
        self.check_tensor(parameter, "grad_buffer", grad_buffer)
        if parameter.buffer is None or grad_buffer.numel() != parameter.buffer.numel():
            held = 0 if parameter.buffer is None else parameter.buffer.numel()
            raise ParameterError(
                f"{parameter.name}: the new grad_buffer has {grad_buffer.numel()} elements, the registered one {held}"
            )
        self.parameters[ds_id] = replace(parameter, buffer=grad_buffer)

    def register_graph(
        self, graph_id: int, ds_ids: Iterable[int], sharded: bool, reduces_always: bool, elsewhere: bool = False
    ) -> None:
        """The graph's two policies. Collective; what one rank refuses, all refuse.

        `elsewhere`: True if another runtime of this process has the id.
        """
        ids = tuple(dict.fromkeys(ds_ids))
        graph = RegisteredGraph(frozenset(ids), reduces_always)
        try:
            if elsewhere:
                raise EngineError(f"graph_id {graph_id} belongs to another runtime of this process")
            parameters = self._parameters_of(graph_id, ids, sharded)
        except ZeroweaveError as error:
            self._exchange(graph_id, error)
            raise
        self._agree(graph_id, graph, parameters)
        self.graphs[graph_id] = graph

    def _parameters_of(self, graph_id: int, ids: Sequence[int], sharded: bool) -> list[RegisteredParameter]:
        if graph_id in self.graphs:
            raise EngineError(f"a graph with graph_id {graph_id} is registered already")
        parameters = [self.parameter(ds_id) for ds_id in ids]
        for parameter in parameters:
            if (parameter.flat is not None) != sharded:
                made = "register_z3_param" if parameter.flat is not None else "register_param"
                raise ParameterError(f"{parameter.name} of graph {graph_id} was registered with {made}")
        return parameters

    def _exchange(self, graph_id: int, mine: Any) -> list[Any]:
        """Collective: every rank's `mine`; raises where another rank sent an error instead."""
        ranks = self._control.all_gather_object(mine, f"the registration of graph {graph_id}")
        for rank, theirs in enumerate(ranks):
            if isinstance(theirs, ZeroweaveError) and not isinstance(mine, ZeroweaveError):
                raise type(theirs)(f"rank {rank} could not register graph {graph_id}: {theirs}")
        return ranks

    def _agree(self, graph_id: int, graph: RegisteredGraph, parameters: Sequence[RegisteredParameter]) -> None:
        """Collective: every rank learns what the others hold of each gradient."""
        same = [(p.id, p.shape, p.flat and p.flat.layout, p.persistent, p.grad_dtype) for p in parameters]
        held_here = [None if p.buffer is None else (p.buffer.numel(), p.offset) for p in parameters]
        ranks = self._exchange(graph_id, (graph.reduces_always, same, held_here))
        for rank, theirs in enumerate(ranks):
            if theirs[:2] != (graph.reduces_always, same):
                raise ParameterError(
                    f"graph {graph_id}: ranks {self.rank} and {rank} registered it with different stages, "
                    "parameters, sizes of their partitions, or values of `persistent` or `expected_grad_dtype`"
                )
        for index, parameter in enumerate(parameters):
            if parameter.agreed:
                continue
            held = [theirs[2][index] for theirs in ranks]
            shares: tuple[Share, ...] | None
            if all(one is None for one in held):
                shares = even_shares(parameter.numel, self.world)
            elif any(one is None for one in held):
                raise ParameterError(f"{parameter.name}: some ranks registered a grad_buffer and some did not")
            else:
                shares = agree_on_shares(parameter.name, parameter.numel, held)
            self.parameters[parameter.id] = replace(parameter, shares=shares, agreed=True)

    def parameter(self, ds_id: int) -> RegisteredParameter:
        if ds_id not in self.parameters:
            raise ParameterError(f"no parameter with ds_id {ds_id} is registered")
        return self.parameters[ds_id]

    def graph(self, graph_id: int) -> RegisteredGraph:
        if graph_id not in self.graphs:
            raise EngineError(f"no graph with graph_id {graph_id} is registered")
        return self.graphs[graph_id]

    def of(self, graph_id: int, ds_id: int) -> tuple[RegisteredGraph, RegisteredParameter]:
        graph, parameter = self.graph(graph_id), self.parameter(ds_id)
        if ds_id not in graph.ids:
            raise ParameterError(f"{parameter.name} does not belong to graph {graph_id}")
        return graph, parameter

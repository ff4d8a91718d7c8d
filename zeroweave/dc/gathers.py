"""Sharded parameters that a graph gathers, waits for, and releases by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

import torch
from torch.autograd.graph import increment_version

from zeroweave.comm.transport import Transport
from zeroweave.dc.registry import RegisteredParameter, Registry
from zeroweave.errors import EngineError, ParameterError
from zeroweave.runtime.flat import ShardedFlat


class Gathers:
    """The gathered parameters of one runtime."""

    def __init__(self, registry: Registry, transport: Transport) -> None:
        self._registry, self._transport = registry, transport
        self._prefetched: set[int] = set()
        """parameters that a prefetch holds for the next `allgather_param`"""
        self._releases: Counter[int] = Counter()
        """how many of its users have released a parameter"""

    def allgather_param(
        self, ds_tensor: torch.Tensor, graph_id: int, ds_id: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        parameter, flat = self._find(graph_id, ds_id, ds_tensor, dtype)
        if ds_id in self._prefetched:
            self._prefetched.remove(ds_id)  # with the hold that the prefetch took
        else:
            _unshard(parameter, flat)
        return flat.flat[: parameter.numel].view(parameter.shape)  # one tensor more that views the flat, not two

    def wait_allgather(self, gathered: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
        parameter, flat = self._find(graph_id, ds_id)
        if not flat.holds:
            raise EngineError(f"wait_allgather: nobody has gathered {parameter.name}")
        flat.wait()
        return gathered

    def release_param(self, gathered: torch.Tensor, graph_id: int, ds_id: int, n_users: int = 1) -> None:
        parameter, flat = self._find(graph_id, ds_id)
        self._releases[ds_id] += 1
        if self._releases[ds_id] < n_users:
            return
        del self._releases[ds_id]
        if not flat.holds:
            raise EngineError(f"release_param: nobody has gathered {parameter.name}")
        flat.reshard(handed_in=1)

    def prefetch_params_fused(
        self,
        graph_id: int,
        ds_tensors: Sequence[torch.Tensor],
        ds_ids: Sequence[int],
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> None:
        wanted: dict[int, tuple[RegisteredParameter, ShardedFlat]] = {}
        for ds_tensor, ds_id, dtype in zip(ds_tensors, ds_ids, dtypes or repeat(None, len(ds_ids)), strict=True):
            found = self._find(graph_id, ds_id, ds_tensor, dtype)
            if ds_id not in self._prefetched:
                wanted[ds_id] = found
        with self._transport.together():
            for ds_id, (parameter, flat) in wanted.items():
                self._prefetched.add(ds_id)
                _unshard(parameter, flat)

    def _find(
        self, graph_id: int, ds_id: int, given: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> tuple[RegisteredParameter, ShardedFlat]:
        """A sharded parameter of the graph. `given` must be its registered partition, `dtype` that of the partition."""
        _, parameter = self._registry.of(graph_id, ds_id)
        flat = parameter.flat
        if flat is None:
            raise ParameterError(f"{parameter.name} is not sharded; register it with register_z3_param")
        at = (flat.shard.data_ptr(), flat.shard.numel(), flat.dtype)
        if given is not None and (given.data_ptr(), given.numel(), given.dtype) != at:
            raise ParameterError(
                f"{parameter.name}: {given.dtype} {list(given.shape)} is not the memory that was registered as its "
                f"partition ({flat.dtype} [{flat.shard.numel()}]); hand in that tensor, not a copy"
            )
        if dtype not in (None, flat.dtype):
            raise ParameterError(
                f"{parameter.name} is gathered in {flat.dtype}, the dtype of its partition, not in {dtype}; cast what "
                "wait_allgather returns"
            )
        return parameter, flat

    @property
    def held(self) -> bool:
        """True if a parameter is gathered, or on the way, and not released."""
        return any(flat.holds > parameter.persistent for parameter, flat in self._sharded())

    def sweep(self) -> None:
        """Frees what a tensor still viewed at its release and no tensor views any more."""
        for _, flat in self._sharded():
            if not flat.holds:
                flat.free()

    def reset(self) -> None:
        """Drops every hold."""
        self._prefetched.clear()
        self._releases.clear()
        for _, flat in self._sharded():
            flat.drop()

    def reset_idle(self) -> None:
        """Drops what is held only because it is persistent or prefetched: the next use gathers it again."""
        for parameter, flat in self._sharded():
            if flat.holds == parameter.persistent + (parameter.id in self._prefetched):
                self._prefetched.discard(parameter.id)
                del self._releases[parameter.id]
                flat.drop()

    def renew(self) -> None:
        """The shards have new values: drops every hold.

        A backward that still needs the old values, because its forward saved a view of them, raises.
        """
        self.reset()
        for _, flat in self._sharded():
            increment_version(flat.flat)

    def _sharded(self) -> list[tuple[RegisteredParameter, ShardedFlat]]:
        return [(p, p.flat) for p in self._registry.parameters.values() if p.flat is not None]


def _unshard(parameter: RegisteredParameter, flat: ShardedFlat) -> None:
    if parameter.persistent and not flat.holds:
        flat.unshard()  # a hold that no release drops
    flat.unshard()

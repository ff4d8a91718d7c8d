"""The runtime of the low-level API: what `zeroweave.dc` names, put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from zeroweave._torch.distributed import end_process_group
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import make_transport, own_group, take_device
from zeroweave.comm.transport import ReduceOp
from zeroweave.comm.wrappers import Wire, fenced
from zeroweave.config import RuntimeConfig
from zeroweave.dc.gradients import WindowGradients
from zeroweave.dc.registered_buffer import BufferedGathers, buffered
from zeroweave.dc.registry import RegisteredParameter, Registry
from zeroweave.dc.targets import GradientPartition
from zeroweave.errors import ConfigError, EngineError, ParameterError
from zeroweave.ranks.control import Agreement, Control
from zeroweave.ranks.start import groups_at_end
from zeroweave.runtime.flat import ShardedFlat
from zeroweave.runtime.reductions import Reductions
from zeroweave.runtime.storages import free_storages

_GRAPHS: Final[WeakValueDictionary[int, Runtime]] = WeakValueDictionary()


class _Parts(NamedTuple):
    """A registry, and the gradients of its parameters."""

    registry: Registry
    gradients: WindowGradients


class Runtime:
    """Parameters, graphs and communication over the ranks of `process_group` (None: all).

    Graph ids are unique in this process: operators find their Runtime by them.

    `config`: a `RuntimeConfig`, a mapping, or an object with attributes of those names. `initial_reduce_bucket_size`
    is in elements; both are the same on all ranks, else ConfigError. Making one is collective, and so are registering
    a graph and `cleanup`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        config: RuntimeConfig | Mapping[str, Any] | object = None,
        initial_reduce_bucket_size: int = 1 << 27,
    ) -> None:
        self.config = RuntimeConfig.load(config)
        if initial_reduce_bucket_size < 1:
            raise ValueError(f"[ZW101] initial_reduce_bucket_size must be at least 1, not {initial_reduce_bucket_size}")
        self.device = take_device(process_group)
        self._control = Control.over(process_group, self.config.deadline_seconds)
        self.rank, self.world = self._control.rank, self._control.world
        try:
            self._agree_on_settings(initial_reduce_bucket_size)
        except ConfigError:
            self._control.close()
            raise
        group = own_group(process_group, self._control, timedelta(seconds=self.config.deadline_seconds))
        self.ledger = Ledger(self.world, self.rank)
        plain = make_transport(group, self.device, self.ledger)
        self._ends, own, failed = ExitStack(), ExitStack(), _failure_of(self._control)
        own.callback(self._control.close)
        if group is not None:
            own.callback(end_process_group, group)
        own.callback(plain.close)
        groups_at_end(self._ends, own, self.device, failed)
        self._buffered: BufferedGathers | None = None
        if self.config.symmetric_memory:
            self._buffered = buffered(plain, self._control, self.device, self.ledger, self._ends, failed)
        self._outgrown = True
        """True if the registered buffer may be too small for what is registered"""
        self.transport = Wire(fenced(self._buffered or plain, self.device, self.config), self.device)
        make_flat = partial(ShardedFlat, transport=self.transport, gauge=self.ledger.gauge("flats"))
        self._bucket_size = initial_reduce_bucket_size
        registry = Registry(self._control, self.device, make_flat)
        self._real: _Parts | None = _Parts(registry, self._gradients_of(registry))
        self._rehearsal: _Parts | None = None
        """while profiling: what acts in the place of `_real`"""
        self._checks = 0
        self._prefetched: set[int] = set()
        """parameters that a prefetch holds for the next `allgather_param`"""
        self._releases: Counter[int] = Counter()
        """how many of its users have released a parameter"""

    def _agree_on_settings(self, bucket_size: int) -> None:
        """Collective. ConfigError where ranks differ: they would reduce in different ways, or wait for each other."""
        mine = {**self.config.model_dump(), "initial_reduce_bucket_size": bucket_size}
        for rank, theirs in enumerate(self._control.all_gather_object(mine, "the settings of the runtime")):
            for key in (key for key, value in mine.items() if theirs[key] != value):
                raise ConfigError(
                    f"{key} must be the same on all ranks: it is {mine[key]!r} on rank {self.rank} and {theirs[key]!r} "
                    f"on rank {rank}"
                )

    def _gradients_of(self, registry: Registry, rehearses: bool = False) -> WindowGradients:
        config, ledger = self.config, self.ledger
        op: ReduceOp = "predivide" if config.pre_div_reduce else "average"
        dtype = None if config.reduce_dtype is None else getattr(torch, config.reduce_dtype)
        reductions = Reductions(self.transport, op, dtype, ledger.gauge("reduce buckets"))
        buckets = self._bucket_size, 2 if config.double_buffer else 1
        return WindowGradients(registry, reductions, *buckets, ledger.gauge("gradients"), self._check, rehearses)

    @property
    def _parts(self) -> _Parts:
        """What calls act on now; EngineError after `cleanup`."""
        if self._real is None:
            raise EngineError("the runtime was cleaned up: call init again")
        return self._rehearsal or self._real

    @property
    def graph_ids(self) -> tuple[int, ...]:
        """The graphs that are registered."""
        return tuple(self._parts.registry.graphs)

    def register_param(
        self,
        ds_id: int,
        ds_shape: Sequence[int],
        ds_tensor: torch.Tensor,
        grad_buffer: torch.Tensor | None = None,
        offset: int = 0,
    ) -> None:
        """A parameter that every rank holds whole (ZeRO-1 and 2).

        `grad_buffer`: this rank's place for the reduced gradient, written in its dtype. If it has as many elements
        as the parameter it holds the whole gradient, and `offset` does not matter; if fewer, it holds
        elements `offset` to `offset + numel` of the parameter's flat gradient. None: each rank gets an equal share,
        step by step, from `take_gradients`. Nothing is allocated here.
        """
        self._refuse_profiling(f"registering parameter {ds_id}")
        parameter = RegisteredParameter(ds_id, tuple(ds_shape), grad_buffer, offset)
        self._parts.registry.register_param(parameter, ds_tensor)

    def register_z3_param(
        self,
        ds_id: int,
        ds_shape: Sequence[int],
        ds_tensor: torch.Tensor,
        grad_buffer: torch.Tensor | None = None,
        persistent: bool = False,
        expected_grad_dtype: torch.dtype | None = None,
    ) -> None:
        """A parameter of which `ds_tensor` [c] is this rank's partition: elements rank * c to (rank + 1) * c.

        c is at least numel / world, rounded up, and equal on all ranks; what is beyond the parameter is padding.
        `grad_buffer` [c]: the same part of the gradient, as above. `persistent`: once gathered it stays gathered
        until the forward after the next update. Gradients are cast to `expected_grad_dtype` when they are handed in.
        """
        self._refuse_profiling(f"registering parameter {ds_id}")
        parameter = RegisteredParameter(ds_id, tuple(ds_shape), grad_buffer, 0, None, persistent, expected_grad_dtype)
        self._parts.registry.register_z3_param(parameter, ds_tensor)

    def update_param_grad_buffer(self, ds_id: int, grad_buffer: torch.Tensor) -> None:
        """Another buffer for the same elements, from the next reduction that is settled on.

        What the window has added up so far is copied into it.
        """
        self._refuse_profiling(f"another buffer for parameter {ds_id}")
        self._parts.gradients.update_param_grad_buffer(ds_id, grad_buffer)

    def register_graph_z1(self, graph_id: int, ds_ids: Iterable[int]) -> None:
        """A graph whose backwards add gradients up locally, and reduce them where they update. Collective."""
        self._register(graph_id, ds_ids, sharded=False, reduces_always=False)

    def register_graph_z2(self, graph_id: int, ds_ids: Iterable[int]) -> None:
        """A graph whose backwards reduce every time: a window's first result is copied, later ones are added."""
        self._register(graph_id, ds_ids, sharded=False, reduces_always=True)

    def register_graph_z3(self, graph_id: int, ds_ids: Iterable[int]) -> None:
        """As `register_graph_z2`, over sharded parameters, which the graph gathers."""
        self._register(graph_id, ds_ids, sharded=True, reduces_always=True)

    def _register(self, graph_id: int, ds_ids: Iterable[int], sharded: bool, reduces_always: bool) -> None:
        self._refuse_profiling(f"registering graph {graph_id}")
        elsewhere = _GRAPHS.get(graph_id, self) is not self
        self._parts.registry.register_graph(graph_id, ds_ids, sharded, reduces_always, elsewhere)
        _GRAPHS[graph_id] = self
        self._outgrown = True

    def start_forward(self) -> None:
        """A forward begins. Outside of a window an update may have changed the parameters.

        The first forward after a window drops all that is gathered. Each further one until a backward begins drops what
        is held only because it is persistent or prefetched. What they use is gathered again.
        """
        gradients = self._parts.gradients
        if self._outgrown:
            self.lazy_init_symm_memory()
        if gradients.begin_forward():
            self._drop_all()
            for _, flat in self._sharded():
                increment_version(flat.flat)  # a backward that saved a view of the old values raises
        elif not gradients.in_window:
            for parameter, flat in self._sharded():
                if flat.holds == parameter.persistent + (parameter.id in self._prefetched):
                    self._prefetched.discard(parameter.id)
                    del self._releases[parameter.id]
                    flat.drop()

    def end_forward(self) -> None:
        """The forward is over. Storage that a tensor still viewed at its release is freed if none views it any more."""
        for _, flat in self._sharded():
            if not flat.holds:
                flat.free()

    def start_backward(self, update: bool) -> None:
        """A backward begins; `update`: its end is the end of the window.

        EngineError where an earlier backward did not finish; `zero_grad()` aborts it.
        """
        self._parts.gradients.start_backward(update)

    def end_backward(self, graph_id: int, release_reduce_buckets: bool | None = None) -> None:
        """The graph's part of the backward is over; may be left out of backwards that do not update.

        None settles the reductions of all graphs, and releases their buckets, when the whole backward is over: at the
        end of a backward of autograd, or now if there is none, with the local sums of all graphs. True settles now,
        False leaves it to a later call.
        """
        self._parts.gradients.end_backward(graph_id, release_reduce_buckets)
        self.end_forward()

    def _check(self) -> None:
        if self.config.check_every_step and not self.is_profiling():
            self._checks += 1
            count, digest = self.ledger.mark
            self._control.agree(Agreement(self._checks, count, digest, b""))

    def reduce_grad(self, grad: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
        """A gradient of the present backward, of the parameter's shape, any floating dtype. Returns an empty tensor.

        It is not copied before its bucket is reduced, and must not be written until then. Every rank hands in the
        same gradients in the same order.
        """
        return self._parts.gradients.reduce_grad(grad, graph_id, ds_id)

    def take_gradients(self) -> GradientPartition:
        """The window's gradients of all parameters without a buffer; the runtime keeps no reference.

        Called once after the updating backward. The caller ends them with `release()`.
        """
        return self._parts.gradients.take_gradients()

    def zero_grad(self) -> None:
        """Aborts the window, and resets all that is gathered: after a skipped step or an exception, on all ranks."""
        self._parts.gradients.zero_grad()
        self._drop_all()

    def shape_of(self, graph_id: int, ds_id: int) -> tuple[int, ...]:
        """The full shape of a parameter of a graph."""
        return self._parts.registry.of(graph_id, ds_id)[1].shape

    def allgather_param(
        self, ds_tensor: torch.Tensor, graph_id: int, ds_id: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Takes a hold on a sharded parameter and starts its gather; returns it full, to be waited for.

        ParameterError for a `dtype` other than that of the partition `ds_tensor`.
        """
        parameter, flat = self._find(graph_id, ds_id, ds_tensor, dtype)
        if ds_id in self._prefetched:
            self._prefetched.remove(ds_id)  # with the hold that the prefetch took
        else:
            _unshard(parameter, flat)
        return flat.flat[: parameter.numel].view(parameter.shape)  # one tensor more that views the flat, not two

    def wait_allgather(self, gathered: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
        """Makes what `allgather_param` returned usable on the current stream; returns it."""
        parameter, flat = self._find(graph_id, ds_id)
        if not flat.holds:
            raise EngineError(f"wait_allgather: {parameter.name} is not gathered")
        flat.wait()
        return gathered

    def release_param(self, gathered: torch.Tensor, graph_id: int, ds_id: int, n_users: int = 1) -> None:
        """Drops the hold at the last of `n_users` calls. The last hold frees the storage, in stream order.

        The storage stays while any tensor but `gathered` views it; `gathered` itself must not be read any more.
        """
        parameter, flat = self._find(graph_id, ds_id)
        self._releases[ds_id] += 1
        if self._releases[ds_id] < n_users:
            return
        del self._releases[ds_id]
        if not flat.holds:
            raise EngineError(f"release_param: {parameter.name} is not gathered")
        flat.reshard(handed_in=1)

    def prefetch_params_fused(
        self,
        graph_id: int,
        ds_tensors: Sequence[torch.Tensor],
        ds_ids: Sequence[int],
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> None:
        """Starts the gathers that the next `allgather_param` of these parameters asks for, by kernel in one launch.

        Nothing is started where one of them is refused; `dtypes` as the `dtype` of `allgather_param`.
        """
        wanted: dict[int, tuple[RegisteredParameter, ShardedFlat]] = {}
        for ds_tensor, ds_id, dtype in zip(ds_tensors, ds_ids, dtypes or repeat(None, len(ds_ids)), strict=True):
            found = self._find(graph_id, ds_id, ds_tensor, dtype)
            if ds_id not in self._prefetched:
                wanted[ds_id] = found
        with self.transport.together():
            for ds_id, (parameter, flat) in wanted.items():
                self._prefetched.add(ds_id)
                _unshard(parameter, flat)

    def _find(
        self, graph_id: int, ds_id: int, given: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> tuple[RegisteredParameter, ShardedFlat]:
        """A sharded parameter of the graph. `given` must be its registered partition, `dtype` that of the partition."""
        _, parameter = self._parts.registry.of(graph_id, ds_id)
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

    def _sharded(self) -> list[tuple[RegisteredParameter, ShardedFlat]]:
        return [(p, p.flat) for p in self._parts.registry.parameters.values() if p.flat is not None]

    def _drop_all(self) -> None:
        """Drops every hold."""
        self._prefetched.clear()
        self._releases.clear()
        for _, flat in self._sharded():
            flat.drop()

    def lazy_init_symm_memory(self) -> None:
        """Makes the registered buffer as large as the largest sharded parameter that a rank has registered. Collective.

        The first forward calls it, and so does the first one after a graph was registered. It does nothing where the
        buffer is large enough, without a buffer (`symmetric_memory`), and while profiling.
        """
        sizes = [flat.layout.nbytes for _, flat in self._sharded()]
        if self._buffered is not None and not self.is_profiling():
            self._buffered.reserve(max(sizes, default=0))
            self._outgrown = False

    def free_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Frees what no other code can read, above `free_activation_threshold`; see `free_storages`.

        The caller may hold each tensor in `tensors` and in one variable; it must not read them any more.
        """
        free_storages(tensors, self.config.free_activation_threshold, held=1)

    def enable_profiling(self, on: bool) -> None:
        """Steps without communication from now on, or real ones again. On all ranks, between windows.

        While it is on, gathers give copies of this rank's partition, and reductions zeros. Gradient buffers, partitions
        and the last window's values stay as they are, and `take_gradients` gives zeros. `ledger` counts nothing,
        `planned` what would have been sent. Persistent parameters are gathered again, then and afterwards.
        """
        parts = self._parts
        if on == self.is_profiling():
            return
        parts.gradients.check_finished()
        if parts.gradients.in_window or any(flat.holds > p.persistent for p, flat in self._sharded()):
            raise EngineError(
                f"enable_profiling({on}) in the middle of a window: call it when the updating backward has ended and "
                "gathered parameters are released, or after zero_grad()"
            )
        self._drop_all()
        if not on:
            parts.gradients.zero_grad()  # the rehearsal's
        self._rehearsal = parts._replace(gradients=self._gradients_of(parts.registry, True)) if on else None
        self.transport.skip(on)

    def is_profiling(self) -> bool:
        """True while steps run without communication."""
        return self._rehearsal is not None

    def _refuse_profiling(self, what: str) -> None:
        if self.is_profiling():
            raise EngineError(f"{what} while profiling: call enable_profiling(False) first")

    @property
    def planned(self) -> Ledger:
        """What the present profiling, or the last one, would have sent."""
        return self.transport.planned

    def reset(self) -> None:
        """Unregisters the graphs, for instance before a new compilation. Parameters, and what the window has, stay."""
        self._refuse_profiling("reset()")
        for graph_id in self.graph_ids:
            _GRAPHS.pop(graph_id, None)
        self._parts.registry.graphs.clear()

    def cleanup(self) -> None:
        """Frees everything and ends the communicator; a second call does nothing. Collective."""
        if self._real is None:
            return
        self.zero_grad()
        self.enable_profiling(False)
        self.zero_grad()
        self.reset()
        self._real.registry.parameters.clear()
        self._real = None
        self._ends.close()


def _unshard(parameter: RegisteredParameter, flat: ShardedFlat) -> None:
    if parameter.persistent and not flat.holds:
        flat.unshard()  # a hold that no release drops
    flat.unshard()


def _failure_of(control: Control) -> Callable[[], bool]:
    """What tells whether this rank has failed. It does not keep the group of a runtime that is gone."""
    found = ref(control)
    return lambda: (there := found()) is None or there.broken is not None


def runtime_of(graph_id: int) -> Runtime:
    """The Runtime that `graph_id` was registered with; EngineError if none."""
    runtime = _GRAPHS.get(graph_id)
    if runtime is None:
        raise EngineError(f"no graph with graph_id {graph_id} is registered")
    return runtime

"""The runtime by name, for those who bring their own compiler pass. See docs/runtime.md.

The functions of this module act on one default `Runtime`, which `init` makes and `cleanup` ends. Runtimes over
other groups can be made beside it; a graph id belongs to one Runtime, and the operators of `torch.ops.zeroweave`
find it by that id.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from zeroweave.compile.frames import keep_package_from_dynamo
from zeroweave.config import RuntimeConfig
from zeroweave.dc import operators
from zeroweave.dc.runtime import RuntimeByName
from zeroweave.dc.targets import GradientPartition
from zeroweave.errors import EngineError
from zeroweave.runtime.storages import free_storages

__all__ = ["GradientPartition", "Runtime", "RuntimeConfig"]


class Runtime(RuntimeByName):
    """A runtime whose graph ids are unique in this process, so that operators find it by them."""

    def _register(self, graph_id: int, ds_ids: Iterable[int], sharded: bool, reduces_always: bool) -> None:
        super()._register(graph_id, ds_ids, sharded, reduces_always)
        _STATE.graphs[graph_id] = self

    def _check_graph(self, graph_id: int) -> None:
        if _STATE.graphs.get(graph_id, self) is not self:
            raise EngineError(f"graph_id {graph_id} belongs to another runtime of this process")

    def reset(self) -> None:
        """Forgets the graphs, for instance before a new compilation. Parameters, and what the window has, stay."""
        forgotten = self.graph_ids
        super().reset()
        for graph_id in forgotten:
            _STATE.graphs.pop(graph_id, None)


class _State:
    """The default Runtime, which Runtime each graph id belongs to, and the operators that find it by that."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.graphs: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()
        self.libraries: dict[str, torch.library.Library] = {}


_STATE = _State()


def _default() -> Runtime:
    if _STATE.runtime is None:
        raise EngineError("there is no runtime: call zeroweave.dc.init first")
    return _STATE.runtime


def runtime_of(graph_id: int) -> Runtime:
    """The Runtime that `graph_id` was registered with; EngineError if none."""
    runtime = _STATE.graphs.get(graph_id)
    if runtime is None:
        raise EngineError(f"no graph with graph_id {graph_id} is registered")
    return runtime


def init(
    process_group: dist.ProcessGroup | None = None,
    config: RuntimeConfig | Mapping[str, Any] | object = None,
    initial_reduce_bucket_size: int = 1 << 27,
) -> Runtime:
    """Makes the default `Runtime`. EngineError while there is one: `cleanup` first. Collective."""
    if _STATE.runtime is not None:
        raise EngineError("zeroweave.dc is initialised already: call cleanup() first, or make a Runtime of your own")
    _STATE.runtime = Runtime(process_group, config, initial_reduce_bucket_size)
    return _STATE.runtime


def cleanup() -> None:
    """Ends the default Runtime, if there is one; `init` works again. Collective."""
    runtime, _STATE.runtime = _STATE.runtime, None
    if runtime is not None:
        runtime.cleanup()


def register_param(
    ds_id: int,
    ds_shape: Sequence[int],
    ds_tensor: torch.Tensor,
    grad_buffer: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    """`Runtime.register_param` of the default runtime."""
    _default().register_param(ds_id, ds_shape, ds_tensor, grad_buffer, offset)


def register_z3_param(
    ds_id: int,
    ds_shape: Sequence[int],
    ds_tensor: torch.Tensor,
    grad_buffer: torch.Tensor | None = None,
    persistent: bool = False,
) -> None:
    """`Runtime.register_z3_param` of the default runtime."""
    _default().register_z3_param(ds_id, ds_shape, ds_tensor, grad_buffer, persistent)


def update_param_grad_buffer(ds_id: int, grad_buffer: torch.Tensor) -> None:
    """`Runtime.update_param_grad_buffer` of the default runtime."""
    _default().update_param_grad_buffer(ds_id, grad_buffer)


def register_graph_z1(graph_id: int, ds_ids: Iterable[int]) -> None:
    """`Runtime.register_graph_z1` of the default runtime."""
    _default().register_graph_z1(graph_id, ds_ids)


def register_graph_z2(graph_id: int, ds_ids: Iterable[int]) -> None:
    """`Runtime.register_graph_z2` of the default runtime."""
    _default().register_graph_z2(graph_id, ds_ids)


def register_graph_z3(graph_id: int, ds_ids: Iterable[int]) -> None:
    """`Runtime.register_graph_z3` of the default runtime."""
    _default().register_graph_z3(graph_id, ds_ids)


def start_forward() -> None:
    """`Runtime.start_forward` of the default runtime."""
    _default().start_forward()


def end_forward() -> None:
    """`Runtime.end_forward` of the default runtime."""
    _default().end_forward()


def start_backward(update: bool) -> None:
    """`Runtime.start_backward` of the default runtime."""
    _default().start_backward(update)


def end_backward(graph_id: int, release_reduce_buckets: bool | None = None) -> None:
    """`Runtime.end_backward` of the runtime that the graph belongs to."""
    runtime_of(graph_id).end_backward(graph_id, release_reduce_buckets)


def reduce_grad(grad: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
    """`Runtime.reduce_grad` of the runtime that the graph belongs to."""
    return runtime_of(graph_id).reduce_grad(grad, graph_id, ds_id)


def take_gradients() -> GradientPartition:
    """`Runtime.take_gradients` of the default runtime."""
    return _default().take_gradients()


def zero_grad() -> None:
    """`Runtime.zero_grad` of the default runtime."""
    _default().zero_grad()


def allgather_param(ds_tensor: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
    """`Runtime.allgather_param` of the runtime that the graph belongs to."""
    return runtime_of(graph_id).allgather_param(ds_tensor, graph_id, ds_id)


def wait_allgather(gathered: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
    """`Runtime.wait_allgather` of the runtime that the graph belongs to."""
    return runtime_of(graph_id).wait_allgather(gathered, graph_id, ds_id)


def release_param(gathered: torch.Tensor, graph_id: int, ds_id: int, n_users: int = 1) -> None:
    """`Runtime.release_param` of the runtime that the graph belongs to."""
    runtime_of(graph_id).release_param(gathered, graph_id, ds_id, n_users)


def prefetch_params_fused(graph_id: int, ds_tensors: Sequence[torch.Tensor], ds_ids: Sequence[int]) -> None:
    """`Runtime.prefetch_params_fused` of the runtime that the graph belongs to."""
    runtime_of(graph_id).prefetch_params_fused(graph_id, ds_tensors, ds_ids)


def enable_profiling(on: bool) -> None:
    """`Runtime.enable_profiling` of the default runtime."""
    _default().enable_profiling(on)


def is_profiling() -> bool:
    """`Runtime.is_profiling` of the default runtime."""
    return _default().is_profiling()


def reset() -> None:
    """`Runtime.reset` of the default runtime."""
    _default().reset()


def lazy_init_symm_memory() -> None:
    """`Runtime.lazy_init_symm_memory` of the default runtime."""
    _default().lazy_init_symm_memory()


def free_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """`Runtime.free_tensors` of the default runtime; above the default threshold while there is none."""
    free_storages(tensors, _free_threshold(), held=1)


def add_free_tensors(graph: fx.Graph, tensors: Iterable[fx.Node] | None = None) -> list[fx.Node]:
    """Frees large saved activations of a backward graph after their last use; see `operators.add_free_tensors`."""
    return operators.add_free_tensors(graph, _free_threshold(), tensors)


def _free_threshold() -> int:
    config = RuntimeConfig() if _STATE.runtime is None else _STATE.runtime.config
    return config.free_activation_threshold


def install_ops(namespace: str) -> None:
    """Defines the operators as `torch.ops.<namespace>.*`, too; a second call does nothing.

    EngineError where the namespace has an operator of one of the names from elsewhere.
    """
    if namespace not in _STATE.libraries:
        _STATE.libraries[namespace] = operators.install(namespace, runtime_of, _free_threshold)


def inductor_options() -> dict[str, Any]:
    """The options of Inductor under which the operators are promised; see `operators.inductor_options`.

    To be called after `install_ops`, and its result handed to `torch._inductor.config.patch` around a compilation.
    """
    return operators.inductor_options(_STATE.libraries)


install_ops("zeroweave")
keep_package_from_dynamo("zeroweave")

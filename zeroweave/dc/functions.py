"""Functions of the default `Runtime`, and operators for a user's graphs.

The operators are `torch.ops.zeroweave.*`, and the same under other namespaces on request.
What a compiler may do to them follows from their schemas. Arguments marked as written (`Tensor(a!)`) are not
written; the mark keeps the operator in a graph whose results are not used, after everything that computes or
reads the argument before it and before everything that reads it afterwards:

    reduce_grad(grad)         after the gradient, before what reads its result
    prefetch_params_fused     before the next allgather_param of the same partitions, after the last one
    wait_allgather(gathered)  after the allgather_param, before every use
    release_param(gathered)   after every use
    free_tensors(tensors)     after every use
    end_backward(deps)        after the reduce_grads whose results are its `deps`

The mark cannot say that communication reads and writes memory later than the operator runs: hence
`inductor_options`. They are meant for graphs that autograd has been traced out of; autograd does not see them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from zeroweave._torch.inductor import inductor_reads_first
from zeroweave.config import RuntimeConfig
from zeroweave.dc.runtime import Runtime, runtime_of
from zeroweave.errors import EngineError
from zeroweave.runtime.storages import free_storages, owners_beside

P = ParamSpec("P")
R = TypeVar("R")

_default: Runtime | None = None


def init(
    process_group: dist.ProcessGroup | None = None,
    config: RuntimeConfig | Mapping[str, Any] | object = None,
    initial_reduce_bucket_size: int = 1 << 27,
) -> Runtime:
    """Makes the default `Runtime`. EngineError while there is one: `cleanup` first. Collective."""
    global _default
    if _default is not None:
        raise EngineError("zeroweave.dc is initialised already: call cleanup() first, or make a Runtime of your own")
    _default = Runtime(process_group, config, initial_reduce_bucket_size)
    return _default


def cleanup() -> None:
    """Ends the default Runtime, if there is one; `init` works again. Collective."""
    global _default
    runtime, _default = _default, None
    if runtime is not None:
        runtime.cleanup()


def free_threshold() -> int:
    """The `free_activation_threshold` of the default Runtime; that of the settings' defaults while there is none."""
    config = RuntimeConfig() if _default is None else _default.config
    return config.free_activation_threshold


def of_default(method: Callable[Concatenate[Runtime, P], R]) -> Callable[P, R]:
    """This method of the Runtime that is the default one when it is called."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _default is None:
            raise EngineError("there is no runtime: call zeroweave.dc.init first")
        return method(_default, *args, **kwargs)

    return _as_function(method, call)


def _as_function(method: Callable[Concatenate[Runtime, P], R], call: Callable[P, R]) -> Callable[P, R]:
    """`call`, which looks like the method without its `self`."""
    signature = inspect.signature(method)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    return wraps(method)(call)


def _of_graph(method: Callable[Concatenate[Runtime, P], R], place: int) -> Callable[P, R]:
    """This method of the Runtime that has the graph whose id is the argument at `place`."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        graph_id: Any = kwargs["graph_id"] if "graph_id" in kwargs else args[place]
        return method(runtime_of(graph_id), *args, **kwargs)

    return _as_function(method, call)


reduce_grad = _of_graph(Runtime.reduce_grad, 1)
end_backward = _of_graph(Runtime.end_backward, 0)
allgather_param = _of_graph(Runtime.allgather_param, 1)
wait_allgather = _of_graph(Runtime.wait_allgather, 1)
release_param = _of_graph(Runtime.release_param, 1)
prefetch_params_fused = _of_graph(Runtime.prefetch_params_fused, 0)


def _end_backward(deps: Sequence[torch.Tensor], graph_id: int, release_reduce_buckets: bool | None = None) -> None:
    end_backward(graph_id, release_reduce_buckets)


def _wait_allgather(gathered: torch.Tensor, graph_id: int, ds_id: int) -> None:
    wait_allgather(gathered, graph_id, ds_id)


def _empty(grad: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
    return grad.new_empty(0)


def _full(ds_tensor: torch.Tensor, graph_id: int, ds_id: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return ds_tensor.new_empty(runtime_of(graph_id).shape_of(graph_id, ds_id))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def free_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """`Runtime.free_tensors` of the default runtime; above the default threshold while there is none."""
    free_storages(tensors, free_threshold(), held=1)


def _free_tensors(tensors: Sequence[torch.Tensor]) -> None:
    # How many owners a tensor has inside a kernel whose caller holds it in one variable. Counted each time: it depends
    # on how Python and PyTorch hand arguments on, which changes when Dynamo is first used.
    ours, variable = torch.ops.zeroweave, torch.empty(0, device="cpu")
    free_storages(tensors, free_threshold(), ours._owners.default([variable])[0])


class _Operator(NamedTuple):
    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any] = _nothing


OPERATORS: Final = {
    "reduce_grad": _Operator("(Tensor(a!) grad, int graph_id, int ds_id) -> Tensor", reduce_grad, _empty),
    "allgather_param": _Operator(
        "(Tensor ds_tensor, int graph_id, int ds_id, ScalarType? dtype=None) -> Tensor", allgather_param, _full
    ),
    "wait_allgather": _Operator("(Tensor(a!) gathered, int graph_id, int ds_id) -> ()", _wait_allgather),
    "release_param": _Operator("(Tensor(a!) gathered, int graph_id, int ds_id, int n_users=1) -> ()", release_param),
    "prefetch_params_fused": _Operator(
        "(int graph_id, Tensor(a!)[] ds_tensors, int[] ds_ids, ScalarType[]? dtypes=None) -> ()", prefetch_params_fused
    ),
    "free_tensors": _Operator("(Tensor(a!)[] tensors) -> ()", _free_tensors),
    "end_backward": _Operator(
        "(Tensor(a!)[] deps, int graph_id, bool? release_reduce_buckets=None) -> ()", _end_backward
    ),
    "_owners": _Operator("(Tensor(a!)[] tensors) -> int[]", owners_beside),
}
_LIBRARIES: Final[dict[str, torch.library.Library]] = {}
"""The operators live as long as these."""


def install_ops(namespace: str) -> None:
    """Defines the operators as `torch.ops.<namespace>.*`, too; a second call does nothing.

    EngineError, and nothing is defined, where the namespace has an operator of one of the names from elsewhere.
    """
    if namespace in _LIBRARIES:
        return
    taken = [name for name in OPERATORS if hasattr(getattr(torch.ops, namespace), name)]
    if taken:
        raise EngineError(f"torch.ops.{namespace} has operators of other origin: {', '.join(taken)}")
    library = _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    for name, operator in OPERATORS.items():
        library.define(name + operator.schema)
        library.impl(name, operator.kernel, "CompositeExplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        if name != "_owners":
            torch.library.register_fake(f"{namespace}::{name}", operator.fake, lib=library)


def inductor_options() -> dict[str, Any]:
    """Inductor's options under which the operators do in its code what they do in the graph.

    To be called after `install_ops`, and its result handed to `torch._inductor.config.patch` around a compilation. It
    also tells Inductor, once and for the process, to compute what reads an argument before the operator runs.
    """
    inductor_reads_first(
        [
            getattr(getattr(torch.ops, namespace), name).default
            for namespace in _LIBRARIES
            for name, operator in OPERATORS.items()
            if "!" in operator.schema
        ]
    )
    return {
        # Communication reads and writes memory later than its operator runs: nothing else may use it meanwhile.
        "allow_buffer_reuse": False,
        "inplace_buffers": False,
        "memory_planning": False,
        "disabled_passes": "reinplace_inplaceable_ops",
        # The order of the graph is kept, so that a gather stays ahead of its wait.
        "reorder_for_locality": False,
        "reorder_for_peak_memory": False,
        "reorder_for_compute_comm_overlap": False,
        "aten_distributed_optimizations.enable_overlap_scheduling": False,
        # Its key does not know the shapes that are registered with the runtime. Compiled kernels are still cached.
        "fx_graph_cache": False,
    }

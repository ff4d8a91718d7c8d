"""The functions that act on the default `Runtime`, which `init` makes and `cleanup` ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from zeroweave.compile.frames import keep_package_from_dynamo
from zeroweave.config import RuntimeConfig
from zeroweave.dc import operators
from zeroweave.dc.runtime import Runtime
from zeroweave.errors import EngineError
from zeroweave.runtime.storages import free_storages

P = ParamSpec("P")
R = TypeVar("R")


class _Process:
    """What a process has one of: the default Runtime, and the operators that are defined."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self.libraries: dict[str, torch.library.Library] = {}

    @property
    def runtime(self) -> Runtime:
        if self._runtime is None:
            raise EngineError("there is no runtime: call zeroweave.dc.init first")
        return self._runtime

    @property
    def free_threshold(self) -> int:
        config = RuntimeConfig() if self._runtime is None else self._runtime.config
        return config.free_activation_threshold

    def init(
        self,
        process_group: dist.ProcessGroup | None = None,
        config: RuntimeConfig | Mapping[str, Any] | object = None,
        initial_reduce_bucket_size: int = 1 << 27,
    ) -> Runtime:
        """Makes the default `Runtime`. EngineError while there is one: `cleanup` first. Collective."""
        if self._runtime is not None:
            raise EngineError(
                "zeroweave.dc is initialised already: call cleanup() first, or make a Runtime of your own"
            )
        self._runtime = Runtime(process_group, config, initial_reduce_bucket_size)
        return self._runtime

    def cleanup(self) -> None:
        """Ends the default Runtime, if there is one; `init` works again. Collective."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.cleanup()


_PROCESS: Final = _Process()


def _of_default(method: Callable[Concatenate[Runtime, P], R]) -> Callable[P, R]:
    """This method of whichever Runtime is the default one when it is called."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(_PROCESS.runtime, *args, **kwargs)

    signature = inspect.signature(method)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    return call


init, cleanup = _PROCESS.init, _PROCESS.cleanup
register_param = _of_default(Runtime.register_param)
register_z3_param = _of_default(Runtime.register_z3_param)
update_param_grad_buffer = _of_default(Runtime.update_param_grad_buffer)
register_graph_z1 = _of_default(Runtime.register_graph_z1)
register_graph_z2 = _of_default(Runtime.register_graph_z2)
register_graph_z3 = _of_default(Runtime.register_graph_z3)
start_forward = _of_default(Runtime.start_forward)
end_forward = _of_default(Runtime.end_forward)
start_backward = _of_default(Runtime.start_backward)
take_gradients = _of_default(Runtime.take_gradients)
zero_grad = _of_default(Runtime.zero_grad)
enable_profiling = _of_default(Runtime.enable_profiling)
is_profiling = _of_default(Runtime.is_profiling)
reset = _of_default(Runtime.reset)
lazy_init_symm_memory = _of_default(Runtime.lazy_init_symm_memory)


def free_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """`Runtime.free_tensors` of the default runtime; above the default threshold while there is none."""
    free_storages(tensors, _PROCESS.free_threshold, held=1)


def add_free_tensors(graph: fx.Graph, tensors: Iterable[fx.Node] | None = None) -> list[fx.Node]:
    """Frees large saved activations of a backward graph after their last use; see `operators.add_free_tensors`."""
    return operators.add_free_tensors(graph, _PROCESS.free_threshold, tensors)


def install_ops(namespace: str) -> None:
    """Defines the operators as `torch.ops.<namespace>.*`, too; a second call does nothing.

    EngineError where the namespace has an operator of one of the names from elsewhere.
    """
    if namespace not in _PROCESS.libraries:
        _PROCESS.libraries[namespace] = operators.install(namespace, lambda: _PROCESS.free_threshold)


def inductor_options() -> dict[str, Any]:
    """The options of Inductor under which the operators are promised; see `operators.inductor_options`.

    To be called after `install_ops`, and its result handed to `torch._inductor.config.patch` around a compilation.
    """
    return operators.inductor_options(_PROCESS.libraries)


install_ops("zeroweave")
keep_package_from_dynamo("zeroweave")

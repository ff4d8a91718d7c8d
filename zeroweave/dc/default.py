"""The default `Runtime`, which `init` makes and `cleanup` ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from zeroweave.config import RuntimeConfig
from zeroweave.dc.runtime import Runtime
from zeroweave.errors import EngineError

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

    return as_function(method, call)


def as_function(method: Callable[Concatenate[Runtime, P], R], call: Callable[P, R]) -> Callable[P, R]:
    """`call`, which looks like the method without its `self`."""
    signature = inspect.signature(method)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    return wraps(method)(call)

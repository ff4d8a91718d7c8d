"""Tensors without memory, and calls for each operator."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def without_memory() -> AbstractContextManager[Any]:
    """Inside, tensors have shapes, dtypes and devices, and no memory.

    Why not tensors on `meta`: AOTAutograd loses gradients there of some composite operators (cross entropy is one), and
    attention there is the one that keeps its scores. Why without the cache of results: a view that is taken from there
    gives a storage that was freed its size back.
    """
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode()
    mode.cache_enabled = False
    return cast(AbstractContextManager[Any], mode)


def value_errors() -> tuple[type[Exception], ...]:
    """What operators raise if their results depend on values. Why: a plan says which module asks for them."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException


class OperatorMode(TorchDispatchMode):
    """Inside, `ran(operator, args, kwargs, out)` is called after each operator.

    Why: `TorchDispatchMode` has no public name, nor the word that lets Dynamo compile inside of one.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran(func, args, kwargs or {}, out)
        return out

    def ran(self, operator: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        raise NotImplementedError


def operator_name(target: Any) -> str:
    """The name of an operator without its overload ("mm"), "" for anything else. Why: as `operator_schema`."""
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def counted_operations(target: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations of a matmul or a convolution, by PyTorch's own count; 0 for anything else.

    One that writes into its first argument ("addmm_") has as many as the one that returns its result.

    Why: the count is registered for packets of overloads, and for none that write.
    """
    from torch.utils.flop_counter import flop_registry

    if not isinstance(target, torch._ops.OpOverload):
        return 0
    count = flop_registry.get(target._overloadpacket)
    if count is None and (name := operator_name(target)).endswith("_"):
        count = flop_registry.get(getattr(getattr(torch.ops, target.namespace), name.removesuffix("_"), None))
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))

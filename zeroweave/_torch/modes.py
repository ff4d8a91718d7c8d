"""Modes of the dispatcher: tensors without memory, a call for each operator, selective activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint

_SELECTIVE: tuple[type, ...] = (
    vars(checkpoint)["_CachingTorchDispatchMode"],
    vars(checkpoint)["_CachedTorchDispatchMode"],
)


def unseen() -> AbstractContextManager[None]:
    """Inside, selective activation checkpointing does not see operations; other modes do.

    Why: it counts the operations of a forward, and wants the same ones when that runs again. But what is gathered and
    reduced in between differs then. The modes are private, and so is the stack of them.
    """
    return _without_selective() if torch._C._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def _without_selective() -> Iterator[None]:
    """Why: see `unseen`. A mode may be between others, which stay in their order."""
    modes: list[Any] = dispatch._get_current_dispatch_mode_stack()
    if not any(isinstance(mode, _SELECTIVE) for mode in modes):
        yield
        return
    for _ in modes:
        dispatch._pop_mode()
    others = [mode for mode in modes if not isinstance(mode, _SELECTIVE)]
    try:
        for mode in others:
            dispatch._push_mode(mode)
        try:
            yield
        finally:
            for _ in others:
                dispatch._pop_mode()
    finally:
        for mode in modes:
            dispatch._push_mode(mode)


def fake_tensors() -> AbstractContextManager[Any]:
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


class OperatorMode(dispatch.TorchDispatchMode):
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

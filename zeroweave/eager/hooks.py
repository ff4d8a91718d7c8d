"""The calls of modules: regions, other modules with parameters and marked methods enter the runtime first.

A `ModuleCall` stands in `module._compiled_call_impl`, the place that PyTorch keeps for a replacement of a
module's call. It wraps the module's own hooks and forward, compiled or not, and Dynamo never sees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroweave._torch.autograd import recomputing
from zeroweave._torch.fx import map_tensors
from zeroweave._torch.tensors import post_accumulate_hooks, tensor_hooks
from zeroweave.eager.access import Access
from zeroweave.errors import EngineError
from zeroweave.layout import SlotKey
from zeroweave.runtime.runtime import Runtime
from zeroweave.runtime.tape import Frame


@dataclass(frozen=True)
class Compiled:
    """How the calls of a region run compiled."""

    run: Callable[..., Any]
    """`run(module, *args, **kwargs)` instead of the module's eager forward"""
    wanted: Callable[[], bool]
    """True if the call that begins now is to run compiled"""
    fell_back: Callable[[], None]
    """called when Dynamo has run the module uncompiled"""


class ModuleCall:
    """Makes each execution of `module` a call that holds the module's buckets.

    `session` surrounds the call if it is the outermost one. `forward(function, args, kwargs)` runs a function as the
    engine runs the model. `compiled`: None for a module that always runs eagerly.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        slots: Sequence[SlotKey],
        runtime: Runtime,
        access: Access,
        session: Callable[[], AbstractContextManager[None]],
        forward: Callable[..., Any],
        compiled: Compiled | None = None,
    ) -> None:
        self.name, self.module = name, module
        self.uses = tuple(sorted({bucket for bucket, _ in slots}))
        self._trainable = [s for s in slots if runtime.buckets[s[0]].layout.trainable]
        # An embedding's backward reads no values of it.
        self._trains = bool(self._trainable) and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        self._runtime, self._access, self._session, self._compiled = runtime, access, session, compiled
        self.forward = forward
        self._inner = access.of(module)
        self._runs_compiled = False
        """True if the last call that was no recomputation ran compiled"""

    def install(self, instead: Callable[..., Any] | None = None) -> None:
        """`instead`: a function to call in its place."""
        self.module._compiled_call_impl = instead or self

    def remove(self) -> None:
        self.module._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runtime = self._runtime
        if not runtime.in_session:
            with self._session():
                return self(*args, **kwargs)
        frame = runtime.enter(self.name, "forward", self.uses, self._trains)
        try:
            if self._compiled is not None and self._runs(self._compiled, frame):
                result = self._run_compiled(self._compiled, *args, **kwargs)
            else:
                runtime.ran_eagerly()
                result = self.module._call_impl(*args, **kwargs)
            return own_outputs(result, runtime)
        finally:
            if torch.is_grad_enabled() and not recomputing():
                runtime.gradients.expect(s for s in self._trainable if s not in frame.announced)
            runtime.leave(frame)

    def _runs(self, compiled: Compiled, frame: Frame) -> bool:
        """True if this call runs compiled. A recomputation inside a backward runs as its forward did."""
        if not self._runtime.in_backward:
            self._runs_compiled = compiled.wanted()
            frame.runs(self._runs_compiled)
        return self._runs_compiled if frame.compiled is None else frame.compiled

    def _run_compiled(self, compiled: Compiled, *args: Any, **kwargs: Any) -> Any:
        before = self._runtime.compiled_calls
        self._access.unwatch(self._inner)
        try:
            result = compiled.run(self.module, *args, **kwargs)
        finally:
            self._access.watch(self._inner)
        if self._runtime.compiled_calls == before:  # Dynamo ran the module as it is
            self._runtime.ran_eagerly()
            compiled.fell_back()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is an ordinary module


def own_outputs(result: Any, runtime: Runtime) -> Any:
    """`result` with a clone in the place of every parameter, and every view of one, whose values would go."""
    if isinstance(result, torch.Tensor) and runtime.directory.bucket(result) is None:
        return result

    def own(tensor: torch.Tensor) -> torch.Tensor:
        place = runtime.directory.covering(tensor)
        if place is None:
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled() and not recomputing():
            runtime.gradients.expect([place])  # the clone's gradient comes through eager autograd
        return tensor.clone()

    return map_tensors(own, result)


def hook_gradients(runtime: Runtime, stubs: Mapping[str, nn.Parameter]) -> list[RemovableHandle]:
    """Delivers what eager autograd accumulates into the real parameters, whose `.grad` is empty afterwards.

    It also delivers what is accumulated into their `stubs`, by name: an `autograd.Function` of a loss that is given a
    stub leads back to that. Returned are the hooks of stubs, to be removed when these are ordinary parameters again.
    The others are never removed: a graph may outlive the engine, and the runtime then refuses its gradients.
    """
    handles = []
    for name, stub in stubs.items():
        if stub.requires_grad:
            handles.append(hook_gradient(stub, runtime, *runtime.directory.slots[name]))
    for bucket in runtime.buckets.values():
        if bucket.layout.trainable:
            for slot, parameter in enumerate(bucket.real):
                hook_gradient(parameter, runtime, bucket.id, slot)
    return handles


def hook_gradient(parameter: nn.Parameter, runtime: Runtime, bucket: int, slot: int) -> RemovableHandle:
    """Delivers what autograd accumulates into a parameter as the slot's gradient.

    The hook does not keep the runtime: Python's garbage collector cannot look into it, so what it holds would live
    as long as the hook does, and never be freed if it holds the parameter.
    """
    reference = weakref.ref(runtime)

    def hand_over(parameter: torch.Tensor) -> None:
        if type(parameter) is nn.Parameter and parameter.grad is None:  # a compiled backward delivered it
            return
        with torch.DisableTorchFunctionSubclass():  # it may be a stub
            if (gradient := parameter.grad) is None:
                return
            parameter.grad = None
        if (alive := reference()) is None:
            raise EngineError("[ZW407] a backward of an engine that is gone: its gradients would be lost")
        alive.delivery.deliver_eager(bucket, slot, gradient)

    with torch.DisableTorchFunctionSubclass():
        return parameter.register_post_accumulate_grad_hook(hand_over)


def hooks_beside(parameter: torch.Tensor, trained: bool) -> tuple[int, ...]:
    """The ids of a parameter's hooks other than that of `hook_gradient`, which is the first of a `trained` one."""
    return *tensor_hooks(parameter), *post_accumulate_hooks(parameter)[int(trained) :]


def mark_forward(module: nn.Module, *methods: str) -> None:
    """Makes these methods of `module` run as `forward` does under an engine, with the parameters that they read.

    To be called before or after `initialize`, on all ranks; without an engine the methods are unchanged. A marked
    method is collective as a forward is. EngineError for a name that is no method of the module.
    """
    for name in methods:
        if not callable(getattr(type(module), name, None)):
            raise EngineError(f"mark_forward: {type(module).__name__} has no method {name!r}")
        vars(module).update({name: MarkedMethod(module, name)})


class MarkedMethod:
    """Replaces a method in the module's attributes, so that copies of the module have their own."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self._module), self._name).__get__(self._module)
        calls = (inner._compiled_call_impl for inner in self._module.modules())
        call = next((each for each in calls if isinstance(each, ModuleCall)), None)
        return method(*args, **kwargs) if call is None else call.forward(method, args, kwargs)

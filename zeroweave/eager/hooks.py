"""The calls of modules: regions and other modules with parameters enter the runtime before they compute.

A `ModuleCall` stands in `module._compiled_call_impl`, the place that PyTorch keeps for a replacement of a
module's call. It wraps the module's own hooks and forward, compiled or not, and Dynamo never sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from zeroweave._torch import map_tensors, recomputing
from zeroweave.eager.access import Access
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.runtime import Runtime

Compiled = Callable[..., Any]


class ModuleCall:
    """Makes each execution of `module` a call that holds the module's buckets.

    `session` surrounds the call if it is the outermost one; `compiled(module, *args, **kwargs)` runs
    instead of the module's eager forward where it is given and `may_compile()` holds.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        slots: Sequence[tuple[int, int]],
        runtime: Runtime,
        access: Access,
        session: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.name, self.module = name, module
        self.uses = tuple(sorted({bucket for bucket, _ in slots}))
        self._trainable = [s for s in slots if runtime.buckets[s[0]].layout.trainable]
        self._runtime, self._access, self._session = runtime, access, session
        self._inner = tuple(module.modules())
        self.compiled: Compiled | None = None
        self._runs_compiled = False
        self.may_compile: Callable[[], bool] = lambda: False
        self.gave_up: Callable[[ModuleCall], None] = lambda call: None

    def install(self) -> None:
        self.module._compiled_call_impl = self

    def remove(self) -> None:
        self.module._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._runtime.in_session:
            return self._call(*args, **kwargs)
        with self._session():
            return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        runtime = self._runtime
        frame = runtime.enter(self.name, "forward", self.uses)
        try:
            # a recomputation inside a backward runs as its forward ran
            if not runtime.in_backward:
                self._runs_compiled = self.may_compile()
            if self.compiled is not None and self._runs_compiled:
                result = self._run_compiled(self.compiled, *args, **kwargs)
            else:
                runtime.counts.eager_calls += 1
                result = self.module._call_impl(*args, **kwargs)
            return own_outputs(result, runtime)
        finally:
            if torch.is_grad_enabled() and not recomputing():
                runtime.gradients.expect(s for s in self._trainable if s not in frame.announced)
            runtime.leave(frame)

    def _run_compiled(self, compiled: Compiled, *args: Any, **kwargs: Any) -> Any:
        counts = self._runtime.counts
        before = counts.compiled_calls
        self._access.unwatch(self._inner)
        try:
            result = compiled(self.module, *args, **kwargs)
        finally:
            self._access.watch(self._inner)
        if counts.compiled_calls == before:  # Dynamo ran the module as it is
            counts.eager_calls += 1
            self.gave_up(self)
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


class GradientHooks:
    """Delivers the gradients of eager autograd; a parameter's `.grad` is empty afterwards."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))
            for bucket in runtime.buckets.values()
            if bucket.layout.trainable
            for index, parameter in enumerate(bucket.real)
        ]

    def _hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def deliver(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:  # None: a compiled backward delivered it
                self._runtime.deliver_eager(bucket.id, index, gradient)

        return deliver

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

"""Methods other than forward that compute with parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from zeroweave.eager.hooks import ModuleCall
from zeroweave.errors import EngineError


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

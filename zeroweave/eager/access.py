"""Reads of parameters that no call announced, such as `F.linear(x, self.embedding.weight)` in the root's forward.

While the engine computes, each module's `_parameters` is a dictionary that unshards a parameter's bucket when
the parameter is read. Dynamo shares one graph between equal modules only where `_parameters` is a plain
dict, so a compiled region gets its plain dicts back while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.runtime import Runtime

_Read = Callable[[Any], None]


class _Watched(dict[str, Any]):
    """A module's `_parameters` that reports reads of parameters."""

    __slots__ = ("_plain", "_read")

    def __init__(self, plain: dict[str, Any], read: _Read) -> None:
        super().__init__(plain)
        self._plain, self._read = plain, read

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._plain[name] = value  # where a replaced parameter is noticed

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._plain[name]

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self._read(value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = super().get(name, default)
        self._read(value)
        return value

    def items(self) -> Any:
        for value in super().values():
            self._read(value)
        return super().items()

    def values(self) -> Any:
        for value in super().values():
            self._read(value)
        return super().values()

    def replace(self, old: Any, new: Any) -> None:
        """Replaces `old` by `new`; the plain dictionary stays unchanged."""
        for name, value in super().items():
            if value is old:
                super().__setitem__(name, new)


class Access:
    """The watched and the plain dictionaries of every module of a model."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self._runtime = runtime
        self.buckets = tuple(runtime.buckets.values())
        self._place: dict[int, tuple[Bucket, int]] = {
            id(p): (b, slot) for b in runtime.buckets.values() for slot, p in enumerate(b.real)
        }
        self._plain = {m: m._parameters for m in model.modules() if any(p is not None for p in m._parameters.values())}
        self._watched: dict[nn.Module, _Watched] = {}

    def _read(self, parameter: Any) -> None:
        place = self._place.get(id(parameter))
        if place is not None:
            self._runtime.read(*place)

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """`new` is a real parameter in the place of `old`."""
        self._place[id(new)] = self._place.pop(id(old))
        for watched in self._watched.values():
            watched.replace(old, new)

    def of(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """The modules inside that hold parameters directly."""
        return tuple(m for m in module.modules() if m in self._plain)

    def watch(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Watches these modules (None: all), whose plain dictionaries hold the real parameters now."""
        for module in self._plain if modules is None else modules:
            watched = self._watched.get(module)
            if watched is None:
                watched = self._watched[module] = _Watched(self._plain[module], self._read)
            module.__dict__["_parameters"] = watched

    def unwatch(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Gives these modules (None: all) their plain dictionaries back."""
        for module in self._plain if modules is None else modules:
            module.__dict__["_parameters"] = self._plain[module]

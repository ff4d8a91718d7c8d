"""Reads of parameters that no call announced, such as `F.linear(x, self.embedding.weight)` in the root's forward.

While the engine computes, each module's `_parameters` is a dictionary that unshards a parameter's bucket when
the parameter is read. Dynamo shares one graph between equal modules only where `_parameters` is a plain
dict, so a compiled region gets its plain dicts back while it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeroweave._torch import use_count
from zeroweave.parameters.places import Places
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.runtime import Runtime

_Read = Callable[[Any], None]


class _Watched(dict[str, Any]):
    """A module's `_parameters` that tells when a parameter is read."""

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
        """Puts `new` where `old` stands; the plain dictionary is left alone."""
        for name, value in super().items():
            if value is old:
                super().__setitem__(name, new)


class Access:
    """The watched and the plain dictionaries of every module of a model."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self._runtime = runtime
        self.buckets, self.places = tuple(runtime.buckets.values()), runtime.directory.places
        self._bucket: dict[int, Bucket] = {id(p): b for b in runtime.buckets.values() for p in b.real}
        self._plain = {m: m._parameters for m in model.modules() if any(p is not None for p in m._parameters.values())}
        self._watched: dict[nn.Module, _Watched] = {}

    def _read(self, parameter: Any) -> None:
        bucket = self._bucket.get(id(parameter))
        if bucket is not None:
            self._runtime.read(bucket)

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """`new` is a real parameter in the place of `old`."""
        self._bucket[id(new)] = self._bucket.pop(id(old))
        for watched in self._watched.values():
            watched.replace(old, new)

    def watch(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Watches these modules (None: all), whose plain dictionaries hold the real parameters now."""
        for module in self._plain if modules is None else modules:
            if (plain := self._plain.get(module)) is not None:
                watched = self._watched.get(module)
                if watched is None:
                    watched = self._watched[module] = _Watched(plain, self._read)
                module.__dict__["_parameters"] = watched

    def unwatch(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Gives these modules (None: all) their plain dictionaries back."""
        for module in self._plain if modules is None else modules:
            if (plain := self._plain.get(module)) is not None:
                module.__dict__["_parameters"] = plain


def _hand_over(
    deliver: Callable[[int, int, torch.Tensor], None], bucket: int, slot: int
) -> Callable[[torch.Tensor], None]:
    def hook(view: torch.Tensor) -> None:
        gradient, view.grad = view.grad, None
        if gradient is not None:
            deliver(bucket, slot, gradient)

    return hook


class Shown:
    """What the modules show: real, watched parameters while anybody computes; else stubs, or views if open.

    The views are for users, who may keep them: they own a share of the flat, which then lingers. When their time
    is over (`close`, for real parameters the step), whatever parameter a user has kept becomes a stub.
    """

    def __init__(self, places: Places, access: Access) -> None:
        self._places, self._access = places, access
        self._count = 0
        self._views: dict[str, nn.Parameter] | None = None
        for bucket in access.buckets:
            bucket.attach(self._retire)
        self.show()  # once before users can keep anything: the buckets learn what is the engine's own
        self.hide()

    @property
    def views(self) -> dict[str, nn.Parameter]:
        """What `open` shows, by name."""
        assert self._views is not None
        return self._views

    def open(self, deliver: Callable[[int, int, torch.Tensor], None]) -> None:
        """Shows views of the gathered parameters to the user until `close`.

        A term of the loss that reads them has gradients too: `deliver(bucket id, slot, gradient)` gets those.
        """
        self._views = self._places.show_views()
        for name, view in self._views.items():
            if view.requires_grad:
                view.register_post_accumulate_grad_hook(_hand_over(deliver, *self._access.places[name]))

    def close(self) -> None:
        """Shows stubs again, and makes one of each view that the user has kept.

        A graph that reads views goes on with a copy: theirs are the values of now.
        """
        if self._views is not None:
            views, self._views = self._views, None
            self._places.show_stubs()
            while views:
                name, view = views.popitem()
                if sys.getrefcount(view) > 2:  # this name and the argument
                    content = self._places.retire(name, view)
                    if content is view or use_count(content) > 1:
                        content.data = content.data.clone()

    def show(self) -> None:
        """One more needs the real parameters."""
        if self._count == 0:
            self._places.show_real()
            self._access.watch()
            self._note(shown=True)
        self._count += 1

    def hide(self) -> None:
        """One less; with the last one the stubs return."""
        self._count -= 1
        if self._count == 0:
            self._access.unwatch()
            if self._views is None:
                self._places.show_stubs()
            else:
                self._places.show(self._views)
            self._note(shown=False)

    def _note(self, shown: bool) -> None:
        for bucket in self._access.buckets:
            bucket.note_shown(shown)

    def _retire(self, name: str, real: nn.Parameter) -> nn.Parameter:
        if self._count:
            return real  # the modules show it
        new = self._places.retire(name, real)
        if new is not real:
            self._access.replace(real, new)
        return new

    def reset(self) -> None:
        """After an exception: nobody computes any more."""
        while self._count:
            self.hide()

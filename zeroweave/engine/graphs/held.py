"""Tensors that a program has at hand beside parameters and buffers: in attributes of modules, and in its functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any, Final, NamedTuple

import torch

from zeroweave.engine.graphs.around import content_of

_DEPTH: Final = 4
"""Containers, objects and functions inside of each other are looked into so far."""
_OTHERS: Final = frozenset({"builtins", "torch", "zeroweave"})
"""Packages whose objects are not looked into: the engine's own tensors, and those of optimizers, are known."""


class Held(NamedTuple):
    """A tensor, what people call it, and how to find what is in its place later."""

    name: str
    find: Callable[[], object]
    tensor: torch.Tensor

    @property
    def is_there(self) -> bool:
        return self.find() is self.tensor


def lies(tensor: torch.Tensor) -> object:
    """Where, and how: with the same tensor it is another one after `tensor.data = …`, `set_` and `resize_`."""
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:  # it has no memory of its own
        return None


def held_by(model: torch.nn.Module) -> Iterator[Held]:
    """In the attributes of its modules, in what these consist of, and in the globals that forwards name."""
    modules = dict(model.named_modules())
    known = frozenset(map(id, modules.values()))
    for name, module in modules.items():
        for attribute, value in list(vars(module).items()):
            if attribute not in ("_parameters", "_buffers", "_modules"):
                at = f"{name}.{attribute}" if name else attribute
                yield from _within(value, at, partial(vars(module).get, attribute), _DEPTH - 2, known)
        forward, at = type(module).forward, f"{name}.forward" if name else "forward"
        yield from _within(forward, at, partial(_same, forward), _DEPTH - 2, known)


def captured_by(function: Any, known: Iterable[torch.nn.Module]) -> Iterator[Held]:
    """What a function has at hand: in its closure, defaults and object, and the globals that it names.

    `known`: modules that are looked into elsewhere.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    yield from _within(function, name, lambda: function, _DEPTH, frozenset(map(id, known)))


def _within(
    value: Any, name: str, find: Callable[[], object], depth: int, known: frozenset[int] = frozenset()
) -> Iterator[Held]:
    """`find` finds the value."""
    if isinstance(value, torch.Tensor):
        yield Held(name, find, value)
        return
    if not depth or id(value) in known:
        return
    for at, part, found in _parts(value, find):
        yield from _within(part, f"{name}{at}", found, depth - 1, known)


def _parts(value: Any, find: Callable[[], object]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """What a container or function consists of: where, what, and how to find it."""
    match value:
        case list() | tuple() | deque():
            yield from ((f"[{at}]", part, partial(_item, find, at)) for at, part in enumerate(value))
        case dict():
            yield from ((f"[{at!r}]", part, partial(_item, find, at)) for at, part in value.items())
        case torch.nn.Module():
            for held in (value._buffers, value._parameters, value._modules):
                yield from ((f".{at}", part, partial(held.get, at)) for at, part in held.items())
        case MethodType():
            yield from _named_by(value.__func__, value.__self__)
            yield "", value.__func__, lambda: value.__func__
        case FunctionType():
            for at, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield f".{at}", content_of(cell), partial(content_of, cell)
            for index, part in enumerate(value.__defaults__ or ()):
                yield f".{index}", part, partial(_item, lambda: value.__defaults__, index)
            for at in value.__code__.co_names:
                part = value.__globals__.get(at)
                if isinstance(part, torch.Tensor | torch.nn.Module):
                    yield f".{at}", part, partial(value.__globals__.get, at)
        case partial():
            yield "", value.func, lambda: value.func
            yield ".args", value.args, lambda: value.args
            yield ".keywords", value.keywords, lambda: value.keywords
        case _ if callable(value):
            yield from _named_by(type(value).__call__, value)
        case _ if type(value).__module__.partition(".")[0] not in _OTHERS:
            for at, part in attributes_of(value).items():
                yield f".{at}", part, partial(_attribute, find, at)


def _named_by(function: Any, owner: Any) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """The attributes of a method's object that its code names: others may change with each step."""
    if isinstance(owner, torch.nn.Module):
        yield ".__self__", owner, lambda: owner
    held = getattr(owner, "__dict__", {})
    for at in getattr(getattr(function, "__code__", None), "co_names", ()):
        if at in held:
            yield f".{at}", held[at], partial(held.get, at)


def _same(value: object) -> object:
    return value


def attributes_of(value: object) -> dict[str, Any]:
    """Of a plain object, with its slots; nothing is computed for it."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for at, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType) and hasattr(value, at):
                found[at] = slot.__get__(value)
    return found


def _attribute(find: Callable[[], object], at: str) -> object:
    return attributes_of(find()).get(at)


def _item(find: Callable[[], Any], at: Any) -> object:
    try:
        return find()[at]
    except (KeyError, IndexError, TypeError):
        return None

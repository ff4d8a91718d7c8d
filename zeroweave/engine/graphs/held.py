"""Tensors that a program has at hand beside parameters and buffers: in attributes of modules, and in its functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from zeroweave.engine.graphs.around import content_of

_DEPTH = 4
"""Containers and functions inside of each other are looked into so far."""


class Held(NamedTuple):
    """A tensor, what people call it, and how to find what is in its place later."""

    name: str
    find: Callable[[], object]
    tensor: torch.Tensor

    @property
    def is_there(self) -> bool:
        return self.find() is self.tensor


def held_by(model: torch.nn.Module) -> Iterator[Held]:
    """In the attributes of its modules, and in containers and functions among those."""
    modules = dict(model.named_modules())
    known = frozenset(map(id, modules.values()))
    for name, module in modules.items():
        for attribute, value in list(vars(module).items()):
            if attribute not in ("_parameters", "_buffers", "_modules"):
                at = f"{name}.{attribute}" if name else attribute
                yield from _within(value, at, partial(vars(module).get, attribute), _DEPTH - 2, known)


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
        case list() | tuple():
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


def _named_by(function: Any, owner: Any) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """The attributes of a method's object that its code names: others may change with each step."""
    if isinstance(owner, torch.nn.Module):
        yield ".__self__", owner, lambda: owner
    held = getattr(owner, "__dict__", {})
    for at in getattr(getattr(function, "__code__", None), "co_names", ()):
        if at in held:
            yield f".{at}", held[at], partial(held.get, at)


def _item(find: Callable[[], Any], at: Any) -> object:
    try:
        return find()[at]
    except (KeyError, IndexError, TypeError):
        return None

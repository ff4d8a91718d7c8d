"""Keeps Dynamo out of the package's own code: only what a region's frame runs is ever traced.

If Dynamo cannot capture a region's frame as a whole, it runs that frame eagerly and tries all functions called from
there: autograd's saved-tensors hooks, hooks on parameters, the dictionaries that watch reads, callbacks at the end of a
backward. Compiled, these would be separate graphs, kept by code object for the next engine, and autograd would count
their reads and writes as the model's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from types import CodeType, FunctionType, ModuleType

from torch import nn

from zeroweave._torch.dynamo import keep_from_dynamo


def keep_package_from_dynamo(package: str) -> None:
    """Frames of the loaded modules of `package` run as they are from now on, and so does all that they call.

    Models are left out: their forwards may be part of a region. What Dynamo inlines while it traces a region is inlined
    before. To be called again when more modules have been loaded.
    """
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for code in code_of(module):
                keep_from_dynamo(code)


def code_of(module: ModuleType) -> Iterator[CodeType]:
    """The code of every function and method that `module` defines, of what is defined inside them too."""
    for function in _functions(module, vars(module).values(), set()):
        yield from _with_inner(function.__code__)


def _functions(module: ModuleType, values: Iterable[object], seen: set[int]) -> Iterator[FunctionType]:
    for value in list(values):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        found: Iterable[object] = ()
        if isinstance(value, FunctionType):
            if value.__globals__ is vars(module):
                yield value
            found = vars(value).values()  # what a decorator wraps
        elif isinstance(value, property):
            found = value.fget, value.fset, value.fdel
        elif isinstance(value, cached_property | partial):
            found = (value.func,)
        elif hasattr(value, "cache_info"):
            found = (getattr(value, "__wrapped__", None),)  # what functools.cache wraps
        elif isinstance(value, type) and value.__module__ == module.__name__ and not issubclass(value, nn.Module):
            found = vars(value).values()
        if found and id(value) not in seen:
            seen.add(id(value))
            yield from _functions(module, found, seen)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)

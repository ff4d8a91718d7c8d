"""The units of compilation: the blocks and regions of a model.

Everything here looks at the module tree only: classes, names and shapes, never at values, so that it works
on models at rest, on `meta` and before any process group exists, and gives the same answer on all ranks. The exception
is `region_key`, which also looks at hooks, and distinguishes regions of one rank.

A **list** is an `nn.ModuleList` or `nn.Sequential`. It *repeats a class* if two of its entries are of one
class that holds parameters. Only outermost repeating lists count: what they contain belongs to their blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from zeroweave._torch.modules import hooks_as_called
from zeroweave.errors import ConfigError
from zeroweave.parameters.foreign import is_foreign


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of `model` as (qualified name, module), in model order; each module once.

    A block is a composite entry of an outermost list that repeats a class. A list whose repeated entries are
    leaves (`Sequential(Linear, ReLU, Linear)`) is one block itself if it can be called, as a Sequential can
    and a ModuleList cannot, and if nothing in it repeats a class on its own. A block may be a ModuleList that
    is never called itself: it is still one place for buckets (see `find_regions` for what is compiled).
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        known = module in seen
        seen.add(module)
        if known or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        entries = _entries(module)
        counts = Counter(_class(child) for child in entries.values() if has_parameters(child))
        repeated = [child for child in entries.values() if counts[_class(child)] > 1]
        if any(map(_is_composite, repeated)):
            for key, child in entries.items():
                if _is_composite(child) and has_parameters(child) and child not in seen:
                    seen.update(child.modules())
                    found.append((f"{name}.{key}" if name else key, child))
            seen.update(module.modules())
        elif repeated and _is_callable(module) and not any(map(find_blocks, entries.values())):
            seen.update(module.modules())
            found.append((name, module))
    return found


def find_regions(
    model: nn.Module, patterns: str | Sequence[str] = "auto", *, max_bytes: int
) -> list[tuple[str, nn.Module]]:
    """The modules of `model` that are compiled as one, by qualified name, in model order; none is inside another.

    "auto": every block that can be called (of one that cannot, its outermost composite members), and each
    outermost other module that has children and parameters and contains no block. In a model without blocks:
    the largest composite modules whose parameters take at most `max_bytes`, the model itself included.
    Otherwise `patterns` are shell patterns of qualified names (`"model.layers.*"`): the outermost modules with
    parameters that match one. A module known under two names is one region, under its first name.

    Raises ConfigError if a pattern matches no module that could be a region.
    """
    if not isinstance(patterns, str):
        return matching(model, patterns)
    if patterns != "auto":
        raise ConfigError(f'compile.regions is "auto" or a list of name patterns, not {patterns!r}')
    blocks = find_blocks(model)
    if not blocks:
        return _outermost(model, lambda module: _can_be_region(module) and _fits(module, max_bytes))
    above = {parent for name, _ in blocks for parent in _parents(model, name)}
    return _outermost(model, lambda module: module not in above and _can_be_region(module))


def find_units(model: nn.Module, patterns: str | Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules whose parameters go together, as (qualified name, module); a parameter belongs to the first it is in.

    Those are the regions that `patterns` name, compiled or not, and then the blocks.
    """
    named = [] if isinstance(patterns, str) else matching(model, patterns)
    return [*named, *find_blocks(model)]


def _outermost(model: nn.Module, is_one: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    """The outermost modules for which `is_one` says so, in model order, each under its first name."""
    found: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and is_one(module):
            inside.update(module.modules())
            found.append((name, module))
    return found


def _can_be_region(module: nn.Module) -> bool:
    return _is_callable(module) and has_parameters(module) and _is_composite(module)


def _fits(module: nn.Module, max_bytes: int) -> bool:
    return sum(p.numel() * p.element_size() for p in module.parameters()) <= max_bytes


def matching(model: nn.Module, patterns: Sequence[str], key: str = "compile.regions") -> list[tuple[str, nn.Module]]:
    """The outermost modules with parameters whose names match one of these, as (qualified name, module).

    ConfigError that names the `key` of the config for a pattern that no module matches.
    """
    candidates = {m: name for name, m in model.named_modules() if has_parameters(m) and _is_callable(m)}
    hits = {pattern: {m for m, name in candidates.items() if fnmatchcase(name, pattern)} for pattern in patterns}
    if missing := [pattern for pattern in patterns if not hits[pattern]]:
        raise ConfigError(
            f"[ZW106] {key}: no module with parameters matches {', '.join(map(repr, missing))}; "
            "patterns are matched against the qualified names of model.named_modules()"
        )
    return _outermost(model, set().union(*hits.values()).__contains__)


def call_modules(model: nn.Module, regions: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The modules outside all `regions` that hold parameters directly, in model order.

    They run eagerly, and each execution is a separate call.
    """
    inside = {module for _, region in regions for module in region.modules()}
    return [
        (name, module)
        for name, module in model.named_modules()
        if module not in inside and any(p is not None and not is_foreign(p) for p in module._parameters.values())
    ]


def region_key(module: nn.Module) -> Hashable:
    """What two regions have in common if they can share a template: classes, names, shapes, dtypes and hooks.

    Regions with different keys get wrappers of their own in `Templates`, so that Dynamo's recompile limit
    counts only real variants and sizes that differ between regions are not taken for dynamic ones.
    """
    modules = tuple((name, _class(child)) for name, child in module.named_modules(remove_duplicate=False))
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters(remove_duplicate=False)
    )
    hooks = tuple(
        (name, kind, _identity(hook), *how)
        for name, child in module.named_modules(remove_duplicate=False)
        for kind, hook, *how in hooks_as_called(child)
    )
    return modules, parameters, hooks


def _identity(hook: Callable[..., Any]) -> tuple[int, ...]:
    """Equal for equal hooks; Python makes a new method object each time that a method is accessed."""
    if isinstance(hook, MethodType):
        return id(hook.__self__), id(hook.__func__)
    return (id(hook),)


def has_parameters(module: nn.Module) -> bool:
    """True if `module` or a module inside it holds a parameter."""
    return next(module.parameters(), None) is not None


def _entries(module: nn.Module) -> dict[str, nn.Module]:
    """Children with repetitions: a list may hold one module several times."""
    return {key: child for key, child in module._modules.items() if child is not None}


def _parents(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules on the way from `model` to the module called `name`, that one excluded."""
    module = model
    for part in name.split(".") if name else ():
        yield module
        module = module.get_submodule(part)


def _class(module: nn.Module) -> type[nn.Module]:
    """The module's class; parametrizations (weight_norm) give every module its own class."""
    return cast(type[nn.Module], type_before_parametrizations(module))


def _is_composite(module: nn.Module) -> bool:
    return any(key != "parametrizations" for key, _ in module.named_children())


def _is_callable(module: nn.Module) -> bool:
    """True if the class defines a forward; ModuleList and ModuleDict do not."""
    return type(module).forward is not nn.Module.forward

"""What of a model must stay as it was at `initialize`: which modules have parameters, and how these compute."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from zeroweave._torch.modules import child_modules, is_compiled_function, parameter_entries
from zeroweave.errors import ParameterError


class Anatomy:
    """The modules of a model, each under the module that holds it, and the names of their parameters.

    Costs a reference for each, and a look at each in `check`.
    """

    def __init__(self, model: nn.Module) -> None:
        own = {id(module) for module in model.modules() if next(module.parameters(), None) is not None}
        named = [(name or "the model", module) for name, module in model.named_modules() if id(module) in own]
        self._attributes = [(name, vars(module)) for name, module in named]
        self._children = [
            (f"{name}.{child}" if module is not model else child, child_modules(module), child, inner)
            for name, module in named
            for child, inner in module.named_children()
            if id(inner) in own
        ]
        self._paths: list[str] = []
        """of all modules, with a dot behind, and of each:"""
        self._inside: list[dict[str, nn.Module | None]] = []
        self._entries: list[dict[str, nn.Parameter | None]] = []
        self._names: list[frozenset[str]] = []
        """of its entries, at first"""
        self._empty: list[tuple[str, dict[str, nn.Parameter | None], str]] = []
        """where no parameter stands, such as a bias that is left out"""
        self._add("", model)
        self._inner, self._known, self._sizes = self._now()
        """what `check` has accepted; children that it keeps alive are known by `id`, with what they are in"""

    def check(self) -> None:
        """ParameterError that names what was replaced or has come, or every module whose forward was compiled."""
        replaced = [name for name, children, child, inner in self._children if children.get(child) is not inner]
        if replaced:
            raise ParameterError(
                f"{', '.join(replaced)}: the module was replaced or deleted since zeroweave.initialize (as "
                "resize_token_embeddings(...) does), so its parameters would not be trained; call engine.destroy(), "
                "change the model, and initialize again with a new optimizer"
            )
        if came := [*self._modules_that_came(), *self._parameters_that_came()]:
            raise ParameterError(
                f"{', '.join(came)}: added to the model since zeroweave.initialize, so its parameters would not be "
                "trained, the same on all ranks, or saved; call engine.destroy(), add it, and initialize again, or "
                "keep what stays frozen outside of the model, in a list for instance"
            )
        compiled = [name for name, own in self._attributes if "forward" in own and is_compiled_function(own["forward"])]
        if compiled:
            raise ParameterError(
                f"{', '.join(compiled)}: forward was compiled with torch.compile under an engine; leave that out, "
                "the engine compiles its regions"
            )

    def _modules_that_came(self) -> list[str]:
        """The names of those with parameters; others may come, and are watched from now on."""
        if self._inner_now() == self._inner:
            return []
        new = [
            (f"{path}{name}", module)
            for path, inside in zip(self._paths, self._inside, strict=True)
            for name, module in inside.items()
            if module is not None and (id(inside), id(module)) not in self._known
        ]
        if came := [name for name, module in new if next(module.parameters(), None) is not None]:
            return came
        for name, module in new:
            self._add(f"{name}.", module)
        self._inner, self._known, self._sizes = self._now()
        return []

    def _parameters_that_came(self) -> Iterator[str]:
        yield from (place for place, entries, name in self._empty if entries.get(name) is not None)
        if self._sizes_now() != self._sizes:
            for path, entries, names in zip(self._paths, self._entries, self._names, strict=True):
                yield from (f"{path}{name}" for name, p in entries.items() if p is not None and name not in names)

    def _add(self, path: str, module: nn.Module) -> None:
        """This module and those inside of it are watched."""
        for name, each in module.named_modules():
            place, inside, entries = f"{path}{name}{name and '.'}", child_modules(each), parameter_entries(each)
            self._paths.append(place)
            self._inside.append(inside)
            self._entries.append(entries)
            self._names.append(frozenset(entries))
            self._empty += ((f"{place}{name}", entries, name) for name, entry in entries.items() if entry is None)

    def _now(self) -> tuple[list[tuple[nn.Module | None, ...]], set[tuple[int, int]], list[int]]:
        known = {(id(inside), id(module)) for inside in self._inside for module in inside.values()}
        return self._inner_now(), known, self._sizes_now()

    def _inner_now(self) -> list[tuple[nn.Module | None, ...]]:
        """Of each module that has some. Asked in each step, of all modules, as is the next."""
        return list(map(tuple, map(dict.values, filter(None, self._inside))))

    def _sizes_now(self) -> list[int]:
        return list(map(len, self._entries))

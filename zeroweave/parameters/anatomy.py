"""What of a model must stay as it was at `initialize`: which modules have parameters, and how these compute."""

from __future__ import annotations

from torch import nn

from zeroweave._torch.modules import child_modules, is_compiled_function, parameter_entries
from zeroweave.errors import ParameterError

_NAMED = 6
"""So many of the parameters that have come are named in an error."""


class Anatomy:
    """The modules of a model, each under the module that holds it, and the names of its parameters.

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
        self._model = model
        self._names = self._names_now()
        self._seen = _Seen(model)
        """what `check` has found in order"""

    def check(self) -> None:
        """ParameterError that names what was replaced or has come, or every module whose forward was compiled."""
        replaced = [name for name, children, child, inner in self._children if children.get(child) is not inner]
        if replaced:
            raise ParameterError(
                f"{', '.join(replaced)}: the module was replaced or deleted since zeroweave.initialize (as "
                "resize_token_embeddings(...) does), so its parameters would not be trained; call engine.destroy(), "
                "change the model, and initialize again with a new optimizer"
            )
        if not self._seen.holds:
            if came := [name for name in self._names_now() if name not in self._names]:
                more = f" and {len(came) - _NAMED} more" if len(came) > _NAMED else ""
                raise ParameterError(
                    f"{', '.join(came[:_NAMED])}{more}: added to the model since zeroweave.initialize, so it would not "
                    "be trained, the same on all ranks, or saved; call engine.destroy(), add it, and initialize again, "
                    "or keep what stays frozen outside of the model, in a list for instance"
                )
            self._seen = _Seen(self._model)
        compiled = [name for name, own in self._attributes if "forward" in own and is_compiled_function(own["forward"])]
        if compiled:
            raise ParameterError(
                f"{', '.join(compiled)}: forward was compiled with torch.compile under an engine; leave that out, "
                "the engine compiles its regions"
            )

    def _names_now(self) -> dict[str, None]:
        """All names of all parameters, in the model's order."""
        return dict.fromkeys(name for name, _ in self._model.named_parameters(remove_duplicate=False))


class _Seen:
    """Which modules a model has, and where parameters stand in each, at the moment."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._inside = [child_modules(module) for module in modules]
        self._entries = [parameter_entries(module) for module in modules]
        self._empty = [(entries, name) for entries in self._entries for name, entry in entries.items() if entry is None]
        """where none stands, such as a bias that is left out"""
        self._inner, self._sizes = self._inner_now(), self._sizes_now()

    @property
    def holds(self) -> bool:
        """Is nothing else there? Asked in each step, of all modules, so it takes what Python does at once."""
        return (
            self._inner_now() == self._inner
            and self._sizes_now() == self._sizes
            and all(entries.get(name) is None for entries, name in self._empty)
        )

    def _inner_now(self) -> list[tuple[nn.Module | None, ...]]:
        """The children of each module that has some."""
        return list(map(tuple, map(dict.values, filter(None, self._inside))))

    def _sizes_now(self) -> list[int]:
        return list(map(len, self._entries))

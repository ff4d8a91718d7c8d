"""What of a model must stay as it was at `initialize`: its parameters, the modules that have them, how they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from zeroweave._torch.modules import Inside, child_modules, is_compiled_function
from zeroweave.errors import ParameterError, listed
from zeroweave.parameters.foreign import is_foreign
from zeroweave.parameters.stub import AtRest


class StructureCheck:
    """The modules of a model that have parameters, each under the module that holds it.

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
        self._model, self._inside = model, Inside(model)

    def check(self, own: Callable[[], Iterable[nn.Parameter]]) -> None:
        """ParameterError that names what was replaced or has come, or every module whose forward was compiled.

        `own()`: the parameters that the model may have, under any names, besides some that are at rest.
        """
        replaced = [name for name, children, child, inner in self._children if children.get(child) is not inner]
        if replaced:
            raise ParameterError(
                f"[ZW205] {', '.join(replaced)}: the module was replaced or deleted since zeroweave.initialize (as "
                "resize_token_embeddings(...) does), so its parameters would not be trained; call engine.destroy(), "
                "change the model, and initialize again with a new optimizer"
            )
        if not self._inside.holds:
            known = set(map(id, own()))
            named = self._model.named_parameters(remove_duplicate=False)
            if came := [name for name, p in named if not (id(p) in known or isinstance(p, AtRest) or is_foreign(p))]:
                raise ParameterError(
                    f"[ZW205] {listed(came, 6)}: added to the model since zeroweave.initialize, so it "
                    "would not be trained, the same on all ranks, or saved; call engine.destroy(), add it, and "
                    "initialize again, or keep what stays frozen outside of the model, in a list for instance"
                )
            self._inside = Inside(self._model)
        compiled = [name for name, own in self._attributes if "forward" in own and is_compiled_function(own["forward"])]
        if compiled:
            raise ParameterError(
                f"[ZW205] {', '.join(compiled)}: forward was compiled with torch.compile under an engine; leave that "
                "out, the engine compiles its regions"
            )

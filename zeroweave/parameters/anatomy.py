"""What of a model must stay as it was at `initialize`: its modules with parameters, and how they compute."""

from __future__ import annotations

from torch import nn

from zeroweave._torch.modules import child_modules, is_compiled_function
from zeroweave.errors import ParameterError


class Anatomy:
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

    def check(self) -> None:
        """ParameterError that names every module that was replaced, or whose forward was compiled."""
        replaced = [name for name, children, child, inner in self._children if children.get(child) is not inner]
        if replaced:
            raise ParameterError(
                f"{', '.join(replaced)}: the module was replaced or deleted since zeroweave.initialize (as "
                "resize_token_embeddings(...) does), so its parameters would not be trained; call engine.destroy(), "
                "change the model, and initialize again with a new optimizer"
            )
        compiled = [name for name, own in self._attributes if "forward" in own and is_compiled_function(own["forward"])]
        if compiled:
            raise ParameterError(
                f"{', '.join(compiled)}: forward was compiled with torch.compile under an engine; leave that out, "
                "the engine compiles its regions"
            )

"""Puts the calls of a model's regions and other modules in place, and takes them out again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn

from zeroweave._torch.autograd import allowing_hooks_again, recomputing, refuses_hooks
from zeroweave._torch.fx import flatten, map_tensors
from zeroweave._torch.modules import Hooks
from zeroweave.compile.lower import Code, compile_graph
from zeroweave.compile.progress import Announcer
from zeroweave.compile.regions import call_modules, find_regions, region_key
from zeroweave.compile.templates import Templates
from zeroweave.config import Config
from zeroweave.eager.access import Access
from zeroweave.eager.chunked_loss import Head
from zeroweave.eager.handles import SavedTensors
from zeroweave.eager.hooks import Compiled, ModuleCall, own_outputs
from zeroweave.eager.parameter_visibility import ParameterVisibility
from zeroweave.errors import EngineError
from zeroweave.notices import Journal, warn
from zeroweave.parameters.foreign import own_parameters
from zeroweave.runtime.runtime import Runtime

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor] | Literal["chunked"] | None
"""See `Engine.train_step`."""

_HOOKED: Final = (
    "hooks of its modules have come or gone since zeroweave.initialize, and compiled code has those that were there "
    "then: register what stays before it, and remove what has come to train compiled again"
)
_PARTLY: Final = (
    "a hook of register_backward_hook sees what a module's last operator gives it, which compiled code has no more: "
    "register_full_backward_hook does in compiled code what it does elsewhere"
)
_FUNCTIONAL: Final = (
    "torch.func.grad, vjp, jacrev or hessian inside of the model's forward: they take no hooks for saved tensors, and "
    "engines need these to have parameters there again in the backward. Use torch.autograd.grad on the parameters, or "
    "on those of functional_call, which trains as in a plain model"
)


class Calls:
    """The calls of one engine.

    `in_first_step()`: true if that step runs now. `code`: what turns a template's graph into code.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        config: Config,
        access: Access,
        shown: ParameterVisibility,
        device_type: str,
        rank: int,
        journal: Journal,
        in_first_step: Callable[[], bool],
        code: Code = compile_graph,
    ) -> None:
        self._model, self._runtime, self._shown = model, runtime, shown
        self._rank, self._journal = rank, journal
        self._dtype = None if config.precision.params is None else getattr(torch, config.precision.params)
        wanted = config.precision.autocast
        self._autocast = None if wanted is None else getattr(torch, wanted)
        self._device_type = device_type
        self.eager_regions: dict[str, str] = {}
        """the regions that Dynamo gave up on, or whose hooks it does not know, by name, with the reason"""
        self._told_eager: set[str] = set()
        self._compiling = False
        """true if regions that are called now run compiled"""
        self._told_cache = False
        self._saving = SavedTensors(runtime)
        regions = find_regions(model, config.compile.regions, max_bytes=config.bucket.bytes)
        self.regions = len(regions)
        self.templates: Templates | None = None
        if config.compile.enabled:
            c, names = config.compile, {module: name for name, module in regions}
            announcer = Announcer.on_terminal(self._rank, in_first_step)
            # Where nothing is freed, nothing that compiled code saves needs them.
            hooks = None if runtime.activations.moves or runtime.frees_flats else self._saving
            self.templates = Templates(
                runtime, names, c.lower, c.recompile_limit, c.activation_budget, announcer, journal, code, hooks
            )

        slot_of = {id(p): runtime.directory.slots[name] for name, p in own_parameters(model).items()}

        def call(name: str, module: nn.Module, recurse: bool, compiled: Compiled | None = None) -> ModuleCall:
            slots = [slot_of[id(p)] for p in module.parameters(recurse) if id(p) in slot_of]
            return ModuleCall(name, module, slots, runtime, access, self.session, self.run, compiled)

        outside = call_modules(model, regions)
        self.eager_modules = tuple(name for name, _ in outside)
        """modules outside of all regions, by name"""
        self._calls = [call(name, module, recurse=False) for name, module in outside]
        for name, module in regions:
            compiled = None
            if self.templates is not None:
                compiled = self._compiled(name, module, self.templates, config.compile.dynamic)
            self._calls.append(call(name, module, recurse=True, compiled=compiled))
        for made in self._calls:
            made.install()
        self._chunked = config.loss == "chunked"
        if self._chunked:
            self._head()  # an error now rather than in the first step

    def _compiled(self, name: str, module: nn.Module, templates: Templates, dynamic: bool | None) -> Compiled:
        key = region_key(module)

        def fell_back() -> None:
            if name not in self.eager_regions:
                self._tell_eager(name, templates.fallback_reason(key, module))

        hooks = Hooks(module)
        compiled_with = None if hooks.partly() else hooks.now()

        def wanted() -> bool:
            if not self._compiling:
                return False
            if hooks.now() == compiled_with:
                if self.eager_regions.get(name) == _HOOKED:
                    del self.eager_regions[name]
                return True
            if name not in self.eager_regions:
                self._tell_eager(name, _PARTLY if compiled_with is None else _HOOKED)
            return False

        run = templates.compile(key, dynamic)
        templates.announcer.expect(key, name)
        return Compiled(run, wanted, fell_back)

    def _tell_eager(self, name: str, reason: str) -> None:
        """A region trains eagerly; told once for each reason."""
        if reason not in self._told_eager:
            self._told_eager.add(reason)
            self._journal.warn("fallback", f"{name or 'the model'} trains eagerly, exact but slower: {reason}")
        self.eager_regions[name] = reason

    @contextmanager
    def session(self, inputs: Hashable = None) -> Iterator[None]:
        """The outermost forward: real parameters in the modules, handles for what eager code saves.

        `inputs`: see `Runtime.begin_session`.
        """
        self._shown.show()
        try:
            self._runtime.begin_session(inputs)
            # A recomputation's saved tensors are for the checkpoint's own hooks, which must stay innermost.
            with allowing_hooks_again(), nullcontext() if recomputing() else self._saving:
                yield
            self._runtime.end_session()
        except BaseException as error:
            self._runtime.abort_session()
            if refuses_hooks(error):
                raise EngineError(_FUNCTIONAL) from error
            raise
        finally:
            self._shown.hide()

    def _head(self) -> Head:
        """The call of the layer that makes the logits. EngineError where that does not run by itself."""
        found = getattr(self._model, "get_output_embeddings", lambda: None)()
        eager = (call for call in self._calls if call.name in self.eager_modules)
        call = next((call for call in eager if call.module is found), None)
        kind = type(self._model).__name__
        if call is None:
            raise EngineError(
                f"[ZW401] loss 'chunked': {kind}.get_output_embeddings() names no layer that runs by itself: let it "
                "return the torch.nn.Linear that makes the logits, let compile.regions name blocks that do not have it "
                "inside, or leave loss 'chunked' out"
            )
        return Head(call, kind)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], chunked: bool = False) -> Any:
        """Runs the model. `chunked`: as with the config's `loss` "chunked", its logits are never whole."""
        chunked = (chunked or self._chunked) and torch.is_grad_enabled()
        with self._head().waiting() if chunked else nullcontext():
            return self.run(self._model, args, self._without_cache(dict(kwargs)))

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the model, or a method that is marked as a forward, with floating tensors in `precision.params`."""
        if self._runtime.in_session:
            return function(*args, **kwargs)
        if (dtype := self._dtype) is not None:

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(dtype) if tensor.is_floating_point() else tensor

            args, kwargs = map_tensors(cast, tuple(args)), map_tensors(cast, dict(kwargs))
        graphs, shapes = self._runtime.graphs, None
        if graphs is not None:
            leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
            shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
        with self.session(shapes), self.compiling():
            result = own_outputs(function(*args, **kwargs), self._runtime)
            return result if graphs is None else map_tensors(graphs.own, result)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Regions that are called inside run compiled, everywhere else eagerly; `precision.autocast` holds inside."""
        before, self._compiling = self._compiling, True
        try:
            casts = self._autocast is not None
            # Without autocast's cache, which would hold a cast copy of every parameter until the end of the forward.
            with torch.autocast(self._device_type, self._autocast, cache_enabled=False) if casts else nullcontext():
                yield
        finally:
            self._compiling = before

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """`kwargs` with `use_cache=False` for a transformers model that would make a key-value cache.

        With a cache every layer reads its own index, and none shares its template with another. A caller that
        passes `use_cache` or a cache gets it.
        """
        if self.templates is None or not getattr(getattr(self._model, "config", None), "use_cache", False):
            return kwargs
        if "use_cache" in kwargs or kwargs.get("past_key_values") is not None:
            return kwargs
        parameters = inspect.signature(self._model.forward).parameters
        if "use_cache" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return kwargs
        if not self._told_cache:
            self._told_cache = True
            warn(
                "the model's config asks for a key-value cache (use_cache=True), with which every layer would be "
                "compiled anew: the engine passes use_cache=False; pass use_cache=True in the call to keep it",
                self._rank,
            )
        return {**kwargs, "use_cache": False}

    def remove(self) -> None:
        """The modules call themselves again."""
        for call in self._calls:
            call.remove()
        if self.templates is not None:
            self.templates.close()


def loss_of(output: Any, batch: Any, loss: Loss) -> torch.Tensor:
    """See `Engine.train_step`."""
    if callable(loss):
        found, giver = loss(output, batch), "loss"
    elif loss in (None, "chunked"):
        found, giver = output if isinstance(output, torch.Tensor) else output.loss, "the output's .loss"
    else:
        raise TypeError(f"[ZW401] loss={loss!r} in train_step(): pass a function of output and batch, or 'chunked'")
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"[ZW401] train_step() needs a tensor as its loss; {giver} gave it something of {type(found)}")
    return found


def arguments_of(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What `Engine.train_step` calls the module with."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, tuple | list) else (batch,)), {}

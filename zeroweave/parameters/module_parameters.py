"""Parameters at rest: between engine calls the user's own Parameter objects are stubs that refuse values.

A parameter whose storage was freed must not be reachable: PyTorch dies on it. So `rest` exchanges the
content of every parameter object for a stub (`AtRest`), and every earlier reference, those in optimizer
groups included, is one from then on. While the engine computes, `ModuleParameters` puts its real parameters into the
modules, and takes them out again.

    at rest      modules and earlier references both show stubs
    shown        modules show other parameters (the engine's real ones); earlier references still refuse
    restored     every object is an ordinary Parameter again; the stubs are gone
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroweave._torch.modules import (
    Inside,
    child_modules,
    is_compiled_function,
    parameter_entries,
    refresh_rnn_weights,
    watch_rnn_weights,
)
from zeroweave._torch.tensors import exchange, put_hooks, tensor_hooks
from zeroweave.errors import ParameterError, listed
from zeroweave.parameters.foreign import is_foreign, names_of, own_parameters
from zeroweave.parameters.stub import VALUES, AtRest, Showing, StubStatus


def rest(model: nn.Module, status: StubStatus, real: Callable[[str, nn.Parameter], nn.Parameter]) -> ModuleParameters:
    """Puts all parameters of `model` to rest, or none. `check_structure(model)` must have passed.

    `real(name, parameter)` is called once for each distinct parameter, in model order, before anything is
    changed; it returns the engine's real Parameter, a new object whose shape, stride, dtype, device and
    `requires_grad` the stub takes over. The content of the old object is dropped and must not be used for
    autograd again, because `swap_tensors` poisons it; `status` has its hooks. Errors of `real` pass through;
    ParameterError where a parameter cannot be swapped.
    """
    named = own_parameters(model)
    reals = {name: real(name, parameter) for name, parameter in named.items()}
    rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    swapped: list[tuple[nn.Parameter, torch.Tensor]] = []
    current = ""
    other: torch.Tensor
    for rnn in rnns:
        watch_rnn_weights(rnn, watch=False)
    try:
        for current, parameter in named.items():
            other = AtRest(reals[current], current, status)
            vars(other).update({**vars(parameter), **vars(other)})
            torch.utils.swap_tensors(parameter, other)
            swapped.append((parameter, other))
            vars(reals[current]).update(vars(other))
        status.hooks.update((name, hooks) for name, stub in named.items() if (hooks := tensor_hooks(stub)))
        return ModuleParameters(model, status, named, reals)
    except BaseException as error:
        for parameter, other in reversed(swapped):
            torch.utils.swap_tensors(parameter, other)
        for rnn in rnns:
            watch_rnn_weights(rnn, watch=True)
        if isinstance(error, RuntimeError):
            raise ParameterError(
                f"[ZW202] parameter {current!r} cannot be put to rest; nothing was changed: {error}"
            ) from error
        raise


class ModuleParameters:
    """Every (module, name) where a parameter of the model stands, and what stands there.

    `names` maps canonical names, in model order, to stubs, and `all_names` to all names of each. `aliases` maps the
    further names of tied parameters to canonical ones. Costs two lists of references. Built by `rest`.
    """

    def __init__(
        self, model: nn.Module, status: StubStatus, stubs: Mapping[str, nn.Parameter], reals: Mapping[str, nn.Parameter]
    ) -> None:
        self.names: dict[str, nn.Parameter] = dict(stubs)
        canonical = {id(stub): name for name, stub in stubs.items()}
        self.all_names = names_of(model)
        self.aliases = {alias: name for name, known in self.all_names.items() for alias in known[1:]}
        self.status = status
        self._entries: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self._labels: list[str] = []  # the name of each place for errors
        self._owners: list[str] = []  # the canonical name of the parameter that belongs there
        self._rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        self.hooks: list[RemovableHandle] = []
        """those of the modules' state dicts that are the engine's own"""
        for path, module in model.named_modules():
            entries = parameter_entries(module)
            for name, stub in entries.items():
                if stub is not None and not is_foreign(stub):
                    self._entries.append((entries, name))
                    self._labels.append(f"{path}.{name}" if path else name)
                    self._owners.append(canonical[id(stub)])
            first = next((p for p in module.parameters() if not is_foreign(p)), None)
            if first is not None:
                self.hooks += _StateDictGuard(module, path, canonical[id(first)], status).handles
        self._stubs = [self.names[name] for name in self._owners]
        self._reals = [reals[name] for name in self._owners]
        self._shown = self._stubs
        self._structure = _StructureCheck(model)

    def check(self) -> None:
        """ParameterError if modules with parameters, or parameters, were replaced, or others have come."""
        if replaced := self._replaced():
            self._refuse(replaced, self.status.showing)
        # A forward may have given a real one another name.
        self._structure.check(lambda: (*self._shown, *self._reals))

    def show(self, parameters: Mapping[str, nn.Parameter] | None = None, showing: Showing = Showing.REAL) -> None:
        """Puts these, by canonical name, into the modules, which show `showing` then. None: the real parameters.

        ParameterError, with nothing changed, if someone replaced an entry or a module meanwhile.
        """
        wanted = self._reals if parameters is None else [parameters[name] for name in self._owners]
        if wanted is not self._shown:
            self.check()
            self._put(wanted, frozenset())
        self.status.show(showing)

    def views(self) -> dict[str, nn.Parameter]:
        """New Parameters over the memory of the real ones, by canonical name, for code that may keep what it gets.

        User code must not keep a real parameter longer than its storage. These own a share of the storage and keep it
        from being freed.
        """
        views: dict[str, nn.Parameter] = {}
        for name, real in zip(self._owners, self._reals, strict=True):
            if name not in views:
                views[name] = nn.Parameter(real.detach(), requires_grad=real.requires_grad)
                vars(views[name]).update(vars(real))
        return views

    def show_stubs(self) -> None:
        """Puts the stubs back. No-op if they are there.

        An entry that someone replaced meanwhile stays, and is named by the ParameterError that
        is raised after all others are at rest.
        """
        replaced, showing = self._replaced(), self.status.showing
        self._put(self._stubs, replaced)
        self.status.show(Showing.STUBS)
        if replaced:
            self._refuse(replaced, showing)

    def retire(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Makes a real parameter, or a view of one, a stub for all who refer to it, while the modules do not show it.

        Returns a new object with its content, hooks and graphs, which is the real one from now on; `parameter`
        itself, unchanged, where some C++ code refers to it weakly.
        """
        torch.clear_autocast_cache()  # weak references, of which an open `torch.autocast` makes new ones
        other: torch.Tensor = AtRest(parameter, name, self.status)
        vars(other).update({**vars(parameter), **vars(other)})
        try:
            exchange(parameter, other)
        except RuntimeError:
            return parameter
        content = cast(nn.Parameter, other)
        self._reals = [content if real is parameter else real for real in self._reals]
        return content

    def restore(self, values: Callable[[str], torch.Tensor]) -> None:
        """Makes every parameter object of the user an ordinary Parameter again, with `values(name)` in it.

        Each value must be a separate full tensor; it is not copied. Hooks on modules are removed. Entries
        that someone replaced keep what they hold. If `values` raises, the parameters that it had not
        answered for stay at rest and `restore` can be called again. ParameterError, with nothing restored,
        if a stub is weakly referenced.
        """
        self._put(self._stubs, self._replaced())
        resting = {name: stub for name, stub in self.names.items() if isinstance(stub, AtRest)}
        held = [name for name, stub in resting.items() if weakref.getweakrefs(stub)]
        if held:
            raise ParameterError(
                f"[ZW210] parameters {', '.join(held)} are weakly referenced and cannot be restored; "
                "drop the references (weakref.ref, WeakKeyDictionary) and try again"
            )
        for name, stub in resting.items():
            full = nn.Parameter(values(name), requires_grad=stub.requires_grad)
            full.__dict__.update({key: value for key, value in vars(stub).items() if key not in _OWN})
            torch.utils.swap_tensors(stub, full)
            put_hooks(stub, self.status.hooks.get(name, OrderedDict()))
        for rnn in self._rnns:
            refresh_rnn_weights(rnn)
            watch_rnn_weights(rnn, watch=True)
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()

    def _replaced(self) -> frozenset[int]:
        """The places that do not hold what was put there."""
        places = zip(self._entries, self._shown, strict=True)
        return frozenset([i for i, ((entries, name), old) in enumerate(places) if entries.get(name) is not old])

    def _put(self, wanted: list[nn.Parameter], but: frozenset[int]) -> None:
        if wanted is self._shown:
            return
        for i, ((entries, name), new) in enumerate(zip(self._entries, wanted, strict=True)):
            if i not in but:
                entries[name] = new
        for rnn in self._rnns:
            refresh_rnn_weights(rnn)
        self._shown = wanted

    def _refuse(self, replaced: frozenset[int], showing: Showing) -> NoReturn:
        """`showing`: what the modules showed when these were replaced."""
        labels = ", ".join(self._labels[i] for i in sorted(replaced))
        where = "with copy_()" if showing in (Showing.OPEN, Showing.LENT) else "inside `with engine.full_parameters():`"
        raise ParameterError(
            f"[ZW205] {labels}: replaced or deleted in the module since zeroweave.initialize, so it would not be "
            f"trained; assign values {where} instead, or call engine.destroy(), replace it, and initialize again with "
            "a new optimizer; torch.func.functional_call of a model replaces them, too: give it one without an engine"
        )


_OWN = frozenset(("_zeroweave_name", "_zeroweave_status", "_is_param"))


class _StateDictGuard:
    """Hooks on one module: its state dicts are refused at rest, and independent copies where views of flats are open.

    They are methods of an object so that copying and pickling the module, hooks included, can be refused.
    """

    def __init__(self, module: nn.Module, path: str, parameter: str, status: StubStatus) -> None:
        self._where = f"of {path!r}, parameter {parameter!r}" if path else f"with parameter {parameter!r}"
        self._own = tuple(name for name, p in parameter_entries(module).items() if p is None or not is_foreign(p))
        self._status = status
        self.handles: list[RemovableHandle] = [
            module.register_state_dict_pre_hook(self._before_save),
            module.register_state_dict_post_hook(functools.partial(self._after_save)),  # it gets an attribute
            module.register_load_state_dict_pre_hook(self._before_load),
        ]

    def _refuse_at_rest(self, what: str) -> None:
        if self._status.showing not in (Showing.OPEN, Showing.LENT):
            raise ParameterError(f"[ZW203] {what} {self._where}: {VALUES}")

    def _before_save(self, *_: object) -> None:
        self._refuse_at_rest("state_dict()")

    def _after_save(self, _: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        for key in (prefix + name for name in self._own):
            if self._status.showing is Showing.OPEN and isinstance(state.get(key), torch.Tensor):
                state[key] = state[key].detach().clone()

    def _before_load(self, _: nn.Module, __: object, prefix: str, metadata: Mapping[str, Any], *___: object) -> None:
        self._refuse_at_rest("load_state_dict()")
        if metadata.get("assign_to_params_buffers"):
            raise ParameterError(
                f"[ZW205] load_state_dict(assign=True) {self._where}: it would replace what the engine shards; "
                "leave assign out, or use engine.load_state_dict()"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ParameterError(
            f"[ZW203] copying or pickling the module {self._where}: it belongs to an engine; build a new one and "
            "load engine.state_dict() into it"
        )


class _StructureCheck:
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

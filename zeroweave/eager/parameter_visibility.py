"""What the modules of a model show, and when: stubs, real parameters during computation, views if open."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import nn

from zeroweave._torch.storages import use_count
from zeroweave.eager.access import Access
from zeroweave.eager.hooks import hook_gradient, hooks_beside
from zeroweave.errors import EngineError
from zeroweave.notices import warn
from zeroweave.parameters.module_parameters import ModuleParameters
from zeroweave.parameters.stub import AtRest, Showing
from zeroweave.runtime.runtime import Runtime


class ParameterVisibility:
    """What the modules show: real, watched parameters during computation; else stubs, or views if open.

    The views are for users, who may keep them: they own a share of the flat, which then lingers. When their time
    is over (`close`, for real parameters the step), each parameter that a user has kept becomes a stub.
    """

    def __init__(self, runtime: Runtime, parameters: ModuleParameters, access: Access) -> None:
        self._runtime, self._module_parameters, self._access = runtime, parameters, access
        self._count = 0
        """how many computations need the real parameters"""
        self._views: dict[str, nn.Parameter] | None = None
        """what `open` shows, by name; None: it is closed"""
        self._off = set[str]()
        """the trained parameters whose real ones do not require gradients, by name"""
        for bucket in access.buckets:
            bucket.attach(self._retire, parameters.status.hooks)
        self.show()  # once before users can keep anything: the buckets learn what is the engine's own
        self.hide()

    # ------------------------------------------------------------------ to the user
    @property
    def is_open(self) -> bool:
        """True if all parameters are gathered and readable for the user."""
        return self._views is not None

    @property
    def views(self) -> dict[str, nn.Parameter]:
        """What `open` shows, by name."""
        assert self._views is not None
        return self._views

    def open(self) -> None:
        """Gathers everything and shows views of it to the user until `close`; a second call does nothing. Collective.

        A term of the loss that reads them has gradients too, which are delivered as all others are. Between a forward
        and its backward the real parameters are shown, because the graph leads to these.
        """
        if self.is_open:
            return
        self._toggle()
        for bucket in self._access.buckets:
            bucket.unshard()
        for bucket in self._access.buckets:
            bucket.wait()
        runtime, places = self._runtime, self._runtime.directory.slots
        if runtime.awaits_backward:
            views = {name: runtime.buckets[bucket].real[slot] for name, (bucket, slot) in places.items()}
        else:
            views = self._module_parameters.views()
            for name, view in views.items():
                if self._is_trained(name):
                    on = view.requires_grad
                    view.requires_grad_()  # or it takes no hook
                    hook_gradient(view, runtime, *places[name])
                    view.requires_grad_(on)
        self._module_parameters.show(views, Showing.OPEN)
        self._views = views

    def close(self) -> None:
        """Shows stubs again, and makes one of each view that the user has kept; does nothing the second time.

        A graph that reads views continues with a copy of their present values.
        """
        if not self.is_open:
            return
        hooked = [name for name, view in self.views.items() if hooks_beside(view, self._is_trained(name))]
        self._withdraw()
        with ExitStack() as each:  # a parameter that was written raises, but the others go as well
            for bucket in self._access.buckets:
                each.callback(self._runtime.replay.lingering.reshard, bucket.id)
        if hooked:
            warn(
                f"hooks on {', '.join(hooked)} end here: they were registered where full parameters are shown, and "
                "those do not train; hook the module, or look at engine.gradients()",
                self._runtime.transport.rank,
            )

    def _is_trained(self, name: str) -> bool:
        return self._runtime.buckets[self._runtime.directory.slots[name][0]].layout.trainable

    def _withdraw(self) -> None:
        self._toggle()
        views, self._views = self.views, None
        self._module_parameters.show_stubs()
        real = {id(p) for bucket in self._access.buckets for p in bucket.real}
        while views:
            name, view = views.popitem()
            if id(view) not in real and sys.getrefcount(view) > 2:  # this name and the argument
                content = self._module_parameters.retire(name, view)
                if content is view or use_count(content) > 1:
                    content.data = content.data.clone()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside nothing is open; at the end, unless that is an exception, what was is open again. Collective."""
        was_open = self.is_open
        self.close()
        yield
        if was_open:
            self.open()

    @contextmanager
    def lent(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, this rank's modules show these full values, by name, wherever they are. Nothing computes. Local."""
        stubs = self._module_parameters.names.items()
        lent = {name: nn.Parameter(values[name], stub.requires_grad) for name, stub in stubs}
        self._module_parameters.show(lent, Showing.LENT)
        try:
            yield
        finally:
            self._module_parameters.show_stubs()
            if self._views is not None:
                self._module_parameters.show(self._views, Showing.OPEN)

    @property
    def _lends(self) -> bool:
        """True if this rank shows its own full values."""
        return self._module_parameters.status.showing is Showing.LENT

    # ------------------------------------------------------------------ to the loss
    def read(self, name: str, values: bool) -> nn.Parameter | None:
        """The real parameter, for code that has a stub; None where the parameter cannot be read now.

        It can be between a forward and its backward, in a forward, and in a backward. `values`: its values are read,
        which gathers them, collectively at stage 3. They stay usable as `Runtime.read` says.
        """
        runtime = self._runtime
        if self._lends or not (runtime.awaits_backward or runtime.in_session or runtime.in_backward):
            return None
        if not (runtime.in_session or runtime.in_backward):
            self._toggle()
        bucket, slot = runtime.directory.slots[name]
        if values:
            runtime.read(runtime.buckets[bucket], slot)
        return runtime.buckets[bucket].real[slot]

    # ------------------------------------------------------------------ to the engine's calls
    def show(self) -> None:
        """One more needs the real parameters."""
        if self._lends:
            raise EngineError(
                "[ZW402] a forward inside `with engine.full_on_rank_0():`, where one rank may be alone: leave it first"
            )
        if self._count == 0:
            self._toggle()
            self._module_parameters.show(showing=Showing.OPEN if self.is_open else Showing.REAL)
            self._access.watch()
            self._note(shown=True)
        self._count += 1

    def _toggle(self) -> None:
        """Sets `requires_grad` of the real parameters as the program last set it on stubs, or on open views."""
        for name, view in (self._views or {}).items():
            if view.requires_grad != (stub := cast(AtRest, self._module_parameters.names[name])).requires_grad:
                stub.toggle(view.requires_grad)
        off = self._module_parameters.status.off
        for name in off ^ self._off:
            bucket, slot = self._runtime.directory.slots[name]
            self._runtime.buckets[bucket].toggle(slot, name not in off)
        self._off = set(off)

    def hide(self) -> None:
        """One less; with the last one the stubs return."""
        self._count -= 1
        if self._count == 0:
            self._access.unwatch()
            if self._views is None:
                self._module_parameters.show_stubs()
            else:
                self._module_parameters.show(self._views, Showing.OPEN)
            self._note(shown=False)

    def reset(self) -> None:
        """After an exception: no computation is left."""
        while self._count:
            self.hide()

    def _note(self, shown: bool) -> None:
        for bucket in self._access.buckets:
            bucket.note_shown(shown)

    def _retire(self, name: str, real: nn.Parameter) -> nn.Parameter:
        if self._count:
            return real  # the modules show it
        new = self._module_parameters.retire(name, real)
        if new is not real:
            self._access.replace(real, new)
        return new

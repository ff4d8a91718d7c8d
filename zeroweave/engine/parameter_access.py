"""Values out of shards and into them: of one parameter, or of all."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from zeroweave.eager.parameter_visibility import ParameterVisibility
from zeroweave.engine import state_dict as state
from zeroweave.engine import write_check
from zeroweave.engine.context import EngineContext
from zeroweave.engine.window import Window
from zeroweave.errors import AgreementError, EngineError, ParameterError, RankFailure
from zeroweave.layout import Fragment
from zeroweave.notices import warn
from zeroweave.optim.scaler import Scaler
from zeroweave.optim.state_memory import Room
from zeroweave.optim.states import Gathered, States
from zeroweave.runtime.bucket import Bucket


class ParameterAccess:
    """The values of one engine's parameters, gradients and optimizer state, as users read and write them.

    `what` names a value of a parameter: "param", the value itself; "grad", the reduced gradient; or a key of the
    optimizer's state, such as "exp_avg". The public methods are those of `Engine`, which tells more of them.
    """

    def __init__(self, context: EngineContext, window: Window, scaler: Scaler, shown: ParameterVisibility) -> None:
        self._context, self._model, self._runtime = context, context.model, context.runtime
        self._control, self._guard, self._optimizer = context.control, context.guard, context.optimizer
        self._window, self._scaler, self.shown = window, scaler, shown
        self._staging = context.runtime.replay.executor.staging

    def _meet(self, call: str) -> None:
        """In a guarded call that all ranks make, before anything else."""
        self._window.refuse_inside(call)
        self._guard.meet()

    # ------------------------------------------------------------------ one parameter
    def full(self, parameter: nn.Parameter | str, what: str = "param") -> torch.Tensor | None:
        with self._guard("full"):
            bucket, slot = self._find(parameter, "full()", what)
            self._guard.meet()
            missing = False
            if what == "param":
                shard = bucket.values()
            elif what == "grad":
                gradient, missing = self._gradient(bucket, slot)
                if gradient is None:
                    return None
                shard = gradient
            else:
                found, whole = self._state(bucket, slot, what)
                if whole:
                    return found
                shard = torch.zeros(bucket.shard.numel(), dtype=found.dtype, device=bucket.device)
                bucket.fragment(shard, slot).copy_(found)
            full = state.gather_like(self._runtime, bucket, shard)[slot]  # another group may have what this one misses
            return None if missing else full.clone()

    def set_full(self, parameter: nn.Parameter | str, value: torch.Tensor, what: str = "param") -> None:
        with self._guard("set_full"):
            bucket, slot = self._find(parameter, "set_full()", what)
            value = _tensor(value, "set_full()")
            self._guard.meet()
            spec, fragment = bucket.layout.slots[slot], bucket.layout.fragment(slot, bucket.rank)
            mine, label = write_check.digest(value.to(bucket.shard.dtype)), f"set_full() of {spec.name!r}"
            names = [(spec.name, bucket.layout.groups)]
            if refused := write_check.compared(names, [mine], [True], label, self._control)[0]:
                raise EngineError(f"[ZW501] {refused}")
            here = slice(fragment.offset, fragment.offset + fragment.numel)
            self._set(bucket, slot, what, value, spec.shape, here)

    def fragment(self, parameter: nn.Parameter | str) -> Fragment:
        bucket, slot = self._find(parameter, "fragment()")
        return bucket.layout.fragment(slot, bucket.rank)

    def local(self, parameter: nn.Parameter | str, what: str = "param") -> torch.Tensor | None:
        with self._guard("local"):
            bucket, slot = self._find(parameter, "local()", what)
            if what == "param":
                return bucket.fragment(bucket.values(), slot).clone()
            if what == "grad":
                gradient, missing = self._gradient(bucket, slot)
                return None if gradient is None or missing else bucket.fragment(gradient, slot).clone()
            found, whole = self._state(bucket, slot, what)
            return found if whole else found.to(bucket.device, copy=True)

    def set_local(self, parameter: nn.Parameter | str, value: torch.Tensor, what: str = "param") -> None:
        with self._guard("set_local"):
            bucket, slot = self._find(parameter, "set_local()", what)
            value = _tensor(value, "set_local()")
            self._set(bucket, slot, what, value, (bucket.layout.fragment(slot, bucket.rank).numel,))

    def _find(self, parameter: nn.Parameter | str, method: str, what: str = "param") -> tuple[Bucket, int]:
        self._window.refuse_inside(method)
        name = self._name_of(parameter)
        bucket_id, slot = self._runtime.directory.slots[name]
        bucket = self._runtime.buckets[bucket_id]
        if what != "param" and not bucket.layout.trainable:
            raise EngineError(f"[ZW406] {method}: {name!r} is frozen and has no {what!r}")
        return bucket, slot

    def _name_of(self, parameter: nn.Parameter | str) -> str:
        """The canonical name of a parameter that is given by one of its names or as the user's object."""
        known = self._context.module_parameters
        if isinstance(parameter, str):
            if (name := known.aliases.get(parameter, parameter)) in known.names:
                return name
            near = difflib.get_close_matches(parameter, known.names, n=1)
            raise EngineError(
                f"[ZW406] the model has no parameter {parameter!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        for name, each in (*known.names.items(), *self._model.named_parameters()):  # the user's own; those shown now
            if each is parameter:
                return name
        raise EngineError(f"[ZW406] a parameter of shape {list(parameter.shape)} is none of the model's")

    def _absent(self) -> dict[int, frozenset[int]]:
        """For each trainable bucket the slots that no rank has had a gradient for in the window. Collective."""
        gradients = self._runtime.gradients
        ranks = self._control.all_gather_bytes(gradients.had_gradient(), "which gradients exist")
        return gradients.absent(bytes(any(flags) for flags in zip(*ranks, strict=True)))

    def _gradient(self, bucket: Bucket, slot: int) -> tuple[torch.Tensor | None, bool]:
        """This rank's shard of the gradients of a bucket, and whether no rank has one for the slot. Collective.

        The shard is None where nothing was reduced, then on all ranks.
        """
        self._window.reduce_rest("reading a gradient")
        missing = self._absent()[bucket.id]
        return self._scaler.look(bucket.id), slot in missing

    def _state(self, bucket: Bucket, slot: int, key: str) -> tuple[torch.Tensor, bool]:
        """What the ranks' optimizers hold of a slot under a key. Collective.

        This rank's part [numel of its fragment], zeros if it holds none, and False; or one value for the whole
        parameter, such as a step counter, and True. EngineError on all ranks where a sharding group holds nothing.
        """
        if self._optimizer is None:
            raise EngineError("[ZW406] the engine has no optimizer, so parameters have no optimizer state")
        layout, name = bucket.layout, bucket.layout.slots[slot].name
        held = self._optimizer.state_of(bucket.id, slot)
        value, mine, whole = held.get(key), None, None
        if key in self._optimizer.offload.cut_of(bucket.id, slot):
            mine = value
        elif value is not None:
            kind = torch.float32 if isinstance(value, float) else None
            whole = torch.as_tensor(value, dtype=kind, device="cpu").detach()
        told = None if mine is None else mine.dtype, whole, sorted(map(str, held))
        ranks = self._control.all_gather_object(told, f"{key} of {name}")
        found: dict[int, tuple[torch.Tensor, bool]] = {}
        for rank, (dtype, value, _) in enumerate(ranks):
            if value is not None:
                found.setdefault(rank % layout.groups, (value, True))
            elif dtype is not None:
                numel = layout.fragment(slot, bucket.rank).numel
                part = torch.zeros(numel, dtype=dtype, device="cpu") if mine is None else mine
                found.setdefault(rank % layout.groups, (part, False))
        if len(found) == layout.groups:
            return found[self._control.rank % layout.groups]
        known = sorted({known for _, _, names in ranks for known in names})
        holds = ", ".join(known) if known else "nothing of it before its first step with a gradient"
        raise EngineError(f"[ZW406] the optimizer holds no {key!r} of {name!r}; it holds {holds}")

    @torch.no_grad()
    def _set(
        self,
        bucket: Bucket,
        slot: int,
        what: str,
        value: torch.Tensor,
        shape: tuple[int, ...],
        here: slice = slice(None),
    ) -> None:
        """`value` is to have this shape, unless the parameter has one value as a whole. `here`: this rank's part."""
        name = bucket.layout.slots[slot].name
        whole = what not in ("param", "grad") and self._state(bucket, slot, what)[1]
        if whole:
            shape, here = (), slice(None)
        if tuple(value.shape) != shape and not (whole and value.numel() == 1):
            raise EngineError(f"{what!r} of {name!r} has the shape {list(shape)}, and not {list(value.shape)}")
        part = value.reshape(-1)[here]
        if what == "param":
            with self.rewriting(f"writing {name!r}"):
                values = bucket.values()
                bucket.fragment(values, slot).copy_(part)
                bucket.put(values)
                bucket.renew()
        elif what == "grad":
            if not self._context.stubs.gradients_pending:
                raise EngineError(
                    f"[ZW406] there is no gradient of {name!r} to be replaced: call it after the backward"
                )
            self._window.reduce_rest("replacing a gradient")
            self._scaler.write(bucket.id, slot, part)
        else:
            assert self._optimizer is not None
            self._staging.arrive_all()
            self._optimizer.set_state(bucket.id, slot, what, part)

    # ------------------------------------------------------------------ all of them
    @contextmanager
    def full_parameters(self) -> Iterator[dict[str, nn.Parameter]]:
        buckets, control, label = list(self._runtime.buckets.values()), self._control, "full_parameters()"
        with self._guard("full_parameters"):
            if self._runtime.in_session or self._runtime.in_backward:
                raise EngineError("[ZW402] full_parameters() inside a forward or backward: enter it between them")
            self._window.refuse_inside("full_parameters()")
            self._guard.meet()
            self.shown.close()
            self.shown.open()
            self._staging.arrive_all()
            before = write_check.versions(buckets)
            for bucket in buckets:
                bucket.part()
        back = False
        try:
            with self._runtime.writing():
                try:
                    yield self.shown.views
                except Exception:
                    back = True
                    if not self._guard.lost:
                        with suppress(RankFailure, AgreementError):
                            write_check.gives_up(label, control)
                    raise
            with self._guard("the end of full_parameters", clean=False):
                if wrong := write_check.moved(self.shown.views, buckets):
                    write_check.gives_up(label, control)
                refused = wrong or write_check.keep(buckets, before, control, label)
            if wrong:
                back = True
                raise ParameterError(f"[ZW205] {wrong}")
            if refused:
                back = True
                raise EngineError(f"[ZW501] {refused}")  # on all ranks, or those that did not raise by themselves
        finally:
            write_check.abort(buckets)
            self.shown.close()
            for bucket in buckets:
                bucket.unite(restore=back)
            if back and not self._guard.lost:  # what is gathered still has been written
                with self._guard("the end of full_parameters", clean=False):
                    self._runtime.replay.lingering.gather_again()
            if self._context.config.gather_after_step and not self._guard.lost:
                self.shown.open()
        for bucket in buckets:
            bucket.check_alone()

    def state_dict(self) -> dict[str, Any]:
        return self._on_rank_0("state_dict")[1]

    def _on_rank_0(self, call: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What is streamed, and the state dict; both are empty on the other ranks.

        The modules make the state dict. Where they only have other names since `initialize`, it has those of then.
        """
        with self._guard(call):
            self._meet(f"{call}()")
            values = dict(state.stream(self._context))
            shaped, found = bool(state.changing(self._context) or state.extra_states(self._model)), dict[str, Any]()
            try:
                found = state.of_modules(self._context, values, self.shown.lent) if self._control.rank == 0 else {}
            except ParameterError:  # a forward has given a parameter another name
                if shaped:
                    raise
            return values, found if shaped or found.keys() == values.keys() else dict(values)

    @contextmanager
    def full_on_rank_0(self) -> Iterator[dict[str, Any]]:
        values, found = self._on_rank_0("full_on_rank_0")
        with self._guard.around("full_on_rank_0()"), ExitStack() as lent:
            if found and not self.shown.is_open:  # what is open already is more
                lent.enter_context(self.shown.lent(state.own(self._context, values)))
            yield found

    def stream_state_dict(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._guard("stream_state_dict"):
            self._meet("stream_state_dict()")
            self.tell_left_out("stream_state_dict()")
        items = state.stream(self._context)
        try:
            while True:
                with self._guard("stream_state_dict"):
                    self._window.refuse_inside("stream_state_dict()")
                    item = next(items, None)
                if item is None:
                    return
                yield item
        finally:
            items.close()

    def tell_left_out(self, call: str) -> None:
        """Warns of what a call that goes bucket by bucket leaves out, as whole modules would be needed for it."""
        if changing := state.changing(self._context):
            warn(
                f"{call} has parameters and buffers only: it leaves out what {', '.join(changing)} would add or change "
                "by extra state, hooks or methods; engine.state_dict() and engine.full_on_rank_0() ask them",
                self._control.rank,
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        with self._guard("load_state_dict"):
            self._meet("load_state_dict()")
            with self.rewriting("load_state_dict()"):
                state.load_state_dict(state_dict, self._context, self.shown.lent)

    @torch.no_grad()
    def gradients(self) -> dict[str, torch.Tensor | None]:
        with self._guard("gradients"):
            self._meet("gradients()")
            self._window.reduce_rest("gradients()")
            result: dict[str, torch.Tensor | None] = {}
            for bucket_id, missing in self._absent().items():
                bucket, shard = self._runtime.buckets[bucket_id], self._scaler.look(bucket_id)
                views = None if shard is None else state.gather_like(self._runtime, bucket, shard.float())
                for index, slot in enumerate(bucket.layout.slots):
                    result[slot.name] = None if views is None or index in missing else views[index].cpu().clone()
            return result

    def whole(self, optimizer_state: bool) -> tuple[state.FullValues, Gathered]:
        """All parameters, and what the optimizer holds of them if that is wanted: what `Engine.destroy` gives back."""
        self._window.refuse_inside("destroy()")
        self._window.refuse_coalescing("destroy()")
        self._guard.meet()
        self._window.abort()
        self.shown.close()
        self._runtime.replay.lingering.let_go()
        values = state.FullValues(self._runtime, self._context.original_dtypes)
        if self._optimizer is None or not optimizer_state:
            return values, Gathered({})
        room = Room.now(self._context.device).without(values.missing)  # what the parameters leave
        return values, self._optimizer.gather(self._runtime.transport, self._control, room)

    def give_back(self, values: state.FullValues, states: States) -> None:
        """The model and the optimizer are ordinary ones again, with what `whole` has found."""
        self._context.module_parameters.restore(values)
        if self._optimizer is not None:
            self._optimizer.destroy(states)

    # ------------------------------------------------------------------ new values
    @contextmanager
    def rewriting(self, what: str) -> Iterator[None]:
        """Inside, the values of parameters change: between two windows, with nothing gathered."""
        self._window.refuse_waiting(what)
        with self.shown.closed():
            self._window.abort()  # nothing stays gathered with the old values
            self._staging.arrive_all()
            yield
            self.rewrite_views()

    @contextmanager
    def optimizer_shown(self, call: str) -> Iterator[None]:
        """Inside, the optimizer has fragments and their states, and may write both. Not in a forward or backward."""
        lingering, optimizer = self._runtime.replay.lingering, self._optimizer
        assert optimizer is not None
        with self._guard(call):
            self._window.refuse_inside(call)
            self._window.refuse_computing(call, "call it between them")
            self._guard.meet()
            with self.shown.closed():
                self._staging.arrive_all()
                lingering.wait()  # gathers that are under way read the shards
                trained = [bucket for bucket in self._runtime.buckets.values() if bucket.layout.trainable]
                for bucket in trained:
                    bucket.still()
                with optimizer.shown():
                    yield
                for bucket in trained:
                    bucket.rewritten()
                    bucket.renew()
                lingering.gather_again()
                self.rewrite_views()

    def rewrite_views(self) -> None:
        """Views that user code keeps show new values. Collective."""
        lingering = self._runtime.replay.lingering
        lingering.rewrite(self._context.agreements.union("which parameters are viewed", lingering.viewed()))


def tell_dropped(lacking: str, rank: int) -> None:
    """Warns that `destroy` has dropped the optimizer's state. `lacking`: see `Gathered`."""
    warn(
        f"engine.destroy() has dropped the optimizer's state: {lacking}. The "
        "parameters are complete. To go on training later, keep the engine, or run fewer ranks on a machine; "
        "before destroy(), engine.full(name, key) gives the state of one parameter at a time. "
        "engine.destroy(optimizer_state=False) drops it without this warning",
        rank,
    )


def _tensor(value: object, method: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise EngineError(f"{method} takes a tensor, and not a {type(value).__name__}")
    return value.detach()

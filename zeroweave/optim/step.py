"""The user's optimizer on fragments: its own object, groups, learning rates and schedulers.

Outside a step the optimizer's groups hold the user's parameters, which are stubs; inside they hold the
fragments, in the same order, and `optimizer.state` is keyed by fragments. What an element-wise
optimizer computes from a fragment is, bit for bit, that part of what it computes from the whole parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from zeroweave._torch.modules import has_step_hooks, is_step_replaced
from zeroweave.comm.transport import Transport
from zeroweave.errors import ParameterError
from zeroweave.layout import SlotKey
from zeroweave.optim.fragments import Fragments
from zeroweave.optim.fused_update import OnePass
from zeroweave.optim.groups import Groups, RestingState
from zeroweave.optim.matrices import Matrices, Whole
from zeroweave.optim.multi_optimizer import WHOLE_MATRIX, members_of
from zeroweave.optim.optimizer_check import ELEMENT_WISE
from zeroweave.optim.rules import COMPACT_RULES, RULES, Kernels, Masters
from zeroweave.optim.scaler import Scaled
from zeroweave.optim.state_memory import Room
from zeroweave.optim.state_offload import StateOffload
from zeroweave.optim.states import Described, Gathered, Held, States, counts_on_device, gather, take, tensors_in
from zeroweave.ranks.control import Control
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.transfers import Transfers

_AT_ONCE: Final = 256 << 20
"""Bytes of masters that are updated in one call at most, where no bucket has more."""


class ShardedOptimizer:
    """Steps the user's optimizer on this rank's fragments of every trainable bucket.

    `slot_of` maps `id(parameter)` of the model's parameters to (bucket id, slot index).
    `check_optimizer` must have passed. `states` replaces what the optimizer holds of trainable parameters: what it is
    to hold of this rank's fragments. What it holds of others (frozen ones, ones without elements) stays as it is.
    Trainable parameters in no group are never updated. Memory: the optimizer's own state, over the fragments; with
    `moments_off` it lives in host memory, by way of `transfers`, with `compact` in few bits, see `optim.compact`.
    `whole`: what is updated as wholes and not by fragments, see `optim.matrices`.
    `kernels`: those of `_triton.rules`, for updates in one pass; None: the optimizer steps itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        slot_of: Mapping[int, SlotKey],
        transfers: Transfers,
        states: States,
        moments_off: bool = False,
        whole: Whole | None = None,
        kernels: Kernels | None = None,
        compact: bool = False,
    ) -> None:
        self.optimizer, self._device = optimizer, transfers.device
        trainable = [bucket for bucket in buckets if bucket.layout.trainable]
        self._fragments = {b.layout.id: Fragments(b) for b in trainable}
        in_groups: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
        self.sharded: dict[SlotKey, nn.Parameter] = {}
        """(bucket id, slot) -> the user's parameter whose state is that of fragments"""
        members = [(one, group) for one in members_of(optimizer) for group in one.param_groups]
        self._member = {slot_of[id(user)]: one for one, group in members for user in group["params"]}
        """(bucket id, slot) -> the optimizer that has it; `optimizer` itself if that is no `Several`"""
        touched = {bucket for bucket, _ in self._member}
        self._views = views = {bucket.layout.id: bucket for bucket in trainable if bucket.layout.id in touched}
        self._matrices: Matrices | None = None
        if whole is not None:
            held = [user for users in in_groups for user in users if id(user) in whole.parameters and user.numel()]
            matrices = [slot_of[id(user)] for user in held if slot_of[id(user)][0] in views]
            self._matrices = Matrices(whole, matrices, views, self._fragments, self._member, self._device)
        self._all: list[list[nn.Parameter]] = []
        """by group, the fragments"""
        self._stepped: list[list[nn.Parameter]] = []
        """and what a step sees: of matrices that are updated as wholes, this rank's own"""
        self._parts: dict[int, list[list[nn.Parameter]]] = {}
        """of that, what belongs to one bucket"""
        for index, users in enumerate(in_groups):
            self._all.append([])
            self._stepped.append([])
            for user in users:
                bucket, slot = slot_of[id(user)]
                if bucket not in self._fragments:
                    continue  # frozen: it would never have a gradient
                fragment, state = self._fragments[bucket].parameters[slot], self._member[bucket, slot].state
                if user.numel():
                    self.sharded[bucket, slot] = user
                    state.pop(user, None)
                parts = self._parts.setdefault(bucket, [[] for _ in in_groups])
                self._all[index].append(fragment)
                stepped = fragment if self._matrices is None else self._matrices.stepped(bucket, slot, fragment)
                if stepped is not None:
                    parts[index].append(stepped)
                    self._stepped[index].append(stepped)
                if (bucket, slot) in states:
                    state[fragment] = states[bucket, slot]
        few, hosted = (sorted(views) if on else () for on in (compact, moments_off))
        self.offload = StateOffload(transfers, views, self._fragments, optimizer, hosted, few)
        self._at_once = max([_AT_ONCE, *(fragments.nbytes for fragments in self._fragments.values())])
        """bytes of masters that are updated in one call: their gradients, cast, are alive at once"""
        group_of = {slot_of[id(user)]: index for index, users in enumerate(in_groups) for user in users}
        self._group_of = group_of
        self.shared = frozenset(group_of[at] for at in self.sharded if views[at[0]].layout.groups == 1)
        """the groups with parameters of which all ranks have a part"""
        self._one_pass = None
        rule = (COMPACT_RULES if self.offload.compact else RULES).get(type(optimizer))
        if kernels is not None and whole is None and rule is not None:
            self._one_pass = OnePass(optimizer, rule, views, self._fragments, group_of, kernels, self.offload.compact)
        self.groups = Groups(optimizer, in_groups, self._all)
        """of the optimizer; at rest they hold the user's parameters"""
        self._names = {id(user): views[bucket].layout.slots[slot].name for (bucket, slot), user in self.sharded.items()}
        self._rest(self._names)

    @property
    def by_bucket(self) -> bool:
        """True if buckets may be updated one at a time, in any order: known optimizers, no hooks, no replaced `step`.

        Sending whole matrices needs one order of buckets on all ranks. A step that departs from its schedule has none,
        so whole matrices are updated when all gradients are there.
        """
        return self._matrices is None and self._separable

    @property
    def _separable(self) -> bool:
        """True if buckets may be updated in separate calls."""
        members = members_of(self.optimizer)
        listened_to = any(has_step_hooks(one) or is_step_replaced(one) for one in (self.optimizer, *members))
        return all(type(one) in ELEMENT_WISE | WHOLE_MATRIX for one in members) and not listened_to

    def in_turn(
        self, take: Callable[[int], Scaled | None], absent: Mapping[int, Set[int]], order: Sequence[int]
    ) -> Callable[[Sequence[int]], None]:
        """Returns the function that updates. A step calls it with buckets, keys of `absent`, when their turn comes.

        It gets the gradient of each from `take(bucket)`: [shard_numel] in any floating dtype, or None. `absent`: of
        each bucket, the slots without a gradient on any rank; the optimizer skips them, as it does for a `.grad` of
        None. `order`: that of the turns. An optimizer that only steps as a whole updates all of them in the turn of the
        last. ParameterError if a group has an option that its states cannot have, and from the function if the
        optimizer's groups have changed.
        """
        if refused := self.offload.refused_in(self.optimizer.param_groups):
            raise ParameterError(f"[ZW302] nothing was updated: the optimizer's {'; '.join(refused)}")
        by_bucket, separable = self.by_bucket, self._separable
        order = order if by_bucket else sorted(absent)
        if by_bucket and self._one_pass is not None:
            with self.groups.holding([[] for _ in self._all]):
                self.optimizer.step()  # learning rate schedulers want to see one
        self.offload.expect([bucket for bucket in order if bucket in self._parts])

        def taken(buckets: Sequence[int]) -> dict[int, Scaled]:
            return {bucket: gradient for bucket in buckets if (gradient := take(bucket)) is not None}

        def update(buckets: Sequence[int]) -> None:
            for together in self._calls(buckets):
                gradients = taken(together)
                for bucket in together:
                    if bucket not in gradients:
                        self.offload.abort(bucket)
                    elif bucket not in self._parts:
                        del gradients[bucket]  # no parameter of it is in any group
                if self._one_pass is not None:
                    for bucket in filter(self._one_pass.takes, [*gradients]):
                        with self.offload.on_device([bucket], whole=False) as here:
                            self._one_pass.update(bucket, Masters(*here[bucket]), gradients.pop(bucket), absent[bucket])
                            if self.offload.comes(bucket):
                                self._one_pass.release(bucket)
                if gradients:
                    moved = list(gradients)
                    self._step(gradients, absent, self._parts_of(moved), moved)

        waiting = set(absent)

        def update_when_all_came(buckets: Sequence[int]) -> None:
            waiting.difference_update(buckets)
            if not waiting and separable:
                update(order)
            elif not waiting:
                self._step(taken(order), absent, self._stepped, sorted(self._parts))

        return update if by_bucket else update_when_all_came

    def _calls(self, buckets: Sequence[int]) -> Iterator[list[int]]:
        """These buckets in the same order, by calls of the optimizer; one whose state comes from elsewhere comes alone.

        A call's own work in Python is worth it for many fragments only. With whole matrices the calls are the same on
        all ranks, each of which decides by itself where states live.
        """
        together, nbytes = list[int](), 0.0
        for bucket in buckets:
            alone = self._matrices is None and self.offload.comes(bucket)
            own = math.inf if alone else self._fragments[bucket].nbytes
            if together and nbytes + own > self._at_once:
                yield together
                together, nbytes = [], 0.0
            together.append(bucket)
            nbytes += own
        if together:
            yield together

    def _parts_of(self, buckets: Sequence[int]) -> list[list[nn.Parameter]]:
        """What the optimizer's groups have of these buckets, which are in some."""
        parts = [self._parts[bucket] for bucket in buckets]
        return parts[0] if len(parts) == 1 else [list(chain(*groups)) for groups in zip(*parts, strict=True)]

    def state_of(self, bucket: int, slot: int) -> Mapping[str, Any]:
        """What the optimizer holds of this rank's fragment of a slot, to be read; empty before its first step."""
        self.offload.finish()
        return self.offload.state_of(bucket, slot)

    def set_state(self, bucket: int, slot: int, key: str, value: torch.Tensor) -> None:
        """Overwrites what `state_of` has under a key, of its shape; nothing where the optimizer holds nothing."""
        with self.offload.writing(bucket):
            state = self.optimizer.state.get(self._fragments[bucket].parameters[slot], {})
            match state.get(key):
                case torch.Tensor() as tensor:
                    tensor.copy_(value.reshape(tensor.shape))
                case None:
                    pass
                case number:
                    state[key] = type(number)(value.item())
        self.states_changed()

    def states_changed(self) -> None:
        """Others than steps have written into the optimizer's state, on all ranks."""
        if self._matrices is not None:
            self._matrices.forget()
        if self._one_pass is not None:
            self._one_pass.forget(self._views)

    def replace(self, bucket: int, states: Mapping[int, dict[str, Any]]) -> None:
        """What the optimizer holds of these slots' fragments is `states` from now on; that of others stays."""
        with self.offload.writing(bucket, states):
            for slot, state in states.items():
                fragment = self._fragments[bucket].parameters[slot]
                if (member := self._member.get((bucket, slot))) is None:
                    continue  # in no group
                member.state.pop(fragment, None)
                if state and (bucket, slot) in self.sharded:
                    member.state[fragment] = state
        self.states_changed()

    def load(self, states: States) -> None:
        """Continues, inside `optimizer.load_state_dict`, with `states`, which the optimizer brings up to date."""
        buckets: dict[int, dict[int, dict[str, Any]]] = {}
        for bucket, slot in self.sharded:
            buckets.setdefault(bucket, {})[slot] = states.get((bucket, slot), {})
        for bucket, mine in buckets.items():
            self.replace(bucket, mine)
        with self.groups.holding(self._all):
            self.optimizer.__setstate__({"state": self.optimizer.state, "param_groups": self.optimizer.param_groups})
        self._rest(self._names)

    def _rest(self, names: Mapping[int, str]) -> None:
        """`optimizer.state` refuses parameters of these names, by `id`. It is another object then, as after loading."""
        for member in members_of(self.optimizer):
            if type(state := member.state) in (defaultdict, RestingState):
                inside = [one for one in vars(member).values() if isinstance(one, torch.optim.Optimizer)]
                made = RestingState(state.default_factory, state, names) if names else None
                kept = defaultdict(state.default_factory, state) if made is None else made
                for one in (member, *inside):
                    if one.state is state:
                        vars(one).update(state=kept)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the groups hold all fragments, and these and their states are on the device, as in a step."""
        with self.groups.holding(self._all), self.offload.on_device(sorted(self._views)):
            yield
        self.states_changed()

    def home_of_moments(self, bucket: int) -> torch.device:
        """Where `replace` wants what belongs to the elements of a bucket's fragments."""
        return torch.device("cpu") if bucket in self.offload.on_host() else self._device

    def home_of_scalars(self, bucket: int, slot: int, key: str) -> torch.device:
        """Where the optimizer wants a tensor that belongs to a parameter as a whole: as `load_state_dict` has it."""
        if key != "step":
            return self._device
        group = self.optimizer.param_groups[self._group_of[bucket, slot]] if (bucket, slot) in self._group_of else {}
        return self._device if counts_on_device(group) else torch.device("cpu")

    def memory(self) -> int:
        """Bytes of the optimizer's state tensors on this rank, step counters included."""
        coded = sum(moments.nbytes for moments in self.offload.compact.values())
        return coded + sum(value.nbytes for value in tensors_in(list(self.optimizer.state.values())))

    def gather(self, transport: Transport, control: Control, room: Room | None) -> Gathered:
        """The state of whole parameters, where all ranks have `room` for it; None: on rank 0 alone. Collective.

        `destroy` needs it, and so do state dicts.
        """
        self.offload.finish()
        told = control.all_gather_object(self.offload.uncuttable(), "state that cannot be cut")
        if any(told):
            return Gathered({}, max(told))
        held = self.offload.outline_of, self.offload.cut_of, self.offload.value_of
        return gather(*held, self._views, self._fragments, transport, control, self._device, room)

    def take(
        self, held: Held, named: Mapping[str, nn.Parameter], told: Described, transport: Transport, world: int
    ) -> States:
        """What `load` needs, of what rank 0 has `held` and `told` of whole parameters. Collective."""
        buckets = self._views.values()
        return take(held, buckets, named, [told] * world, transport, self._device, self.home_of_moments)

    @property
    def sharding_groups(self) -> int:
        """How many ranks have their own parameters under one name; 1 where all have the same."""
        return max((bucket.layout.groups for bucket in self._views.values()), default=1)

    def destroy(self, states: States) -> None:
        """Hands the optimizer back with the user's parameters and `states`, which `gather` has got. Idempotent.

        To be called after the parameters were restored.
        """
        self.offload.finish()
        self._rest({})
        for (bucket, slot), user in self.sharded.items():
            state = self._member[bucket, slot].state
            state.pop(self._fragments[bucket].parameters[slot], None)
            if (bucket, slot) in states:
                state[user] = states[bucket, slot]
        self.offload.compact.clear()
        self.groups.give_back()
        self.sharded = {}

    def _step(
        self,
        gradients: dict[int, Scaled],
        absent: Mapping[int, Set[int]],
        groups: list[list[nn.Parameter]],
        moved: Sequence[int],
    ) -> None:
        """Updates the fragments in `groups`, those of the buckets `moved`, by `gradients`, which are used up."""
        fragments = [(self._fragments[bucket], bucket) for bucket in gradients]
        if self._one_pass is not None:
            self._one_pass.forget(moved)
        whole = nullcontext() if self._matrices is None else self._matrices.gathered([*gradients], absent)
        with self.groups.holding(groups), self.offload.on_device(moved):
            try:
                for one, bucket in fragments:
                    one.set_gradients(gradients.pop(bucket).product(), absent[bucket])
                with whole:
                    self.optimizer.step()
            finally:
                for one, _ in fragments:
                    one.drop_gradients()

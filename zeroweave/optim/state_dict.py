"""`state_dict()` and `load_state_dict()` of an optimizer that is sharded: of whole parameters, by way of rank 0.

PyTorch calls hooks before and after each of both. All that the ranks do together happens before, so that what is
refused has changed nothing:

    state_dict        before   rank 0 gathers the state of whole parameters, bucket by bucket
                      after    it takes the place of what PyTorch has packed; other ranks have none
    load_state_dict   before   each rank takes its part of rank 0's; PyTorch gets the groups and what is not sharded
                      after    the optimizer has its part
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import chain, count
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import nn

from zeroweave._torch.fx import map_tensors
from zeroweave.comm.transport import Transport
from zeroweave.errors import EngineError, ParameterError
from zeroweave.optim.multi_optimizer import kind_of, members_of
from zeroweave.optim.states import Described, Held, States, Told, counts_on_device, tell, uncuttable
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.ranks.control import Control

StateDict = dict[str, Any]


class _Given(NamedTuple):
    """What rank 0 tells the others of a state dict that is to be loaded."""

    problem: str = ""
    rest: StateDict | None = None
    """without the state that is sharded; its tensors in host memory"""
    told: Described | None = None


class StateDicts:
    """The hooks of one sharded optimizer, from here to `close`.

    `named`: the user's parameters by name. `alone(call)` guards a call that all ranks make between two windows. The
    optimizer does not keep this alive.
    """

    def __init__(
        self,
        sharded: ShardedOptimizer,
        named: Mapping[str, nn.Parameter],
        transport: Transport,
        control: Control,
        alone: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._sharded, self._named, self._transport = sharded, named, transport
        self._control, self._alone = control, alone
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._states: States = {}
        """what a hook before has made for the one after"""
        optimizer = sharded.optimizer
        self._handles = [
            optimizer.register_state_dict_pre_hook(weak(self._before_save)),
            optimizer.register_state_dict_post_hook(weak(self._after_save), prepend=True),
            optimizer.register_load_state_dict_pre_hook(weak(self._before_load)),
            optimizer.register_load_state_dict_post_hook(weak(self._after_load), prepend=True),
        ]
        for member in members_of(optimizer):
            if member is not optimizer:
                self._handles.append(member.register_state_dict_pre_hook(_refuse_one("state_dict()")))
                self._handles.append(member.register_load_state_dict_pre_hook(_refuse_one("load_state_dict()")))

    def close(self) -> None:
        """Both are the optimizer's own again."""
        for handle in self._handles:
            handle.remove()

    # ------------------------------------------------------------------ state_dict
    def _before_save(self, optimizer: torch.optim.Optimizer) -> None:
        self._sharded.groups.refuse_changed()
        with self._alone("optimizer.state_dict"):
            self._refuse_experts("state_dict()", "engine.save()")
            self._states, lacking = self._sharded.gather(self._transport, self._control, None)
            if lacking is not None:
                raise EngineError(f"[ZW303] optimizer.state_dict(): {lacking}")
        self._sharded.groups.pack()

    def _after_save(self, optimizer: torch.optim.Optimizer, packed: StateDict) -> StateDict:
        self._sharded.groups.packed()
        states, self._states = self._states, {}
        whole = {id(user): states.get(number) for number, user in self._sharded.sharded.items()}
        state: dict[Any, Any] = {key: v for key, v in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        for index, user in enumerate(_users(optimizer) if self._control.rank == 0 else ()):
            if (held := whole[id(user)] if id(user) in whole else optimizer.state.get(user)) is not None:
                state[index] = held
        numbers, pairs = count(), zip(packed["param_groups"], optimizer.param_groups, strict=True)
        groups = [{**group, "params": [next(numbers) for _ in own["params"]]} for group, own in pairs]
        return {**packed, "state": state, "param_groups": groups}

    # ------------------------------------------------------------------ load_state_dict
    def _before_load(self, optimizer: torch.optim.Optimizer, given: StateDict) -> StateDict:
        self._sharded.groups.refuse_changed()
        with self._alone("optimizer.load_state_dict"):
            self._refuse_experts("load_state_dict()", "engine.load()")
            mine, held = self._look(optimizer, given) if self._control.rank == 0 else (_Given(), {})
            found: _Given = self._control.broadcast_object(mine, label="the optimizer's state dict")
            if found.problem:
                raise EngineError(f"[ZW303] optimizer.load_state_dict(): nothing was loaded: {found.problem}")
            assert found.rest is not None and found.told is not None
            world = self._control.world
            self._states = self._sharded.take(held, self._named, found.told, self._transport, world)
        for new, own in zip(found.rest["param_groups"], optimizer.param_groups, strict=True):
            new.update({key: value.to(own[key].device) for key, value in _tensors(new) if key in dict(_tensors(own))})
        return found.rest

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        states, self._states = self._states, {}
        self._sharded.load(states)

    def _look(self, optimizer: torch.optim.Optimizer, given: StateDict) -> tuple[_Given, Held]:
        """What to tell of a state dict, and what it has for parameters that are sharded."""
        try:
            return self._describe(optimizer, given)
        except Exception as error:  # of any kind: the other ranks wait to be told
            return _Given(f"it is not an optimizer's state dict ({type(error).__name__}: {error})"), {}

    def _describe(self, optimizer: torch.optim.Optimizer, given: StateDict) -> tuple[_Given, Held]:
        saved, groups = given["param_groups"], optimizer.param_groups
        sizes = [[len(group["params"]) for group in each] for each in (saved, groups)]
        if sizes[0] != sizes[1]:
            return _Given(f"its groups have {sizes[0]} parameters, those of the optimizer {sizes[1]}"), {}
        if refused := self._sharded.offload.refused_in(saved):
            return _Given(f"its {'; '.join(refused)}"), {}
        ids = dict(zip(chain.from_iterable(group["params"] for group in saved), _users(optimizer), strict=True))
        sharded = {id(user) for user in self._sharded.sharded.values()}
        held = {user: given["state"][key] for key, user in ids.items() if id(user) in sharded and key in given["state"]}
        if problems := uncuttable(held, self._names):
            return _Given(f"it is of other parameters: {', '.join(problems)}"), {}
        told = {}
        for group, new in zip(groups, saved, strict=True):
            on_device = counts_on_device(new)
            for user in (user for user in group["params"] if user in held):
                told[self._names[id(user)]] = {
                    key: _told(held, user, key, value, on_device) for key, value in held[user].items()
                }
        state = {key: value for key, value in given["state"].items() if ids.get(key) not in held}
        whole = {**given, "state": state, "param_groups": saved}
        rest = map_tensors(lambda tensor: tensor.detach().cpu(), whole)
        return _Given(rest=rest, told=Described(kind_of(optimizer), [], told)), held

    def _refuse_experts(self, what: str, instead: str) -> None:
        if (groups := self._sharded.sharding_groups) > 1:
            raise EngineError(
                f"[ZW303] optimizer.{what} has one entry for each parameter, and each of {groups} groups of ranks has "
                f"experts of its own: use {instead}"
            )


def _refuse_one(what: str) -> Callable[..., None]:
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        raise EngineError(
            f"[ZW304] {what} of {type(optimizer).__name__} alone, which is one of several optimizers of an engine: use "
            f"engine.optimizer.{what}, which has all of them"
        )

    return hook


def _tensors(group: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in group.items() if isinstance(value, torch.Tensor)]


def _users(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [user for group in optimizer.param_groups for user in group["params"]]


def _told(held: Held, user: nn.Parameter, key: str, value: Any, on_device: bool) -> Told:
    """As PyTorch loads it: floating values of elements get the dtype of what they are of."""
    told = tell(held, user, key, value, on_device)
    if told.kind == "cut" and value.is_floating_point():
        return Told("cut")
    return Told("whole", value=value) if told.kind == "own" else told


def weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same as a function that does not keep the object of `method` alive."""
    weak = WeakMethod(method)

    def hook(*args: Any) -> Any:
        if (alive := weak()) is None:
            raise ParameterError(
                "[ZW303] the optimizer's state is gone: the engine that had it was dropped without destroy()"
            )
        return alive(*args)

    return hook

"""What the user's optimizer shows while it is sharded: the members of its groups, its state, `train()` and `eval()`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn

from zeroweave.errors import ParameterError
from zeroweave.optim.multi_optimizer import members_of


class Groups:
    """What the groups hold: the user's parameters, or fragments while the optimizer computes with them.

    `users` and `fragments`, by group: the lists that groups hold at rest, and those of all fragments.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        users: Sequence[list[nn.Parameter]],
        fragments: Sequence[list[nn.Parameter]],
    ) -> None:
        self._optimizer, self._fragments = optimizer, fragments
        self._users = users
        """empty once they are returned"""
        self._members = [list(map(id, group)) for group in users]
        self._packing = False
        """true while PyTorch puts a state dict together"""

    @property
    def at_rest(self) -> bool:
        """True if the groups hold the user's parameters."""
        return all(g["params"] is own for g, own in zip(self._optimizer.param_groups, self._users, strict=False))

    @contextmanager
    def holding(self, parameters: Sequence[list[nn.Parameter]]) -> Iterator[None]:
        """Inside, the groups hold these, by group. Errors as `refuse_changed`."""
        self.refuse_changed()
        self._hold(parameters)
        try:
            yield
        finally:
            self.rest()

    def pack(self) -> None:
        """PyTorch is about to put a state dict together, and wants all that has a state to be in some group."""
        self._packing = True
        self._hold([[*users, *fragments] for users, fragments in zip(self._users, self._fragments, strict=True)])

    def packed(self) -> None:
        """It has done so, or has failed to. The groups are what they were."""
        if self._packing:
            self._packing = False
            self.rest()

    def refuse_changed(self) -> None:
        """ParameterError if the groups have other parameters than they had."""
        self.packed()
        held = self._optimizer.param_groups
        if len(held) != len(self._users) or any(
            group["params"] is not users or list(map(id, users)) != members
            for group, users, members in zip(held, self._users, self._members, strict=False)
        ):
            raise ParameterError(
                "[ZW302] the parameters of the optimizer's groups changed since zeroweave.initialize; options of a "
                "group, such as lr, can change at any time, its parameters cannot: call engine.destroy(), change them, "
                "and initialize again"
            )

    def rest(self) -> None:
        """The groups hold the user's parameters."""
        for group, users in zip(self._optimizer.param_groups, self._users, strict=False):
            group["params"] = users

    def give_back(self) -> None:
        """The same for good: they may hold others later."""
        self.rest()
        self._users = ()

    def _hold(self, parameters: Sequence[list[nn.Parameter]]) -> None:
        for group, own in zip(self._optimizer.param_groups, parameters, strict=True):
            group["params"] = own


class RestingState(defaultdict[Any, Any]):
    """`optimizer.state`: it has what is held of fragments, and refuses whole parameters.

    A sharded parameter is in it once anything is; ParameterError where it is read.
    """

    def __init__(self, default: Any = None, values: Any = (), names: Mapping[int, str] | None = None) -> None:
        """`names`: of the sharded parameters, by `id`; a copy has none."""
        super().__init__(default, values)
        self.names = names or {}

    def _known(self, key: Any) -> Any:
        if (name := self.names.get(id(key))) is not None:
            raise ParameterError(
                f"[ZW303] the optimizer's state of {name!r} is sharded, and optimizer.state has that of fragments: "
                f"read it by engine.full({name!r}, key), write it by engine.set_full({name!r}, value, key) or "
                "engine.set_local(…)"
            )
        return key

    def __missing__(self, key: Any) -> Any:
        return super().__missing__(self._known(key))

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or (id(key) in self.names and len(self) > 0)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._known(key), value)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._known(key), default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return super().setdefault(self._known(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._known(key), *default)


def serve_modes(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    shown: Callable[[str], AbstractContextManager[None]],
    ends: ExitStack,
) -> None:
    """Shows `train()` and `eval()` fragments, in the context `shown(call)`, until `ends`.

    In a step they see these anyway. In both, optimizers of schedule-free training move the parameters.
    """
    for member in members_of(optimizer):
        for mode in ("train", "eval"):
            if callable(getattr(type(member), mode, None)):
                vars(member).update({mode: _seeing(getattr(member, mode), groups, shown, f"optimizer.{mode}()")})
                ends.callback(vars(member).pop, mode, None)


def _seeing(
    method: Callable[..., Any], groups: Groups, shown: Callable[[str], AbstractContextManager[None]], what: str
) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with shown(what) if groups.at_rest else nullcontext():
            return method(*args, **options)

    return call

"""What the groups of the user's optimizer hold: the user's parameters, or fragments while it computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from zeroweave.errors import ParameterError


class Groups:
    """`users` and `fragments`, by group: the lists that groups hold at rest, and those of all fragments."""

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

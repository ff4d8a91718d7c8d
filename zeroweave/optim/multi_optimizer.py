"""Several optimizers as one, those that are to have whole matrices, and those that are declared element-wise.

initialize(model, [Muon(matrices), AdamW(others)])        what people train matrices with
initialize(model, WholeMatrices(Own(model.parameters())))  your own optimizer that computes with matrices
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import torch

from zeroweave.errors import ParameterError

WHOLE_MATRIX: Final[frozenset[type]] = frozenset({torch.optim.Muon})
"""Optimizers of torch that compute with whole matrices, each by itself, and keep states of their shape. Exact types."""


@dataclass(frozen=True)
class WholeMatrices:
    """An optimizer for `initialize` whose parameters are updated as wholes, each on one rank, and not as fragments.

    It may compute what it likes of a parameter, its gradient and its state, such as an orthogonal factor, norms, rows
    and columns. It updates each parameter by itself, and what it keeps of one is of the parameter's shape, or one
    value. The engine's optimizer is `optimizer` itself. `torch.optim.Muon` needs no such mark.
    """

    optimizer: torch.optim.Optimizer


_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_DECLARED: Final = "zeroweave_element_wise"


def element_wise(optimizer: _Optimizer) -> _Optimizer:
    """Declares that `optimizer` is element-wise; returns the same object.

    Element-wise means: a step on a part of each parameter, with that part of its gradient and its state, equals that
    part of a step on the whole. An optimizer that does not do this trains with wrong numbers. The optimizers of
    torch that are element-wise, `zeroweave.Lion` and those of the package schedulefree need no declaration.
    """
    vars(optimizer).update({_DECLARED: True})
    return optimizer


def is_declared_element_wise(optimizer: torch.optim.Optimizer) -> bool:
    """True if `element_wise` was called with it."""
    return bool(vars(optimizer).get(_DECLARED))


class Given(NamedTuple):
    """One of the optimizers that were passed, or what stands in its place. `whole`: it wants whole matrices."""

    optimizer: Any
    whole: bool


def given(optimizers: object) -> list[Given]:
    """What was passed as one optimizer or as a list of them. ParameterError for an empty list."""
    if isinstance(optimizers, list | tuple):
        if not optimizers:
            raise ParameterError("[ZW304] the list of optimizers is empty: pass None for evaluation only")
        return [one for each in optimizers for one in given(each)]
    if isinstance(optimizers, WholeMatrices):
        return [Given(optimizers.optimizer, True)]
    return [Given(optimizers, type(optimizers) in WHOLE_MATRIX)]


def is_optimizer(thing: object) -> bool:
    """True if it is what `given` takes, and nothing else."""
    if isinstance(thing, list | tuple):
        return bool(thing) and all(map(is_optimizer, thing))
    return isinstance(thing, torch.optim.Optimizer | WholeMatrices)


def as_one(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The only one, or a `Several` of them, which have no parameter in common."""
    return optimizers[0] if len(optimizers) == 1 else Several(optimizers)


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The members of a `Several`; of any other, itself."""
    return optimizer.members if isinstance(optimizer, Several) else (optimizer,)


def kind_of(thing: object) -> str:
    """What to call the class of an optimizer or a scheduler; those of several, one after the other."""
    return " + ".join(type(one).__name__ for one in getattr(thing, "members", (thing,)))


class Several(torch.optim.Optimizer):
    """Optimizers that step together. Their groups are its groups, the very same dictionaries, and so is their state.

    Learning-rate schedulers work on it, and on each of `members`. `state` can be read; what is put into it goes into
    that of a member.
    """

    def __init__(self, members: Iterable[torch.optim.Optimizer]) -> None:
        self.members = tuple(members)
        # The constructor of the base makes its own groups; this one brings the rest, as for a copy.
        torch.optim.Optimizer.__setstate__(self, {"defaults": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all members, as they are now."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """That of all members, as it is now."""
        return _States(self.members)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps each, in the order of the list."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the call does not say which of them it belongs to."""
        raise ParameterError("[ZW304] several optimizers stand behind this one: add the group to one of them")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Gives each member its part of loaded groups and state, as the end of `load_state_dict` has it."""
        groups, held = iter(state["param_groups"]), dict(state["state"])
        parts = [[next(groups) for _ in member.param_groups] for member in self.members]
        homes = {id(p): at for at, part in enumerate(parts) for group in part for p in group["params"]}
        for at, member in enumerate(self.members):
            mine: defaultdict[Any, Any] = defaultdict(dict)
            mine.update(
                (key, v) for key, v in held.items() if homes.get(id(key), at if key in member.state else -1) == at
            )
            member.__setstate__({"state": mine, "param_groups": parts[at]})


class _States(Mapping[Any, Any]):
    """What several optimizers hold, as one."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self._states = [member.state for member in members]

    def __getitem__(self, key: Any) -> Any:
        for state in self._states:
            if key in state:  # they make an entry for what they do not have
                return state[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._states)

    def __len__(self) -> int:
        return sum(map(len, self._states))


class Schedulers:
    """Learning-rate schedulers that move together, with each optimizer step. `members`: in the order of the list."""

    def __init__(self, members: Iterable[Any]) -> None:
        self.members = tuple(members)

    def step(self) -> None:
        for member in self.members:
            member.step()

    def get_last_lr(self) -> list[float]:
        """The last learning rates of each, one after the other."""
        return [rate for member in self.members for rate in member.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for member, held in zip(self.members, state["members"], strict=True):
            member.load_state_dict(held)

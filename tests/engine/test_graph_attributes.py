"""Which numbers of modules, losses and globals are looked at, and when one is another."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from zeroweave.engine.graphs.attributes import Attributes

GLOBAL, BESIDE, ASSIGNED, loss = 1.0, 1.0, 1.0, 1.0
SEEN = ("plain", "of_wrapper", "of_mixin", "of_base", "kept", "inner", "of_class")
ELSEWHERE = ("hidden", "unread", "last", "calls", "evaluations", "boost", "training")


class Kind(Enum):
    ONE = 1
    TWO = 2


def through(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, x: Any) -> Any:
        return forward(self, x) * self.of_wrapper

    return wrapper


class Mixin:
    def mixed(self) -> Any:
        return self.of_mixin  # type: ignore[attr-defined]


class Base(nn.Module):
    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        for name in (*SEEN, *ELSEWHERE):
            if name in ("training", "of_class"):
                continue
            setattr(self, name, 1.0)
        self.calls, self.evaluations, self.boost, self.numbers, self.nothing = 0, 0, True, [1.0], None
        self.register_buffer("mask", None)

    def forward(self, x: Any) -> Any:
        return x * self.of_base


class Hidden(Base):
    """Whose forward nobody calls, as it is another one's, which does not ask for it."""

    def forward(self, x: Any) -> Any:
        self.plain = 2.0
        return x


class Other(Hidden):
    def forward(self, x: Any) -> Any:
        return x * self.plain


def beside(x: Any) -> Any:
    return x * BESIDE


class Module(Base, Mixin):
    @through
    def forward(self, x: Any) -> Any:
        global ASSIGNED
        ASSIGNED += 1.0
        self.calls += 1
        if not self.training:
            self.evaluations += 1
        if self.boost:
            self.boost = False
        x.plain += 1
        self.note(x, 1)
        beside(x)
        found = super().forward(x) * self.plain * self.mixed() * self.kept_by * self.of_class * GLOBAL
        return found, [self.inner * each for each in (lambda: self.numbers)()], self.nothing, self.mask, x.last, x.loss

    @staticmethod
    def note(x: Any, value: Any) -> None:
        x.plain = value

    @property
    def kept_by(self) -> float:
        return self.kept

    def set_epoch(self) -> None:
        self.unread += self.hidden


def held(things: list[Any], change: Callable[[], None]) -> bool:
    """Are attributes still what they were, behind a change?"""
    attributes = Attributes()
    attributes.look(things)
    constants = attributes.constants()
    assert constants.hold() and attributes.changed is None
    change()
    assert constants.hold() == (attributes.changed is None)
    return constants.hold()


@pytest.mark.parametrize("name", SEEN)
def test_what_a_step_reads_of_its_own_object_is_seen(name: str) -> None:
    module = nn.Sequential(Module())
    assert not held([module], lambda: setattr(module[0], name, 2.0))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_it_writes_or_does_not_read_is_not(name: str) -> None:
    module = Module()
    assert held([module], lambda: setattr(module, name, 2.0))


CHANGES: list[tuple[str, Any, Any]] = [
    ("plain", 1.0, numpy.float32(2.0)),
    ("plain", numpy.float32(1.0), numpy.float32(2.0)),
    ("plain", numpy.bool_(True), numpy.bool_(False)),
    ("plain", "one", "two"),
    ("plain", (1, (2, 3)), (1, (2, 4))),
    ("plain", Kind.ONE, Kind.TWO),
    ("nothing", None, torch.ones(3)),
    ("mask", None, torch.ones(3)),
    ("numbers", [1.0], None),
    ("numbers", [1.0], 1.0),
]


@pytest.mark.parametrize(("name", "one", "other"), CHANGES)
def test_another_value_is_another_one(name: str, one: Any, other: Any) -> None:
    module = Module()
    setattr(module, name, one)
    assert not held([module], lambda: setattr(module, name, other))


@pytest.mark.parametrize(
    ("one", "other"),
    [(math.nan, float("nan")), (0.1 + 0.2, 0.30000000000000004), ([1.0], [2.0]), ("ab", "".join("ab"))],
)
def test_an_equal_one_is_not(one: Any, other: Any) -> None:
    module = Module()
    module.plain = one
    assert held([module], lambda: setattr(module, "plain", other))


def test_a_forward_that_another_one_hides_is_not_looked_at() -> None:
    module = Other()
    assert not held([module], lambda: setattr(module, "plain", 2.0))


def test_looking_again_takes_little() -> None:
    """Of a large model few things are asked for: what torch's own modules read are parameters."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 30)
    attributes = Attributes()
    attributes.look([model])
    assert len(attributes.constants()._rest) < 20, "of 30 equal layers few things are looked at one by one"


def test_what_comes_and_goes_is_seen() -> None:
    module = Module()
    del module.plain
    assert not held([module], lambda: setattr(module, "plain", 1.0))
    assert not held([module], lambda: delattr(module, "plain"))
    assert not held([module], lambda: module.register_buffer("plain", torch.ones(3)))
    other = Criterion()
    assert not held([other], lambda: setattr(other, "__dict__", {"weight": 2.0}))


def test_globals_are_seen_where_code_reads_them_as_such() -> None:
    def change(name: str) -> bool:
        before = globals()[name]
        try:
            return held([Module()], lambda: globals().update({name: before + 1}))
        finally:
            globals()[name] = before

    assert not change("GLOBAL") and not change("BESIDE") and change("ASSIGNED") and change("loss")


class Slotted:
    __slots__ = ("unset", "weight")

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, output: Any, batch: Any) -> Any:
        return output * (self.unset if hasattr(self, "unset") else self.weight)


class Mapped(dict[str, float]):
    def __init__(self) -> None:
        super().__init__(other=1.0)
        self.weight = 1.0

    def __call__(self, output: Any, batch: Any) -> Any:
        return output * self.weight


class Criterion:
    shared = 1.0

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, output: Any, batch: Any) -> Any:
        return output * self._scale()

    def _scale(self) -> float:
        return self.weight

    def bound(self, output: Any, batch: Any) -> Any:
        return output * self._scale()

    @classmethod
    def of_class(cls, output: Any, batch: Any) -> Any:
        return output * cls.shared


class Inherited(Criterion):
    def __call__(self, output: Any, batch: Any) -> Any:
        return super().__call__(output, batch) + 1


@pytest.mark.parametrize(
    ("owner", "loss_of", "name"),
    [
        (Slotted(), lambda owner: owner, "weight"),
        (Slotted(), lambda owner: owner, "unset"),
        (Mapped(), lambda owner: owner, "weight"),
        (Criterion(), lambda owner: lambda output, batch: owner(output, batch), "weight"),
        (Criterion(), lambda owner: owner, "weight"),
        (Criterion(), lambda owner: owner.bound, "weight"),
        (Criterion(), lambda owner: functools.partial(owner.bound, batch=None), "weight"),
        (Inherited(), lambda owner: owner, "weight"),
        (type("Own", (Criterion,), {}), lambda owner: owner.of_class, "shared"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), lambda owner: owner, "label_smoothing"),
    ],
)
def test_losses_are_looked_at_like_modules(owner: Any, loss_of: Any, name: str) -> None:
    assert not held([loss_of(owner)], lambda: setattr(owner, name, 2.0))


def test_a_forward_in_the_place_of_its_class_s_is_looked_at() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        return x * module.other

    module: Any = Module()
    module.other, module.forward = 1.0, functools.partial(forward, module)
    assert not held([module], lambda: setattr(module, "other", 2.0))


class Guarded(Module):
    """Can be asked in a forward only."""

    closed = False

    def __getattribute__(self, name: str) -> Any:
        if name == "plain" and Guarded.closed:
            raise RuntimeError("only inside")
        return super().__getattribute__(name)


class Raising(float):
    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = float.__hash__


def test_what_objects_think_of_being_asked_ends_no_step() -> None:
    module, looped = Guarded(), Criterion().bound

    def odd(output: Any, batch: Any) -> Any:
        return output

    odd.__wrapped__ = odd  # type: ignore[attr-defined]
    assert held([module, odd, looped], lambda: setattr(Guarded, "closed", True))
    Guarded.closed = False
    module.plain = Raising(1.0)
    assert not held([module], lambda: setattr(module, "plain", Raising(1.0)))

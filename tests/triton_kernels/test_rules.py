"""The kernels beside `torch.optim`: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.triton_kernels.kernels import HERE, ROUNDED, masters, rules
from zeroweave.comm.rounding import cast_, join_, noise_, split_
from zeroweave.optim.lion import Lion

NUMEL = 5000
Kernel = Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor], int], None]
FACTOR = 0.37
RATE, DECAY = 1e-3, 0.1


def random(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUMEL, generator=generator).to(dtype).to(HERE)


def factor() -> Tensor:
    return torch.tensor(FACTOR, device=HERE)


def adam(coupled: bool, amsgrad: bool) -> Kernel:
    def update(master: Tensor, rest: Tensor, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        at_hand = (1 - RATE * DECAY, RATE / (1 - 0.9**step), math.sqrt(1 - 0.999**step))
        largest = state.get("max_exp_avg_sq", master)
        moments = (state["exp_avg"], state["exp_avg_sq"], largest)
        rules.adam[masters.programs(NUMEL)](
            master, rest, gradient, *moments, factor(), NUMEL,
            *at_hand, DECAY, 1 - 0.9, 0.999, 1 - 0.999, 1e-8,
            SPLIT=master.dtype == torch.bfloat16, FACTOR=2, COUPLED=coupled,
            AMSGRAD=amsgrad, MAXIMIZE=False, SIZE=masters.BLOCK, **ROUNDED,
        )  # fmt: skip

    return update


def sgd(momentum: float, nesterov: bool, dampening: float) -> Kernel:
    def update(master: Tensor, rest: Tensor, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        rules.sgd[masters.programs(NUMEL)](
            master, rest, gradient, state.get("momentum_buffer", master), factor(), NUMEL,
            RATE, DECAY, momentum, 1 - dampening,
            SPLIT=master.dtype == torch.bfloat16, FACTOR=2, DECAY=True,
            MOMENTUM=momentum != 0, FIRST=step == 1, NESTEROV=nesterov, MAXIMIZE=False, SIZE=masters.BLOCK, **ROUNDED,
        )  # fmt: skip

    return update


def adagrad(master: Tensor, rest: Tensor, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> None:
    rules.adagrad[masters.programs(NUMEL)](
        master, rest, gradient, state["sum"], factor(), NUMEL,
        RATE / (1 + (step - 1) * 0.1), DECAY, 1e-10,
        SPLIT=master.dtype == torch.bfloat16, FACTOR=2, DECAY=True, MAXIMIZE=False,
        SIZE=masters.BLOCK, **ROUNDED,
    )  # fmt: skip


def lion(maximize: bool) -> Kernel:
    def update(master: Tensor, rest: Tensor, gradient: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        rules.lion[masters.programs(NUMEL)](
            master, rest, gradient, state["exp_avg"], factor(), NUMEL,
            1 - RATE * DECAY, RATE, 0.9, 1 - 0.9, 0.99, 1 - 0.99,
            SPLIT=master.dtype == torch.bfloat16, FACTOR=2, MAXIMIZE=maximize,
            SIZE=masters.BLOCK, **ROUNDED,
        )  # fmt: skip

    return update


CASES: dict[str, tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], Kernel]] = {
    "adamw": (lambda p: torch.optim.AdamW(p, RATE, weight_decay=DECAY), adam(False, False)),
    "adam": (lambda p: torch.optim.Adam(p, RATE, weight_decay=DECAY), adam(True, False)),
    "amsgrad": (lambda p: torch.optim.AdamW(p, RATE, weight_decay=DECAY, amsgrad=True), adam(False, True)),
    "sgd": (lambda p: torch.optim.SGD(p, RATE, weight_decay=DECAY), sgd(0.0, False, 0.0)),
    "momentum": (
        lambda p: torch.optim.SGD(p, RATE, weight_decay=DECAY, momentum=0.9, dampening=0.1),
        sgd(0.9, False, 0.1),
    ),
    "nesterov": (
        lambda p: torch.optim.SGD(p, RATE, weight_decay=DECAY, momentum=0.9, nesterov=True),
        sgd(0.9, True, 0.0),
    ),
    "adagrad": (lambda p: torch.optim.Adagrad(p, RATE, lr_decay=0.1, weight_decay=DECAY), adagrad),
    "lion": (lambda p: Lion(p, RATE, weight_decay=DECAY), lion(False)),
    "lion that maximizes": (
        lambda p: Lion(p, RATE, weight_decay=DECAY, maximize=True),
        lion(True),
    ),
}


def far(found: Tensor, wanted: Tensor, terms: Tensor) -> float:
    """The largest difference, in units of the last place of the largest term that was added to get there."""
    _, exponent = torch.frexp(torch.maximum(terms, wanted.abs()))
    return float(((found - wanted).abs() / torch.exp2(exponent.double() - 24)).max())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_within_a_unit_of_the_last_place_of_torchs(case: str, split: bool) -> None:
    make, kernel = CASES[case]
    parameter = nn.Parameter(random(0))
    optimizer = make([parameter])
    shard, rest = (torch.empty(NUMEL, dtype=d, device=HERE) for d in (torch.bfloat16, torch.int16))
    for step in range(1, 5):
        gradient, before = random(step, torch.bfloat16), parameter.detach().clone()
        held: dict[str, Any] = optimizer.state[parameter]
        state = {key: value.clone() for key, value in held.items() if value is not None and value.numel() > 1}
        parameter.grad = gradient.float() * FACTOR
        optimizer.step()
        wanted = {key: v for key, v in optimizer.state[parameter].items() if v is not None and v.numel() > 1}
        state = {key: state.get(key, torch.zeros_like(value)) for key, value in wanted.items()}
        was = {key: value.clone() for key, value in state.items()}
        split_(before, shard, rest)
        master = shard if split else before.clone()
        kernel(master, rest, gradient, state, step)
        after = join_(torch.empty_like(before), shard, rest) if split else master
        terms = torch.maximum(before.abs(), (gradient.float() * FACTOR).abs()) + DECAY * before.abs()
        assert far(after, parameter.detach(), torch.maximum(before.abs(), torch.full_like(before, 4 * RATE))) <= 1
        for key, value in wanted.items():
            squares = "sq" in key or key == "sum"  # a unit in a gradient that decay was added to is two in its square
            size = torch.maximum(terms.square() if squares else terms, was[key].abs())
            # A kernel rounds the product and the sum; torch may round their end only.
            limit = 3 if squares else 2 if key == "momentum_buffer" else 1
            assert far(state[key], value, size) <= limit, key


def differing(found: Tensor, wanted: Tensor) -> list[tuple[int, float, float]]:
    """Where they are not equal, which NaNs are here, and the values there."""
    places = (found.nan_to_num(nan=7.0) != wanted.nan_to_num(nan=7.0)).nonzero().flatten().tolist()
    return [(at, float(found[at]), float(wanted[at])) for at in places]


def test_lion_has_the_bits_of_its_steps_on_the_host() -> None:
    """Zero, infinite and missing numbers, and signs that hang on the last bit of a sum."""
    parameter = nn.Parameter(random(0).cpu())
    optimizer = Lion([parameter], RATE, weight_decay=DECAY)
    master, momentum = parameter.detach().clone().to(HERE), torch.zeros(NUMEL, device=HERE)
    for step in range(1, 5):
        gradient = random(step).cpu()
        gradient[:7] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-38])
        if step > 1:  # b1 * m + (1 - b1) * g is nearly 0
            gradient[100:] = -optimizer.state[parameter]["exp_avg"][100:] * (0.9 / (1 - 0.9))
        parameter.grad = gradient.clone()
        optimizer.step()
        rules.lion[masters.programs(NUMEL)](
            master, master, gradient.to(HERE), momentum, factor(), NUMEL,
            1 - RATE * DECAY, RATE, 0.9, 1 - 0.9, 0.99, 1 - 0.99,
            SPLIT=False, FACTOR=0, MAXIMIZE=False, SIZE=masters.BLOCK, **ROUNDED,
        )  # fmt: skip
        for found, wanted in ((master, parameter.detach()), (momentum, optimizer.state[parameter]["exp_avg"])):
            assert differing(found.cpu(), wanted) == []
        assert not parameter[4].isfinite() and parameter[2:4].isfinite().all()


@pytest.mark.parametrize("kind", [torch.int16, torch.int8])
@pytest.mark.parametrize("by_chance", [False, True])
def test_masters_are_split_cast_and_joined_as_on_the_host(kind: torch.dtype, by_chance: bool) -> None:
    high = torch.arange(1 << 16, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7F, 0x80, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (high.unsqueeze(1) | low).flatten().view(torch.float32)
    random = noise_(torch.empty(values.shape, dtype=torch.int32), 0, 3) if by_chance else None
    wanted = [torch.empty(values.shape, dtype=dtype) for dtype in (torch.bfloat16, kind, torch.float32)]
    split_(values, *wanted[:2], random)
    join_(wanted[2], *wanted[:2])
    found = [torch.empty_like(each, device=HERE) for each in wanted]
    masters.split_(values.to(HERE), *found[:2], None if random is None else random.to(HERE))
    masters.join_(found[2], *found[:2])
    cast, rounded = torch.empty_like(found[0]), torch.empty_like(wanted[0])
    masters.cast_(cast, values.to(HERE))
    cast_(rounded, values)
    bits = {torch.bfloat16: torch.int16, kind: kind, torch.float32: torch.int32}
    for mine, theirs in zip([*found, cast], [*wanted, rounded], strict=True):
        assert torch.equal(mine.cpu().view(bits[mine.dtype]), theirs.view(bits[theirs.dtype]))

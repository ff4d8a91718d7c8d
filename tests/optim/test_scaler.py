"""The loss scale's course, and what it does to a loss."""

from __future__ import annotations

import random

import pytest
import torch

from zeroweave.config import Config
from zeroweave.layout import ParameterSpec, build_layout
from zeroweave.optim.scaler import LossScale, checks, loss_scale_of


def course(scale: LossScale, overflows: list[bool]) -> list[float]:
    values = []
    for overflow in overflows:
        scale.update(overflow)
        values.append(scale.value)
    return values


def torchs(initial: float, window: int, overflows: list[bool]) -> list[float]:
    """The same by `torch.amp.GradScaler`, which sees a gradient that is infinite or is not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=window)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    values = []
    for overflow in overflows:
        scaler.scale(torch.zeros(1))  # makes its tensors
        parameter.grad = torch.tensor([float("inf") if overflow else 1.0])
        scaler.step(optimizer)
        scaler.update()
        values.append(scaler.get_scale())
    return values


@pytest.mark.oldest
@pytest.mark.parametrize("seed", range(8))
def test_the_course_is_torchs(seed: int) -> None:
    draws = random.Random(seed)
    overflows = [draws.random() < 0.15 for _ in range(300)]
    window = draws.choice([1, 3, 10])
    scale = LossScale(2.0**16, dynamic=True, window=window, minimum=2.0**-40)
    assert course(scale, overflows) == torchs(2.0**16, window, overflows)


def test_hysteresis_forgives_and_is_given_back_by_a_doubling() -> None:
    scale = LossScale(1024.0, dynamic=True, window=3, hysteresis=2)
    assert course(scale, [True, False, True, True]) == [1024.0, 1024.0, 512.0, 256.0]
    assert course(scale, [False] * 3 + [True, True]) == [256.0, 256.0, 512.0, 512.0, 256.0]


def test_the_minimum_is_kept() -> None:
    scale = LossScale(3.0, dynamic=True, minimum=1.0)
    assert not scale.at_minimum
    assert course(scale, [True, True, True]) == [1.5, 1.0, 1.0]
    assert scale.at_minimum


def test_what_hysteresis_forgives_is_forgiven_at_the_minimum_too() -> None:
    """As in DeepSpeed, whose scaler raises at the first overflow that would halve."""
    scale = LossScale(1.0, dynamic=True, hysteresis=3)
    told = []
    for _ in range(3):
        told.append(scale.at_minimum)
        scale.update(overflow=True)
    assert told == [False, False, True] and scale.value == 1.0


def test_a_run_with_more_good_steps_than_the_window_doubles_at_the_next() -> None:
    scale = LossScale(8.0, dynamic=True, window=3)
    scale.resume({"value": 8.0, "good_steps": 7, "patience": 1})
    assert course(scale, [False, False, False, False]) == [16.0, 16.0, 16.0, 32.0]


def test_the_scale_stays_finite_in_float32() -> None:
    scale = LossScale(2.0**126, dynamic=True, window=1)
    assert course(scale, [False] * 3) == [2.0**127] * 3
    assert torch.tensor(scale.value).isfinite()


def test_a_static_scale_never_changes() -> None:
    scale = LossScale(128.0)
    assert scale.at_minimum and course(scale, [True, False, True]) == [128.0] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_losses_are_scaled_in_float32_at_least(dtype: torch.dtype) -> None:
    loss = torch.tensor(3.0, dtype=dtype)
    scaled = LossScale(2.0**16).of(loss)
    assert scaled.item() == 3 * 2.0**16 and scaled.dtype == torch.promote_types(dtype, torch.float32)
    assert LossScale(1.0).of(loss) is loss


def layouts(dtype: str, trained: bool = True) -> tuple[object, ...]:
    return build_layout([ParameterSpec("w", (4,), dtype, 2, trained, None)], 1, 1 << 20)


Wanted = tuple[float, bool] | None


@pytest.mark.parametrize(
    ("config", "dtype", "wanted"),
    [
        ({}, "bfloat16", None),
        ({}, "float16", (65536.0, True)),
        ({"autocast": "float16"}, "bfloat16", (65536.0, True)),
        ({"autocast": "bfloat16"}, "bfloat16", None),
        ({"loss_scale": 128}, "float16", (128.0, False)),
        ({"loss_scale": 8.0}, "bfloat16", (8.0, False)),
        ({"loss_scale": "dynamic", "initial_loss_scale": 16}, "bfloat16", (16.0, True)),
    ],
)
def test_what_a_config_asks_for(config: dict[str, object], dtype: str, wanted: Wanted) -> None:
    settings = Config.load({"precision": config})
    scale = loss_scale_of(settings, layouts(dtype))  # type: ignore[arg-type]
    assert (None if scale is None else (scale.value, scale.dynamic)) == wanted
    assert checks(settings, layouts(dtype)) == (wanted is not None)  # type: ignore[arg-type]


def test_frozen_float16_needs_no_scale() -> None:
    assert loss_scale_of(Config(), layouts("float16", trained=False)) is None  # type: ignore[arg-type]
    assert checks(Config(on_nonfinite="skip"), layouts("float16", trained=False))  # type: ignore[arg-type]

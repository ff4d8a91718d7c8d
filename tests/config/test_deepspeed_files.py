"""DeepSpeed files as the documentation of DeepSpeed, Accelerate and Trainer prints them: read, or refused by key."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zeroweave as zw
from zeroweave import Config, ConfigError
from zeroweave.integrations.deepspeed import FromDeepSpeed

FILES = Path(__file__).parent / "deepspeed"

TRAINER = {
    "train_micro_batch_size_per_gpu": 8,
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "fp16.enabled": True,
    "bf16.enabled": False,
    "optimizer.params.lr": 2e-4,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-7,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 2e-4,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
}
"""What an integration knows: the settings of a training run by DeepSpeed's names."""

ACCELERATE = {**TRAINER, "gradient_accumulation_steps": 1}
FP16 = {
    "precision": {
        "params": "float16",
        "loss_scale": "dynamic",
        "initial_loss_scale": 65536.0,
        "loss_scale_window": 1000,
        "loss_scale_hysteresis": 2,
        "min_loss_scale": 1.0,
    },
    "on_nonfinite": "raise",
}
OFFLOADED = {"optimizer": "all", "params": True}


def load(name: str, auto: dict[str, Any] | None = None) -> FromDeepSpeed:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zw.load_deepspeed(FILES / f"{name}.json", auto)


READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "getting_started": ({}, {"stage": 1, **FP16}),
    "zero_1": ({}, {"stage": 1, "bucket": {"bytes": 4 * 500_000_000}}),
    "zero_2": ({}, {"stage": 2, "bucket": {"bytes": 4 * 500_000_000}}),
    "zero_infinity": ({}, {"offload": OFFLOADED, "bucket": {"bytes": 4 * 10_000_000}}),
    "accelerate_stage_2": (
        ACCELERATE,
        {"stage": 2, "gradient_clipping": 0.5, "bucket": {"bytes": 2 * 200_000_000}, **FP16},
    ),
    "accelerate_stage_3_offload": (ACCELERATE, {"gradient_clipping": 0.5, "offload": OFFLOADED, **FP16}),
    "trainer_stage_2": ({}, {"stage": 2, "offload": {"optimizer": "all"}, "bucket": {"bytes": 4 * 500_000_000}}),
    "trainer_stage_3": ({}, {"offload": OFFLOADED}),
}
"""With what "auto" stands for, and the config."""

OPEN = "optimizer.params.lr optimizer.params.weight_decay".split()
WARMUP = [f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")]
ADAM = [f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")]
DISKS = [f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param")]

REFUSED: dict[str, list[str]] = {
    "zenflow": ["zero_optimization.zenflow"],
    "autosp": ["compile.passes"],
    "accelerate_stage_2": ["gradient_clipping", *OPEN, *WARMUP, "scheduler.params.total_num_steps"],
    "accelerate_stage_3_offload": ["gradient_clipping", *OPEN, *WARMUP, "scheduler.params.total_num_steps"],
    "accelerate_zero_plus_plus": [
        f"zero_optimization.{name}" for name in ("zero_quantized_weights", "zero_quantized_gradients")
    ],
    "trainer_nvme": ["fp16.enabled", *DISKS, "gradient_accumulation_steps", "gradient_clipping", *ADAM, *WARMUP],
}
"""Without anything for "auto": the keys that the error names."""


def test_every_file_is_read_or_refused() -> None:
    assert {path.stem for path in FILES.glob("*.json")} == READ.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read(name: str) -> None:
    auto, means = READ[name]
    assert load(name, auto).config == Config.load(means)


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_by_its_keys(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name)
    first, *lines = str(caught.value).splitlines()
    assert first == f"[ZW105] {FILES / name}.json: the DeepSpeed config cannot be followed:"
    assert [re.split(" is | must ", line.removeprefix("- "))[0] for line in lines] == REFUSED[name]
    assert all(re.search(r" is .*: | must be ", line) for line in lines), "a line without a reason"


def test_what_is_left_when_auto_is_filled_in() -> None:
    with pytest.raises(ConfigError) as caught:
        load("trainer_nvme", TRAINER)
    reason = "must be 'none' or 'cpu', not 'nvme'"
    assert str(caught.value).splitlines()[1:] == [f"- {key} {reason}" for key in DISKS]


def test_the_optimizer_and_the_scheduler_of_a_file() -> None:
    made = load("accelerate_stage_2", ACCELERATE)
    assert made.optimizer is not None and made.lr_scheduler is not None
    optimizer = made.optimizer([nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is torch.optim.AdamW
    assert {key: optimizer.param_groups[0][key] for key in ("lr", "weight_decay")} == {"lr": 2e-4, "weight_decay": 0.1}
    assert type(made.lr_scheduler(optimizer)) is LambdaLR
    assert load("zero_2").optimizer is load("zero_2").lr_scheduler is None


def test_a_config_alone_has_no_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"- optimizer is .*: a Config has none; zeroweave.load_deepspeed"):
        Config.from_deepspeed(FILES / "getting_started.json")

"""The optimizer and scheduler sections of a DeepSpeed config: torch's classes, with DeepSpeed's meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from zeroweave import ConfigError

STAGE = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0}


def made(**sections: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer, of a learning rate of 0.004 unless the section says another, and the scheduler."""
    parts = zw.load_deepspeed({**STAGE, "optimizer": {"type": "AdamW", "params": {"lr": 0.004}}, **sections})
    assert parts.optimizer is not None
    optimizer = parts.optimizer([nn.Parameter(torch.zeros(2))])
    return optimizer, parts.lr_scheduler and parts.lr_scheduler(optimizer)


def refused(**sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        zw.load_deepspeed({**STAGE, **sections})
    return [line.removeprefix("- ") for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("name", "params", "kind", "has"),
    [
        ("AdamW", {"lr": 0.1}, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
        ("Adam", {"betas": [0.8, 0.9], "weight_decay": 0.1}, torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        ("adam", {"adam_w_mode": True, "eps": 1e-6}, torch.optim.AdamW, {"eps": 1e-6, "weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
        (
            "AdamW",
            {"bias_correction": True, "set_grad_none": False, "fp32_optimizer_states": True},
            torch.optim.AdamW,
            {},
        ),
        ("adagrad", {"lr": 0.2}, torch.optim.Adagrad, {"lr": 0.2}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
        ("NAdam", {}, torch.optim.NAdam, {}),
        ("Lion", {}, zw.Lion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        ("lion", {"lr": 0.01, "betas": [0.8, 0.9]}, zw.Lion, {"lr": 0.01, "betas": (0.8, 0.9)}),
        ("Adafactor", {"eps": [None, 0.01]}, torch.optim.Adafactor, {"eps": (None, 0.01)}),
    ],
)
def test_an_optimizer(name: str, params: dict[str, Any], kind: type, has: dict[str, Any]) -> None:
    optimizer, _ = made(optimizer={"type": name, "params": params, "legacy_fusion": False})
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in has} == has


@pytest.mark.parametrize("name", ["Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "Muon", "MuAdam"])
def test_an_optimizer_that_torch_does_not_have(name: str) -> None:
    (line,) = refused(optimizer={"type": name, "params": {"lr": 1, "momentum": 1}})
    assert line.startswith(f"optimizer.type is {name!r}: ")


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("AdamW", "optimizer is 'AdamW': a section with a type, such as AdamW or WarmupLR, and its params"),
        (
            {"params": {}},
            "optimizer is {'params': {}}: a section with a type, such as AdamW or WarmupLR, and its params",
        ),
        ({"type": "AdamW", "params": 3}, "optimizer.params is 3: a section of keys"),
        ({"type": "Adamw2"}, "optimizer.type is 'Adamw2': none of torch.optim, as AdamW, Adam and SGD are"),
        ({"type": "Optimizer"}, "optimizer.type is 'Optimizer': none of torch.optim, as AdamW, Adam and SGD are"),
        ({"type": "lr_scheduler"}, "optimizer.type is 'lr_scheduler': none of torch.optim, as AdamW, Adam and SGD are"),
        (
            {"type": "Adam", "adam_w_mod": True},
            "optimizer.adam_w_mod: unknown; its parameters belong in optimizer.params",
        ),
        (
            {"type": "AdamW", "params": {"max_grad_norm": 1}},
            "optimizer.params.max_grad_norm: write gradient_clipping, beside optimizer",
        ),
        (
            {"type": "Adam", "params": {"bias_correction": False}},
            "optimizer.params.bias_correction: torch's AdamW does as with True",
        ),
        (
            {"type": "AdamW", "params": {"lr": "auto"}},
            "optimizer.params.lr is 'auto', which an integration fills in: write the value, or pass "
            "auto={'optimizer.params.lr': ...}",
        ),
        ({"type": "Adam", "params": {"adam_w_mode": "no"}}, "optimizer.params.adam_w_mode is 'no': true or false"),
        (
            {"type": "AdamW", "params": {"lr": -1}},
            "optimizer.params is {'lr': -1, 'weight_decay': 0.0}: Invalid learning rate: -1",
        ),
    ],
)
def test_an_optimizer_that_is_wrong(section: Any, problem: str) -> None:
    assert refused(optimizer=section) == [problem]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("AdamW", "weight_deca", 1),
        ("AdamW", "lr", "1e-4"),
        ("Adam", "betas", 0.9),
        ("Adam", "betas", [0.9, None]),
        ("SGD", "bias_correction", True),
        ("SGD", "torch_adam", True),
    ],
)
def test_parameters_that_the_class_of_torch_refuses(name: str, key: str, value: Any) -> None:
    (line,) = refused(optimizer={"type": name, "params": {key: value}})
    assert line.startswith("optimizer.params is {") and key in line


RATES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 4}, [0, 0, 0.005, 0.0079248, 0.01, 0.01]),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.001, 0.002, 0.003, 0.004, 0.004]),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 2, "warmup_type": "linear"},
        [0.1, 0.1, 0.3, 0.5, 0.5],
    ),
    (
        "WarmupDecayLR",
        {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"},
        [0, 0, 0.0005, 0.001, 0.00075, 0.0005, 0.00025, 0, 0],
    ),
    (
        "WarmupCosineLR",
        {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear", "cos_min_ratio": 0.5},
        [0, 0, 0.002, 0.0037071, 0.003, 0.0022929, 0.002, 0.002],
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 2, "lr_range_test_step_rate": 5}, [0.001, 0.0035, 0.006, 0.0085]),
    ("LRRangeTest", {"lr_range_test_step_size": 2, "lr_range_test_staircase": True}, [0.001, 0.001, 0.002, 0.002]),
    ("StepLR", {"step_size": 2, "gamma": 0.5}, [0.004, 0.004, 0.002, 0.002, 0.001]),
]
"""The rate of each optimizer step as DeepSpeed 0.19.8 has it, its optimizer made with 0.004."""


@pytest.mark.parametrize(("name", "params", "rates"), RATES)
def test_a_scheduler(name: str, params: dict[str, Any], rates: list[float]) -> None:
    optimizer, scheduler = made(scheduler={"type": name, "params": params})
    seen = []
    for _ in rates:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx(rates, rel=1e-4, abs=1e-12)


def test_a_scheduler_goes_on_from_its_state() -> None:
    section = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}
    optimizer, scheduler = made(scheduler=section)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    again, resumed = made(scheduler=section)
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for each in (optimizer, again):
        each.step()
    scheduler.step()
    resumed.step()
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] > 0


def test_groups_have_rates_of_their_own() -> None:
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))]},
        {"params": [nn.Parameter(torch.zeros(1))], "lr": torch.tensor(0.5)},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    parts = zw.load_deepspeed({**STAGE, "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}})
    assert parts.lr_scheduler is not None
    scheduler = parts.lr_scheduler(optimizer)
    for _ in range(501):
        optimizer.step()
        scheduler.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.05, 0.25])


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (3, "scheduler is 3: a section with a type, such as AdamW or WarmupLR, and its params"),
        ({"type": "WarmupLR", "params": []}, None),
        ({"type": "WarmupLR", "params": "x"}, "scheduler.params is 'x': a section of keys"),
        ({"type": "WarmupLR", "param": {}}, "scheduler.param: unknown; its parameters belong in scheduler.params"),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}},
            "scheduler.type is 'OneCycle': betas are not cycled with the learning rate: torch's OneCycleLR, with its "
            "own params, is nearest",
        ),
        (
            {"type": "Warmup"},
            "scheduler.type is 'Warmup': none of WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest or of "
            "torch.optim.lr_scheduler",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
            "scheduler.params.warmup_num_steps must be greater than or equal to 1, not 0",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "cosine"}},
            "scheduler.params.warmup_type must be 'log' or 'linear', not 'cosine'",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 3}},
            "unknown key 'scheduler.params.warmup_steps' in the config; did you mean "
            "'scheduler.params.warmup_num_steps'?",
        ),
        ({"type": "CosineAnnealingLR"}, "scheduler.params is {}: "),
        (
            {"type": "CyclicLR", "params": {"base_lr": 0.1, "max_lr": 1.0, "mode": "up"}},
            "scheduler.params is {'base_lr': 0.1, 'max_lr': 1.0, 'mode': 'up'}: ",
        ),
        ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps is missing"),
    ],
)
def test_a_scheduler_that_is_wrong(section: Any, problem: str | None) -> None:
    if problem is None:
        assert made(scheduler=section)[1] is not None  # nothing is said: the defaults
        return
    (line,) = refused(scheduler=section)
    assert line.startswith(problem) if problem.endswith(": ") else line == problem


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    sections = {"optimizer": {"type": "Lamb"}, "scheduler": {"type": "WarmupDecayLR"}, "zenflow": {}, "bf16": {"on": 1}}
    path.write_text(json.dumps({**STAGE, **sections}))
    with pytest.raises(ConfigError) as caught:
        zw.load_deepspeed(path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"[ZW105] {path}: the DeepSpeed config cannot be followed:"
    assert [line.split(" is ")[0].split(":")[0].split(" must")[0] for line in lines] == [
        "- zenflow",
        "- bf16.on",
        "- optimizer.type",
        "- scheduler.params.total_num_steps",
    ]


def test_an_engine_of_a_deepspeed_config() -> None:
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    source = {**STAGE, "compile": {"enabled": False}, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    parts = zw.load_deepspeed({**source, "scheduler": section})
    with zw.initialize(nn.Linear(2, 1), parts.optimizer, parts.config, parts.lr_scheduler) as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)

""" "auto" in a DeepSpeed config, and values that no DeepSpeed config should have."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest

import zeroweave as zw
from tests.config.test_deepspeed import nested
from tests.support.marks import daily
from zeroweave import Config, ConfigError
from zeroweave.config.deepspeed_keys import KEYS

STAGE = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0}


def refused(source: Any, auto: Any = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.from_deepspeed(source, auto)
    return [line.removeprefix("- ") for line in str(caught.value).splitlines()[1:]]


def test_auto_is_what_the_integration_says() -> None:
    source = {
        "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    auto = {
        "zero_optimization.stage": 2,
        "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.reduce_bucket_size": 1000,
        "bf16.enabled": True,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer.params.lr": 0.1,  # the file has none
    }
    assert Config.from_deepspeed(source, auto) == Config.load(
        {
            "stage": 2,
            "offload": {"optimizer": "all"},
            "bucket": {"bytes": 2000},
            "precision": {"params": "bfloat16"},
            "on_nonfinite": "skip",
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
        }
    )
    assert source["gradient_clipping"] == "auto", "the caller's own"


def test_auto_that_changes_no_result_is_the_default() -> None:
    names = ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size")
    zero = {"stage": 3, **dict.fromkeys(names, "auto")}
    assert Config.from_deepspeed({**STAGE, "zero_optimization": zero}) == Config()


def test_auto_inside_a_section_that_is_refused() -> None:
    source = {**STAGE, "amp": {"enabled": "auto", "opt_level": "auto"}}
    assert refused(source) == ["amp is {'enabled': 'auto', 'opt_level': 'auto'}: use torch_autocast"]
    assert Config.from_deepspeed(source, {"amp.enabled": False}) == Config()


def test_auto_that_nobody_fills_in() -> None:
    assert refused({**STAGE, "fp16": {"enabled": "auto"}}) == [
        "fp16.enabled is 'auto', which an integration fills in: write the value, or pass auto={'fp16.enabled': ...}"
    ]


def test_a_value_that_the_integration_does_not_have() -> None:
    assert refused({**STAGE, "gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}) == [
        'gradient_accumulation_steps is 2, but `auto` says 4: make them equal, or write "auto"'
    ]


def test_pairs_of_a_program_and_lists_of_a_file_are_the_same() -> None:
    section = {"type": "AdamW", "params": {"betas": [0.9, 0.95], "lr": 1.0}}
    made = zw.load_deepspeed({**STAGE, "optimizer": section}, {"optimizer.params.betas": (0.9, 0.95)})
    assert made.optimizer is not None
    with pytest.raises(ConfigError, match=r"optimizer.params.lr is 1.0, but `auto` says 2.0"):
        zw.load_deepspeed({**STAGE, "optimizer": section}, {"optimizer.params.lr": 2.0})


def test_a_name_that_is_none() -> None:
    assert refused(STAGE, {"bf16.enable": True}) == ["'bf16.enable' of `auto`: unknown; did you mean 'bf16.enabled'?"]


def test_other_names_of_the_same_key() -> None:
    zero = {"stage": 3, "prefetch_bucket_size": 0}
    assert Config.from_deepspeed({**STAGE, "zero_optimization": zero}).compile.prefetch == 0
    old = {**STAGE, "bfloat16": {"enabled": "auto"}}
    assert Config.from_deepspeed(old, {"bf16.enabled": True}).precision.params == "bfloat16"
    assert refused({**STAGE, "bf16": {"enabled": True}, "bfloat16": {"enabled": False}}) == [
        "bf16.enabled is written twice, under an older name as well: keep one"
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled must be a valid boolean, not 'yes'"),
        ({"fp16": {"loss_scale": "big"}}, "fp16.loss_scale must be 0 or a valid number, not 'big'"),
        (
            {"fp16": {"initial_scale_power": 5000}},
            "fp16.initial_scale_power must be less than or equal to 127, not 5000",
        ),
        ({"gradient_clipping": math.nan}, "gradient_clipping must be a finite number, not nan"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be less than or equal to 3, not 4"),
        ({1: 2}, "1: unknown, and it may change results; remove it"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "fp32"}},
            "torch_autocast.dtype must be 'bfloat16' or 'float16', not 'fp32'",
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
            "data_types.param_dtype is float16, but bf16.enabled and fp16.enabled say bfloat16",
        ),
    ],
)
def test_values_that_cannot_be(source: dict[str, Any], problem: str) -> None:
    assert refused({**STAGE, **source}) == [problem]


ODD = ("x", "auto", "", -1, 0, 1, 1.5, 10**400, math.inf, math.nan, True, False, None, [], [1], {}, {"a": []}, {"": {}})


TABLES = ("zero_optimization", "bf16", "fp16", "compile", "data_types", "torch_autocast")


@daily("key", [*list(KEYS)[::6], *TABLES], [key for index, key in enumerate(KEYS) if index % 6])
def test_no_value_crashes(key: str) -> None:
    for value in ODD:
        for beside in ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    zw.load_deepspeed(beside | nested(key, value))
                except ConfigError as error:
                    assert key.rpartition(".")[2] in str(error) or "stage" in str(error), (value, error)

"""DeepSpeed's switches of compilation together, keys that nobody knows, and configs in the wrong place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zeroweave as zw
from zeroweave import Config, ConfigError


def deepspeed(**sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3}, **sections}


def refused(source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.from_deepspeed(source)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("keys", "enabled"),
    [
        ({}, True),
        ({"enabled": True, "deepcompile": False}, True),
        ({"enabled": False, "deepcompile": True}, True),
        ({"enabled": False, "deepcompile": False}, False),
    ],
)
def test_either_switch_compiles(keys: dict[str, bool], enabled: bool) -> None:
    assert Config.from_deepspeed(deepspeed(compile=keys)).compile.enabled is enabled


def test_what_is_switched_off_is_zeroweaves_default() -> None:
    off = dict.fromkeys(
        ("free_activation", "offload_activation", "offload_opt_states", "offload_parameters", "sync_after_reduce"),
        False,
    )
    source = deepspeed(compile={**off, "double_buffer": True, "free_activation_threshold": 7, "passes": None})
    assert Config.from_deepspeed(source) == Config()
    assert (
        Config.from_deepspeed(deepspeed(gradient_allreduce_op="mean", managed_gradient_accumulation=True)) == Config()
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"compile": {"deepcompile": "yes"}}, "compile.deepcompile must be a valid boolean, not 'yes'"),
        ({"compile": {"backend": "cudagraphs"}}, "compile.backend must be 'inductor' or 'aot_eager', not 'cudagraphs'"),
        (
            {"compile": {"free_activation_threshold": 1.5}},
            "compile.free_activation_threshold must be a valid integer, not 1.5",
        ),
        ({"compile": True}, "compile is True: a section of keys"),
        (
            {"gradient_allreduce_op": "sum"},
            "gradient_allreduce_op is 'sum': gradients are averaged (both values of reduce.op): multiply the loss by "
            "the number of ranks for their sum",
        ),
        (
            {"managed_gradient_accumulation": False},
            "managed_gradient_accumulation is False: name each boundary with "
            "engine.set_gradient_accumulation_boundary(...)",
        ),
    ],
)
def test_what_cannot_be_followed(source: dict[str, Any], message: str) -> None:
    assert refused(deepspeed(**source))[1:] == [f"- {message}"]


def test_parameters_are_offloaded_at_stage_3_only() -> None:
    source = {"zero_optimization": {"stage": 2}, "compile": {"offload_parameters": True}}
    assert "offload.params works with stage 3 only" in refused(source)[0]


@pytest.mark.parametrize(
    ("source", "near"),
    [
        ({"zero_optimization": {"overlap_com": True}}, "zero_optimization.overlap_comm"),
        ({"overlap_com": True}, "zero_optimization.overlap_comm"),
        ({"stage": 3}, "zero_optimization.stage"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"compile": {"deepcompil": True}}, "compile.deepcompile"),
        ({"bf16": {"enable": True}}, "bf16.enabled"),
    ],
)
def test_a_near_miss_is_told_what_was_meant(source: dict[str, Any], near: str) -> None:
    assert refused(source)[1].endswith(f"did you mean {near!r}?")


def test_what_is_near_nothing_is_to_be_removed() -> None:
    assert refused(deepspeed(zzz=1))[1:] == ["- zzz: unknown, and it may change results; remove it"]


def test_errors_name_the_file(tmp_path: Path) -> None:
    absent = tmp_path / "nope.json"
    assert refused(absent) == [f"[ZW104] {absent}: the config file cannot be read: No such file or directory"]
    assert refused(str(absent))[0].startswith(f"[ZW104] {absent}: ")
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"overlap_com": True}))
    assert refused(wrong)[0] == f"[ZW105] {wrong}: the DeepSpeed config cannot be followed:"


def test_a_deepspeed_config_for_an_engine(tmp_path: Path) -> None:
    source = deepspeed(bf16={"enabled": True}, gradient_accumulation_steps=2)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(source))
    for given in (source, path, str(path)):
        with pytest.raises(ConfigError) as caught:
            zw.initialize(nn.Linear(2, 2), config=given)
        message = str(caught.value).replace(f"{path}: ", "")
        assert message == (
            "[ZW105] 'zero_optimization', 'bf16' of a DeepSpeed config: read it with "
            "zeroweave.Config.from_deepspeed(path_or_dict), and pass what that returns"
        )
    assert str(caught.value).startswith(f"[ZW105] {path}: ")

"""Defaults, files, and what a config is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from zeroweave.config import Config, RuntimeConfig
from zeroweave.errors import ConfigError

DEBUG = (
    "sync_before_reduce",
    "sync_after_reduce",
    "sync_before_allgather",
    "sync_after_allgather",
    "check_every_step",
)
OF_THE_ENGINE = (*DEBUG, "check_graphs", "keep_gradient_targets")


ROUND_TRIPS: list[dict[str, Any]] = [
    {},
    {"precision": {"params": "bfloat16", "optimizer": "compact"}},
    {"precision": {"params": "bfloat16", "optimizer": "compact", "master": "split"}},
    {"precision": {"params": "bfloat16", "optimizer": "compact"}, "offload": {"optimizer": "all"}},
    {"precision": {"params": "bfloat16", "master": "float32"}},
    {"precision": {"params": "float16", "initial_loss_scale": 256.0}},
    {"stage": 1, "gradient_clipping": 0.5, "offload": {"optimizer": "all"}},
]


@pytest.mark.parametrize("given", ROUND_TRIPS)
def test_what_a_config_writes_it_reads(given: dict[str, Any]) -> None:
    config = Config.model_validate(given)
    assert Config.model_validate(config.model_dump()) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        ({"params": True}, r"offload\.params in host memory: leave offload\.params out, or set precision\.optimizer"),
        ({"optimizer": "all", "params": True}, r"offload\.params in host memory"),
    ],
)
def test_compact_states_are_offloaded_without_parameters(offload: dict[str, Any], words: str) -> None:
    config = {"precision": {"params": "bfloat16", "optimizer": "compact"}, "offload": {"optimizer": "all"}}
    Config.model_validate(config)
    with pytest.raises(pydantic.ValidationError, match=rf"precision\.optimizer 'compact' .*{words}"):
        Config.model_validate({**config, "offload": offload})
    Config.model_validate({**config, "offload": {"optimizer": "adaptive", "memory_budget": 1}})


def test_compact_states_have_masters_of_their_own() -> None:
    with pytest.raises(pydantic.ValidationError, match=r"precision\.master 'float32' is for"):
        Config.model_validate({"precision": {"params": "bfloat16", "optimizer": "compact", "master": "float32"}})


def test_defaults() -> None:
    config = Config()
    assert (config.stage, config.gradient_accumulation_steps, config.gradient_clipping) == (3, 1, None)
    assert (config.gather_after_step, config.deadline_seconds) == (False, 600.0)
    assert config.precision.model_dump() == {
        "params": None,
        "master": "split",
        "optimizer": "full",
        "autocast": None,
        "reduce": None,
        "accumulate": "float32",
        "loss_scale": None,
        "initial_loss_scale": 65536.0,
        "loss_scale_window": 2000,
        "loss_scale_hysteresis": 1,
        "min_loss_scale": 1.0,
    }
    assert config.on_nonfinite is None
    assert config.bucket.model_dump() == {"bytes": 1 << 30, "by_block": True}
    assert config.reduce.model_dump() == {"depth": 2, "op": "average"}
    assert config.compile.model_dump() == {
        "enabled": True,
        "regions": "auto",
        "lower": "inductor",
        "recompile_limit": 16,
        "cuda_graphs": True,
        "activation_budget": 1.0,
        "prefetch": "auto",
        "keep": "auto",
        "memory_budget": "auto",
        "record_steps": 3,
        "passes": (),
        "dynamic": None,
    }
    assert config.transport.model_dump() == {"gathers": "auto"}
    assert config.activations.model_dump() == {"free_threshold_bytes": None}
    assert config.offload.model_dump() == {
        "optimizer": "none",
        "params": False,
        "memory_budget": None,
        "activations": False,
        "activations_threshold_bytes": 1 << 20,
    }
    assert config.log_dir is None
    assert config.log.model_dump() == {"every": 10, "progress": False, "steps": None, "to": ()}
    assert config.debug.model_dump() == dict.fromkeys(OF_THE_ENGINE, False)
    assert Config.load(None) == Config.load({}) == config


EVERYTHING: dict[str, Any] = {
    "stage": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1,
    "loss": "chunked",
    "gather_after_step": True,
    "deadline_seconds": 30,
    "on_nonfinite": "raise",
    "precision": {
        "params": "bfloat16",
        "master": "float32",
        "optimizer": "full",
        "autocast": "float16",
        "reduce": "float32",
        "accumulate": "bfloat16",
        "loss_scale": "dynamic",
        "initial_loss_scale": 1024,
        "loss_scale_window": 100,
        "loss_scale_hysteresis": 2,
        "min_loss_scale": 0.5,
    },
    "bucket": {"bytes": 1 << 20, "by_block": False},
    "reduce": {"depth": 1, "op": "predivide"},
    "compile": {
        "enabled": True,
        "regions": ["layers.*", "head"],
        "lower": "aot_eager",
        "recompile_limit": 4,
        "cuda_graphs": True,
        "activation_budget": 0.5,
        "prefetch": 0,
        "keep": ["layers.0"],
        "memory_budget": 1 << 30,
        "record_steps": 0,
        "passes": ["json:loads"],
        "dynamic": False,
    },
    "transport": {"gathers": "kernel"},
    "sharding": {"group_size": 8, "states": "group", "optional": ["model.visual*"]},
    "experts": {"parameters": ["*.experts.*"], "parallel_size": 2},
    "activations": {"free_threshold_bytes": 1 << 20},
    "checkpoint": {"keep_last": 3, "keep_every": 100, "save_on_signal": "runs/7"},
    "offload": {
        "optimizer": "adaptive",
        "params": False,
        "memory_budget": 1 << 30,
        "activations": True,
        "activations_threshold_bytes": 4096,
    },
    "log_dir": "runs/7/log",
    "log": {"every": 5, "progress": True, "steps": 1000, "to": ["tensorboard", "wandb"]},
    "debug": dict.fromkeys(OF_THE_ENGINE, True),
}


def toml(config: dict[str, Any]) -> str:
    """JSON's numbers, strings, booleans and lists of strings are TOML's as well."""
    keys = [f"{key} = {json.dumps(value)}" for key, value in config.items() if not isinstance(value, dict)]
    tables = [f"\n[{key}]\n{toml(value)}" for key, value in config.items() if isinstance(value, dict)]
    return "\n".join(keys + tables)


def test_a_dict_json_and_toml_are_equal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EVERYTHING))
    (tmp_path / "config.toml").write_text(toml(EVERYTHING))
    config = Config.load(EVERYTHING)
    assert config == Config(**EVERYTHING)
    assert config == Config.load(tmp_path / "config.json")
    assert config == Config.load(str(tmp_path / "config.toml"))
    assert Config.load(config) is config
    assert config.compile.regions == ("layers.*", "head")
    assert config.model_dump(mode="json") == EVERYTHING, "every key is used in this test"
    assert hash(config) == hash(Config(**EVERYTHING))


def test_a_config_cannot_change() -> None:
    config = Config()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.stage = 1
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.compile.prefetch = 2


def test_the_runtime_by_name_has_the_debug_switches_among_its_keys() -> None:
    assert not any(getattr(RuntimeConfig(), name) for name in DEBUG)
    for source in (dict.fromkeys(DEBUG, True), SimpleNamespace(**dict.fromkeys(DEBUG, True), other="ignored")):
        assert all(getattr(RuntimeConfig.load(source), name) for name in DEBUG)
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.load({"sync_before_reduction": True})
    assert str(caught.value) == (
        "[ZW102] unknown key 'sync_before_reduction' in the config; did you mean 'sync_before_reduce'?"
    )


def test_every_key_is_documented() -> None:
    tables = [value for value in vars(Config()).values() if isinstance(value, pydantic.BaseModel)]
    for model in (Config, RuntimeConfig, *map(type, tables)):
        assert model.__doc__
        for name, field in model.model_fields.items():
            assert field.description or field.default in tables, f"{model.__name__}.{name}"

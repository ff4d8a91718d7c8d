"""DeepSpeed's configuration: every key of the document has the fate that it says, errors name all keys at once."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zeroweave as zw
from zeroweave import Config, ConfigError, UnsupportedError
from zeroweave.config.deepspeed_keys import IGNORED, MAPPED, REFUSED

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "deepspeed.md").read_text()
STAGE = {"zero_optimization": {"stage": 3}}


def nested(key: str, value: Any) -> dict[str, Any]:
    """A DeepSpeed config of stage 3 with one more key, given by its dotted name."""
    config: dict[str, Any] = {table: dict(keys) for table, keys in STAGE.items()}
    *tables, leaf = key.split(".")
    place = config
    for table in tables:
        place = place.setdefault(table, {})
    place[leaf] = value
    return config


def quiet(source: Any) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".* has no gradient_clipping")
        return Config.from_deepspeed(source)


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_deepspeed(source)
    return str(caught.value)


def test_clipping_that_depends_on_deepspeeds_version_is_told() -> None:
    with pytest.warns(UserWarning, match="no gradient_clipping, and nothing is clipped"):
        assert Config.from_deepspeed(STAGE).gradient_clipping is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value, expected in ((0, None), (0.0, None), (1.0, 1.0)):
            assert Config.from_deepspeed({**STAGE, "gradient_clipping": value}).gradient_clipping == expected


def table(title: str) -> dict[str, str]:
    """What the document says of each key. Keys with the same answer share a row."""
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| (.*) \|$", section, flags=re.MULTILINE)
    pairs = [(key, answer) for keys, answer in rows for key in re.findall(r"`([\w.]+)`", keys)]
    assert len(dict(pairs)) == len(pairs), "a key is there twice"
    return dict(pairs)


def test_the_document_has_every_key_in_its_table() -> None:
    assert table("Mapped").keys() == set(MAPPED)
    assert table("Ignored").keys() == set(IGNORED)
    assert table("Refused") == {name: key.instead for name, key in REFUSED.items()}


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
DYNAMIC = {
    "params": "float16",
    "loss_scale": "dynamic",
    "initial_loss_scale": 65536.0,
    "loss_scale_window": 1000,
    "loss_scale_hysteresis": 2,
    "min_loss_scale": 1.0,
}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def compile_(**keys: Any) -> dict[str, Any]:
    return {"compile": keys}


MEANINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}),
    "gradient_clipping": ({"gradient_clipping": 0.5}, {"gradient_clipping": 0.5}),
    "communication_data_type": ({"communication_data_type": "fp32"}, {"precision": {"reduce": "float32"}}),
    "prescale_gradients": ({"prescale_gradients": True}, {"reduce": {"op": "predivide"}}),
    "data_types.grad_accum_dtype": (
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"precision": {"accumulate": "bfloat16"}},
    ),
    "data_types.param_dtype": (
        {**BF16, "data_types": {"param_dtype": "bf16"}},
        {"precision": {"params": "bfloat16"}, "on_nonfinite": "skip"},
    ),
    "bf16.enabled": (BF16, {"precision": {"params": "bfloat16"}, "on_nonfinite": "skip"}),
    "bf16.check_grad_overflow": (
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        {"precision": {"params": "bfloat16"}},
    ),
    "fp16.enabled": (FP16, {"precision": DYNAMIC, "on_nonfinite": "raise"}),
    "fp16.loss_scale": (
        {"fp16": {"enabled": True, "loss_scale": 128}},
        {"precision": {"params": "float16", "loss_scale": 128.0}},
    ),
    "fp16.initial_scale_power": (
        {"fp16": {"enabled": True, "initial_scale_power": 12}},
        {"precision": {**DYNAMIC, "initial_loss_scale": 4096.0}, "on_nonfinite": "raise"},
    ),
    "fp16.loss_scale_window": (
        {"fp16": {"enabled": True, "loss_scale_window": 5}},
        {"precision": {**DYNAMIC, "loss_scale_window": 5}, "on_nonfinite": "raise"},
    ),
    "fp16.hysteresis": (
        {"fp16": {"enabled": True, "hysteresis": 3}},
        {"precision": {**DYNAMIC, "loss_scale_hysteresis": 3}, "on_nonfinite": "raise"},
    ),
    "fp16.min_loss_scale": (
        {"fp16": {"enabled": True, "min_loss_scale": 4}},
        {"precision": {**DYNAMIC, "min_loss_scale": 4}, "on_nonfinite": "raise"},
    ),
    "torch_autocast.enabled": ({"torch_autocast": {"enabled": True}}, {"precision": {"autocast": "bfloat16"}}),
    "torch_autocast.dtype": (
        {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}},
        {"precision": {"autocast": "bfloat16"}},
    ),
    "activation_checkpointing.cpu_checkpointing": (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"offload": {"activations": True}},
    ),
    "compile.enabled": (compile_(enabled=False), {"compile": {"enabled": False}}),
    "compile.deepcompile": (compile_(deepcompile=False), {"compile": {"enabled": False}}),
    "compile.backend": (compile_(backend="aot_eager"), {"compile": {"lower": "aot_eager"}}),
    "compile.free_activation": (
        compile_(free_activation=True),
        {"activations": {"free_threshold_bytes": 4 * 10 * 1024 * 1024}},
    ),
    "compile.free_activation_threshold": (
        {**compile_(free_activation=True, free_activation_threshold=1000), "torch_autocast": {"enabled": True}},
        {"activations": {"free_threshold_bytes": 2000}, "precision": {"autocast": "bfloat16"}},
    ),
    "compile.offload_activation": (compile_(offload_activation=True), {"offload": {"activations": True}}),
    "compile.offload_opt_states": (compile_(offload_opt_states=True), {"offload": {"optimizer": "all"}}),
    "compile.offload_parameters": (compile_(offload_parameters=True), {"offload": {"params": True}}),
    "compile.double_buffer": (compile_(double_buffer=False), {"reduce": {"depth": 1}}),
    **{
        f"compile.{name}": (compile_(**{name: True}), {"debug": {name: True}})
        for name in ("sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather")
    },
    "zero_optimization.stage": (zero(stage=2), {"stage": 2}),
    "zero_optimization.reduce_bucket_size": (
        {**BF16, **zero(reduce_bucket_size=5e8)},
        {"precision": {"params": "bfloat16"}, "on_nonfinite": "skip", "bucket": {"bytes": 10**9}},
    ),
    "zero_optimization.allgather_bucket_size": (
        zero(reduce_bucket_size=1000, allgather_bucket_size=500),
        {"bucket": {"bytes": 2000}},
    ),
    "zero_optimization.zero_hpz_partition_size": (
        zero(zero_hpz_partition_size=8, mics_shard_size=-1),
        {"sharding": {"group_size": 8}},
    ),
    "zero_optimization.mics_shard_size": (
        zero(mics_shard_size=4, zero_hpz_partition_size=1),
        {"sharding": {"group_size": 4}},
    ),
    "zero_optimization.overlap_comm": (zero(overlap_comm=False), {"reduce": {"depth": 1}}),
    "zero_optimization.stage3_prefetch_bucket_size": (
        zero(stage3_prefetch_bucket_size=0),
        {"compile": {"prefetch": 0}},
    ),
    "zero_optimization.offload_optimizer.device": (
        zero(offload_optimizer={"device": "cpu"}),
        {"offload": {"optimizer": "all"}},
    ),
    "zero_optimization.offload_param.device": (zero(offload_param={"device": "cpu"}), {"offload": {"params": True}}),
}


def test_every_mapped_key_is_tested() -> None:
    assert MEANINGS.keys() == MAPPED.keys()


@pytest.mark.parametrize("key", MEANINGS)
def test_mapped(key: str) -> None:
    source, means = MEANINGS[key]
    config = quiet({**STAGE, **source})
    assert config == Config.load({"stage": 3, **means})
    assert config != Config() or "stage" in key, "the row tests nothing"


@pytest.mark.parametrize("key", IGNORED)
def test_ignored(key: str) -> None:
    with pytest.warns(UserWarning, match=f"which change no result: {re.escape(key)}$"):
        assert Config.from_deepspeed(nested(key, "auto")) == Config()


@pytest.mark.parametrize("key", REFUSED)
def test_refused(key: str) -> None:
    asked = not any(off is True for off in REFUSED[key].off)
    assert refused(nested(key, asked)).splitlines()[1:] == [f"- {key} is {asked}: {REFUSED[key].instead}"]
    for off in REFUSED[key].off:
        assert quiet(nested(key, off)) == Config()


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("curriculum_learning", {"enabled": False, "curriculum_type": "seqlen", "min_difficulty": 8}),
        ("amp", {"enabled": False, "opt_level": "O1"}),
    ],
)
def test_a_section_that_is_switched_off_asks_for_nothing(key: str, section: dict[str, Any]) -> None:
    assert quiet(nested(key, section)) == Config()
    for on in ({**section, "enabled": True, "device": "cpu"}, {k: v for k, v in section.items() if v}):
        if on != section:
            assert REFUSED[key].instead in refused(nested(key, on))


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("fp16", {"consecutive_hysteresis": True, "loss_scale": "auto", "min_loss_scale": 0}),
        ("bf16", {"bf16_master_weights_and_grads": True, "check_grad_overflow": 1}),
        ("torch_autocast", {"lower_precision_safe_modules": ["torch.nn.Linear"], "dtype": "auto"}),
    ],
)
def test_what_stands_beside_a_switch_that_is_off_asks_for_nothing(section: str, keys: dict[str, Any]) -> None:
    assert quiet({**STAGE, section: {"enabled": False, **keys}}) == Config()
    assert len(refused({**STAGE, section: {"enabled": True, **keys}}).splitlines()) == 1 + len(keys)
    assert f"{section}.enable: unknown" in refused({**STAGE, section: {"enabled": False, "enable": True}})


@pytest.mark.parametrize(
    "sizes", [{"train_batch_size": 32}, {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}]
)
def test_batches_that_some_number_of_ranks_makes(sizes: dict[str, int]) -> None:
    with pytest.warns(UserWarning, match="which change no result: train_batch_size"):
        config = Config.from_deepspeed({**STAGE, **sizes, "gradient_accumulation_steps": 4})
    assert config.gradient_accumulation_steps == 4


def test_all_keys_that_cannot_be_followed_are_named_at_once() -> None:
    source = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "disk"},
            "zero_quantized_weights": True,
            "new": 1,
        },
        "optimizer": {"type": "AdamW"},
        "gradient_clipping": "auto",
        "zero_optimisation": {},
        "communication_data_type": "int8",
        "steps_per_print": 1,
    }
    lines = refused(source).splitlines()
    assert lines[0] == "[ZW105] the DeepSpeed config cannot be followed:"
    assert [re.split(" is | must |:", line)[0] for line in lines[1:]] == [
        "- zero_optimization.offload_param.device",
        "- zero_optimization.zero_quantized_weights",
        "- zero_optimization.new",
        "- optimizer",
        "- gradient_clipping",
        "- zero_optimisation",
        "- communication_data_type",
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({**BF16, **FP16}, "bf16.enabled and fp16.enabled: one of them"),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2},
            "gradient_accumulation_steps is missing: write train_batch_size / (train_micro_batch_size_per_gpu × ranks)",
        ),
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
            "train_batch_size is 30, which no number of ranks makes of 4 steps of accumulation × 4 samples: correct "
            "one of them",
        ),
        (
            {"train_batch_size": 5, "gradient_accumulation_steps": 2},
            "train_batch_size is 5, which no number of ranks makes of 2 steps of accumulation: correct one of them",
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp16"}},
            "data_types.grad_accum_dtype must be 'float32' or 'bfloat16', not 'fp16'",
        ),
        (zero(reduce_bucket_size="big"), "zero_optimization.reduce_bucket_size must be a valid integer, not 'big'"),
        (
            zero(offload_param={"device": "nvme", "nvme_path": "/disk"}),
            "zero_optimization.offload_param.device must be 'none' or 'cpu', not 'nvme'",
        ),
    ],
)
def test_what_says_too_little_or_too_much(source: dict[str, Any], message: str) -> None:
    assert refused({**STAGE, **source}).splitlines()[1:] == [f"- {message}"]


@pytest.mark.parametrize("source", [{}, {"zero_optimization": {"stage": 0}}, {"zero_optimization": False}])
def test_no_sharding(source: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="stage must be 1, 2 or 3, not 0"):
        Config.from_deepspeed(source)
    assert quiet({"zero_optimization": True}).stage == 1  # the old form


def test_values_are_checked_as_those_of_any_config() -> None:
    source = {"fp16": {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}}
    assert "precision.initial_loss_scale must be at least precision.min_loss_scale" in refused({**STAGE, **source})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bfloat16": {"enabled": True}}))
    assert (
        quiet(path)
        == quiet(str(path))
        == Config.load({"stage": 2, "precision": {"params": "bfloat16"}, "on_nonfinite": "skip"})
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.from_deepspeed(tmp_path / "absent.json")
    path.write_text('{"zero_optimization": {"stage": 3, "stage": 1}}')
    with pytest.raises(ConfigError, match=r"ds_config.json: .* not valid JSON: more than one 'stage' in one table"):
        Config.from_deepspeed(path)


# ---------------------------------------------------------------------- switches together, and keys that nobody knows
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
    assert Config.from_deepspeed({**STAGE, "compile": keys}).compile.enabled is enabled


def test_what_is_switched_off_is_zeroweaves_default() -> None:
    off = dict.fromkeys(
        ("free_activation", "offload_activation", "offload_opt_states", "offload_parameters", "sync_after_reduce"),
        False,
    )
    source = {**STAGE, "compile": {**off, "double_buffer": True, "free_activation_threshold": 7, "passes": None}}
    assert Config.from_deepspeed(source) == Config()
    average = {"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True}
    assert Config.from_deepspeed({**STAGE, **average}) == Config()


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
    assert refused({**STAGE, **source}).splitlines()[1:] == [f"- {message}"]


def test_parameters_are_offloaded_at_stage_3_only() -> None:
    source = {"zero_optimization": {"stage": 2}, "compile": {"offload_parameters": True}}
    assert "offload.params works with stage 3 only" in refused(source)


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
    assert refused(source).splitlines()[1].endswith(f"did you mean {near!r}?")


def test_what_is_near_nothing_is_to_be_removed() -> None:
    assert refused({**STAGE, "zzz": 1}).splitlines()[1:] == ["- zzz: unknown, and it may change results; remove it"]


def test_errors_name_the_file(tmp_path: Path) -> None:
    absent = tmp_path / "nope.json"
    assert refused(absent) == f"[ZW104] {absent}: the config file cannot be read: No such file or directory"
    assert refused(str(absent)).startswith(f"[ZW104] {absent}: ")
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"overlap_com": True}))
    assert refused(wrong).splitlines()[0] == f"[ZW105] {wrong}: the DeepSpeed config cannot be followed:"


def test_a_deepspeed_config_for_an_engine(tmp_path: Path) -> None:
    source = {**STAGE, "bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
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

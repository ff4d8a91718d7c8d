"""DeepSpeed's configuration in terms of zeroweave's: what of it is mapped, what is ignored, what is refused.

`KEYS` is the whole of it, in dotted names; docs/deepspeed.md explains it row by row. Whatever is in neither is refused
as well: a key that nobody knows may change results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from zeroweave.errors import ConfigError

_DTYPES: Final = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}


@dataclass(frozen=True)
class Key:
    """What becomes of a key. A refused one is accepted with a value in `off`: zeroweave does the same then."""

    fate: Literal["mapped", "ignored", "refused"]
    off: tuple[Any, ...] = ()
    instead: str = ""
    """refused: what to do"""


_OFF: Final[tuple[Any, ...]] = (False, None, 0, {}, [])
_MAPPED, _IGNORED = Key("mapped"), Key("ignored")


def _refused(instead: str, *off: Any) -> Key:
    return Key("refused", off or _OFF, instead)


_PRECISION = "masters and optimizer states are float32"
_NOT_HERE = "zeroweave has nothing like it"
_DEVICE = 'write {"device": "cpu"}'
_ADAPTIVE = "set offload.optimizer to 'adaptive' in zeroweave's own config"
_DEVICES: Final = ("none", "cpu", None)

KEYS: Final[dict[str, Key]] = {
    **dict.fromkeys(
        (
            "gradient_accumulation_steps",
            "gradient_clipping",
            "communication_data_type",
            "prescale_gradients",
            "data_types.grad_accum_dtype",
            "bf16.enabled",
            "bf16.check_grad_overflow",
            "fp16.enabled",
            "fp16.loss_scale",
            "fp16.initial_scale_power",
            "fp16.loss_scale_window",
            "fp16.hysteresis",
            "fp16.min_loss_scale",
            "torch_autocast.enabled",
            "torch_autocast.dtype",
            "zero_optimization.stage",
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.overlap_comm",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.offload_optimizer.device",
            "zero_optimization.offload_param.device",
        ),
        _MAPPED,
    ),
    **dict.fromkeys(
        (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "dataloader_drop_last",
            "steps_per_print",
            "wall_clock_breakdown",
            "memory_breakdown",
            "dump_state",
            "disable_allgather",
            "vocabulary_size",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "tensorboard",
            "wandb",
            "comet",
            "csv_monitor",
            "comms_logger",
            "flops_profiler",
            "checkpoint",
            "nebula",
            "aio",
            "graph_harvesting",
            "bf16.immediate_grad_update",
            "fp16.auto_cast",
            "fp16.fused_mode",
            "activation_checkpointing.contiguous_memory_optimization",
            "activation_checkpointing.number_checkpoints",
            "activation_checkpointing.profile",
            "activation_checkpointing.synchronize_checkpoint_boundary",
            "compile.deepcompile",
            "compile.double_buffer",
            "compile.symmetric_memory",
            "compile.free_activation",
            "zero_optimization.allgather_partitions",
            "zero_optimization.contiguous_gradients",
            "zero_optimization.reduce_scatter",
            "zero_optimization.round_robin_gradients",
            "zero_optimization.use_multi_rank_bucket_allreduce",
            "zero_optimization.load_from_fp32_weights",
            "zero_optimization.elastic_checkpoint",
            "zero_optimization.ignore_unused_parameters",
            "zero_optimization.legacy_stage1",
            "zero_optimization.sub_group_size",
            "zero_optimization.memory_efficient_linear",
            "zero_optimization.override_module_apply",
            "zero_optimization.pipeline_loading_checkpoint",
            "zero_optimization.log_trace_cache_warnings",
            "zero_optimization.enable_sanity_checks",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance",
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_model_persistence_threshold",
            "zero_optimization.stage3_module_granularity_threshold",
            "zero_optimization.stage3_partition_stream_chunk_size",
            "zero_optimization.stage3_use_all_reduce_for_fetch_params",
            "zero_optimization.stage3_allgather_sequential",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.offload_optimizer.buffer_count",
            "zero_optimization.offload_optimizer.fast_init",
            "zero_optimization.offload_optimizer.pipeline_read",
            "zero_optimization.offload_optimizer.pipeline_write",
            "zero_optimization.offload_optimizer.nvme_path",
            "zero_optimization.offload_optimizer.cpuadam_cores_perc",
            "zero_optimization.offload_optimizer.super_offload",
            "zero_optimization.offload_param.pin_memory",
            "zero_optimization.offload_param.buffer_count",
            "zero_optimization.offload_param.buffer_size",
            "zero_optimization.offload_param.max_in_cpu",
            "zero_optimization.offload_param.nvme_path",
        ),
        _IGNORED,
    ),
    "optimizer": _refused("build the optimizer and pass it to zeroweave.initialize"),
    "scheduler": _refused("build the learning-rate scheduler and pass it to zeroweave.initialize"),
    "gradient_predivide_factor": _refused("use prescale_gradients, which divides by the world first", 1, None),
    "sparse_gradients": _refused("gradients are dense"),
    "sparse_attention": _refused("it belongs to the model"),
    "amp": _refused("use torch_autocast", {"enabled": False}, *_OFF),
    "fp16.consecutive_hysteresis": _refused("an overflow counts whether or not good steps came before it"),
    "fp16.fp16_master_weights_and_grads": _refused(_PRECISION),
    "bf16.bf16_master_weights_and_grads": _refused(_PRECISION),
    "bf16.bf16_optimizer_states": _refused(_PRECISION),
    "torch_autocast.lower_precision_safe_modules": _refused("torch.autocast decides by operator"),
    "activation_checkpointing.partition_activations": _refused("use torch.utils.checkpoint in the model"),
    "activation_checkpointing.cpu_checkpointing": _refused("use torch.utils.checkpoint in the model"),
    "zero_optimization.offload_optimizer": _refused(_DEVICE),
    "zero_optimization.offload_optimizer.ratio": _refused(f"a share needs a budget: {_ADAPTIVE}", 1, 1.0, None),
    "zero_optimization.offload_param": _refused(_DEVICE),
    "zero_optimization.cpu_offload": _refused(f"offload_optimizer: {_DEVICE}"),
    "zero_optimization.cpu_offload_param": _refused(f"offload_param: {_DEVICE}"),
    "zero_optimization.cpu_offload_use_pin_memory": _refused("write offload_optimizer and offload_param"),
    "zero_optimization.zero_hpz_partition_size": _refused("parameters are sharded over all ranks", 1, *_OFF),
    "zero_optimization.mics_shard_size": _refused("parameters are sharded over all ranks", -1, *_OFF),
    "zero_optimization.mics_hierarchical_params_gather": _refused("parameters are sharded over all ranks"),
    "zero_optimization.zero_quantized_weights": _refused("nothing is quantized"),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused("nothing is quantized"),
    "zero_optimization.zero_quantized_gradients": _refused("nothing is quantized"),
    "zero_optimization.zeropp_loco_param": _refused("nothing is quantized"),
    "zero_optimization.zenflow": _refused(_NOT_HERE),
    "zero_optimization.leaf_module": _refused("name regions in compile.regions"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _refused("optimizers are element-wise"),
    "compile.offload_activation": _refused(_NOT_HERE),
    "compile.offload_opt_states": _refused(f"a share needs a budget: {_ADAPTIVE}"),
    "compile.offload_parameters": _refused(f"zero_optimization.offload_param: {_DEVICE}"),
    "progressive_layer_drop": _refused(_NOT_HERE, {"enabled": False}, *_OFF),
    "eigenvalue": _refused(_NOT_HERE, {"enabled": False}, *_OFF),
    "quantize_training": _refused("nothing is quantized", {"enabled": False}, *_OFF),
    "compression_training": _refused("nothing is quantized"),
    "curriculum_learning": _refused("the data loader is yours", {"enabled": False}, *_OFF),
    "data_efficiency": _refused("the data loader is yours", {"enabled": False}, *_OFF),
    "elasticity": _refused(_NOT_HERE, {"enabled": False}, *_OFF),
    "autotuning": _refused(_NOT_HERE, {"enabled": False}, *_OFF),
    "hybrid_engine": _refused(_NOT_HERE, {"enabled": False}, *_OFF),
    "pipeline": _refused("pipelines are not run"),
    "tensor_parallel": _refused("tensors are not split"),
    "sequence_parallel_size": _refused("sequences are not split", 1, *_OFF),
    "seq_parallel_communication_data_type": _refused("sequences are not split", None),
    "use_data_before_expert_parallelism": _refused(_NOT_HERE),
}
"""Sections without a dot are taken as they are: their own keys are not looked at."""

_RENAMED: Final = {"bfloat16": "bf16"}

_AUTO_IS_DEFAULT: Final = frozenset(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size")
)
"""Mapped keys that change no result: an integration's "auto" leaves zeroweave's default."""


def translate(source: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of `Config` that a DeepSpeed configuration means, and the keys of it that change nothing.

    ConfigError names every key that is refused, unknown or left to an integration, at once.
    """
    values = dict(_flat(source))
    problems = [problem for key, value in values.items() if (problem := _problem(key, value))]
    if not problems:
        problems = [*_contradictions(values)]
    if problems:
        raise ConfigError("\n".join(["the DeepSpeed config cannot be followed:", *(f"- {each}" for each in problems)]))
    return _config(values), sorted(key for key in values if KEYS[key].fate == "ignored")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = prefix + (_RENAMED.get(name, name) if not prefix else name)
        if key == "zero_optimization" and isinstance(value, bool):
            yield "zero_optimization.stage", int(value)
        elif isinstance(value, Mapping) and any(known.startswith(f"{key}.") for known in KEYS):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _problem(key: str, value: Any) -> str | None:
    known = KEYS.get(key)
    if known is None:
        return f"{key}: unknown, and it may change results; remove it"
    if known.fate == "ignored":
        return None
    if known.fate == "refused":
        return None if _asks_nothing(value, known.off) else f"{key} is {value!r}: {known.instead}"
    if value == "auto" and key not in _AUTO_IS_DEFAULT:
        return f"{key} is 'auto', which an integration fills in: write the value"
    if key in ("communication_data_type", "data_types.grad_accum_dtype", "torch_autocast.dtype"):
        if value is not None and str(value).removeprefix("torch.") not in _DTYPES:
            return f"{key} is {value!r}: one of {', '.join(_DTYPES)}"
    elif key.endswith(".device"):
        if value not in _DEVICES:
            return f"{key} is {value!r}: 'cpu' or 'none'"
    elif key.endswith(("bucket_size", "power")) and value not in (None, "auto"):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            return f"{key} is {value!r}: a whole number"
    return None


def _asks_nothing(value: Any, off: tuple[Any, ...]) -> bool:
    """Is it one of `off`, or a section that is switched off as one of them is, whatever else it says?"""
    if isinstance(value, Mapping) and value:
        return any(each and each.items() <= value.items() for each in off if isinstance(each, Mapping))
    return value is not True and value in off  # True would equal 1


def _contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("bf16.enabled") and values.get("fp16.enabled"):
        yield "bf16.enabled and fp16.enabled: one of them"
    sizes = {"train_batch_size", "train_micro_batch_size_per_gpu"}
    if "gradient_accumulation_steps" not in values and sizes <= values.keys():
        yield (
            "gradient_accumulation_steps is missing: write train_batch_size / (train_micro_batch_size_per_gpu × ranks)"
        )
    if _dtype(values, "data_types.grad_accum_dtype") == "float16":
        yield "data_types.grad_accum_dtype is 'fp16': fp32 or bf16"


def _dtype(values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    return None if value is None else _DTYPES[str(value).removeprefix("torch.")]


def _config(values: Mapping[str, Any]) -> dict[str, Any]:
    half = bool(values.get("bf16.enabled")) or bool(values.get("fp16.enabled"))
    config: dict[str, Any] = {"stage": values.get("zero_optimization.stage", 0), "precision": _precision(values)}
    if "gradient_accumulation_steps" in values:
        config["gradient_accumulation_steps"] = values["gradient_accumulation_steps"]
    if values.get("gradient_clipping"):
        config["gradient_clipping"] = values["gradient_clipping"]
    if values.get("bf16.enabled") and values.get("bf16.check_grad_overflow", True):
        config["on_nonfinite"] = "skip"
    if config["precision"].get("loss_scale") == "dynamic":
        config["on_nonfinite"] = "raise"  # at the smallest scale; above it the step is skipped
    sizes = [values.get(f"zero_optimization.{name}") for name in ("reduce_bucket_size", "allgather_bucket_size")]
    if elements := [int(size) for size in sizes if size not in (None, "auto")]:
        config["bucket"] = {"bytes": min(elements) * (2 if half else 4)}
    offload = config["offload"] = {}
    if values.get("zero_optimization.offload_optimizer.device") == "cpu":
        offload["optimizer"] = "all"
    if values.get("zero_optimization.offload_param.device") == "cpu":
        offload["params"] = True
    reduce = config["reduce"] = {}
    if values.get("prescale_gradients"):
        reduce["op"] = "presum"
    if values.get("zero_optimization.overlap_comm") is False:
        reduce["depth"] = 1
    if values.get("zero_optimization.stage3_prefetch_bucket_size") == 0:
        config["compile"] = {"prefetch": 0}
    return config


def _precision(values: Mapping[str, Any]) -> dict[str, Any]:
    precision: dict[str, Any] = {}
    if values.get("bf16.enabled"):
        precision["params"] = "bfloat16"
    if values.get("fp16.enabled"):
        precision["params"] = "float16"
        scale = values.get("fp16.loss_scale", 0)
        if scale:
            precision["loss_scale"] = float(scale)
        else:
            precision["loss_scale"] = "dynamic"
            precision["initial_loss_scale"] = 2.0 ** values.get("fp16.initial_scale_power", 16)
            precision["loss_scale_window"] = values.get("fp16.loss_scale_window", 1000)
            precision["loss_scale_hysteresis"] = values.get("fp16.hysteresis", 2)
            precision["min_loss_scale"] = values.get("fp16.min_loss_scale", 1)
    if values.get("torch_autocast.enabled"):
        precision["autocast"] = _dtype(values, "torch_autocast.dtype") or "bfloat16"
    for key, name in (("communication_data_type", "reduce"), ("data_types.grad_accum_dtype", "accumulate")):
        if (dtype := _dtype(values, key)) is not None:
            precision[name] = dtype
    return precision

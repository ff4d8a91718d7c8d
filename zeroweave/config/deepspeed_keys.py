"""The keys of a DeepSpeed configuration, by dotted name: what is mapped, what is ignored and what is refused.

docs/deepspeed.md has the same three tables. A name without an entry is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field


class Mapped(NamedTuple):
    """A key that is followed.

    ours: the dotted key of zeroweave's config that it sets; "": several keys together decide (`deepspeed.translate`).
    kind: the type of its value, which converts it as well. A value that is converted to None sets nothing.
    """

    ours: str
    kind: Any


class Refused(NamedTuple):
    """A key that cannot be followed. instead: what to do. off: the values with which it asks for nothing."""

    instead: str
    off: tuple[Any, ...] = (False, None, 0, {}, [], {"enabled": False})


def _named(*names: str) -> Any:
    """Dtypes by DeepSpeed's names, short and long; converted to the long ones."""
    long = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    known = {name: long[short] for short in names for name in (short, long[short])}
    kind = Literal[*(long[short] for short in names)]  # type: ignore[valid-type]
    return Annotated[kind, BeforeValidator(lambda value: known.get(str(value).removeprefix("torch."), value))]


def _when(value: bool, ours: Any) -> Any:
    """A switch that sets our key to `ours` where it has this value."""
    return Annotated[bool, AfterValidator(lambda given: ours if given is value else None)]


def _number(value: Any) -> Any:
    """JSON has large numbers as 5e8: a float that is whole is an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Whole = Annotated[int, Field(ge=0, lt=2**56), BeforeValidator(_number)]
_Count = Annotated[int, Field(ge=1, lt=2**56), BeforeValidator(_number)]
_Group = Annotated[int | None, AfterValidator(lambda given: given if given and given > 1 else None)]
"""Ranks of a sharding group; -1, 0 and 1 ask for none."""
_Power = Annotated[int, Field(ge=0, le=127), BeforeValidator(_number)]
_Number = Annotated[float, Field(ge=0, lt=2**56), BeforeValidator(_number)]
_Device = Literal["none", "cpu"]
_DTYPE: Final = _named("fp32", "bf16", "fp16")
_ZERO: Final = "zero_optimization."

MAPPED: Final = {
    "gradient_accumulation_steps": Mapped("gradient_accumulation_steps", _Count),
    "gradient_clipping": Mapped("gradient_clipping", Annotated[_Number, AfterValidator(lambda norm: norm or None)]),
    "communication_data_type": Mapped("precision.reduce", _DTYPE),
    "prescale_gradients": Mapped("reduce.op", _when(True, "predivide")),
    "data_types.grad_accum_dtype": Mapped("precision.accumulate", _named("fp32", "bf16")),
    "data_types.param_dtype": Mapped("", _DTYPE),
    "bf16.enabled": Mapped("precision.params", _when(True, "bfloat16")),
    "bf16.check_grad_overflow": Mapped("", bool),
    "fp16.enabled": Mapped("precision.params", _when(True, "float16")),
    "fp16.loss_scale": Mapped("", Literal[0] | Annotated[float, Field(ge=2.0**-126, lt=2**56)]),
    "fp16.initial_scale_power": Mapped("", _Power),
    "fp16.loss_scale_window": Mapped("", _Count),
    "fp16.hysteresis": Mapped("", _Count),
    "fp16.min_loss_scale": Mapped("", Annotated[float, Field(gt=0, lt=2**56)]),
    "torch_autocast.enabled": Mapped("", bool),
    "torch_autocast.dtype": Mapped("", _named("bf16", "fp16")),
    "activation_checkpointing.cpu_checkpointing": Mapped("offload.activations", _when(True, True)),
    "compile.enabled": Mapped("compile.enabled", bool),
    "compile.deepcompile": Mapped("compile.enabled", bool),
    "compile.backend": Mapped("compile.lower", Literal["inductor", "aot_eager"]),
    "compile.free_activation": Mapped("", bool),
    "compile.free_activation_threshold": Mapped("", _Whole),
    "compile.offload_activation": Mapped("offload.activations", _when(True, True)),
    "compile.offload_opt_states": Mapped("offload.optimizer", _when(True, "all")),
    "compile.offload_parameters": Mapped("offload.params", _when(True, True)),
    "compile.double_buffer": Mapped("reduce.depth", _when(False, 1)),
    **{
        f"compile.sync_{moment}": Mapped(f"debug.sync_{moment}", bool)
        for moment in ("before_reduce", "after_reduce", "before_allgather", "after_allgather")
    },
    f"{_ZERO}stage": Mapped("stage", Annotated[int, Field(ge=0, le=3), BeforeValidator(_number)]),
    f"{_ZERO}reduce_bucket_size": Mapped("", _Count),
    f"{_ZERO}allgather_bucket_size": Mapped("", _Count),
    f"{_ZERO}overlap_comm": Mapped("reduce.depth", _when(False, 1)),
    f"{_ZERO}zero_hpz_partition_size": Mapped("sharding.group_size", _Group),
    f"{_ZERO}mics_shard_size": Mapped("sharding.group_size", _Group),
    f"{_ZERO}stage3_prefetch_bucket_size": Mapped(
        "compile.prefetch", Annotated[_Whole, AfterValidator(lambda elements: None if elements else 0)]
    ),
    f"{_ZERO}offload_optimizer.device": Mapped(
        "offload.optimizer", Annotated[_Device, AfterValidator({"cpu": "all"}.get)]
    ),
    f"{_ZERO}offload_param.device": Mapped("offload.params", Annotated[_Device, AfterValidator({"cpu": True}.get)]),
}

_IGNORED: Final = {
    "": """
        train_batch_size train_micro_batch_size_per_gpu dataloader_drop_last steps_per_print
        wall_clock_breakdown memory_breakdown dump_state disable_allgather vocabulary_size
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer tensorboard wandb comet csv_monitor
        comms_logger flops_profiler timers checkpoint datastates_ckpt nebula aio graph_harvesting disable_python_gc
        log_level allgather_size
    """,
    "data_types": "keep_in_fp32_modules",
    "bf16": "immediate_grad_update",
    "fp16": "auto_cast fused_mode",
    "activation_checkpointing": """
        contiguous_memory_optimization number_checkpoints profile synchronize_checkpoint_boundary
    """,
    "compile": """
        offload_activation_pin_memory symmetric_memory autoep_non_moe debug_log keep_int_input_tensors
        keep_all_input_tensors
    """,
    "zero_optimization": """
        allgather_partitions contiguous_gradients reduce_scatter round_robin_gradients
        use_multi_rank_bucket_allreduce load_from_fp32_weights elastic_checkpoint ignore_unused_parameters
        legacy_stage1 sub_group_size memory_efficient_linear override_module_apply pipeline_loading_checkpoint
        log_trace_cache_warnings enable_sanity_checks stage3_max_live_parameters stage3_max_reuse_distance
        stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_module_granularity_threshold stage3_partition_stream_chunk_size
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        compute_grad_norm parameter_alignment aio reflow
    """,
    "zero_optimization.offload_optimizer": """
        pin_memory buffer_count fast_init pipeline_read pipeline_write nvme_path cpuadam_cores_perc
        super_offload
    """,
    "zero_optimization.offload_param": "pin_memory buffer_count buffer_size max_in_cpu nvme_path",
}
IGNORED: Final = tuple(
    f"{section}.{name}".removeprefix(".") for section, names in _IGNORED.items() for name in names.split()
)
"""The keys that change no result."""

_BUILT = (
    "a Config has none; zeroweave.load_deepspeed(path_or_dict) builds it, or build your own and pass it to "
    "zeroweave.initialize"
)
_PRECISION = "masters and optimizer states are float32"
_DEVICE = 'write {"device": "cpu"} there'
_QUANTIZED = "nothing is quantized"
_8_BITS = "nothing is computed in 8 bits: use bf16"
_LOADER = "the data loader is yours"
_NOTHING: Final[tuple[Any, ...]] = (False, None, 0, {}, [])
_ONE: Final[tuple[Any, ...]] = (1, False, None, 0)

REFUSED: Final = {
    "optimizer": Refused(_BUILT),
    "scheduler": Refused(_BUILT),
    "gradient_predivide_factor": Refused("use prescale_gradients, which divides by the world first", (1, None)),
    "gradient_allreduce_op": Refused(
        "gradients are averaged (both values of reduce.op): multiply the loss by the number of ranks for their sum",
        ("mean", "MEAN", None),
    ),
    "managed_gradient_accumulation": Refused(
        "name each boundary with engine.set_gradient_accumulation_boundary(...)", (True, None)
    ),
    "sparse_gradients": Refused("gradients are dense"),
    "sparse_attention": Refused("it belongs to the model"),
    "amp": Refused("use torch_autocast"),
    "fp16.consecutive_hysteresis": Refused("an overflow counts whether or not good steps came before it"),
    "fp16.fp16_master_weights_and_grads": Refused(_PRECISION),
    "bf16.bf16_master_weights_and_grads": Refused(_PRECISION),
    "bf16.bf16_optimizer_states": Refused(_PRECISION),
    "data_types.buffer_dtype": Refused("buffers keep their dtype: cast them in the model", (None,)),
    "fp32_allreduce": Refused('write "communication_data_type": "fp32"'),
    "torch_autocast.lower_precision_safe_modules": Refused("torch.autocast decides by operator"),
    "activation_checkpointing.partition_activations": Refused("use torch.utils.checkpoint in the model"),
    f"{_ZERO}offload_optimizer": Refused(_DEVICE, _NOTHING),
    f"{_ZERO}offload_optimizer.ratio": Refused(
        "a share needs a budget: set offload.optimizer to 'adaptive' in zeroweave's own config", (1, None)
    ),
    f"{_ZERO}offload_param": Refused(_DEVICE, _NOTHING),
    f"{_ZERO}cpu_offload": Refused(f"offload_optimizer: {_DEVICE}"),
    f"{_ZERO}cpu_offload_param": Refused(f"offload_param: {_DEVICE}"),
    f"{_ZERO}cpu_offload_use_pin_memory": Refused("write offload_optimizer and offload_param"),
    f"{_ZERO}mics_hierarchical_params_gather": Refused("parameters are gathered inside groups of mics_shard_size"),
    f"{_ZERO}zero_quantized_weights": Refused(_QUANTIZED),
    f"{_ZERO}zero_quantized_nontrainable_weights": Refused(_QUANTIZED),
    f"{_ZERO}zero_quantized_gradients": Refused(_QUANTIZED),
    f"{_ZERO}zeropp_loco_param": Refused(_QUANTIZED),
    f"{_ZERO}zenflow": Refused(f"each step updates all parameters; offload_optimizer: {_DEVICE}"),
    f"{_ZERO}leaf_module": Refused("name the layers in compile.regions: each is gathered as a whole"),
    f"{_ZERO}save_muon_momentum_buffer_in_memory": Refused("momentum lies in shards; see offload_optimizer"),
    "compile.kwargs": Refused("torch.compile's options are Inductor's own: set torch._inductor.config"),
    "compile.passes": Refused(
        "graphs hold no communication: zeroweave's own compile.passes change the schedule",
        (["z1"], ["z3"], False, None, []),
    ),
    "progressive_layer_drop": Refused("it belongs to the model"),
    "eigenvalue": Refused("it belongs to the training loop"),
    "quantize_training": Refused(_QUANTIZED),
    "compression_training": Refused(_QUANTIZED),
    "weight_quantization": Refused(_QUANTIZED),
    "hifloat8": Refused(_8_BITS),
    "msamp": Refused(_8_BITS),
    "curriculum_learning": Refused(_LOADER),
    "data_efficiency": Refused(_LOADER),
    "elasticity": Refused("the ranks are the same from start to end; zeroweave run --max-restarts starts them anew"),
    "autotuning": Refused("schedules are tuned while steps are timed (compile.record_steps); batch sizes are yours"),
    "hybrid_engine": Refused("call engine.module.generate(...), which works under any engine"),
    "pipeline": Refused("pipelines are not run"),
    "tensor_parallel": Refused("tensors are not split", ({"autotp_size": 0}, {"autotp_size": 1}, False, None, {})),
    "expert_parallel": Refused(
        "experts are layers of the model's own: name their parameters in experts.parameters of zeroweave's own config"
    ),
    "sequence_parallel_size": Refused("sequences are not split", _ONE),
    "seq_parallel_communication_data_type": Refused("sequences are not split", ("fp32", None)),
    "use_data_before_expert_parallelism": Refused("experts.parallel_size counts consecutive ranks"),
}

KEYS: Final = (*MAPPED, *IGNORED, *REFUSED)
NAMES: Final = tuple(dict.fromkeys(name for key in KEYS for name in accumulate(key.split("."), "{}.{}".format)))
"""All dotted names, those of sections included."""
SECTIONS: Final = frozenset(key.rpartition(".")[0] for key in KEYS) - {""}
"""The sections whose keys are looked at one by one. Other sections are taken as a whole."""
OUTERMOST: Final = frozenset(key.split(".")[0] for key in KEYS)
"""The keys that are not inside a section."""

_PREFIX: Final = f"{_ZERO}stage3_"
RENAMED: Final[Mapping[str, str]] = {
    "bfloat16": "bf16",
    **{f"{_ZERO}{key.removeprefix(_PREFIX)}": key for key in KEYS if key.startswith(_PREFIX)},
}
"""Other names of the same keys."""


def owner(name: str) -> str | None:
    """The key that decides about a dotted name: itself, or the section that is taken as a whole. None: unknown."""
    names: Iterator[str] = accumulate(name.split("."), "{}.{}".format)
    return next((key for key in names if key in KEYS and (key == name or key not in SECTIONS)), None)

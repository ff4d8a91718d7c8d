"""Every key of a DeepSpeed configuration that is known, in dotted names, and what becomes of it.

docs/deepspeed.md explains it row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal


@dataclass(frozen=True)
class Key:
    """What becomes of a key. A refused one is accepted with a value in `off`: zeroweave does the same then."""

    fate: Literal["mapped", "ignored", "refused"]
    off: tuple[Any, ...] = ()
    instead: str = ""
    """refused: what to do"""


_OFF: Final[tuple[Any, ...]] = (False, None, 0, {}, [])
_DISABLED: Final[tuple[Any, ...]] = ({"enabled": False}, *_OFF)


def _refused(instead: str, *off: Any) -> Key:
    return Key("refused", off or _OFF, instead)


_PRECISION = "masters and optimizer states are float32"
_DEVICE = 'write {"device": "cpu"}'
_BUILT = "zeroweave.load_deepspeed(path_or_dict) builds it, or build your own and pass it to zeroweave.initialize"
_ADAPTIVE = "set offload.optimizer to 'adaptive' in zeroweave's own config"

_MAPPED: Final = {
    "": "gradient_accumulation_steps gradient_clipping communication_data_type prescale_gradients",
    "data_types": "grad_accum_dtype param_dtype",
    "bf16": "enabled check_grad_overflow",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
    "torch_autocast": "enabled dtype",
    "activation_checkpointing": "cpu_checkpointing",
    "compile": """
        enabled deepcompile backend free_activation free_activation_threshold offload_activation
        offload_opt_states offload_parameters double_buffer sync_before_reduce sync_after_reduce
        sync_before_allgather sync_after_allgather
    """,
    "zero_optimization": "stage reduce_bucket_size allgather_bucket_size overlap_comm stage3_prefetch_bucket_size",
    "zero_optimization.offload_optimizer": "device",
    "zero_optimization.offload_param": "device",
}
"""By section."""

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
"""By section."""


def _dotted(sections: Mapping[str, str]) -> Iterator[str]:
    return (f"{section}.{name}".removeprefix(".") for section, names in sections.items() for name in names.split())


KEYS: Final[dict[str, Key]] = {
    **dict.fromkeys(_dotted(_MAPPED), Key("mapped")),
    **dict.fromkeys(_dotted(_IGNORED), Key("ignored")),
    "optimizer": _refused(f"a Config has none; {_BUILT}"),
    "scheduler": _refused(f"a Config has none; {_BUILT}"),
    "gradient_predivide_factor": _refused("use prescale_gradients, which divides by the world first", 1, None),
    "gradient_allreduce_op": _refused(
        "gradients are averaged (both values of reduce.op): multiply the loss by the number of ranks for their sum",
        "mean",
        "MEAN",
        None,
    ),
    "managed_gradient_accumulation": _refused(
        "name each boundary with engine.set_gradient_accumulation_boundary(...)", True, None
    ),
    "sparse_gradients": _refused("gradients are dense"),
    "sparse_attention": _refused("it belongs to the model"),
    "amp": _refused("use torch_autocast", *_DISABLED),
    "fp16.consecutive_hysteresis": _refused("an overflow counts whether or not good steps came before it"),
    "fp16.fp16_master_weights_and_grads": _refused(_PRECISION),
    "bf16.bf16_master_weights_and_grads": _refused(_PRECISION),
    "bf16.bf16_optimizer_states": _refused(_PRECISION),
    "data_types.buffer_dtype": _refused("buffers keep their dtype: cast them in the model", None),
    "fp32_allreduce": _refused('write "communication_data_type": "fp32"'),
    "torch_autocast.lower_precision_safe_modules": _refused("torch.autocast decides by operator"),
    "activation_checkpointing.partition_activations": _refused("use torch.utils.checkpoint in the model"),
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
    "zero_optimization.zenflow": _refused(f"each step updates all parameters; offload_optimizer: {_DEVICE}"),
    "zero_optimization.leaf_module": _refused("name the layers in compile.regions: each is gathered as a whole"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _refused("momentum lies in shards; see offload_optimizer"),
    "compile.kwargs": _refused("torch.compile's options are Inductor's own: set torch._inductor.config"),
    "compile.passes": _refused(
        "graphs hold no communication: zeroweave's own compile.passes change the schedule", ["z1"], ["z3"], *_OFF
    ),
    "progressive_layer_drop": _refused("it belongs to the model", *_DISABLED),
    "eigenvalue": _refused("it belongs to the training loop", *_DISABLED),
    "quantize_training": _refused("nothing is quantized", *_DISABLED),
    "compression_training": _refused("nothing is quantized", *_DISABLED),
    "weight_quantization": _refused("nothing is quantized"),
    "hifloat8": _refused("nothing is computed in 8 bits: use bf16", *_DISABLED),
    "msamp": _refused("nothing is computed in 8 bits: use bf16", *_DISABLED),
    "curriculum_learning": _refused("the data loader is yours", *_DISABLED),
    "data_efficiency": _refused("the data loader is yours", *_DISABLED),
    "elasticity": _refused(
        "the ranks are the same from start to end; zeroweave run --max-restarts starts them anew", *_DISABLED
    ),
    "autotuning": _refused(
        "schedules are tuned while steps are timed (compile.record_steps); batch sizes are yours", *_DISABLED
    ),
    "hybrid_engine": _refused("call engine.module.generate(...), which works under any engine", *_DISABLED),
    "pipeline": _refused("pipelines are not run"),
    "tensor_parallel": _refused("tensors are not split", {"autotp_size": 0}, {"autotp_size": 1}, *_OFF),
    "expert_parallel": _refused(
        "experts are layers of the model's own: name their parameters in experts.parameters of zeroweave's own config",
        *_DISABLED,
    ),
    "sequence_parallel_size": _refused("sequences are not split", 1, *_OFF),
    "seq_parallel_communication_data_type": _refused("sequences are not split", "fp32", None),
    "use_data_before_expert_parallelism": _refused("experts.parallel_size counts consecutive ranks"),
}
"""Sections without a dot are taken as they are: their own keys are not looked at."""


def key_of(name: str) -> Key | None:
    """What becomes of a dotted name: its own entry, or that of the section that is taken as it is; None: unknown."""
    sections = [key for key in accumulate(name.split("."), "{}.{}".format) if key in KEYS]
    whole = [key for key in sections if key == name or not any(other.startswith(f"{key}.") for other in KEYS)]
    return KEYS[whole[-1]] if whole else None


SECTIONS: Final = frozenset(key.split(".")[0] for key in KEYS)
"""The keys of a DeepSpeed config that are not inside another."""

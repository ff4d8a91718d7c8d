"""Every key of a DeepSpeed configuration that is known, in dotted names, and what becomes of it.

docs/deepspeed.md explains it row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal


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
_DEVICE = 'write {"device": "cpu"}'
_ADAPTIVE = "set offload.optimizer to 'adaptive' in zeroweave's own config"

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
            "activation_checkpointing.cpu_checkpointing",
            "compile.enabled",
            "compile.deepcompile",
            "compile.backend",
            "compile.free_activation",
            "compile.free_activation_threshold",
            "compile.offload_activation",
            "compile.offload_opt_states",
            "compile.offload_parameters",
            "compile.double_buffer",
            "compile.sync_before_reduce",
            "compile.sync_after_reduce",
            "compile.sync_before_allgather",
            "compile.sync_after_allgather",
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
            "compile.offload_activation_pin_memory",
            "compile.symmetric_memory",
            "compile.autoep_non_moe",
            "compile.debug_log",
            "compile.keep_int_input_tensors",
            "compile.keep_all_input_tensors",
            "disable_python_gc",
            "log_level",
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
    "amp": _refused("use torch_autocast", {"enabled": False}, *_OFF),
    "fp16.consecutive_hysteresis": _refused("an overflow counts whether or not good steps came before it"),
    "fp16.fp16_master_weights_and_grads": _refused(_PRECISION),
    "bf16.bf16_master_weights_and_grads": _refused(_PRECISION),
    "bf16.bf16_optimizer_states": _refused(_PRECISION),
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
    "zero_optimization.save_muon_momentum_buffer_in_memory": _refused("optimizers are element-wise"),
    "compile.kwargs": _refused("torch.compile's options are Inductor's own: set torch._inductor.config"),
    "compile.passes": _refused("graphs hold no communication: zeroweave's own compile.passes change the schedule"),
    "progressive_layer_drop": _refused("it belongs to the model", {"enabled": False}, *_OFF),
    "eigenvalue": _refused("it belongs to the training loop", {"enabled": False}, *_OFF),
    "quantize_training": _refused("nothing is quantized", {"enabled": False}, *_OFF),
    "compression_training": _refused("nothing is quantized"),
    "curriculum_learning": _refused("the data loader is yours", {"enabled": False}, *_OFF),
    "data_efficiency": _refused("the data loader is yours", {"enabled": False}, *_OFF),
    "elasticity": _refused(
        "the ranks are the same from start to end; zeroweave run --max-restarts starts them anew",
        {"enabled": False},
        *_OFF,
    ),
    "autotuning": _refused(
        "schedules are tuned while steps are timed (compile.record_steps); batch sizes are yours",
        {"enabled": False},
        *_OFF,
    ),
    "hybrid_engine": _refused(
        "call engine.module.generate(...), which works under any engine", {"enabled": False}, *_OFF
    ),
    "pipeline": _refused("pipelines are not run"),
    "tensor_parallel": _refused("tensors are not split"),
    "sequence_parallel_size": _refused("sequences are not split", 1, *_OFF),
    "seq_parallel_communication_data_type": _refused("sequences are not split", None),
    "use_data_before_expert_parallelism": _refused("experts.parallel_size counts consecutive ranks"),
}
"""Sections without a dot are taken as they are: their own keys are not looked at."""

SECTIONS: Final = frozenset(key.split(".")[0] for key in KEYS)
"""The keys of a DeepSpeed config that are not inside another."""

"""Every key that DeepSpeed's documentation of its configuration names, nested ones too, has a fate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.config.test_deepspeed import nested
from zeroweave import Config, ConfigError
from zeroweave.config.deepspeed_keys import IGNORED, REFUSED, owner

DOCUMENTED = {
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
        communication_data_type gradient_allreduce_op prescale_gradients gradient_predivide_factor gradient_clipping
        disable_python_gc steps_per_print wall_clock_breakdown dump_state zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer sequence_parallel_size
    """,
    "optimizer": "type params",
    "optimizer.params": """
        lr betas eps weight_decay torch_adam adam_w_mode momentum muon_lr adam_lr ns_method per_head_muon
    """,
    "scheduler": "type params",
    "scheduler.params": """
        warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps lr_range_test_min_lr
        lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase cycle_first_step_size cycle_min_lr
        cycle_max_lr cycle_min_mom cycle_max_mom decay_lr_rate decay_mom_rate decay_step_size
    """,
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads
    """,
    "bf16": "enabled check_grad_overflow immediate_grad_update bf16_master_weights_and_grads bf16_optimizer_states",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "amp": "enabled opt_level",
    "zero_optimization": """
        stage allgather_partitions allgather_bucket_size compute_grad_norm overlap_comm reduce_scatter
        reduce_bucket_size contiguous_gradients offload_param offload_optimizer stage3_max_live_parameters
        stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold sub_group_size
        elastic_checkpoint stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        ignore_unused_parameters round_robin_gradients parameter_alignment zero_hpz_partition_size
        zero_quantized_weights zero_quantized_gradients log_trace_cache_warnings load_from_fp32_weights cpu_offload
        save_muon_momentum_buffer_in_memory
    """,
    "zero_optimization.offload_param": "device nvme_path pin_memory buffer_count buffer_size max_in_cpu",
    "zero_optimization.offload_optimizer": """
        device nvme_path pin_memory ratio buffer_count fast_init pipeline_read pipeline_write super_offload
        cpuadam_cores_perc
    """,
    "zero_optimization.zenflow": """
        topk_ratio select_strategy select_interval update_interval full_warm_up_rounds overlap_step
    """,
    "zero_optimization.reflow": """
        enable_cpu_affinity main_thread_cores bucketwise_cores_per_worker state_update_cores
    """,
    "hifloat8": "enabled backend module_name_patterns min_numel config config.scale_policy",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "aio": "block_size queue_depth thread_count single_submit overlap_events intra_op_parallelism use_gds",
    "zero_optimization.aio": "block_size queue_depth thread_count single_submit overlap_events",
    "tensor_parallel": """
        autotp_size preset_model tp_overlap_comm vocab_parallel_lm_head partition_config
        partition_config.use_default_specs partition_config.layer_specs
    """,
    "hybrid_engine": """
        enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size
        enable_cuda_graph
    """,
    "expert_parallel": """
        enabled autoep_size expert_tensor_parallel_size async_split_plan preset_model use_grouped_mm
        disable_triton_grouped_mm moe_layer_pattern router_pattern expert_pattern score_func score_apply combine_impl
        route_norm route_scale top_k routed_scaling_factor num_expert_groups num_limited_groups load_balance_coeff
        expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern
    """,
    "autotuning": """
        enabled results_dir exps_dir overwrite metric start_profile_step end_profile_step fast max_train_batch_size
        mp_size num_tuning_micro_batch_sizes tuner_type tuner_early_stopping tuner_num_trials arg_mappings
    """,
    "flops_profiler": "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
    "activation_checkpointing": """
        partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
        synchronize_checkpoint_boundary profile
    """,
    "data_efficiency": """
        enabled seed data_routing data_routing.enabled data_routing.random_ltd data_routing.random_ltd.enabled
        data_routing.random_ltd.total_layer_num data_routing.random_ltd.random_ltd_layer_num
        data_routing.random_ltd.random_ltd_layer_id data_routing.random_ltd.model_mask_name
        data_routing.random_ltd.model_type data_routing.random_ltd.hidden_state_order
        data_routing.random_ltd.random_ltd_schedule data_routing.random_ltd.random_ltd_schedule.min_value
        data_routing.random_ltd.random_ltd_schedule.max_value data_routing.random_ltd.random_ltd_schedule.schedule_type
        data_routing.random_ltd.random_ltd_schedule.schedule_config.require_steps
        data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step data_sampling data_sampling.enabled
        data_sampling.num_epochs data_sampling.num_workers data_sampling.curriculum_learning
        data_sampling.curriculum_learning.enabled data_sampling.curriculum_learning.data_cluster_path
        data_sampling.curriculum_learning.curriculum_metrics
    """,
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled workspace project samples_log_interval experiment_name api_key experiment_key online mode",
    "csv_monitor": "enabled output_path job_name",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "checkpoint": """
        tag_validation load_universal use_node_local_storage parallel_write parallel_write.pipeline_stage
        checkpoint_serialization writer
    """,
    "compile": """
        deepcompile passes free_activation free_activation_threshold offload_activation offload_activation_pin_memory
        offload_opt_states offload_parameters double_buffer symmetric_memory debug_log sync_before_reduce
        sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors
        autoep_non_moe
    """,
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "timers": "throughput throughput.enabled throughput.synchronized",
    "elasticity": """
        enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version ignore_non_elastic_batch_info
        prefer_larger_batch num_gpus_per_node model_parallel_size
    """,
    "progressive_layer_drop": "enabled theta gamma",
    "curriculum_learning": "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    "compression_training": """
        layer_reduction weight_quantization activation_quantization sparse_pruning row_pruning head_pruning
        channel_pruning
    """,
    "sparse_attention": "mode block different_layout_per_head num_local_blocks num_global_blocks attention",
}
"""By section: what the documentation of DeepSpeed 0.19.8 and of those beside it names."""


def documented() -> Iterator[str]:
    return (f"{section}.{name}".removeprefix(".") for section, names in DOCUMENTED.items() for name in names.split())


@pytest.mark.parametrize("key", documented())
def test_a_documented_key_has_a_fate(key: str) -> None:
    known, source = owner(key), nested(key, "x")
    assert known is not None
    if known in IGNORED:
        with pytest.warns(UserWarning, match=f"which change no result: {known}$"):
            assert Config.from_deepspeed(source) == Config()
        return
    with pytest.raises(ConfigError) as caught:
        Config.from_deepspeed(source)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"- {known} ")
    assert known not in REFUSED or line.endswith(f": {REFUSED[known].instead}")


def test_what_is_in_a_section_that_is_looked_into_is_not_known_by_its_section() -> None:
    assert owner("zero_optimization.offload_param.speed") is owner("bf16.speed") is owner("speed") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_parallel", {"autotp_size": 1, "preset_model": "llama"}),
        ("expert_parallel", {"enabled": False, "autoep_size": 4}),
        ("compile.passes", ["z3"]),
        ("data_efficiency", {"enabled": False, "data_routing": {"enabled": True}}),
        ("seq_parallel_communication_data_type", "fp32"),
    ],
)
def test_neutral_values_of_nested_keys(key: str, value: Any) -> None:
    assert Config.from_deepspeed(nested(key, value)) == Config()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_parallel", {"autotp_size": 2}),
        ("compression_training", {"weight_quantization": {"shared_parameters": {"enabled": True}}}),
        ("compression_training", {"layer_reduction": {"enabled": False}, "head_pruning": {"x": 1}}),
        ("data_efficiency", {"enabled": True, "data_routing": {"enabled": False}, "seed": 1}),
    ],
)
def test_values_of_nested_keys_that_ask_for_something(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"- {key} is "):
        Config.from_deepspeed(nested(key, value))

"""What Accelerate is asked for that an engine does, and what contradicts one, refused by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend

from zeroweave.errors import UnsupportedError

_DEEPSPEED = "the engine shards instead: zeroweave.Config.from_deepspeed(its JSON) is its config"
_FSDP = 'the engine shards instead: FULL_SHARD is {"stage": 3} in its config, SHARD_GRAD_OP {"stage": 2}'
_MEGATRON = "the engine trains the model as it is: leave it out"
_MESH = "tensor, context and sequence parallelism are not there: leave it out"
_COMPILED = 'the engine compiles by itself: leave it out, and see "compile" in its config'

_ARGUMENTS: Final = {
    "deepspeed_plugin": _DEEPSPEED,
    "deepspeed_plugins": _DEEPSPEED,
    "fsdp_plugin": _FSDP,
    "megatron_lm_plugin": _MEGATRON,
    "torch_tp_plugin": _MESH,
    "parallelism_config": _MESH,
}
_VARIABLES: Final = {
    "ACCELERATE_USE_DEEPSPEED": _DEEPSPEED,
    "ACCELERATE_USE_FSDP": _FSDP,
    "ACCELERATE_USE_MEGATRON_LM": _MEGATRON,
    "ACCELERATE_USE_PARALLELISM_CONFIG": _MESH,
}
"""What `accelerate launch` sets, by the file of `accelerate config` or by its own options."""
_TYPES: Final = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
AUTOCASTS: Final = {"bf16": "bfloat16", "fp16": "float16"}
"""What `mixed_precision` is for an engine."""


def refuse_before(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """UnsupportedError for arguments of `Accelerator`, and variables, that would have it shard or wrap models."""
    given = inspect.signature(Accelerator).bind_partial(*args, **kwargs).arguments
    found = [f"{name}: {why}" for name, why in _ARGUMENTS.items() if given.get(name) is not None]
    found += [f"{name}: {why}" for name, why in _VARIABLES.items() if os.environ.get(name, "").lower() == "true"]
    _refuse(found)


def refuse_made(made: Accelerator) -> None:
    """UnsupportedError for what an accelerator has been told, by any way, that an engine cannot honour."""
    found = []
    if made.distributed_type not in _TYPES:
        found.append(f"distributed_type {made.distributed_type.value}: zeroweave trains on CPUs and NVIDIA GPUs")
    if made.state.dynamo_plugin.backend != DynamoBackend.NO:
        found.append(f"dynamo_backend: {_COMPILED}")
    if made.fp8_enabled:
        found.append('mixed_precision="fp8": use "bf16"')
    if made.autocast_handler is not None:
        found.append("AutocastKwargs: pass it to accelerator.autocast(autocast_handler=...) around a block instead")
    if made.scaler_handler is not None:
        found.append(
            'GradScalerKwargs: the engine scales losses; say it in its config, as {"precision": '
            '{"initial_loss_scale": ..., "loss_scale_window": ...}}'
        )
    if made.ddp_handler is not None and made.ddp_handler.comm_hook != DDPCommunicationHookType.NO:
        found.append(
            'DistributedDataParallelKwargs(comm_hook): say it in its config, as {"precision": {"reduce": "bfloat16"}}'
        )
    if made.project_configuration.save_on_each_node:
        found.append("ProjectConfiguration(save_on_each_node=True): all ranks write one checkpoint to a shared folder")
    _refuse(found)


def _refuse(found: Sequence[str]) -> None:
    if found:
        raise UnsupportedError("[ZW804] an engine under Accelerate cannot be had with\n  " + "\n  ".join(found))

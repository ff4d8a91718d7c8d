"""What the mapped keys of a DeepSpeed configuration may be."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

DTYPES: Final = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
"""DeepSpeed's names of dtypes, and ours."""

_DEVICES: Final = ("none", "cpu", None)
SYNCS: Final = ("sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather")


def _number(value: Any) -> bool:
    """Finite, and not beyond what a size in bytes can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**56


def _whole(least: int, most: float = inf) -> Callable[[Any], bool]:
    return lambda value: _number(value) and least <= value <= most and value == int(value)


_Rule = tuple[Callable[[Any], bool], str]
_SWITCH: Final[_Rule] = (lambda value: isinstance(value, bool), "true or false")
_SIZE: Final[_Rule] = (lambda value: value in (None, "auto") or _whole(0)(value), "a whole number")
_BUCKET: Final[_Rule] = (lambda value: value in (None, "auto") or _whole(1)(value), "a whole number, 1 or more")
_COUNT: Final[_Rule] = (_whole(1), "a whole number, 1 or more")
_DTYPE: Final[_Rule] = (
    lambda value: value is None or str(value).removeprefix("torch.") in DTYPES,
    f"one of {', '.join(DTYPES)}",
)
_DEVICE: Final[_Rule] = (lambda value: value in _DEVICES, "'cpu' or 'none', as nothing is kept on disks")

RULES: Final[dict[str, _Rule]] = {
    "gradient_accumulation_steps": _COUNT,
    "gradient_clipping": (lambda value: value is None or (_number(value) and value >= 0), "a number, 0 or more"),
    "communication_data_type": _DTYPE,
    "prescale_gradients": _SWITCH,
    "data_types.grad_accum_dtype": _DTYPE,
    "data_types.param_dtype": _DTYPE,
    "bf16.enabled": _SWITCH,
    "bf16.check_grad_overflow": _SWITCH,
    "fp16.enabled": _SWITCH,
    "fp16.loss_scale": (
        lambda value: _number(value) and (value == 0 or value >= 2.0**-126),
        "a number, 0 (dynamic) or more",
    ),
    "fp16.initial_scale_power": (_whole(0, 127), "a whole number from 0 to 127"),
    "fp16.loss_scale_window": _COUNT,
    "fp16.hysteresis": _COUNT,
    "fp16.min_loss_scale": (lambda value: _number(value) and value > 0, "a number above 0"),
    "torch_autocast.enabled": _SWITCH,
    "torch_autocast.dtype": _DTYPE,
    "activation_checkpointing.cpu_checkpointing": _SWITCH,
    **{f"compile.{name}": _SWITCH for name in ("enabled", "deepcompile", "double_buffer", "free_activation", *SYNCS)},
    **{f"compile.offload_{name}": _SWITCH for name in ("activation", "opt_states", "parameters")},
    "compile.backend": (lambda value: value in ("inductor", "aot_eager"), "'inductor' or 'aot_eager'"),
    "compile.free_activation_threshold": _SIZE,
    "zero_optimization.stage": (_whole(0, 3), "0, 1, 2 or 3"),
    "zero_optimization.reduce_bucket_size": _BUCKET,
    "zero_optimization.allgather_bucket_size": _BUCKET,
    "zero_optimization.stage3_prefetch_bucket_size": _SIZE,
    "zero_optimization.overlap_comm": (lambda value: value in (None, "auto") or _SWITCH[0](value), "true or false"),
    "zero_optimization.offload_optimizer.device": _DEVICE,
    "zero_optimization.offload_param.device": _DEVICE,
}
"""What a mapped key may be, in code and in words."""

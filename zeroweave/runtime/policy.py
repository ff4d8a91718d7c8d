"""What a stage is: how gradients and parameters are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroweave.comm.transport import ReduceOp


@dataclass(frozen=True)
class Policy:
    """How gradients and parameters are kept. A stage is `kept_by_stage`, `optional` and `Window.reduces`."""

    kept_by_stage: frozenset[int]
    """buckets that stay unsharded until the optimizer step"""
    op: ReduceOp
    reduce_dtype: torch.dtype | None
    accumulate_dtype: torch.dtype
    optional: frozenset[int] = frozenset()
    """those of them that some ranks may not use: unsharded before a window's first call, and reduced last"""
    stays: frozenset[int] = frozenset()
    """buckets that no step changes, and that are gathered once for all windows, unless a schedule says otherwise"""
    keep_gradient_targets: bool = False
    """debugging: reduced gradients have their own memory from set-up on, instead of from settle to update"""
    masters_off: bool = False
    """True if masters that are wider than the gathered dtype are in host memory"""
    params_off: bool = False
    """True if all shards are, too"""
    states_fill: bool = False
    """True if states on their way to an update may take device memory that no step has needed: with one rank"""
    remainder: torch.dtype | None = None
    """float32 masters of bfloat16 are kept as bfloat16 and a remainder of this dtype; None: in float32"""
    compact: frozenset[int] = frozenset()
    """buckets whose remainder is int8, which has no room for 8 of its bits"""
    free_threshold: int | None = None
    """an unused activation of at least so many bytes is freed before the optimizer step; None: none is"""
    offload_threshold: int | None = None
    """activations of at least so many bytes may be moved to host memory; None: none are"""

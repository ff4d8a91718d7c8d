"""What a stage is: how gradients and parameters are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroweave.comm.transport import ReduceOp


@dataclass(frozen=True)
class Policy:
    """How gradients and parameters are kept. A stage is `kept_by_stage`, `optional` and `Observer.reduces`."""

    kept_by_stage: frozenset[int]
    """buckets that stay unsharded until the optimizer step"""
    op: ReduceOp
    reduce_dtype: torch.dtype | None
    accumulate_dtype: torch.dtype
    optional: frozenset[int] = frozenset()
    """those of them that some ranks may not use: unsharded before a window's first call, and reduced last"""
    stays: frozenset[int] = frozenset()
    """buckets that no step changes, and that are gathered once for all windows, where no schedule says otherwise"""
    keep_gradient_targets: bool = False
    """debugging: reduced gradients have memory of their own from set-up on, instead of from settle to update"""
    masters_off: bool = False
    """masters that are wider than what is gathered live in host memory"""
    params_off: bool = False
    """so do all shards"""
    remainder: torch.dtype | None = None
    """float32 masters of bfloat16 are kept as the bfloat16 and what that lacks, in this dtype; None: in float32"""
    compact: frozenset[int] = frozenset()
    """of these buckets in int8, which has no room for 8 bits of it"""
    free_threshold: int | None = None
    """bytes from which on an unused activation is freed before the optimizer step; None: none is"""
    offload_threshold: int | None = None
    """bytes from which on activations may be moved to host memory; None: none are"""

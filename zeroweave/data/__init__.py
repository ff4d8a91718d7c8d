"""Data: which samples a rank trains on, and how far all ranks are with them."""

from zeroweave.data.sampler import GlobalBatchSampler

__all__ = ["GlobalBatchSampler"]

"""Kernels for GPUs. Imported where there is one; its PyTorch brings Triton along."""

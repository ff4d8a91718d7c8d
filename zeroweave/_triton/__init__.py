"""Kernels for GPUs. PyTorch for NVIDIA's brings Triton along; nothing here is imported where there is none."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def kernels(name: str, device: str) -> ModuleType | None:
    """The module `name` of this package, "masters" or "rules", for a type of device; None where it has none."""
    if device != "cuda" or find_spec("triton") is None:
        return None
    return import_module(f"{__name__}.{name}")

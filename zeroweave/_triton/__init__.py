"""Kernels for GPUs. PyTorch for NVIDIA's brings Triton along; nothing here is imported without Triton."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from zeroweave.notices import warn


@cache
def kernels(name: str, device: str) -> ModuleType | None:
    """The module `name` of this package, "masters" or "rules", for a type of device; None where it has none."""
    if device != "cuda" or find_spec("triton") is None or not _run():
        return None
    return import_module(f"{__name__}.{name}")


@cache
def _run() -> bool:
    """True if kernels run here, tried out once. Triton compiles what launches them with a C compiler."""
    try:
        import_module(f"{__name__}.masters").try_out()
    except Exception as error:  # of any kind: of Triton, the C compiler, the driver
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warn(f"Triton makes no kernels here, so that updates and roundings take several passes: {reason}")
        return False
    return True

"""Kernels for GPUs, and numbers that they share with what computes the same without them.

PyTorch for NVIDIA's GPUs brings Triton along. The modules in here are imported only where Triton is.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Final

from zeroweave.layout import ALIGN_BYTES
from zeroweave.notices import warn

CODED_BLOCK: Final = ALIGN_BYTES // 2
"""Elements, bfloat16, of the blocks of `optim.quantize8`."""
LEAST_SCALE: Final = 2.0**-94
"""Scales are not smaller: the least share of it is a normal float32 still, and keeps its code."""
CHANCES: Final = 4096
"""Between two codes; by bits of noise that no master is rounded by."""


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

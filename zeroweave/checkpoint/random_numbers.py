"""The states of random numbers: Python's, NumPy's, and PyTorch's on the CPU and the device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zeroweave.errors import CheckpointError


def states(device: torch.device) -> dict[str, Any]:
    """By whose they are, for `restore`. `device`: where the engine computes."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: Mapping[str, Any], device: torch.device) -> None:
    """Continues with those numbers. A device's are left as they are where a run had none.

    CheckpointError, which changes nothing, for what is no state.
    """
    before = states(device)
    try:
        _set(found, device)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        _set(before, device)
        raise CheckpointError(f"the states of random numbers are not what was written: {error}") from None


def _set(found: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["cpu"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)

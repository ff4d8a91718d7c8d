"""What streams do besides kernels."""

from __future__ import annotations

from typing import Final

import torch

_HERTZ: Final = 2_000_000_000
"""Of GPUs' clocks, roughly: some are slower, and wait longer."""


def busy_wait(seconds: float, device: torch.device) -> None:
    """The current stream of a GPU waits. Why: no public operation takes a given time."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * _HERTZ))

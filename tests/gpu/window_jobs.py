"""What the ranks do in the GPU tests of windows of several backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.jobs import SMALL, allocated, config, deterministic, join, start, tokens
from tests.support.reference import Gradients, worst

KINDS = ("plain", "no_sync", "coalesced")
ROUNDS = 3
"""Windows of each kind, in turn: recorded, adopted, followed, and left for one of another kind."""


@dataclass(frozen=True)
class Windows:
    """Of each kind the largest difference of a gradient from the plain window's, and reductions of a bucket.

    `local_sums`: bytes of them, of one for each element that is trained; `grown`: bytes of the GPU that later
    rounds have left behind.
    """

    differences: dict[str, tuple[float, str]]
    reductions: dict[str, float]
    local_sums: int
    elements: int
    grown: int


def window(engine: Any, kind: str, n: int, device: torch.device) -> None:
    """The backwards of a window, up to its step."""

    def backward(index: int) -> None:
        batch = tokens(SMALL, device, index)
        engine.backward(engine(batch, batch) / n)

    if kind == "coalesced":
        with engine.coalesce_grad_reduction():
            for index in range(n):
                backward(index)
        return
    for index in range(n):
        engine.set_gradient_accumulation_boundary(index == n - 1)
        if kind == "no_sync" and index < n - 1:
            with engine.no_sync():
                backward(index)
        else:
            backward(index)


def windows(stage: int, mode: str, n: int = 4) -> Windows:
    """New memory is filled with NaN, and the learning rate is 0, so that all windows have equal gradients."""
    device = join()
    differences: dict[str, tuple[float, str]] = {}
    reductions: dict[str, float] = {}
    taken = []
    with deterministic(), start(SMALL, config(stage, mode, torch.float32), torch.float32) as engine:
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(ROUNDS):
            plain: Gradients = {}
            for kind in KINDS:
                window(engine, kind, n, device)
                gradients = engine.gradients()
                engine.step()
                plain = plain or gradients
                differences[kind] = max(differences.get(kind, (0.0, "")), worst(gradients, plain))
                reductions[kind] = engine.stats.last_step["reduce_scatter"].calls / len(engine.buckets)
            taken.append(allocated() if device.type == "cuda" else 0)
        return Windows(
            differences,
            reductions,
            engine.stats.memory.local_sums,
            sum(bucket.numel for bucket in engine.buckets),
            taken[-1] - taken[0],
        )

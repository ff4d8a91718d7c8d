"""What the ranks do in the GPU tests of experts, with the model of examples/moe.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zeroweave as zw
from examples.moe import sentences
from tests.distributed.experts import PATTERN, build, own
from tests.gpu.jobs import adamw, average, config, deterministic, join
from tests.support.reference import worst


def batch(index: int, device: torch.device) -> Tensor:
    return sentences(index, dist.get_rank(), dist.get_world_size()).to(device)


def start(stage: int, mode: str, dtype: torch.dtype, parallel_size: int, **more: Any) -> Any:
    join()
    model = build(parallel_size)
    experts = {"parameters": [PATTERN], "parallel_size": parallel_size}
    return zw.initialize(model, adamw(model.parameters()), {**config(stage, mode, dtype), "experts": experts, **more})


def gradients(stage: int, mode: str, parallel_size: int, coalesce: bool) -> tuple[list[tuple[float, str]], int]:
    """fp32: the worst bounded relative difference from the gradients of the unsharded model with all experts.

    Two batches in each step, of which nothing is updated. Further: steps that left their schedule.
    """
    device = join()
    dense, expected = build(1).to(device), []
    for window in range(4):
        for index in (2 * window, 2 * window + 1):
            (dense(batch(index, device)) / 2).backward()
        average(list(dense.parameters()))
        found = {}
        for name, p in dense.named_parameters():
            assert p.grad is not None, name
            found[name] = p.grad.cpu()
        expected.append(own(found, parallel_size))
        dense.zero_grad()
    differences = []
    with start(stage, mode, torch.float32, parallel_size, gradient_accumulation_steps=2) as engine:
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        for window in range(4):
            if coalesce:
                with engine.coalesce_grad_reduction():
                    for index in (2 * window, 2 * window + 1):
                        engine.backward(engine(batch(index, device)) / 2)
            else:
                engine.backward(engine(batch(2 * window, device)))
                engine.step()
                engine.backward(engine(batch(2 * window + 1, device)))
            differences.append(worst(engine.gradients(), expected[window]))
            engine.step()
        assert (engine.stats.compiled_calls > 0) == (mode != "eager")
        return differences, engine.stats.departures


def stages_bitwise(mode: str, parallel_size: int) -> dict[int, list[float]]:
    """Losses of each stage in bfloat16 with deterministic kernels, clipped and far ahead."""
    found = {}
    with deterministic():
        for stage in (1, 2, 3):
            compiling = {**config(stage, mode, torch.bfloat16)["compile"], "prefetch": 2}
            with start(stage, mode, torch.bfloat16, parallel_size, compile=compiling, gradient_clipping=0.5) as engine:
                found[stage] = [_train(engine, index) for index in range(8)]
    return found


def _train(engine: Any, index: int) -> float:
    loss = engine(batch(index, engine.device))
    engine.backward(loss)
    engine.step()
    return loss.item()

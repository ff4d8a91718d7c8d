"""The benchmarks' decoder: known sizes, and weights that do not depend on who asks for them."""

from __future__ import annotations

import math

import torch

from benchmarks.models import SHAPES, Decoder, batches, build, parameter_count, step_flops

CPU = torch.device("cpu")


def test_the_large_one_has_its_published_size() -> None:
    assert parameter_count(SHAPES["qwen3-8b"]) == 8_190_735_360
    assert 1.9e14 < step_flops(SHAPES["qwen3-8b"], 4096, 4096) < 2.1e14


def test_bfloat16_and_fp32_models_start_equal() -> None:
    low, high = (
        dict(build(SHAPES["tiny"], CPU, dtype).named_parameters()) for dtype in (torch.bfloat16, torch.float32)
    )
    assert all(torch.equal(low[name].float(), value) for name, value in high.items())
    assert not torch.equal(high["layers.0.gate.weight"], high["layers.0.up.weight"])


def test_the_first_loss_is_that_of_guessing() -> None:
    shape = SHAPES["tiny"]
    model: Decoder = build(shape, CPU, torch.float32)
    tokens = next(batches(shape, 2, 64, rank=0, device=CPU))
    assert abs(model(tokens, tokens).item() - math.log(512)) < 0.2


def test_ranks_read_different_data_and_runs_the_same() -> None:
    first, second, again = (next(batches(SHAPES["tiny"], 1, 32, rank, CPU)) for rank in (0, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, second)

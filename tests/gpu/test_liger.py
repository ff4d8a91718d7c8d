"""Liger's Triton kernels, which PyTorch takes to write to parameters, train as they do without an engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import liger_jobs

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "transformers", "triton")),
    reason="needs liger-kernel, transformers and Triton",
)


@pytest.mark.parametrize(
    ("stage", "mode", "checkpointing"),
    [
        (3, "inductor", False),
        (3, "inductor", True),
        (2, "inductor", False),
        (1, "inductor", False),
        (3, "aot_eager", False),
        (3, "eager", False),
    ],
)
def test_a_model_that_liger_has_patched(
    ranks: Callable[..., list[Any]], stage: int, mode: str, checkpointing: bool
) -> None:
    for found in ranks(liger_jobs.train, stage, mode, checkpointing):
        assert found["losses"] == pytest.approx(found["expected"], rel=2e-4), found
        assert found["losses"][-1] < found["losses"][0] and found["apart"] < 1e-3, found
        assert (found["compiled"] > 0) == (mode != "eager") and not found["eager"], found

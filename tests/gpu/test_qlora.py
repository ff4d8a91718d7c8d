"""Adapters above weights that bitsandbytes has quantized on the GPU train as without an engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.engine.test_foreign import qlora
from tests.gpu.jobs import join

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "peft", "transformers")),
    reason="needs bitsandbytes, PEFT and transformers",
)


def train(folder: Path, stage: int, mode: str) -> dict[str, Any]:
    device = join()
    torch.backends.cuda.matmul.allow_tf32 = False
    return qlora(folder, stage, mode, str(device))


@pytest.mark.parametrize(("stage", "mode"), [(3, "aot_eager"), (2, "eager"), (3, "eager")])
def test_qlora(ranks: Callable[..., list[Any]], tmp_path: Path, stage: int, mode: str) -> None:
    for found in ranks(train, tmp_path, stage, mode):
        assert found["apart"] < 1e-5 < found["moved"] and found["resumed"] and found["served"], found

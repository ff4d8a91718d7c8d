"""The log of a run on GPUs: what only they have, memory and communication that is exposed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.jobs import SMALL, config, join, start, step, tokens
from zeroweave.engine.logs.sinks import FILE

STEPS = 12


def logged(folder: str) -> tuple[list[float], int]:
    """This rank's losses, and the peak of its memory."""
    device = join()
    settings = config(3, "eager", torch.bfloat16)
    settings["compile"]["prefetch"] = "auto"
    with start(SMALL, {**settings, "log_dir": folder, "log": {"every": 4}}, torch.bfloat16) as engine:
        losses = [step(engine, tokens(SMALL, device)) for _ in range(STEPS)]
        return losses, engine.stats.device.allocated


def test_figures_of_two_gpus(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (first, peak), (second, other) = ranks(logged, str(tmp_path))
    told = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    figures = [each for each in told if each["kind"] == "figures"]
    assert [each["step"] for each in figures] == [1, 4, 8, 12]
    both = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert [each["loss"] for each in figures] == pytest.approx(
        [both[0], sum(both[1:4]) / 3, sum(both[4:8]) / 4, sum(both[8:]) / 4], rel=1e-3
    ), "in bfloat16"
    assert 0 < figures[-1]["memory"] <= max(peak, other) and 0 <= figures[-1]["exposed"] < figures[1]["seconds"]
    assert told[0]["device"].startswith("cuda:0, ")

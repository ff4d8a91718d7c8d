"""Resident memory over many steps of all kinds, shorter than the benchmark: it does not grow, and a leak is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zeroweave as zw
from benchmarks.endurance import resident

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize(("stage", "mode"), [(3, "eager"), (1, "eager"), (3, "aot_eager")])
def test_memory_does_not_grow(stage: int, mode: str) -> None:
    steps, first = 4000, 2000
    found, stats = resident.train(stage, mode, steps, 250, first)
    assert stats.departures >= steps // resident.DEPARTS
    mib, blocks = resident.growth(found)
    assert mib < resident.LIMIT, found
    assert blocks < 2000, found  # of the events of departures and new schedules, of which a thousand at most are kept


def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[list[bytes]] = []
    real = resident.step

    def leaks(engine: zw.Engine, number: int, generator: torch.Generator, folder: Path) -> None:
        kept.append([bytes(16384)])
        real(engine, number, generator, folder)

    monkeypatch.setattr(resident, "step", leaks)
    assert resident.main("--steps 300 --first 150 --every 25 --trace".split()) == 1
    assert "kept.append([bytes(16384)])" in capsys.readouterr().out

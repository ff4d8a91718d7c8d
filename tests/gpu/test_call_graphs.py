"""Graphs of calls on a GPU train as without graphs: shapes in turn, dropout, recomputation, outputs that are kept."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_call_graphs import engine_of, same_parameters, train
from tests.gpu.jobs import deterministic


@pytest.mark.parametrize("lower", ["inductor", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("lengths", "gas", "model"),
    [((64,), 1, {}), ((64, 32, 96), 2, {}), ((64,), 3, {"checkpoints": True}), ((64,), 1, {"shows": True})],
)
def test_trains_as_without_graphs(
    stage: int, lengths: tuple[int, ...], gas: int, model: dict[str, Any], lower: str
) -> None:
    with deterministic():
        plain = engine_of(False, stage, gas, lower, **model)
        wanted = train(plain, 14, lengths)
        engine = engine_of(True, stage, gas, lower, **model)
        assert train(engine, 14, lengths) == wanted
        assert same_parameters(engine, plain)
        assert engine.stats.graphed_calls > 80  # of 84 and more
        assert engine.stats.ungraphed_calls.keys() <= ({"the calls are others"} if gas > 1 else set())
        engine.destroy()
        plain.destroy()

"""Graphs of calls on a GPU train as without graphs: shapes in turn, dropout, recomputation, outputs that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.test_call_graphs import engine_of, same_parameters, train
from tests.gpu.jobs import deterministic
from zeroweave.runtime.cuda_capture import CudaCapture

GPU = torch.device("cuda", 0)


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


def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    x = torch.ones(1 << 20, device=GPU)
    capture = CudaCapture(GPU)

    def waits(args: list[Any]) -> list[Any]:
        made = args[0] * 3
        torch.cuda.synchronize()
        return [made]

    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            capture.capture(waits, [x])
        capture.clear()
        graph, [doubled] = capture.capture(lambda args: [args[0] * 2], [x])
        graph.replay()
        assert float(doubled.sum()) == 2 * x.numel() and float(torch.rand(4, device=GPU).sum()) > 0
        del graph, doubled
        assert capture.nbytes >= x.nbytes
        capture.clear()
        assert capture.nbytes < x.nbytes


def test_there_is_room_for_a_unit_twice_or_not() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    capture, (free, _) = CudaCapture(GPU), torch.cuda.mem_get_info()
    try:
        for part, room in ((0.2, True), (0.6, False)):
            torch.empty(int(part * free), dtype=torch.uint8, device=GPU)
            assert capture.has_room() == room
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

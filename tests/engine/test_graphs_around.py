"""What calls run under when they are made again for a graph."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zeroweave.engine.graphs.around import Modes, Surroundings
from zeroweave.parameters.stub import StubStatus

CPU = torch.device("cpu")


@pytest.mark.parametrize("casts", [False, True])
def test_compiled_code_serves_there_too(casts: bool) -> None:
    """In a capture nothing can be compiled."""
    compiled: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph

    call = torch.compile(lambda x, weight: torch.tanh(x @ weight), backend=backend, fullgraph=True)
    x, weight = torch.randn(2, 4), torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
        call(x, weight)
        modes = Modes((), CPU)
        with modes.again():
            call(x, weight)
    with modes.again():  # as at the end of a window, when the program casts no more
        call(x, weight)
    assert len(compiled) == 1


def test_nothing_that_autocast_has_kept_is_used_or_left() -> None:
    line, x = nn.Linear(4, 4), torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = line(x)
        modes = Modes((line,), CPU)
        with torch.no_grad():
            line.weight.zero_()
            line.bias.zero_()
        with modes.again():
            assert before.any() and not line(x).any(), "the weights of now"
            with torch.no_grad():
                line.bias.add_(1.0)
        assert line(x).eq(1.0).all()


def settings() -> list[tuple[Any, str, Any]]:
    """Each a place, a name there, and another value than the usual one."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    matmul = [(cuda.matmul, f"allow_{name}_reduced_precision_reduction", False) for name in ("bf16", "fp16")]
    return [
        *matmul,
        (cuda.matmul, "allow_fp16_accumulation", True),
        (cuda.matmul, "fp32_precision", "tf32"),
        (cudnn.conv, "fp32_precision", "ieee"),
        (cudnn.rnn, "fp32_precision", "ieee"),
        (cudnn, "enabled", False),
        (cudnn, "benchmark", True),
        (cudnn, "deterministic", True),
    ]


@pytest.mark.parametrize("index", range(len(settings())))
def test_a_setting_of_kernels_belongs_to_a_graph(index: int) -> None:
    owner, name, value = settings()[index]
    places: Any = SimpleNamespace(changes=0, status=StubStatus())
    around = Surroundings(nn.Linear(1, 1), CPU, places, ())
    before, usual = around.now(None), getattr(owner, name)
    assert around.now(None) == before
    setattr(owner, name, value)
    try:
        assert around.now(None) != before
    finally:
        setattr(owner, name, usual)
    assert around.now(None) == before


def test_anomaly_mode_belongs_to_a_graph() -> None:
    places: Any = SimpleNamespace(changes=0, status=StubStatus())
    around = Surroundings(nn.Linear(1, 1), CPU, places, ())
    before = around.now(None)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert around.now(None) != before
    assert around.now(None) == before

"""What calls run under when they are made again for a graph."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from zeroweave.engine.graphs.around import Modes

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

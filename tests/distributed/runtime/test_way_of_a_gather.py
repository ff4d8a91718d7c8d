"""How far it is from a call to the process group: few frames between a decision and its effect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pool
from tests.support.marks import daily
from zeroweave.comm import process_group

ROOT = Path(zw.__file__).parent
ENTRIES = ("eager/hooks.py:__call__", "compile/bind.py:backward")
"""What the program calls: a module, and the compiled code of its backward."""
PAIRED = "comm/wrappers.py:all_gather"
"""That of `Paired`: on the way on the CPU alone, to compare what comes next."""
MOST = 7


def way(frame: FrameType | None) -> list[str]:
    """The package's frames, from this one out to the entry."""
    found: list[str] = []
    while frame is not None and not (found and found[-1] in ENTRIES):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT):
            found.append(f"{file.relative_to(ROOT).as_posix()}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


def gathers(lower: str | None) -> tuple[list[list[str]], list[list[str]]]:
    """The ways of the gathers in the forward, and in the backward, of a step that follows its schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compile_ = {"enabled": lower is not None, "lower": lower or "aot_eager", "prefetch": 1, "record_steps": 0}
    seen: list[list[str]] = []
    issue = process_group.all_gather

    def walked(*args: Any, **kwargs: Any) -> Any:
        seen.append(way(sys._getframe(1)))
        return issue(*args, **kwargs)

    with zw.initialize(model, optimizer, {"stage": 3, "compile": compile_}) as engine:

        def forward() -> Tensor:
            loss: Tensor = engine(torch.ones(2, 8)).sum()
            return loss

        for _ in range(2):
            engine.backward(forward())
            engine.step()
        process_group.all_gather = walked
        try:
            loss = forward()
            ahead = len(seen)
            engine.backward(loss)
        finally:
            process_group.all_gather = issue
        engine.step()
        assert not engine.stats.departures
    return seen[:ahead], seen[ahead:]


@daily("lower", ["aot_eager"], [None])
def test_few_frames_lie_between_a_call_and_its_gather(pools: Callable[[int], Pool], lower: str | None) -> None:
    for forward, backward in pools(2).run(gathers, lower):
        assert len(forward) >= 4 and backward
        for each in forward + (backward if lower is not None else []):
            assert each[0] == "comm/process_group.py:all_gather" and each[-1] in ENTRIES
            assert len(each) - (each[1] == PAIRED) <= MOST, " < ".join(each)

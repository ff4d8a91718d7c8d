"""A program that compiles code of its own in which the engine is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import MODES, daily

Call = Callable[[torch.Tensor], torch.Tensor]


def ways(engine: zw.Engine) -> dict[str, Call]:
    """Each makes a loss; all but the first and the last are whole micro-steps."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (engine(2 * x) + 1).square().mean()

    def loop(x: torch.Tensor) -> torch.Tensor:
        loss = forward(x)
        engine.backward(loss)
        engine.clip_grad_norm_(0.5)
        engine.step()
        return loss

    def deferred(x: torch.Tensor) -> torch.Tensor:
        with engine.no_sync():
            loss = forward(x)
            engine.scale(loss).backward()
        engine.step()
        return loss

    def coalesced(x: torch.Tensor) -> torch.Tensor:
        with engine.coalesce_grad_reduction():
            for part in x.split(2):
                loss = forward(part)
                engine.backward(loss)
        engine.step()
        return loss

    return {
        "forward": forward,
        "loop": loop,
        "deferred": deferred,
        "coalesced": coalesced,
        "train_step": lambda x: engine.train_step(x + 1, lambda output, _: output.square().mean()),
        "module": lambda x: engine.module(x).square().mean(),
    }


def trained(way: str, stage: int, mode: str, compiled: bool) -> tuple[list[torch.Tensor], int]:
    """The losses of some steps and the parameters behind them; how often compiled regions ran."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    config = {"stage": stage, "compile": MODES[mode]}
    with zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config) as engine:
        call: Any = ways(engine)[way]
        if compiled:
            call = torch.compile(call, backend="aot_eager")
        losses = []
        for index in range(4):
            torch.manual_seed(10 * index + dist.get_rank())
            losses.append(loss := call(torch.randn(4, 8)))
            if way in ("forward", "module"):
                engine.backward(loss)
                engine.step()
        assert engine.global_steps == 4
        return [*(loss.detach() for loss in losses), *engine.state_dict().values()], engine.stats.compiled_calls


def compared(way: str, stage: int, mode: str) -> None:
    plain, regions = trained(way, stage, mode, compiled=False)
    found, again = trained(way, stage, mode, compiled=True)
    assert all(map(torch.equal, plain, found)) and len(plain) == len(found) > 3
    assert again == regions and (regions > 0) == (mode == "aot_eager" and way != "module")


@daily(
    ("way", "stage", "mode"),
    [("loop", 2, "aot_eager"), ("train_step", 3, "eager")],
    [
        (way, stage, mode)
        for way in ("forward", "loop", "deferred", "coalesced", "train_step", "module")
        for stage, mode in ((1, "eager"), (3, "aot_eager"))
    ],
)
def test_a_program_may_compile_what_is_around_the_engine(pools: Pools, way: str, stage: int, mode: str) -> None:
    """Its graph breaks at the engine's calls, and the numbers are those of a program that compiles nothing."""
    pools(2).run(compared, way, stage, mode)

"""Windows of any length, whose end the caller decides, with and without reductions in between, at every stage."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.engine.coalescing import Setting, initialize
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.reference import Expected, Plain, build, draw, judge, sgd
from tests.support.zoo import WIDTH, Block, Entry, Stack, regression, rows

LR = 0.05

# Each window is the list of its backwards; each of those says where it runs and what of the model it uses.
Window = list[str]
LENGTHS: list[Window] = [
    ["sync"],
    ["quiet", "quiet", "sync"],
    ["sync", "quiet", "quiet"],
    ["sync", "sync", "sync", "sync"],
    ["quiet"],
    ["coalesced", "coalesced"],
    ["quiet", "sync", "coalesced", "coalesced", "sync"],
    ["sync", "sync"],
    ["sync", "sync"],
]
"""`sync` reduces, `quiet` is in no_sync, neighbours that are `coalesced` are in one block."""


class Optional(Stack):
    """A block more than it uses: `which` says which of two, none, or both. Equal on all ranks."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.extra = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.which = ""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for name in self.which:
            x = self.extra[int(name)](x)
        return x


OPTIONAL = Entry("optional", Optional, rows, regression)
USES = ["", "0", "1", "01", "0", "", "1", "1", "1"]
"""What each window's last backward uses; the others use the first extra block in every other window."""


def uses(index: int, position: int, length: int) -> str:
    return USES[index] if position == length - 1 else "0" * (index % 2)


def by_reference(windows: list[Window]) -> tuple[list[Expected], Expected]:
    """Each window's averaged sum of gradients, with the optimizer step after it; the parameters at the end."""
    plain, gradients = Plain(build(OPTIONAL), sgd), []
    for optimizer in plain.optimizers:
        optimizer.param_groups[0]["lr"] = LR
    for index, length in enumerate(map(len, windows)):
        for position in range(length):
            for net in plain.nets:
                net.which = uses(index, position, length)
            plain.each(lambda *given: loss(*given).backward(), 10 * index + position, length)
        gradients.append(plain.average())
        plain.step()
    return gradients, plain.values()


def loss(call: Any, index: int, length: int) -> Tensor:
    draw(dist.get_rank(), index)
    x, y = rows(dist.get_rank(), index)
    return F.mse_loss(call(x), y) / length


def train(setting: Setting, windows: list[Window]) -> tuple[list[tuple[float, str]], tuple[float, str], list[float]]:
    """Differences of every window's gradients and of the parameters at the end; reductions per bucket of each step."""
    expected, parameters = by_reference(windows)
    differences, reductions = [], []
    with initialize(build(OPTIONAL), setting.config()) as engine:
        engine.optimizer.param_groups[0]["lr"] = LR
        for index, window in enumerate(windows):
            with contextlib.ExitStack() as block:
                for position, where in enumerate(window):
                    last = position == len(window) - 1
                    engine.set_gradient_accumulation_boundary(last)
                    if where == "coalesced" and window[position - 1 : position] != ["coalesced"]:
                        block.enter_context(engine.coalesce_grad_reduction())
                    if where != "coalesced":
                        block.close()
                    engine.module.which = uses(index, position, len(window))
                    with engine.no_sync() if where == "quiet" else contextlib.nullcontext():
                        engine.backward(loss(engine, 10 * index + position, len(window)))
                    if where != "coalesced" and not last:
                        engine.step()
                        assert not engine.was_step_applied()
            engine.set_gradient_accumulation_boundary(True)
            differences.append(judge(engine.gradients(), expected[index]))
            engine.step()
            assert engine.was_step_applied() and engine.global_steps == index + 1
            calls = engine.stats.last_step["reduce_scatter"].calls
            reductions.append(calls / sum(bucket.trainable for bucket in engine.buckets))
        with engine.full_parameters() as full:
            return differences, judge(full, parameters), reductions


SHARDED = [1.0, 1.0, 2.0, 4.0, 1.0, 1.0, 3.0, 2.0, 2.0]
"""Reductions per bucket of each window. At stages 2 and 3 the local sum of `quiet` backwards goes with the next
reduction, or with the step; at stage 1 all goes with the last backward's, or with a block's end."""
STAGE_1 = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0]


@daily(
    ("stage", "mode"),
    [(1, "eager"), (2, "eager")],
    [(1, "aot_eager"), (2, "aot_eager"), (3, "aot_eager"), (3, "eager")],
)
def test_windows_of_every_kind(pools: Pools, stage: int, mode: str) -> None:
    for gradients, parameters, reductions in pools(2).run(train, Setting(stage, mode), LENGTHS):
        assert max(gradients)[0] <= 1 and parameters[0] <= 1, (gradients, parameters)
        assert reductions == (STAGE_1 if stage == 1 else SHARDED)

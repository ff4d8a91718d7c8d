"""Parameters that some ranks only use, from the first step on, when no schedule says in which order to reduce.

All ranks enter the same modules; what they use inside differs, by rank, step and micro-step. See `uneven` for what the
engine is compared with.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.distributed.runtime.uneven import (
    MODES,
    WIDTH,
    Break,
    Choice,
    Gated,
    Setting,
    Stack,
    beside,
    inputs,
    say,
    stack_job,
)
from tests.support.harness import Pool, Pools
from tests.support.marks import daily, slow

BLOCKS = 4
ALL = Choice()


def off(*blocks: int, **more: Any) -> Choice:
    """Without the (only) branch of these blocks."""
    return Choice(off=frozenset((block, 0) for block in blocks), **more)


class Narrow(nn.Module):
    """A layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)
        return out


def tie_branches(stack: Stack) -> None:
    """The branches of the first and the last block are one."""
    stack.blocks[3].gates[0].weight = stack.blocks[0].gates[0].weight


def tie_ends(stack: Stack) -> None:
    stack.end.weight = stack.start.weight


def mix(stack: Stack) -> None:
    """Frozen and trained parameters, and two dtypes, in one block."""
    for block in stack.blocks:
        block.a.requires_grad_(False)
    stack.blocks[1].gates[0] = Narrow()
    stack.blocks[2].gates[0].weight.requires_grad_(False)
    stack.start.requires_grad_(False)


def freeze_blocks(stack: Stack) -> None:
    """Nothing is trained in two of the blocks but their branch."""
    for number in (1, 2):
        for layer in (stack.blocks[number].a, stack.blocks[number].b):
            layer.requires_grad_(False)


Plan = Callable[[int, int, int], Choice]


class Scenario(NamedTuple):
    plan: Plan
    prepare: Callable[[Stack], object] = lambda stack: None
    checkpointed: bool = False
    changes: Mapping[str, Any] = MappingProxyType({})
    """of the `Setting`"""
    grows: bool = True
    """are windows of two micro-steps tried as well?"""
    broken: bool = True
    """is it tried with graph breaks as well?"""


def last() -> int:
    return dist.get_world_size() - 1


def late(rank: int, step: int, micro: int) -> Choice:
    """A branch that nobody uses at first, then one rank, then all, then nobody, then the last rank."""
    used = (False, rank == 0, True, False, rank == last())[step]
    return ALL if used else off(1)


def unfinished(rank: int, step: int, micro: int) -> Choice:
    return off(2, factor=float("inf") if step == 1 else 1.0) if rank == 0 else off(1)


SCENARIOS: dict[str, Scenario] = {
    "one rank": Scenario(lambda rank, step, micro: ALL if rank == 0 else off(2)),
    "first block": Scenario(lambda rank, step, micro: ALL if rank == 0 else off(0)),
    "last block": Scenario(lambda rank, step, micro: ALL if rank == 0 else off(3)),
    "last rank": Scenario(lambda rank, step, micro: ALL if rank == last() else off(0, 1, 2, 3)),
    "opposite": Scenario(lambda rank, step, micro: off(0, 2) if rank == 0 else off(1, 3)),
    "in turn": Scenario(lambda rank, step, micro: ALL if rank == (step + micro) % dist.get_world_size() else off(1, 2)),
    "recorded": Scenario(lambda rank, step, micro: ALL if rank == 0 or step in (0, 1, 3) else off(2)),
    "late": Scenario(late, changes={"optimizer": "adamw", "windows": (1,) * 5}),
    "nothing of a block": Scenario(lambda rank, step, micro: ALL if rank == 0 else off(1, 2, bare=frozenset({1}))),
    "detached": Scenario(lambda rank, step, micro: Choice(detached=frozenset({1} if rank == 0 else {2}))),
    "detached last": Scenario(lambda rank, step, micro: Choice(detached=frozenset({3} if rank == 0 else ()))),
    "multiplied away": Scenario(lambda rank, step, micro: off(0) if rank == 0 else Choice(factor=0.0)),
    "head only": Scenario(lambda rank, step, micro: Choice(cut=rank == last())),
    "head only in turn": Scenario(lambda rank, step, micro: Choice(cut=rank == (step + micro) % 2)),
    "head only, all": Scenario(lambda rank, step, micro: Choice(cut=step < 2 or rank == 0)),
    "no parameter": Scenario(lambda rank, step, micro: Choice(lost=rank == last())),
    "no parameter in turn": Scenario(lambda rank, step, micro: off(1, lost=rank == (step + micro) % 2)),
    "tied": Scenario(lambda rank, step, micro: off(0) if rank == 0 else off(3), tie_branches),
    "tied, none in one": Scenario(lambda rank, step, micro: off(0, 3) if rank == 0 else off(0), tie_branches),
    "tied ends": Scenario(lambda rank, step, micro: Choice(cut=rank == 0), tie_ends),
    "mixed": Scenario(lambda rank, step, micro: off(1, 2) if rank == 0 else off(3), mix, False, {"optimizer": "still"}),
    "frozen": Scenario(lambda rank, step, micro: off(1) if rank == 0 else off(2), freeze_blocks),
    # No graph breaks: with them plain torch.compile, too, finds other saved tensors when it computes a block again, if
    # blocks with and without their branch follow each other.
    "checkpointed": Scenario(
        lambda rank, step, micro: off(0, 2) if rank == 0 else off(1), checkpointed=True, broken=False
    ),
    "clipped": Scenario(
        lambda rank, step, micro: off(0, 2) if rank == 0 else off(1),
        changes={"quiet": True, "config": {"gradient_clipping": 0.05}},
    ),
    "quiet": Scenario(lambda rank, step, micro: off(0, 2) if rank == 0 else off(1), changes={"quiet": True}),
    "not finite": Scenario(unfinished, changes={"config": {"on_nonfinite": "skip"}}),
    "departing": Scenario(
        lambda rank, step, micro: ALL if rank == 0 or step == 0 else off(2),
        changes={"windows": (1, 2, 1, 1, 2)},
        grows=False,
    ),
    "no_sync": Scenario(
        lambda rank, step, micro: off(micro) if rank == 0 else off(1, 2, 3),
        changes={"windows": (3, 3, 3), "window": "no_sync"},
        grows=False,
    ),
    "coalesced": Scenario(
        lambda rank, step, micro: off(micro) if rank == 0 else off(1, 2, 3, cut=micro == 1),
        changes={"windows": (2, 2, 2), "window": "coalesce"},
        grows=False,
    ),
    "small buckets": Scenario(
        lambda rank, step, micro: off(2) if rank == 0 else off(1), changes={"config": {"bucket": {"bytes": 1}}}
    ),
    "one bucket": Scenario(
        lambda rank, step, micro: off(2) if rank == 0 else off(1), changes={"config": {"bucket": {"by_block": False}}}
    ),
    "one in flight": Scenario(
        lambda rank, step, micro: off(2) if rank == 0 else off(1),
        changes={"config": {"reduce": {"depth": 1, "op": "predivide"}, "compile": {"prefetch": 2}}},
    ),
    "kept": Scenario(
        lambda rank, step, micro: off(2) if rank == 0 else off(1), changes={"config": {"compile": {"keep": "all"}}}
    ),
}


def trained(name: str, stage: int, mode: str, breaks: Break, micros: int) -> list[str]:
    """What was wrong on this rank."""
    scenario = SCENARIOS[name]
    setting = Setting(stage, mode, **{"windows": (micros,) * 4, **scenario.changes})
    if len(setting.windows) == 5 and scenario.grows:
        setting = dataclasses.replace(setting, windows=(micros,) * 5)
    say(f"{name}, stage {stage}, {mode}, break {breaks}, windows {setting.windows}")

    def make() -> Stack:
        return Stack([Gated(breaks=breaks) for _ in range(BLOCKS)], scenario.checkpointed, scenario.prepare)

    result = beside(stack_job(make, scenario.plan), setting, seed=3)
    expected = [not (name == "not finite" and step == 1) for step in range(len(setting.windows))]
    wrong = [] if result.applied == expected else [f"steps applied: {result.applied}"]
    return [f"break {breaks}, windows {setting.windows}: {each}" for each in wrong + result.wrong]


def all_ways(name: str, stage: int, mode: str) -> list[str]:
    wrong = []
    for breaks in ("none", "before") if mode != "eager" and SCENARIOS[name].broken else ("none",):
        for micros in (1, 2) if SCENARIOS[name].grows else (1,):
            wrong += trained(name, stage, mode, breaks, micros)  # type: ignore[arg-type]
    return wrong


def several(stage: int, mode: str, names: tuple[str, ...]) -> list[str]:
    return [f"{name}: {each}" for name in names for each in trained(name, stage, mode, "before", 1)]


@slow("3-aot_eager-names0")
@daily(
    ("stage", "mode", "names"),
    [(3, "aot_eager", ("one rank", "head only in turn"))],
    [(3, "eager", ("one rank", "nothing of a block", "head only in turn", "detached", "checkpointed"))],
)
def test_what_ranks_use_differs_from_the_first_step_on(
    pools: Pools, stage: int, mode: str, names: tuple[str, ...]
) -> None:
    for wrong in pools(2).run(several, stage, mode, names):
        assert not wrong, "\n".join(wrong)


ROWS = [(2, stage, mode) for stage in (1, 2, 3) for mode in ("eager", "aot_eager")] + [
    (world, 3, mode) for world in (3, 4) for mode in ("eager", "aot_eager")
]


@pytest.mark.matrix
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(("world", "stage", "mode"), ROWS)
def test_uneven_from_the_first_step_on(pools: Pools, world: int, stage: int, mode: str, name: str) -> None:
    for wrong in pools(world).run(all_ways, name, stage, mode):
        assert not wrong, "\n".join(wrong)


DEADLINE = 60.0
SLACK = 15.0


class Skipping(Stack):
    """Rank 1 leaves out one of the blocks, or the last layer."""

    skipped = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for number, block in enumerate(self.blocks):
            if self.skipped != f"blocks.{number}":
                x = block(x)
        return x if self.skipped == "end" else self.end(x)


def other_modules(stage: int, mode: str, skipped: str, first: int) -> tuple[float, str, bytes]:
    """From step `first` on rank 1 does not enter `skipped`: when the error came, what it says, and the parameters."""
    torch.manual_seed(3)
    model = Skipping([Gated() for _ in range(BLOCKS)])
    config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": DEADLINE}
    began = time.monotonic()
    try:
        with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine:
            for step in range(4):
                began = time.monotonic()
                model.skipped = skipped if dist.get_rank() == 1 and step >= first else ""
                engine.backward(engine(inputs(dist.get_rank(), step, 0)).pow(2).mean())
                engine.step()
            found = [full for name, _ in model.named_parameters() if (full := engine.full(name)) is not None]
    except zw.errors.ZeroweaveError as error:
        return time.monotonic() - began, "\n".join([str(error), *getattr(error, "__notes__", ())]), b""
    return time.monotonic() - began, "", b"".join(full.numpy().tobytes() for full in found)


@pytest.mark.parametrize(
    ("mode", "skipped"),
    [
        ("aot_eager", "blocks.1"),
        *(
            pytest.param(mode, skipped, marks=pytest.mark.matrix)
            for mode in ("eager", "aot_eager")
            for skipped in ("blocks.0", "blocks.2", "blocks.3", "end")
        ),
    ],
)
def test_ranks_that_enter_different_modules_in_the_first_step(
    disposable: Callable[[int], Pool], mode: str, skipped: str
) -> None:
    """Stage 3 cannot: every rank is told which module it is, and what would do, before or a little after the deadline.

    A rank may be ended instead of raising, because it waits in a collective; it then says the same on stderr.
    """
    for outcome in disposable(2).outcomes(other_modules, 3, mode, skipped, 0):
        seconds, text = outcome.value[:2] if outcome.value is not None else (0.0, outcome.stderr + outcome.message)
        assert skipped in text and "stage" in text, outcome.describe() + text
        assert "stages 1 and 2" in text, text
        assert seconds < DEADLINE + SLACK


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("skipped", ["blocks.0", "blocks.2", "blocks.3", "end"])
def test_ranks_that_enter_different_modules_follow_a_schedule(pools: Pools, mode: str, skipped: str) -> None:
    """A rank gathers and reduces what the schedule has, also for a module that it leaves out."""
    for (_, text, found), (_, _, wanted) in zip(
        pools(2).run(other_modules, 3, mode, skipped, 2), pools(2).run(other_modules, 1, mode, skipped, 2), strict=True
    ):
        assert not text
        assert found == wanted != b""


@pytest.mark.matrix
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("skipped", ["blocks.1", "end"])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_may_enter_different_modules(pools: Pools, stage: int, skipped: str, first: int) -> None:
    for _, text, _ in pools(2).run(other_modules, stage, "aot_eager", skipped, first):
        assert not text

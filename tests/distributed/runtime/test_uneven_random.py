"""Random models whose ranks use random parts of what they enter, beside the reference; see `uneven`.

A case is a seed: the model (blocks, their branches, graph breaks, ties, frozen layers), the engine's setting, the
windows, and what each rank uses in each micro-step. All ranks enter the same modules. The report names failing seeds;
of a rank that is ended, its last line on stderr does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.runtime.uneven import BRANCHES, Choice, Gated, Job, Setting, Stack, beside, say, stack_job
from tests.support.harness import Pools

pytestmark = pytest.mark.matrix

WINDOWS = ((1, 1, 1, 1), (1, 1, 1, 1), (2, 2, 2), (1, 2, 1, 2), (2, 1, 1))
BUCKETS: tuple[dict[str, Any], ...] = ({}, {"by_block": 2}, {"bytes": 1}, {"bytes": 300}, {"by_block": False})


def setting_of(draw: random.Random, mode: str) -> Setting:
    stage = draw.choices((1, 2, 3), (1, 2, 7))[0]
    windows = draw.choice(WINDOWS)
    quiet = draw.random() < 0.3
    compiling: dict[str, Any] = {"prefetch": draw.choice(("auto", "auto", 0, 1, 3))}
    if stage == 3:
        compiling["keep"] = draw.choice(("auto", "auto", "none", "all"))
    config = {
        "bucket": draw.choice(BUCKETS),
        "reduce": {"depth": draw.choice((1, 2, 3))},
        "compile": compiling,
    }
    return Setting(
        stage,
        mode,
        windows,
        draw.choice(("plain", "plain", "no_sync", "coalesce")) if max(windows) > 1 else "plain",
        quiet,
        # what Adam makes of a gradient that is nearly zero is no measure of an error
        "sgd" if quiet else draw.choice(("sgd", "adamw")),
        config,
    )


def model_of(draw: random.Random) -> tuple[Callable[[], Stack], list[int]]:
    """A way to make the model, and how many branches its blocks have."""
    kinds = [draw.choices(list(BRANCHES), k=draw.randint(1, 3)) for _ in range(draw.randint(2, 5))]
    breaks = [draw.choice(("none", "none", "before", "between")) for _ in kinds]
    tied, frozen, checkpointed = draw.random() < 0.15, draw.random() < 0.15, draw.random() < 0.15
    chosen = draw.random()
    if checkpointed:  # plain torch.compile cannot compute again what breaks under a checkpoint
        breaks = ["none" for _ in breaks]

    def prepare(stack: Stack) -> None:
        linear = [gate for block in stack.blocks for gate in block.gates if isinstance(gate, nn.Linear)]
        if tied and len(linear) > 1:
            linear[-1].weight = linear[0].weight
        if frozen:
            # not the ends: a loss that leads back to no trained parameter has no backward in plain PyTorch
            layers = [layer for layer in stack.blocks.modules() if isinstance(layer, nn.Linear)]
            layers[int(chosen * len(layers))].requires_grad_(False)

    def make() -> Stack:
        blocks = [Gated(branches, where) for branches, where in zip(kinds, breaks, strict=True)]
        return Stack(blocks, checkpointed, prepare)

    return make, [len(each) for each in kinds]


def plan_of(draw: random.Random, seed: int, branches: list[int]) -> Callable[[int, int, int], Choice]:
    style = draw.choice(("steady", "steady", "per step", "per micro-step", "per micro-step", "after an even step"))
    rate, rare = draw.choice((0.2, 0.5, 0.8)), draw.choice((0.0, 0.0, 0.15))

    def plan(rank: int, step: int, micro: int) -> Choice:
        if style == "after an even step" and step == 0:
            return Choice()
        when = {"per step": f"{step}", "per micro-step": f"{step}.{micro}"}.get(style, "")
        mine = random.Random(f"{seed} {rank} {when}")
        blocks = range(len(branches))
        return Choice(
            off=frozenset((b, i) for b in blocks for i in range(branches[b]) if mine.random() < rate),
            bare=frozenset(b for b in blocks if mine.random() < rare),
            detached=frozenset(b for b in blocks if mine.random() < rare),
            cut=mine.random() < rare / 2,
            lost=mine.random() < rare / 2,
            factor=0.0 if mine.random() < rare / 2 else 1.0,
        )

    return plan


def case(seed: int, mode: str) -> tuple[Job, Setting]:
    draw = random.Random(seed)
    setting = setting_of(draw, mode)
    make, branches = model_of(draw)
    return stack_job(make, plan_of(draw, seed, branches)), setting


def several(seeds: range, mode: str) -> dict[str, list[str]]:
    """What was wrong on this rank, for each case of which anything was."""
    found = {}
    for seed in seeds:
        job, setting = case(seed, mode)
        label = f"seed {seed}, {dist.get_world_size()} ranks, {setting}"
        say(label)
        result = beside(job, setting, seed)
        if wrong := result.wrong + ["a step was left out"] * (not all(result.applied)):
            found[label] = wrong
        torch._dynamo.reset()
    return found


def report(outcomes: list[dict[str, list[str]]]) -> str:
    return "\n".join(f"{label}: {each}" for found in outcomes for label, wrong in found.items() for each in wrong[:3])


@pytest.mark.parametrize(
    ("mode", "seeds"),
    [("eager", range(7)), ("aot_eager", range(100, 101)), ("aot_eager", range(101, 103))],
)
def test_a_few_random_cases(pools: Pools, mode: str, seeds: range) -> None:
    told = report(pools(2).run(several, seeds, mode))
    assert not told, told


PER_JOB = 10
JOBS = [(2, first) for first in range(1000, 1160, PER_JOB)]
JOBS += [(3, first) for first in range(2000, 2040, PER_JOB)]
JOBS += [(4, first) for first in range(3000, 3040, PER_JOB)]
"""(world, first seed): 240 cases"""


@pytest.mark.parametrize(("world", "first"), JOBS)
def test_random_cases(pools: Pools, world: int, first: int) -> None:
    mode = "eager" if first // PER_JOB % 2 else "aot_eager"
    told = report(pools(world).run(several, range(first, first + PER_JOB), mode, deadline=600.0))
    assert not told, told

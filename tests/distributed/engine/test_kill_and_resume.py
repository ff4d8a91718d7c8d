"""A rank is killed somewhere in a step or a save; what goes on from the latest checkpoint is the run without a stop."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

from tests.distributed.engine.stopping import EVERY, STEPS, train
from tests.support.harness import Pools
from tests.support.marks import daily, slow
from zeroweave.ranks.faults import PHASES

STAGES, MODES, SEEDS = (1, 2, 3), ("eager", "aot_eager"), (1, 2)
Case = tuple[int, str, str, int]

CASES: list[Case] = [(s, mode, phase, seed) for s in STAGES for mode in MODES for phase in PHASES for seed in SEEDS]
DAILY: list[Case] = [
    (3, "eager", "forward", 1),
    (3, "aot_eager", "backward", 1),
    (2, "eager", "update", 1),
    (3, "aot_eager", "stage", 1),
    (2, "eager", "write", 1),
    (1, "eager", "publish", 1),
]
SAVING = ("stage", "write", "publish")
"""Phases of a save. The checkpoint before that is there then: a save waits for the one before it."""
WHOLE: dict[tuple[int, str], list[dict[str, Any]]] = {}
"""The runs without a stop, by stage and mode."""


def uninterrupted(pools: Pools, stage: int, mode: str) -> list[dict[str, Any]]:
    if (stage, mode) not in WHOLE:
        WHOLE[stage, mode] = pools(2).run(train, None, stage, mode)
    return WHOLE[stage, mode]


def fault_of(phase: str, chance: random.Random) -> tuple[str, int, int]:
    """One that kills, with its rank and its step."""
    step = chance.choice(range(EVERY, STEPS, EVERY) if phase in SAVING else range(STEPS))
    rank = 0 if phase == "publish" else chance.randrange(2)
    return f"kill:rank={rank},step={step},phase={phase}", rank, step


@slow("3-aot_eager-backward-1", "3-aot_eager-stage-1")
@daily(("stage", "mode", "phase", "seed"), DAILY, [case for case in CASES if case not in DAILY])
def test_killed_and_resumed(
    stage: int, mode: str, phase: str, seed: int, tmp_path: Path, pools: Pools, disposable: Pools
) -> None:
    fault, rank, step = fault_of(phase, random.Random(f"{stage} {mode} {phase} {seed}"))
    ended = disposable(2).first_end(train, tmp_path, stage, mode, fault)
    assert (ended.rank, ended.exit_code) == (rank, -signal.SIGKILL), ended.describe()
    saved = step - 1 if phase in SAVING else step
    first = saved - saved % EVERY + 1
    for ours, theirs in zip(pools(2).run(train, tmp_path, stage, mode), uninterrupted(pools, stage, mode), strict=True):
        assert min(ours["losses"]) == first
        theirs = theirs | {"losses": {k: loss for k, loss in theirs["losses"].items() if k >= first}}
        assert ours == theirs, [key for key in theirs if ours[key] != theirs[key]]


def test_how_many_there_are() -> None:
    assert len(DAILY) == 6 and len({*CASES, *DAILY}) == len(CASES) >= 40

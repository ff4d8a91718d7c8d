"""A rank that hangs or is stopped: the others end soon after the deadline, and where all were is written down."""

from __future__ import annotations

import re
import shutil
import threading
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest

import zeroweave as zw
from tests.distributed.engine.stopping import stacks_of, stop, train
from tests.support.harness import Pools
from tests.support.marks import daily, matrix
from tests.support.patience import patient

DEADLINE = 3.0
SOON = 5.0


def stops(rank: int, later: float, folder: Path, engine: zw.Engine) -> None:
    """This rank is stopped at some moment from its third step on."""
    if engine.rank == rank and engine.global_steps == 3:
        threading.Timer(later, stop, (folder,)).start() if later else stop(folder)


def pauses(rank: int, folder: Path, engine: zw.Engine) -> None:
    """This rank is stopped for half of the deadline, and then continued."""
    if engine.rank == rank and engine.global_steps == 3:
        stop(folder, DEADLINE / 2)


def run_for_ever(folder: Path, stage: int, mode: str, rank: int, later: float) -> dict[str, Any]:
    return train(None, stage, mode, step_begins=partial(stops, rank, later, folder), deadline=DEADLINE, steps=inf)


ROWS = [(stage, mode, rank, 0.0) for stage in (1, 2, 3) for mode in ("eager", "aot_eager") for rank in (0, 1)]
ROWS += [(3, "eager", rank, later) for rank in (0, 1) for later in (0.001, 0.003, 0.005, 0.01, 0.02, 0.05)]
ROWS += [(2, "eager", 1, 0.003)]
DAILY = [(3, "eager", 0, 0.0)]


@daily(("stage", "mode", "rank", "later"), DAILY, [row for row in ROWS if row not in DAILY])
def test_a_stopped_rank_is_missed(
    stage: int, mode: str, rank: int, later: float, tmp_path: Path, disposable: Pools
) -> None:
    ended = disposable(2).first_end(run_for_ever, tmp_path, stage, mode, rank, later)
    assert ended.rank == 1 - rank and ended.failed
    assert ended.ended - float((tmp_path / "stopped").read_text()) < DEADLINE + patient(SOON)
    assert "within the deadline of 3 s" in ended.message + ended.stderr
    folder = stacks_of(ended)
    assert "stopping.py" in (folder / f"rank-{1 - rank:05d}.txt").read_text()
    shutil.rmtree(folder)


def stops_in_a_comparison(folder: Path, engine: zw.Engine) -> None:
    """Rank 1 is stopped in front of the first comparison of schedules, which no collective is."""
    if engine.rank == 1 and engine.global_steps == 0:
        agreements = engine._context.agreements
        agreements.schedule = lambda schedule: stop(folder)  # type: ignore[method-assign]


def test_a_rank_that_is_stopped_before_schedules_are_compared_is_missed(tmp_path: Path, disposable: Pools) -> None:
    run = partial(train, step_begins=partial(stops_in_a_comparison, tmp_path), deadline=DEADLINE)
    ended = disposable(2).first_end(run, None, 3, "eager")
    assert ended.rank == 0 and ended.failed
    told = r"at 'change 1 of the schedule': rank 1 \(last seen at '.*'\) did not arrive within the deadline of 3 s"
    assert re.search(told, ended.message + ended.stderr)
    folder = stacks_of(ended)
    assert "stopping.py" in (folder / "rank-00000.txt").read_text()
    shutil.rmtree(folder)


@daily("phase", [], ["backward", "forward", "update", "write", "publish"])
def test_the_stacks_of_all_ranks_show_where_one_hangs(phase: str, tmp_path: Path, disposable: Pools) -> None:
    rank = 0 if phase == "publish" else 1
    fault = f"hang:rank={rank},step=2,phase={phase}"
    outcomes = disposable(2).outcomes(partial(train, deadline=DEADLINE), tmp_path, 3, "eager", fault)
    assert all(outcome.failed for outcome in outcomes)
    folder = stacks_of(outcomes[1 - rank])
    assert folder == stacks_of(outcomes[rank])
    stacks = [(folder / f"rank-{each:05d}.txt").read_text() for each in range(2)]
    assert "faults.py" in stacks[rank] and "faults.py" not in stacks[1 - rank]
    shutil.rmtree(folder)


@pytest.mark.parametrize("phase", ["forward", *map(matrix, ("backward", "update", "write", "publish"))])
def test_a_rank_that_is_slow_ends_nobody(phase: str, tmp_path: Path, pools: Pools) -> None:
    """It comes within the deadline, though late."""
    slow = f"slow:rank=0,step=2,phase={phase},seconds={0.6 * DEADLINE}"
    whole = pools(2).run(train, None, 3, "eager")
    assert pools(2).run(partial(train, deadline=DEADLINE), tmp_path, 3, "eager", slow) == whole


@daily("rank", [0], [1])
def test_a_rank_that_is_stopped_for_a_while_ends_nobody(rank: int, tmp_path: Path, pools: Pools) -> None:
    whole = pools(2).run(train, None, 3, "eager")
    paused = pools(2).run(
        partial(train, step_begins=partial(pauses, rank, tmp_path), deadline=DEADLINE), None, 3, "eager"
    )
    assert paused == whole and (tmp_path / "continued").exists()

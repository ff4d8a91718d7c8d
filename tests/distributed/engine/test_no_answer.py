"""Rank 0 is stopped where the others wait for nothing but its answer: they end at the deadline, or wait until then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw
from tests.distributed.engine.stopping import stop
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.patience import patient
from zeroweave.ranks import answers, control
from zeroweave.ranks.alarm import Alarm
from zeroweave.ranks.board import Board
from zeroweave.schedule import Schedule

DEADLINE = 3.0
SOON = 5.0
STEPS = 8
"""More than are timed."""

Stop = Callable[[], None]
MOMENTS = ("board", "rendezvous", "barrier", "schedule", "close")
"""Where rank 0 is stopped: before the others reach the board, find each other there for the first group, ask there why
nobody comes to the first barrier, compare schedules, and say that they leave."""


@contextmanager
def stopping(moment: str, stops: Stop, folder: Path) -> Iterator[None]:
    """Inside, an engine's start or end stops rank 0 at the moment; the others come to it behind that."""
    meet, rendezvous, barrier, close = Board.meet, control.rendezvous, control.Control.barrier, Alarm.close

    def late_board(*args: Any) -> Callable[[], Board]:
        opens = meet(*args)
        return lambda: (stops(), opens())[1]  # type: ignore[func-returns-value]

    def late_rendezvous(*args: Any) -> Any:
        stops()
        return rendezvous(*args)

    def late_barrier(self: control.Control, *args: Any) -> None:
        if not self.operations:
            stops()
        barrier(self, *args)

    def late_close(self: Alarm) -> None:
        stops()
        while not (folder / "stopped").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # told just before
        close(self)

    with pytest.MonkeyPatch.context() as patch:
        if moment == "board":
            patch.setattr(Board, "meet", late_board)
        elif moment == "rendezvous":
            patch.setattr(control, "rendezvous", late_rendezvous)
        elif moment == "barrier":
            patch.setattr(control.Control, "barrier", late_barrier)
        elif moment == "close":
            patch.setattr(Alarm, "close", late_close)
        yield


def train(folder: Path, moment: str, seconds: float | None) -> list[float]:
    """The losses of a few steps, the last ones by what the first have cost.

    Rank 0 is stopped for so long, or for good.
    """
    answers.BACKSTOP_SECONDS = 0.5  # the group's own timeout is over at the deadline
    stops = partial(stop, folder, seconds) if dist.get_rank() == 0 else lambda: None

    def stopping_pass(schedule: Schedule) -> Schedule:
        if schedule.costs is not None:  # behind the meeting that tells all ranks what steps have cost
            stops()
        return schedule

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 19), nn.Linear(19, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"stage": 3, "compile": {"enabled": False}, "deadline_seconds": DEADLINE}
    losses = []
    with stopping(moment, stops, folder):
        engine = zw.initialize(model, optimizer, config)
        if moment == "schedule":
            engine.register_pass(stopping_pass)
        for step in range(STEPS):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            losses.append(engine.train_step(rows, lambda output, _: output.square().mean()).item())
        engine.destroy()
    return losses


@daily("moment", ["schedule"], [moment for moment in MOMENTS if moment != "schedule"])
def test_who_gets_no_answer_ends_at_the_deadline(moment: str, tmp_path: Path, disposable: Pools) -> None:
    ended = disposable(2).first_end(train, tmp_path, moment, None)
    assert ended.rank == 1 and ended.exit_code == 1
    waits = 1 if moment in ("schedule", "close") else 2  # for the other ranks first
    assert ended.ended - float((tmp_path / "stopped").read_text()) < waits * DEADLINE + patient(SOON)
    said = "rank 0, whose process keeps the board, has not answered within the deadline of 3 s"
    assert f"rank 1 is ended by its alarm: {said}" in ended.stderr


@daily("moment", ["schedule"], [moment for moment in MOMENTS if moment != "schedule"])
def test_who_gets_an_answer_in_time_goes_on(moment: str, tmp_path: Path, disposable: Pools) -> None:
    whole = disposable(2).run(train, tmp_path, "never", None)
    assert disposable(2).run(train, tmp_path, moment, 0.6 * DEADLINE) == whole
    assert (tmp_path / "continued").exists()

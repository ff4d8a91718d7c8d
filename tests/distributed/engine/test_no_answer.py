"""Rank 0 is stopped where the others wait for nothing but its answer: they end at the deadline, or wait until then."""

from __future__ import annotations

import shutil
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
from tests.distributed.engine.stopping import stacks_of, stop
from tests.support.harness import Pools
from tests.support.patience import patient
from zeroweave.ranks import control
from zeroweave.ranks.alarm import Alarm
from zeroweave.ranks.channel import Channel
from zeroweave.schedule import Schedule

pytestmark = pytest.mark.matrix

DEADLINE = 3.0
SOON = 10.0
STEPS = 8
"""More than are timed."""

Stop = Callable[[], None]
MOMENTS = ("connect", "barrier", "alarm", "agree", "close")
"""Where rank 0 is stopped, beside "schedule": before the others connect to it, come to the first barrier, start their
alarms, agree on a step, and say that they leave. There: before they compare schedules. Who leaves needs no answer."""
WATCHED = ("schedule", "alarm", "agree")
"""Where an alarm knows."""


@contextmanager
def stopping(moment: str, stops: Stop, folder: Path) -> Iterator[None]:
    """Inside, an engine's start or end stops rank 0 at the moment; the others come to it behind that."""
    connect, barrier, agree = control.Control.connect, control.Control.barrier, control.Control.agree
    begin, close = Alarm.__init__, Alarm.close

    def behind() -> None:
        stops()
        while not (folder / "stopped").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # told just before

    def late_connect(self: control.Control, kind: str) -> Channel:
        if kind == "control":
            behind()
        return connect(self, kind)

    def late_barrier(self: control.Control, *args: Any) -> None:
        if not self.operations:
            stops()
        barrier(self, *args)

    def late_agree(self: control.Control, mine: control.Agreement, *args: Any) -> control.Decision:
        if mine.step == 2:
            stops()
        return agree(self, mine, *args)

    def late_start(self: Alarm, *args: Any) -> None:
        behind()
        begin(self, *args)

    def late_close(self: Alarm) -> None:
        behind()
        close(self)

    with pytest.MonkeyPatch.context() as patch:
        if moment == "connect":
            patch.setattr(control.Control, "connect", late_connect)
        elif moment == "barrier":
            patch.setattr(control.Control, "barrier", late_barrier)
        elif moment == "agree":
            patch.setattr(control.Control, "agree", late_agree)
        elif moment == "alarm":
            patch.setattr(Alarm, "__init__", late_start)
        elif moment == "close":
            patch.setattr(Alarm, "close", late_close)
        yield


def train(folder: Path, moment: str, deadline: float, seconds: float | None = None) -> list[float]:
    """The losses of a few steps, the last ones by what the first have cost.

    Rank 0 is stopped for so long, or for good.
    """
    stops = partial(stop, folder, seconds) if dist.get_rank() == 0 else lambda: None

    def stopping_pass(schedule: Schedule) -> Schedule:
        if schedule.costs is not None:  # behind the meeting that tells all ranks what steps have cost
            stops()
        return schedule

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 19), nn.Linear(19, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"stage": 3, "compile": {"enabled": False}, "deadline_seconds": deadline}
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


@pytest.mark.parametrize("moment", ["schedule", *MOMENTS[:-1]])
def test_who_gets_no_answer_ends_at_the_deadline(moment: str, tmp_path: Path, disposable: Pools) -> None:
    # Where twice as long could be taken for soon, it is long.
    deadline = 4 * DEADLINE if moment in ("agree", "barrier") else DEADLINE
    ended = disposable(2).first_end(train, tmp_path, moment, deadline)
    assert ended.rank == 1 and ended.failed
    assert ended.ended - float((tmp_path / "stopped").read_text()) < deadline + patient(SOON)
    said = ended.stderr + ended.message
    assert f"{control.NO_ANSWER} within the deadline of {deadline:g} s" in said, said
    assert ("; the ranks' stacks: " in ended.stderr) == (moment in WATCHED)
    if moment in WATCHED:
        shutil.rmtree(stacks_of(ended))


@pytest.mark.parametrize("moment", ["schedule", *MOMENTS])
def test_who_gets_an_answer_in_time_goes_on(moment: str, tmp_path: Path, disposable: Pools) -> None:
    pool = disposable(2)
    whole = pool.run(train, tmp_path, "never", 2 * DEADLINE)
    assert pool.run(train, tmp_path, moment, 2 * DEADLINE, DEADLINE) == whole
    assert (tmp_path / "continued").exists()

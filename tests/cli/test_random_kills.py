"""A process of a job is killed at a random moment, again and again; what is resumed is the run without a kill.

Each row is one run. A rank or the launcher is killed by SIGKILL at a moment that the seed draws: while the job starts,
trains or saves. The run is resumed, and killed again. At last it is left alone. Each loss of each start, and all that
the run has at its end, must be bit-equal to those of a run that nothing has stopped. No process may be left after a
kill. `ARGS="tests/cli/test_random_kills.py"` for `make matrix` runs all rows.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import Job

KILLS = 5
"""In a row."""
SEEDS = range(20)
TRAINS = 1.0
"""Seconds of training before a kill, at most."""
BEGINS = 6.0
"""Seconds before a kill while the job starts, at most. `EARLY` of the kills are such."""
EARLY = 0.25
STEPS = 400
"""More than `KILLS` times `TRAINS` seconds have, by `STEP`."""
STEP = 0.015
"""Seconds that a step takes at least."""
GONE = 120.0
"""Seconds in which all processes of a job must be gone after a kill. torchrun gives those that it ends 30."""

PROGRAM = f"""
import os, pathlib, sys, time
import torch
from torch import nn
import zeroweave as zw

folder, asynchronous, start = pathlib.Path(sys.argv[1]), sys.argv[2] == "asynchronous", sys.argv[3]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 19), nn.BatchNorm1d(19), nn.Dropout(0.2), nn.Linear(19, 5))
config = {{"stage": 3, "compile": {{"enabled": False}}, "checkpoint": {{"keep_last": 2}}, "deadline_seconds": 60}}
engine = zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
torch.manual_seed(1 + engine.rank)
dataset = torch.randn(44, 8, generator=torch.Generator().manual_seed(2))
sampler = zw.data.GlobalBatchSampler(dataset, batch_size=4, seed=3)
loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
engine.load(folder / "saved", data=sampler, missing_ok=True)
(folder / f"began-{{start}}-{{engine.rank}}").write_text(str(engine.global_steps))
with open(folder / f"losses-{{start}}-{{engine.rank}}", "w", buffering=1) as losses:
    while engine.global_steps < {STEPS}:
        for batch in sampler.counted(loader):
            until = time.monotonic() + {STEP}
            loss = engine.train_step(batch, lambda output, _: output.square().mean())
            losses.write(f"{{engine.global_steps}} {{loss.item().hex()}}\\n")
            if engine.global_steps % 3 == 0 and engine.global_steps < {STEPS}:
                engine.save(folder / "saved", data=sampler, asynchronous=asynchronous)
            time.sleep(max(0.0, until - time.monotonic()))
            if engine.global_steps == {STEPS}:
                break
with open(folder / f"end-{{engine.rank}}", "w") as end:
    for name in [slot.name for bucket in engine.buckets for slot in bucket.slots]:
        for what in ("param", "exp_avg", "exp_avg_sq", "step"):
            end.write(f"{{what}} {{name}} {{engine.local(name, what).tolist()}}\\n")
    for name, buffer in model.named_buffers():
        end.write(f"{{name}} {{buffer.tolist()}}\\n")
    end.write(f"{{sampler.epoch}} {{sampler.position}} {{torch.get_rng_state().tolist()}}\\n")
engine.destroy()
"""


class Started:
    """One start of a run, under its launcher."""

    def __init__(self, job: Job, folder: Path, kind: str, start: int) -> None:
        (folder / "train.py").write_text(PROGRAM)
        self.log = folder / f"log-{start}"
        self.job = job
        command = [sys.executable, "-m", "zeroweave.cli", "run", "-n", 2, folder / "train.py", folder, kind, start]
        self.launcher = self.job.start(command, self.log)
        self.began = [folder / f"began-{start}-{rank}" for rank in range(2)]

    def wait_for_training(self, saved: bool) -> None:
        """Until all ranks train, and if they must have `saved`, until a checkpoint is there."""
        awaited = [*self.began, *([self.log.parent / "saved" / "latest"] if saved else [])]
        until = time.monotonic() + 300
        while not all(path.exists() for path in awaited):
            assert self.launcher.poll() is None and time.monotonic() < until, self.log.read_text()
            time.sleep(0.005)

    def kill(self, victim: str) -> None:
        """Kills the launcher, or a rank by its number."""
        number = self.launcher.pid if victim == "launcher" else self._rank(victim)
        assert self.launcher.poll() is None, self.log.read_text()
        os.kill(number, signal.SIGKILL)

    def _rank(self, victim: str) -> int:
        """The number of a rank's process, as soon as it is there."""
        while self.launcher.poll() is None:
            for number, environment in self.job.running().items():
                if environment.get("RANK") == victim:
                    return number
            time.sleep(0.005)
        raise AssertionError(self.log.read_text())

    def left(self) -> list[str]:
        """What is left of it some time after its launcher has ended."""
        self.launcher.wait(GONE)
        until = time.monotonic() + GONE
        while (left := self.job.running()) and time.monotonic() < until:
            time.sleep(0.02)
        return [f"{number}: rank {environment.get('RANK')}" for number, environment in left.items()]


def losses(folder: Path, rank: int) -> Iterator[str]:
    """Each step's loss of each start, the last line of a killed one only if it is whole."""
    for path in sorted(folder.glob(f"losses-*-{rank}")):
        yield from path.read_text().splitlines(keepends=True)


def finished(folder: Path, kind: str, start: int) -> None:
    """Runs to the end."""
    with Job() as job:
        run = Started(job, folder, kind, start)
        assert run.launcher.wait(300) == 0, run.log.read_text()
        assert run.left() == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finished(folder, "synchronous", 0)
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_and_resumed(seed: int, undisturbed: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    kind = ("synchronous", "asynchronous")[seed % 2]
    told = []
    for start in range(KILLS):
        victim = chance.choice(("0", "1", "launcher"))
        early, moment = chance.random() < EARLY, chance.random()
        last = start == KILLS - 1
        with Job() as job:
            run, began = Started(job, tmp_path, kind, start), time.monotonic()
            if early and not last:
                time.sleep(BEGINS * moment)
            else:
                run.wait_for_training(saved=last)
                time.sleep(TRAINS * moment)
            run.kill(victim)
            killed = time.monotonic()
            left = run.left()
        told.append(f"{victim} after {killed - began:.2f} s, gone after {time.monotonic() - killed:.2f} s")
        assert left == [], (told, run.log.read_text())
    finished(tmp_path, kind, KILLS)
    print(f"seed {seed}, {kind} saves, {KILLS} kills: {'; '.join(told)}")
    resumed = [int(path.read_text()) for path in sorted(tmp_path.glob("began-*-0"))]
    assert resumed == sorted(resumed) and 0 < resumed[-1] < STEPS, resumed
    for rank in range(2):
        (whole,) = undisturbed.glob(f"losses-*-{rank}")
        expected = set(whole.read_text().splitlines(keepends=True))
        assert len(expected) == STEPS
        assert [line for line in losses(tmp_path, rank) if line.endswith("\n") and line not in expected] == []
        assert (tmp_path / f"end-{rank}").read_text() == (undisturbed / f"end-{rank}").read_text()
    saved = [path.name for path in (tmp_path / "saved").iterdir()]
    assert sorted(saved) == ["latest", *(f"step-{step:08d}" for step in (STEPS - 1 - 3, STEPS - 1))], saved
    assert json.loads((tmp_path / "saved" / "latest").read_text())["tag"] == f"step-{STEPS - 1:08d}"


def test_there_are_a_hundred_kills() -> None:
    assert len(SEEDS) * KILLS == 100

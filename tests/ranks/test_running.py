"""What can be seen of processes, and deadlines, which count time in which a process ran."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.processes import is_gone
from zeroweave.ranks.process import RunningClock, is_stopped, note, own

TRAINS = """
import os, sys, time, torch, zeroweave as zw
from pathlib import Path
folder = Path(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = zw.initialize(model, optimizer, {"stage": 3, "deadline_seconds": 5, "compile": {"enabled": False}})
while True:
    engine.backward(engine(torch.randn(8, 16)).square().mean())
    engine.step()
    (folder / f"pid{engine.rank}").write_text(str(os.getpid()))
    over = torch.tensor(float((folder / "over").exists()))
    torch.distributed.broadcast(over, 0)
    if over:
        break
engine.destroy()
"""


def test_a_gap_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = RunningClock()
    for second in range(1, 4):
        now[0] = 100.0 + second
        assert clock.look() == now[0]
    now[0] += 1000.0
    assert clock.look() == 103.0
    now[0] += 2.0
    assert clock.look() == clock.at(now[0]) == 105.0
    assert clock.at(102.0) == 102.0  # before the gap
    now[0] += 50.0
    assert clock.look() == 105.0 and clock.at(1104.0) == 104.0


def test_a_note_is_there_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert note(ValueError("one")) is None
    place = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(place))
    assert note(ValueError("one")) == place
    assert note(ValueError("two")) is None
    assert json.loads(place.read_text())["message"]["message"] == "ValueError: one"


@pytest.mark.matrix
@pytest.mark.parametrize("who", ["all for a while", "one for good"])
def test_ranks_that_are_stopped(tmp_path: Path, who: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    command = [sys.executable, "-m", "zeroweave.cli", "run", "-n", "2", str(script), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        notes = [tmp_path / "pid0", tmp_path / "pid1"]
        while job.poll() is None and not all(note.exists() and note.read_text() for note in notes):
            time.sleep(0.1)
        ranks = [int(note.read_text()) for note in notes]
        if who == "one for good":
            os.kill(ranks[1], signal.SIGSTOP)
            said = job.stderr.read()
            assert job.wait() == 1
            last = said.strip().splitlines()[-1]
            assert "rank 0 failed with exit code 1" in last and "within the deadline of 5 s" in last, said
            return
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                os.kill(rank, number)
            time.sleep(10)
        (tmp_path / "over").touch()
        said = job.stderr.read()
        assert job.wait() == 0, said


def of(number: int) -> str:
    return own().replace(f" {os.getpid()}", f" {number}")


def test_a_process_runs_is_stopped_and_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        name = of(child.pid)
        assert not is_stopped(name) and not is_gone(name)
        child.send_signal(signal.SIGSTOP)
        while not is_stopped(name):
            time.sleep(0.01)
        assert not is_gone(name)
        child.send_signal(signal.SIGCONT)
        while is_stopped(name):
            time.sleep(0.01)
        child.kill()
        while not is_gone(name):  # a zombie: nobody has waited for it
            time.sleep(0.01)
    assert is_gone(name) and not is_stopped(name)


@pytest.mark.parametrize("name", ["", "1", "elsewhere 1", "another machine pid:[1] 1"])
def test_of_another_machine_nothing_is_known(name: str) -> None:
    assert not is_stopped(name) and not is_stopped(own())

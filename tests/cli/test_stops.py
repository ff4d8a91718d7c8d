"""How jobs of `zeroweave run` end and begin again: exit codes, and nothing is left of the ranks."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.commands import ROOT
from tests.support.harness import forking
from tests.support.marks import daily
from tests.support.processes import is_gone
from zeroweave.report import runner

PROGRAM = """
import json, os, pathlib, signal, sys, time
import torch
import zeroweave as zw
from zeroweave.ranks.process import own
from tests.cli.test_stops import listening

folder, what, at = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and (late := os.environ.get("COMES_LATE")) is not None:
    (folder / f"again-{os.environ['RANK']}").touch()
    while os.environ["RANK"] == late and not (folder / f"again-{1 - int(late)}").exists():
        time.sleep(0.02)
    time.sleep(os.environ["RANK"] == late)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
wanted = str(folder / "saved") if what in ("save", "saving") else None
config = {"compile": {"enabled": False}, "checkpoint": {"save_on_signal": wanted}, "deadline_seconds": 60}
engine = zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)
engine.load(folder / "saved", missing_ok=True)
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
told = {"process": own(), "ports": listening(), "from": engine.global_steps, "start": start}
(folder / f"rank-{engine.rank}-{engine.global_steps}").write_text(json.dumps(told))
losses = []
while engine.global_steps < 12 or what not in ("run", "beside", "save"):
    if engine.global_steps == at and engine.rank == 1:
        if what == "raise":
            raise ValueError("no more data")
        if what == "exit":
            sys.exit(7)
        if what == "save":
            os.kill(os.getpid(), signal.SIGTERM)
    generator = torch.Generator().manual_seed(engine.global_steps * 2 + engine.rank)
    loss = engine.train_step(torch.randn(4, 8, generator=generator), lambda output, _: output.square().mean())
    losses.append(loss.item())
    if what in ("run", "beside") and engine.global_steps % 3 == 0:
        engine.save(folder / "saved", asynchronous=what == "beside")
    if engine.rank == 0 and engine.global_steps == at:
        (folder / "there").touch()
(folder / f"done-{engine.rank}").write_text(json.dumps(losses))
engine.destroy()
"""


def listening() -> list[str]:
    """The sockets on which this process listens, by what the kernel calls them."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdecimal() and _is_open(fd)}
    return [name for name in _listening() if f"socket:[{name}]" in own]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _listening() -> set[str]:
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return {line[9] for line in lines if line[3] == "0A"}


class Job:
    """Launchers of the program, each with some of its ranks."""

    def __init__(
        self, folder: Path, launchers: Sequence[Sequence[str]], what: str, at: int, **environment: str
    ) -> None:
        self.folder = folder
        script = folder / "train.py"
        script.write_text(PROGRAM)
        self.launchers = [
            subprocess.Popen(
                [sys.executable, "-m", "zeroweave.cli", "run", *options, str(script), str(folder), what, str(at)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for options in launchers
        ]

    def wait_until_there(self) -> None:
        while not (self.folder / "there").exists():
            assert all(launcher.poll() is None for launcher in self.launchers)
            time.sleep(0.02)

    def ends(self) -> list[tuple[int, str]]:
        """The exit code and the standard error of each launcher. Of all their ranks nothing is left."""
        try:
            ended = [(launcher.communicate(timeout=300)[1], launcher.returncode) for launcher in self.launchers]
        finally:
            for launcher in self.launchers:
                launcher.kill()
        ranks = self.ranks()
        assert ranks and all(is_gone(rank["process"]) for rank in ranks)
        assert any(rank["ports"] for rank in ranks) and not _listening() & {p for rank in ranks for p in rank["ports"]}
        return [(code, error) for error, code in ended]

    def ranks(self) -> list[dict[str, Any]]:
        """What ranks have told of themselves when they began."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank-*"))]

    def losses(self) -> list[list[float]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("done-*"))]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def nodes(way: str) -> list[list[str]]:
    """The options of two launchers on this machine with a rank each, or of one with both ranks."""
    port = free_port()
    if way == "one":
        return [["-n", "2"]]
    if way == "c10d":
        return [["-n", "1", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]] * 2
    return [
        ["-n", "1", "--nnodes", "2", "--node-rank", node, "--master-addr", "localhost", "--master-port", str(port)]
        for node in "01"
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("phase", ["backward", "publish"])
@pytest.mark.parametrize("way", ["one", "c10d", "static"])
def test_killed_ranks_are_started_again_and_go_on(way: str, phase: str, tmp_path: Path) -> None:
    """Where all starts share a store, one rank is later than the other, which must not meet its predecessor."""
    whole = tmp_path / "whole"
    whole.mkdir()
    job = Job(whole, [["-n", "2"]], "run", 0)
    assert [code for code, _ in job.ends()] == [0]
    options = [["--max-restarts", "2", *options] for options in nodes(way)]
    fault = f"kill:rank={int(phase != 'publish')},step={6 if phase == 'publish' else 8},phase={phase}"
    late = {"COMES_LATE": str(int(phase == "backward"))} if way == "static" else {}
    killed = Job(tmp_path, options, "run", 0, ZEROWEAVE_FAULT=fault, **late)
    for code, error in killed.ends():
        assert code == 0, error
    begins = [rank["from"] for rank in killed.ranks()]
    first = 3 if phase == "publish" else 6
    assert begins == [0, first] * 2
    assert killed.losses() == [losses[first:] for losses in job.losses()]
    assert not [path.name for path in (tmp_path / "saved").iterdir() if path.name.startswith(".")]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "first"),
    [("stage,rank=1,step=6", 3), ("stage,step=3", 0), ("write,rank=0", 0), ("write,rank=1", 0), ("publish", 0)],
)
def test_ranks_that_are_killed_while_they_save_beside_the_steps_go_on(fault: str, first: int, tmp_path: Path) -> None:
    """`first`: the step of the last checkpoint that is there whatever happens first, the other ranks or the writer."""
    whole = tmp_path / "whole"
    whole.mkdir()
    job = Job(whole, nodes("one"), "beside", 0)
    assert [code for code, _ in job.ends()] == [0]
    options = [["--max-restarts", "1", *options] for options in nodes("one")]
    killed = Job(tmp_path, options, "beside", 0, ZEROWEAVE_FAULT=f"kill:phase={fault}")
    ((code, error),) = killed.ends()
    assert code == 0, error
    assert [rank["from"] for rank in killed.ranks() if rank["start"] == "1"] == [first] * 2
    assert killed.losses() == [losses[first:] for losses in job.losses()]


@pytest.mark.matrix
def test_without_restarts_left_the_reason_is_shown(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes("one"), "run", 0, ZEROWEAVE_FAULT="kill:rank=1,step=4,phase=update")
    ((code, error),) = job.ends()
    assert code == 137 and "rank 1 failed with signal 9" in error


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("raise", 1, "rank 1 failed with exit code 1: ValueError: no more data"),
        ("exit", 7, "rank 1 failed with exit code 7"),
        ("save", 143, "saved as"),
        ("SIGINT", 130, "ended by SIGINT"),
        ("SIGTERM", 143, "ended by SIGTERM"),
    ],
)
def test_a_stopped_job_has_an_exit_code_and_leaves_nothing(kind: str, code: int, said: str, tmp_path: Path) -> None:
    job = Job(tmp_path, nodes("one"), "on" if kind.startswith("SIG") else kind, 3)
    if kind.startswith("SIG"):
        job.wait_until_there()
        (launcher,) = job.launchers
        launcher.send_signal(getattr(signal, kind))
    ((found, error),) = job.ends()
    assert found == code and said in error, error


def running(folder: Path, what: str) -> tuple[Job, subprocess.Popen[str]]:
    """A job that has come to its third step, and its launcher."""
    job = Job(folder, nodes("one"), what, 3)
    job.wait_until_there()
    (launcher,) = job.launchers
    return job, launcher


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["on", "saving"])
def test_ranks_end_with_a_launcher_that_is_killed(what: str, tmp_path: Path) -> None:
    job, launcher = running(tmp_path, what)
    launcher.kill()
    until = time.monotonic() + 300
    while not all(is_gone(rank["process"]) for rank in job.ranks()):  # a process closes its output before it is gone
        assert time.monotonic() < until
        time.sleep(0.02)
    ((code, error),) = job.ends()
    assert code == -signal.SIGKILL
    assert (what == "saving") == ("SIGTERM: saved as" in error), error


@pytest.mark.matrix
def test_ranks_go_on_under_a_launcher_that_stands_still(tmp_path: Path) -> None:
    job, launcher = running(tmp_path, "saving")
    launcher.send_signal(signal.SIGSTOP)
    time.sleep(5)
    assert not any(is_gone(rank["process"]) for rank in job.ranks())
    launcher.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert not any(is_gone(rank["process"]) for rank in job.ranks())
    launcher.send_signal(signal.SIGTERM)
    ((code, error),) = job.ends()
    assert code == 143 and "SIGTERM: saved as" in error, error


@pytest.mark.matrix
def test_a_launcher_passes_signals_on_and_saves_before_it_ends(tmp_path: Path) -> None:
    job, launcher = running(tmp_path, "saving")
    launcher.send_signal(signal.SIGUSR1)
    while not (tmp_path / "saved" / "latest").exists():
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    ((code, error),) = job.ends()
    assert code == 143, error
    saved = re.findall(r"(SIG\w+): saved as \S+step-(\d+)", error)
    assert [name for name, _ in saved] == ["SIGUSR1", "SIGTERM"]
    assert json.loads((tmp_path / "saved" / "latest").read_text())["tag"] == f"step-{saved[1][1]}"


class Ranks:
    """The program on two ranks without a launcher, in processes that need not import anything."""

    def __init__(self, folder: Path, what: str, at: int) -> None:
        (folder / "train.py").write_text(PROGRAM)
        self.folder = folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": "2"}
        where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "PYTHONPATH": str(ROOT)}
        arguments = [str(folder / "train.py"), str(folder), what, str(at)]
        self.processes = [
            forking().Process(
                target=as_script,
                args=(arguments, where | {"RANK": str(rank)}, folder / f"error{rank}"),
                daemon=True,
            )
            for rank in range(2)
        ]
        for process in self.processes:
            process.start()

    def wait_until_there(self) -> None:
        while not (self.folder / "there").exists():
            assert all(process.is_alive() for process in self.processes), self.errors()
            time.sleep(0.02)

    def ends(self) -> list[int]:
        for process in self.processes:
            process.join(120)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        ranks = [json.loads(path.read_text()) for path in self.folder.glob("rank-*")]
        assert all(is_gone(rank["process"]) for rank in ranks)
        assert not _listening() & {port for rank in ranks for port in rank["ports"]}
        return codes

    def errors(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("error*"))]


def as_script(arguments: list[str], environment: dict[str, str], error: Path) -> None:
    """What `zeroweave run` starts: the runner, and the end of its interpreter."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    os.environ.update(environment)
    os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = ["runner", *arguments]
    sys.path.insert(0, "")
    code = runner.main()
    atexit._run_exitfuncs()
    os._exit(code)


CODES: dict[str, list[int]] = {
    "raise": [1, 1],
    "exit": [1, 7],
    "save": [143, 143],
    "SIGINT": [130, 130],
    "SIGTERM": [-15, -15],
}
"""Ways to stop, and the exit codes of both ranks. A signal from outside comes to both."""
CYCLES = [(kind, at) for at in range(1, 11) for kind in CODES]
DAILY = [("raise", 3), ("save", 2), ("SIGTERM", 4)]


@daily(("kind", "at"), DAILY, [cycle for cycle in CYCLES if cycle not in DAILY])
def test_started_and_stopped(kind: str, at: int, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "on" if kind.startswith("SIG") else kind, at)
    if kind.startswith("SIG"):
        ranks.wait_until_there()
        for process in ranks.processes:
            os.kill(process.pid, getattr(signal, kind))
    codes = ranks.ends()
    if kind == "SIGINT" and codes != CODES[kind]:  # one rank heard of the other's KeyboardInterrupt before its own
        assert sorted(codes) == [1, 130], (codes, ranks.errors())
        assert "KeyboardInterrupt" in ranks.errors()[codes.index(1)], ranks.errors()
    else:
        assert codes == CODES[kind], ranks.errors()


def test_there_are_fifty_cycles() -> None:
    assert len(set(CYCLES)) == 50 and set(DAILY) <= set(CYCLES)

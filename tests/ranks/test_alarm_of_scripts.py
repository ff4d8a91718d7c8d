"""The alarm of whole scripts: exceptions that no engine sees, and ranks whose script has ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.harness import Outcome

pytestmark = pytest.mark.matrix

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from zeroweave.comm.ledger import Ledger
from zeroweave.ranks.alarm import Alarm
from zeroweave.ranks.control import Agreement, Control
dist.init_process_group("gloo")
rank = dist.get_rank()
control = Control.over(None, 60.0)
ledger = Ledger(2, rank)
alarm = Alarm(control, ledger, lambda: 0)
control.agree(Agreement(0, 0, 0, b""))
{body}
"""


def run_script(directory: Path, body: str, ranks: int = 2) -> list[Outcome]:
    """A script of its own per rank, because a process ends there as a user's does."""
    path = directory / "script.py"
    path.write_text(SCRIPT.format(body=textwrap.dedent(body)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        "PYTHONPATH": os.getcwd(),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env=os.environ | address | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outcomes = []
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=300)
            outcomes.append(Outcome(rank, time.time(), value=out, exit_code=process.returncode, stderr=err))
        return outcomes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.oldest
def test_an_uncaught_exception_outside_of_the_engine(tmp_path: Path) -> None:
    outcomes = run_script(
        tmp_path,
        """
        if rank == 0:
            time.sleep(0.3)
            raise ValueError("no more data")
        print("before", end="")
        begin = time.time()
        time.sleep(20)
        """,
    )
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "ValueError: no more data" in outcomes[0].stderr and "zeroweave" not in outcomes[0].stderr
    text = "rank 1 is ended by its alarm: rank 0 failed in the script at step 0: ValueError: no more data"
    assert text in outcomes[1].stderr
    assert outcomes[1].value == "before", "what was printed is not lost"


def test_an_exception_on_all_ranks_shows_each_its_own_traceback(tmp_path: Path) -> None:
    outcomes = run_script(
        tmp_path,
        """
        try:
            raise ValueError("bad config")
        except ValueError as error:
            assert alarm.failed("forward", 0, error)
            time.sleep(rank)
            raise
        """,
    )
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    for outcome in outcomes:
        assert "ValueError: bad config" in outcome.stderr and "ended by its alarm" not in outcome.stderr


def test_a_script_that_never_closes_ends_nobody(tmp_path: Path) -> None:
    outcomes = run_script(
        tmp_path,
        """
        time.sleep(2 * rank)
        print("done", end="")
        """,
    )
    assert [(outcome.exit_code, outcome.value) for outcome in outcomes] == [(0, "done"), (0, "done")]
    assert "zeroweave" not in outcomes[0].stderr + outcomes[1].stderr


def test_a_rank_that_waits_for_one_whose_script_has_ended(tmp_path: Path) -> None:
    outcomes = run_script(
        tmp_path,
        """
        if rank == 0:
            sys.exit(0)
        ledger.record("all_reduce", 0, "float32", 16)
        time.sleep(20)
        """,
    )
    assert [outcome.exit_code for outcome in outcomes] == [0, 1]
    text = "rank 0 issues no collective after its 0: its process ended without closing the engine"
    assert text in outcomes[1].stderr

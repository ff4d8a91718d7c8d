"""What can be seen of another rank's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.processes import is_gone
from zeroweave.ranks.process import is_stopped, own


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

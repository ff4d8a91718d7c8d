"""What ends with an engine, or with the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from tests.support.marks import daily
from zeroweave.ranks import start
from zeroweave.ranks.control import listen
from zeroweave.ranks.start import Rendezvous, at_end


def output_of(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout


SCRIPT = """
from contextlib import ExitStack
from zeroweave.ranks.start import at_end
ends, own = ExitStack(), ExitStack()
own.callback(print, "closed")
at_end(ends, own, lambda: {failed})
{then}
"""


@daily(
    ("then", "failed", "told"),
    [],
    [
        ("", False, "closed\n"),
        ("raise ValueError", False, ""),
        ("raise SystemExit(3)", False, "closed\n"),
        ("ends.close(); print('over')", False, "closed\nover\n"),
        ("", True, ""),
        ("del ends, own", False, ""),
    ],
)
def test_it_ends_with_the_process_unless_it_has_before(then: str, failed: bool, told: str) -> None:
    script = SCRIPT.format(then=then, failed=failed)
    assert output_of(script) == told


def test_it_ends_once() -> None:
    ends, own, closed = ExitStack(), ExitStack(), list[int]()
    own.callback(closed.append, 1)
    at_end(ends, own, lambda: False)
    ends.close()
    ends.close()
    assert closed == [1]


GROUPS = """
import torch
from contextlib import ExitStack
from zeroweave.ranks.start import groups_at_end
ends, own = ExitStack(), ExitStack()
own.callback(print, "closed")
groups_at_end(ends, own, torch.device("{device}"), lambda: False)
{then}
"""


@daily(
    ("device", "then", "told"),
    [],
    [("cpu", "", "closed\n"), ("cuda", "", ""), ("cuda", "ends.close(); print('over')", "closed\nover\n")],
)
def test_the_end_of_a_process_waits_for_no_rank_on_gpus(device: str, then: str, told: str) -> None:
    script = GROUPS.format(device=device, then=then)
    assert output_of(script) == told


def test_ranks_that_do_not_find_each_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(start, "BACKSTOP_SECONDS", 0.1)
    listener, said, ended = listen("127.0.0.1"), list[str](), threading.Event()

    def end(reason: str) -> None:
        said.append(reason)
        ended.set()

    server = Rendezvous.serve("127.0.0.1", listener, 0.2)
    meets = Rendezvous(1, "127.0.0.1", server.port, 0.2, server, end)
    before = threading.active_count()
    with meets.store("one") as store:
        store.set("key", "value")
    with meets.store("two") as store:
        assert not store.check(["key"])
    assert not said and threading.active_count() == before
    with meets.store("three"):
        assert ended.wait(60.0)
    assert set(said) == {
        "rank 1 is ended by its alarm: the ranks have not found each other for 'three' within the deadline of 0.2 s"
    }

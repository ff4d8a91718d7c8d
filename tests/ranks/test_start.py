"""What ends with an engine, or with the process."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

from tests.support.marks import daily
from zeroweave.ranks.start import at_end


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

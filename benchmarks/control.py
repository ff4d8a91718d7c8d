"""What the control plane costs with many ranks: agreements, traffic, and how fast all hear of a failure.

    python -m benchmarks.control --ranks 256

The ranks are processes of this machine that have no engine: a control group, an alarm and a ledger each. They are
forked behind the imports, so that hundreds of them fit into its memory. Prints JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from zeroweave.comm.ledger import Ledger
from zeroweave.ranks.alarm import Alarm
from zeroweave.ranks.control import Address, Agreement, Control, coordinate, listen
from zeroweave.ranks.process import own

DEADLINE: Final = 120.0
IDLE_SECONDS: Final = 3.0
FLAGS: Final = 400
"""Bytes of what ranks tell of their gradients: buckets of a large model."""
MODEL: Final = b"parameter 'model.layers.0.self_attn.q_proj.weight' [4096, 4096] of bfloat16, trained\n" * 300
"""What ranks compare when they start."""
NAMES: Final = {
    "start_seconds": "from the first fork until all ranks have met",
    "compare_seconds": "to compare what 300 parameters are like",
    "agreement_ms": "an agreement, all ranks with the same flags: the median",
    "slowest_ms": "the slowest of them",
    "differing_ms": "an agreement, each rank with flags of its own: the median",
    "sent_bytes": "by a rank, in an agreement",
    "received_bytes": "by a rank, in an agreement",
    "idle_bytes": "by and to a rank, in a second in which nothing happens",
    "failure_seconds": "from an exception on the last rank until the last other process is told to end",
    "memory_mib": "of all ranks together",
}


def measure(ranks: int, rounds: int) -> dict[str, float]:
    """Forks the ranks, of which this process is the first. The figures by name, see `NAMES`."""
    listener, token = listen("127.0.0.1"), secrets.token_bytes(32)
    address = Address("127.0.0.1", listener.getsockname()[1], secrets.token_hex(8), own(), token)
    news, told = os.pipe()
    free, began = _available(), time.monotonic()
    children: list[int] = []
    gc.collect()
    gc.freeze()  # else each collection copies the memory that the processes share
    for rank in range(1, ranks):
        children.append(os.fork())
        if not children[-1]:
            listener.close()
            _live(Control(rank, ranks, DEADLINE, address), rounds, told)
    control = Control(0, ranks, DEADLINE, address, coordinate(ranks, listener, token, DEADLINE))
    figures = _live(control, rounds, told)
    figures |= {"start_seconds": figures["start_seconds"] - began, "memory_mib": free - figures["memory_mib"]}
    ends: list[float] = []
    with os.fdopen(news) as lines:
        while len(ends) < ranks - 1 or "failed" not in figures or "sent_bytes" not in figures:
            said = json.loads(lines.readline())
            ends += said.pop("end", [])
            figures |= said
    for child in children:
        os.waitpid(child, 0)
    os.close(told)
    figures["failure_seconds"] = max(ends) - figures.pop("failed")
    return {name: round(figures[name], 3) for name in NAMES}


def _live(control: Control, rounds: int, told: int) -> dict[str, float]:
    """What a rank does; each but the first ends with it. The last one fails while the others come to an agreement."""

    def say(**figures: Any) -> None:
        os.write(told, json.dumps(figures).encode() + b"\n")

    def end(reason: str) -> None:
        say(end=[time.monotonic()])
        ended.set()
        if control.rank:
            os._exit(0)

    ended = threading.Event()

    control.barrier("the start")
    figures = {"start_seconds": time.monotonic(), "memory_mib": _available()}
    alarm = Alarm(control, Ledger(control.world, control.rank), lambda: 0, end)
    control.barrier("the alarm")
    figures["compare_seconds"] = _timed(lambda: control.all_gather_bytes(MODEL, "the model"))
    assert control.channel is not None
    sent, received = control.channel.sent, control.channel.received
    times = _agreements(control, rounds, bytes(FLAGS))
    if control.rank == 1:
        of_agreements = (control.channel.sent - sent) / rounds, (control.channel.received - received) / rounds
        say(sent_bytes=of_agreements[0], received_bytes=of_agreements[1])
    others = _agreements(control, rounds, secrets.token_bytes(FLAGS))
    control.barrier("a rest")
    traffic = alarm.channel.sent + alarm.channel.received
    time.sleep(IDLE_SECONDS)
    traffic = alarm.channel.sent + alarm.channel.received - traffic
    control.barrier("the failure")
    if control.rank == control.world - 1:
        say(failed=time.monotonic())
        alarm.failed("forward", 0, ValueError("no more data"))
        os._exit(0)
    if control.rank:
        with suppress(RuntimeError):
            control.barrier("where the last rank does not come")
    ended.wait()
    figures |= {"agreement_ms": 1e3 * statistics.median(times), "slowest_ms": 1e3 * max(times)}
    return figures | {"differing_ms": 1e3 * statistics.median(others), "idle_bytes": traffic / IDLE_SECONDS}


def _agreements(control: Control, rounds: int, flags: bytes) -> list[float]:
    mine = [Agreement(step, 7 * step, 2**63 + step, flags, candidate=1, record=2) for step in range(rounds)]
    return [_timed(partial(control.agree, each)) for each in mine]


def _timed(what: Callable[[], object]) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def _available() -> float:
    """MiB of memory that this machine has left."""
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args()
    print(json.dumps({"ranks": asked.ranks, **measure(asked.ranks, asked.rounds)}, indent=1))
    os._exit(0)

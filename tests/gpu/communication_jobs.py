"""What the ranks do in the tests of communication, and what counts kernels for others."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import trace
from tests.gpu.jobs import SMALL, config, join, start, step, tokens


@dataclass(frozen=True)
class Counts:
    """Collectives of one step in the profiler's trace, the schedule and the engine's ledger: calls and bytes.

    `traced_bytes` is None where the profiler does not say how long a kernel's message was.
    """

    traced: dict[str, int]
    traced_bytes: dict[str, int] | None
    scheduled: dict[str, int]
    ledger: dict[str, int]
    ledger_bytes: dict[str, int]


KERNELS = {
    "all_gather": r"nccl.*all_?gather",
    "reduce_scatter": r"nccl.*reduce_?scatter",
    "all_reduce": r"nccl.*all_?reduce",
}
WIDTHS = {"BFloat16": 2, "Float": 4}


def kind_of(kernel: str) -> str | None:
    return next((k for k, pattern in KERNELS.items() if re.match(pattern, kernel, re.IGNORECASE)), None)


def counts(stage: int) -> Counts:
    device = join()
    settings = {**config(stage, "inductor", torch.bfloat16), "transport": {"gathers": "kernel"}}
    with start(SMALL, settings, torch.bfloat16) as engine:
        for _ in range(3):
            step(engine, tokens(SMALL, device))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.capture(lambda: step(engine, tokens(SMALL, device)), path)
            kernels = [(k, e) for e in trace.gpu_events(path) if (k := kind_of(e["name"])) is not None]
        last, schedule = engine.stats.last_step, engine.schedule
        assert schedule is not None
        scheduled = [k for k, _ in schedule.collectives()]
        return Counts(
            traced=tally([k for k, _ in kernels]),
            traced_bytes=traced_bytes(kernels),
            scheduled=tally(scheduled),
            ledger={k: traffic.calls for k, traffic in last.items()},
            ledger_bytes={k: traffic.payload for k, traffic in last.items()},
        )


def tally(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


def traced_bytes(kernels: list[tuple[str, dict[str, Any]]]) -> dict[str, int] | None:
    """Full-size bytes of each kind: what a gather leaves on each rank, what a reduction takes from each."""
    total: dict[str, int] = {}
    for name, event in kernels:
        arguments = event.get("args", {})
        width = WIDTHS.get(arguments.get("dtype", ""))
        if width is None or "In msg nelems" not in arguments or "Out msg nelems" not in arguments:
            return None
        elements = max(int(arguments["In msg nelems"]), int(arguments["Out msg nelems"]))
        total[name] = total.get(name, 0) + elements * width
    return total

"""How much of a step waits for communication, before and after the schedule is made from measured times.

    python -m benchmarks.exposed --model llama-1b --seq 2048 --micro-batch 4

One engine under ZeRO-3 trains by three schedules in turn: the plain one (every gather where it is needed, one
reduction at a time), one call ahead, and the one made from recorded steps. For each, the step is timed as it is and in
profiling mode, without any communication. What a step takes more than the fastest of the three without communication,
as a share of it, is exposed: all three compute the same, but in profiling mode each gather that is left out costs the
local copy that stands for it, so the schedule with the fewest gathers shows best what the computation alone takes. How
much of what is exposed is waiting is recorded beside it; the rest is that computation runs slower beside communication.
Nothing is compiled in between.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroweave as zw
from benchmarks import launch
from benchmarks.models import SHAPES, batches, build

TARGET = 0.6
"""Of what is exposed before, at most."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.exposed", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--model", choices=sorted(SHAPES), default="llama-1b")
    p.add_argument("--seq", type=int, default=2048)
    p.add_argument("--micro-batch", type=int, default=4)
    p.add_argument("--gpus", type=int, default=None, help="processes; default: all GPUs, or 2 on the CPU")
    p.add_argument("--steps", type=int, default=8, help="steps that are timed together")
    p.add_argument("--rounds", type=int, default=3, help="how often; the median counts")
    p.add_argument("--warm", type=int, default=4, help="steps before them that are not")
    p.add_argument("--lower", choices=["inductor", "aot_eager"], default="inductor")
    p.add_argument("--budget-gib", type=float, default=None, help="device memory that the last schedule may use")
    p.add_argument("--out", type=Path, default=None, help="folder for exposed.md")
    return p


def rank_main(rank: int, world: int, port: int, a: argparse.Namespace, result: str) -> None:
    """One rank; rank 0 writes what it measured to `result`."""
    device = launch.join(rank, world, port)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    model = build(SHAPES[a.model], device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    settings = {"lower": a.lower, "prefetch": 0, "keep": "none", "record_steps": 0}
    engine = zw.initialize(model, optimizer, {"stage": 3, "compile": settings, "reduce": {"depth": 1}})
    data = batches(SHAPES[a.model], a.micro_batch, a.seq, rank, device)
    rows = []
    for name in ("as needed", "one call ahead", "from measured times"):
        if name == "one call ahead":
            engine.reschedule(prefetch=1, depth=2)
        elif name == "from measured times":
            train(engine, data, a.warm)
            with engine.record() as recorded:
                train(engine, data, 3)
            budget = None if a.budget_gib is None else int(a.budget_gib * 2**30)
            engine.use(engine.compile_schedule(recorded.operations, "auto", keep="auto", memory_budget=budget))
        rows.append(measured(name, engine, data, a))
    floor = min(row["silent"] for row in rows)
    for row in rows:
        row["share"] = max(0.0, row["step"] - floor) / row["step"]
        row["own"] = max(0.0, row["step"] - row["silent"]) / row["step"]
    if rank == 0:
        Path(result).write_text(json.dumps(rows))
    engine.destroy()
    dist.destroy_process_group()


def train(engine: Any, data: Iterator[torch.Tensor], steps: int) -> float:
    """Seconds of a step. The device is waited for at both ends only, so that the host can run ahead as ever."""
    synchronize(engine.device)
    begin = time.perf_counter()
    for _ in range(steps):
        tokens = next(data)
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
    synchronize(engine.device)
    return (time.perf_counter() - begin) / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(name: str, engine: Any, data: Iterator[torch.Tensor], a: argparse.Namespace) -> dict[str, Any]:
    train(engine, data, a.warm)
    graphs = engine.stats.graphs
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.device)
    step = statistics.median(train(engine, data, a.steps) for _ in range(a.rounds))
    peak = torch.cuda.max_memory_allocated(engine.device) if engine.device.type == "cuda" else 0
    with engine.record() as recorded:
        train(engine, data, 3)
    with engine.profiling():
        train(engine, data, 2)
        silent = statistics.median(train(engine, data, a.steps) for _ in range(a.rounds))
    return {
        "name": name,
        "step": step,
        "silent": silent,
        "waits": sum(operation.exposed for operation in recorded.operations),
        "peak": peak,
        "gathers": sum(kind == "all_gather" for kind, _ in engine.schedule.collectives()),
        "graphs": engine.stats.graphs - graphs,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| gathers are issued | step s | without communication s | exposed | by own | waits s | gathers | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['name']} | {r['step']:.4f} | {r['silent']:.4f} | {r['share']:.1%} | {r['own']:.1%} "
        f"| {r['waits']:.4f} | {r['gathers']} "
        f"| {r['peak'] / 2**30:.2f} |"
        for r in rows
    ]
    before, after = rows[0]["share"], rows[-1]["share"]
    ratio = after / before if before else 0.0
    lines += ["", f"exposed after ÷ before: {ratio:.2f}, at most {TARGET}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    world = a.gpus or torch.cuda.device_count() or 2
    rows = launch.spawned(rank_main, world, a)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    text = f"{a.model}, ZeRO-3, {world} × {device}, sequence {a.seq}, micro-batch {a.micro_batch}\n\n{table(rows)}"
    print(text)
    if a.out is not None:
        a.out.mkdir(parents=True, exist_ok=True)
        (a.out / "exposed.md").write_text(text + "\n")
    before, after = rows[0]["share"], rows[-1]["share"]
    return int(after > TARGET * before or any(row["graphs"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())

"""What it saves that gradient targets live from the reduction to the update only.

    python -m benchmarks.lifetime --model llama-1b --seq 2048 --micro-batch 4

Trains twice under ZeRO-1, with step-local targets and with targets that are kept from set-up on
(`debug.keep_gradient_targets`), and prints step time, peak memory and the difference beside the size of the flat
gradient partition. Exit code 1 unless the difference is the partition within 5 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import launch, report
from benchmarks.models import SHAPES
from benchmarks.worker import GIB, Spec

TOLERANCE = 0.05


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.lifetime", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--model", choices=sorted(SHAPES), default="llama-1b")
    p.add_argument("--seq", type=int, default=2048)
    p.add_argument("--micro-batch", type=int, default=4)
    p.add_argument("--gpus", type=int, default=None, help="processes; default: all GPUs, or 2 on the CPU")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--warm", type=int, default=8, help="first steps that are not counted")
    p.add_argument("--lower", choices=["inductor", "aot_eager"], default="inductor")
    p.add_argument("--out", type=Path, default=None, help="folder for lifetime.md")
    p.add_argument("--timeout", type=float, default=200.0, help="seconds for each of the two")
    return p


def table(rows: Sequence[tuple[str, report.Row]], partition: float) -> str:
    """`partition` is in GiB."""
    lines = ["| gradient targets | step s (min–max) | peak GiB | first, last loss |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {r.step_s:.4f} ({r.min_s:.4f}–{r.max_s:.4f}) | {r.peak_gib:.3f} "
        f"| {r.losses[0]:.4f}, {r.losses[-1]:.4f} |"
        for name, r in rows
    ]
    (_, local), (_, kept) = rows
    lines += [
        "",
        f"difference {kept.peak_gib - local.peak_gib:.3f} GiB, flat gradient partition {partition:.3f} GiB; "
        f"step {local.step_s / kept.step_s:.3f} ×",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    world = a.gpus or torch.cuda.device_count() or 2
    rows = []
    with launch.temporary_folder() as scratch, (scratch / "log").open("w") as log:
        for name, kept in (("step-local", False), ("kept", True)):
            setting = {"debug": {"keep_gradient_targets": kept}}
            spec = Spec("zeroweave-z1", a.model, a.seq, a.micro_batch, a.steps, a.warm, a.lower, False, setting)
            # one folder of compiler caches: the second run compiles nothing, and nothing of that is measured
            rows.append((name, report.row(spec, launch.run(spec, world, a.timeout, log, scratch / "cache"))))
    partition = rows[0][1].details["traffic"]["reduce_scatter"]["payload"] / world / GIB
    text = f"{a.model}, ZeRO-1, {world} × {rows[0][1].device}, sequence {a.seq}, micro-batch {a.micro_batch}\n\n"
    text += table(rows, partition)
    print(text)
    if a.out is not None:
        a.out.mkdir(parents=True, exist_ok=True)
        (a.out / "lifetime.md").write_text(text + "\n")
    difference = rows[1][1].peak_gib - rows[0][1].peak_gib
    return int(abs(difference - partition) > TOLERANCE * partition)


if __name__ == "__main__":
    raise SystemExit(main())

"""What the host takes for one block's forward call and backward, when steps follow their schedule.

    python -m benchmarks.host --package ../other/checkout

Two processes on the CPU (gloo) train blocks of one tiny Linear each, so that there is next to nothing to compute: with
zeroweave, with the zeroweave of other checkouts, and under `torch.compile` alone. These take turns, many times, so that
whatever else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import launch
from benchmarks.host_rank import Record, Spec

PLAIN = "torch.compile"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.host", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--package", type=Path, action="append", default=[], help="another checkout; may be given again")
    p.add_argument("--stage", type=int, default=3)
    p.add_argument("--blocks", type=int, default=24)
    p.add_argument("--width", type=int, default=16)
    p.add_argument("--world", type=int, default=2, help="processes of each kind")
    p.add_argument("--warm", type=int, default=10, help="steps that are not counted")
    p.add_argument("--steps", type=int, default=5, help="steps of each turn")
    p.add_argument("--turns", type=int, default=20)
    p.add_argument("--lower", choices=["inductor", "aot_eager"], default="aot_eager")
    p.add_argument("--timeout", type=float, default=600.0, help="seconds for all")
    return p


def worst(records: Sequence[Record]) -> Record:
    """The slowest rank's figures."""
    return Record(*(max(each) for each in zip(*(asdict(r).values() for r in records), strict=True)))


def table(found: Sequence[tuple[str, Record]]) -> str:
    """One line for each; `×`: forward and backward divided by those of the last, which is the oldest."""
    columns = ["what", "forward µs", "backward µs", "both ×", "forward wall µs", "backward wall µs"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    last = found[-1][1]
    for name, r in found:
        share = (r.forward_us + r.backward_us) / (last.forward_us + last.backward_us)
        cells = [name, f"{r.forward_us:.1f}", f"{r.backward_us:.1f}", f"{share:.3f}"]
        lines.append(f"| {' | '.join([*cells, f'{r.forward_wall_us:.1f}', f'{r.backward_wall_us:.1f}'])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    kinds = {PLAIN: "", "zeroweave": str(launch.ROOT), **{str(p): str(p.resolve()) for p in a.package}}
    spec = Spec(tuple(kinds.values()), a.world, a.stage, a.blocks, a.width, a.warm, a.steps, a.turns, a.lower)
    with launch.temporary_folder() as folder, (folder / "host.log").open("w") as log:
        count = a.world * len(kinds)
        told = launch.ranks("benchmarks.host_rank", "host", asdict(spec), folder, count, a.timeout, log)
    records = [Record(**each) for each in told]
    found = [(name, worst(records[k * a.world :][: a.world])) for k, name in enumerate(kinds)]
    where = f"{a.world} processes, stage {a.stage}, {a.lower}, torch {torch.__version__}"
    print(f"{a.blocks} blocks of one Linear({a.width}, {a.width}), {where}\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

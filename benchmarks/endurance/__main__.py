"""Training for long, and what must not happen in it.

    python -m benchmarks.endurance --out DIR --steps 400 --rounds 3
    python -m benchmarks.endurance --out DIR --graphs both --model llama-1b --steps 2000

The first trains several models at once on the same GPUs. With `--graphs` one model trains alone, as CUDA graphs and
not, and memory and losses are compared. Exit code 1 where something fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.endurance import alike, crowd
from benchmarks.models import SHAPES


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.endurance", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--stages", type=int, nargs="+", default=(3, 2, 1))
    p.add_argument("--gpus", type=int, default=None)
    p.add_argument("--lower", default="inductor")
    p.add_argument("--seconds", type=float, default=3600.0, help="no run begins after this time, and none takes longer")
    p.add_argument("--out", type=Path, required=True, help="folder for logs and compiler caches")
    several = p.add_argument_group("several models at once")
    several.add_argument("--rounds", type=int, default=3)
    several.add_argument("--stream", action="append", default=[], metavar="MODEL:SEQ,…", help="not the usual streams")
    one = p.add_argument_group("one model, as CUDA graphs and not")
    one.add_argument("--graphs", choices=sorted(alike.GRAPHS), default=None, help="both: their losses are compared")
    one.add_argument("--model", choices=sorted(SHAPES), default="llama-1b")
    one.add_argument("--lengths", type=numbers, default=(512, 640, 768, 1024), help="of the sequences, in turn")
    one.add_argument("--micro-batch", type=int, default=1)
    one.add_argument("--loop", choices=["train_step", "plain", "busy"], default="train_step")
    one.add_argument("--watch", type=int, default=100, help="steps after which reserved memory must not grow")
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config, dotted key")
    one.add_argument("--at-once", type=int, default=1, help="stages that train at the same time")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    if a.graphs is None:
        return crowd.main(a)
    if not 0 < a.watch < a.steps:
        raise SystemExit("--watch must be less than --steps")
    return alike.main(a)


if __name__ == "__main__":
    sys.exit(main())

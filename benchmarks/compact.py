"""Compact optimizer states beside full ones: the losses of the demo model, on one process.

    python -m benchmarks.compact --steps 500 --seeds 3

Trains the model of `zeroweave demo` on its text with AdamW: in float32, in bfloat16 with full states, and in bfloat16
with `precision.optimizer: compact`; from the same weights, on the same batches of each seed. Prints the mean loss of
each stretch of steps, averaged over seeds, what compact differs by from full states on the same seed, and the bytes
of masters and states. `--out` writes all losses as JSON.

What the codes of `zeroweave/optim/quantize8.py` and others make of moments, compared with float32 moments of the same
gradients, in 500 steps of the demo model in bfloat16 (the error of updates is that of their norm):

                                         roots of second moments      error of updates
    those of codes.py                    0.1 % too low                 4.6 %
    nearest codes for both               4.5 % too low, and growing   10.4 %
    chance for both                      0.1 % too low                 4.9 %
    first: linear, or cubes              0.1 % too low                 5.2 %, or 4.8 %
    second: logarithms of equal range    0.2 % too high                9.5 %
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import zeroweave as zw
from zeroweave.demo.model import Llama
from zeroweave.demo.run import LEARNING_RATE
from zeroweave.demo.text import Text

KINDS: Final[dict[str, dict[str, Any]]] = {
    "float32": {},
    "bfloat16, full": {"params": "bfloat16"},
    "bfloat16, compact": {"params": "bfloat16", "optimizer": "compact"},
}
FULL, COMPACT = list(KINDS)[1:]


class Run(NamedTuple):
    """losses: by step. nbytes: of masters and states, by parameter."""

    losses: list[float]
    nbytes: float


def run(kind: str, seed: int, steps: int) -> Run:
    """One training."""
    torch.manual_seed(seed)
    model, text = Llama(), Text(seed=seed)
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    config = {"stage": 1, "precision": KINDS[kind], "compile": {"enabled": False}}
    with zw.initialize(model, optimizer, config) as engine:
        losses = [float(engine.train_step(text.step(step))) for step in range(steps)]
        memory = engine.stats.memory
        return Run(losses, (memory.shards + memory.masters + memory.optimizer) / numel)


def table(runs: Mapping[str, Sequence[Run]], stretches: int) -> Iterator[str]:
    """Markdown: mean losses by stretch of steps."""
    steps = len(runs[FULL][0].losses)
    size = max(1, steps // stretches)
    ends = list(range(size, steps + 1, size))

    def means(losses: Sequence[float]) -> list[float]:
        return [sum(losses[end - size : end]) / size for end in ends]

    by_seed = {kind: [means(each.losses) for each in held] for kind, held in runs.items()}
    yield f"| steps | {' | '.join(runs)} | compact − full, by seed | seeds differ by |"
    yield "|" + "---|" * (len(runs) + 3)
    for index, end in enumerate(ends):
        found = {kind: [each[index] for each in held] for kind, held in by_seed.items()}
        mean = " | ".join(f"{sum(each) / len(each):.4f}" for each in found.values())
        away = ", ".join(f"{a - b:+.4f}" for a, b in zip(found[COMPACT], found[FULL], strict=True))
        yield f"| {end - size + 1}–{end} | {mean} | {away} | {max(found[FULL]) - min(found[FULL]):.4f} |"
    yield ""
    for kind, held in runs.items():
        yield f"{kind}: {held[0].nbytes:.2f} bytes of masters and states for each parameter"


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.compact", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--steps", type=int, default=500)
    p.add_argument("--seeds", type=int, default=3, help="so many trainings of each kind")
    p.add_argument("--stretches", type=int, default=5, help="rows of the table")
    p.add_argument("--out", type=Path, default=None, help="file for all losses, as JSON")
    a = p.parse_args()
    runs = {kind: [run(kind, seed, a.steps) for seed in range(a.seeds)] for kind in KINDS}
    print("\n".join(table(runs, a.stretches)))
    if a.out is not None:
        a.out.write_text(json.dumps({kind: [each._asdict() for each in held] for kind, held in runs.items()}))


if __name__ == "__main__":
    main()

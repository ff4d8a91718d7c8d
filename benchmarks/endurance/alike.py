"""Trains one model with CUDA graphs and without, on the same data: nothing fails, nothing grows, losses are equal.

Sequences have several lengths in turn. Each run has processes of its own; those of one stage follow one another and
share the compilers' caches, so that both run the same kernels.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch

from benchmarks import launch
from benchmarks.endurance.rank import VARIABLES, Record, Spec
from benchmarks.lm import overrides

GRAPHS = {"on": (True,), "off": (False,), "both": (True, False)}


def name_of(spec: Spec) -> str:
    return f"{spec.model} stage {spec.stage}, graphs {'on' if spec.graphs else 'off'}"


def run(spec: Spec, world: int, timeout: float, log: TextIO, cache: Path) -> list[Record]:
    with launch.temporary_folder() as folder:
        request = asdict(spec)
        module = "benchmarks.endurance.rank"
        found = launch.ranks(module, name_of(spec), request, folder, world, timeout, log, cache, VARIABLES)
        return [Record(**record) for record in found]


def line(spec: Spec, records: Sequence[Record], seconds: float) -> str:
    """What came of a run: of memory the worst rank's figures, of graphs rank 0's, which are those of all."""
    first = records[0]
    words = [f"{spec.steps} steps of lengths {', '.join(map(str, spec.lengths))}", f"{first.graphed} calls as graphs"]
    words += [f"{count} not: {reason}" for reason, count in first.ungraphed.items()]
    if first.reserved is None:
        words.append("memory not measured")
    else:
        reserved, growth = (max(getattr(r, name) or 0 for r in records) / 2**20 for name in ("reserved", "growth"))
        words.append(f"{reserved:.0f} MiB reserved after step {spec.watch}, then {growth:.0f} more")
    return f"{name_of(spec)}: {'; '.join(words)}; last loss {first.losses[-1]:.4f}; {seconds:.0f} s"


def problems(spec: Spec, records: Sequence[Record]) -> list[str]:
    """What must not be, of one run."""
    found = []
    if any(record.growth for record in records):
        found.append(f"reserved memory grows after step {spec.watch}")
    first = records[0]
    if changed := sum(record.changed for record in records):
        found.append(f"{changed} kept tensors changed")
    if spec.graphs and first.late and spec.loop != "busy":  # the steps after an error are no graphs
        why = "; ".join(first.ungraphed) or "the device has none"
        found.append(f"{first.late} calls after step {spec.watch} were no graphs: {why}")
    return [f"{name_of(spec)}: {each}" for each in found]


def difference(one: Sequence[Record], other: Sequence[Record]) -> str | None:
    """The first step in which the loss of a rank differs, bit for bit; None if there is none."""
    pairs = [
        (step, rank, a, b)
        for rank, (left, right) in enumerate(zip(one, other, strict=True))
        for step, (a, b) in enumerate(zip(left.losses, right.losses, strict=True), 1)
        if repr(a) != repr(b)  # by their text, because NaN is not NaN
    ]
    if not pairs:
        return None
    step, rank, a, b = min(pairs, key=lambda pair: pair[:2])
    return f"first in step {step} on rank {rank}, {a!r} and {b!r}; in all {len(pairs)} differ"


def stage(a: Namespace, number: int, world: int, end: float) -> bool:
    """The runs at one stage. Was all as it must be?"""
    failed: list[str] = []
    runs: list[list[Record]] = []
    with (a.out / f"{a.model}-z{number}.log").open("w") as log:
        for graphs in GRAPHS[a.graphs]:
            shape = a.model, number, graphs, a.lengths, a.micro_batch
            spec = Spec(*shape, a.steps, a.watch, a.loop, a.lower, overrides(a.set))
            begin = time.monotonic()
            if begin > end:
                failed.append(f"{name_of(spec)}: left out for time")
                continue
            try:
                records = run(spec, world, end - begin, log, a.out / f"cache-z{number}")
            except launch.LaunchError as error:
                failed.append(str(error))
                continue
            runs.append(records)
            print(line(spec, records, time.monotonic() - begin), flush=True)
            failed += problems(spec, records)
    if len(runs) == 2:
        differs, what = difference(*runs), f"{a.model} stage {number}: losses with graphs and without"
        if differs is None:
            print(f"holds: {what} are equal in {a.steps} steps on {world} ranks", flush=True)
        else:
            failed.append(f"{what} differ {differs}")
    for each in failed:
        print(f"FAILS: {each}", flush=True)
    return not failed


def main(a: Namespace) -> int:
    """Exit code 1 where a run fails, or something is not as it must be."""
    a.out.mkdir(parents=True, exist_ok=True)
    world, end = a.gpus or torch.cuda.device_count() or 2, time.monotonic() + a.seconds
    with ThreadPoolExecutor(a.at_once) as pool:
        passed = list(pool.map(lambda number: stage(a, number, world, end), a.stages))
    return int(not all(passed))

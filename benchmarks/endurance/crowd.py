"""Trains several models at once on the same GPUs, and says which runs ended with an error.

No times are taken: that the runs disturb each other is meant, as a guard that fires by its timing must be met here.
Each run is one of `benchmarks.lm`, at one stage.
"""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

STREAMS = ("qwen3-8b:1024", "llama-1b:512,llama-1b:256", "llama-1b:1024")
"""Runs one after the other, as model:seq; the streams side by side."""


@dataclass(frozen=True)
class Run:
    """`steps` optimizer steps of one model at one stage."""

    model: str
    seq: int
    stage: int
    steps: int

    def __str__(self) -> str:
        return f"{self.model} seq {self.seq} stage {self.stage}, {self.steps} steps"

    def command(self, gpus: int | None, lower: str, out: Path, timeout: float) -> list[str]:
        shape = [
            "--model",
            self.model,
            "--seq",
            str(self.seq),
            "--micro-batch",
            "1",
            "--impl",
            f"zeroweave-z{self.stage}",
        ]
        course = ["--steps", str(self.steps), "--warm", "15", "--lower", lower, "--timeout", str(timeout)]
        where = ["--cache", str(out / "cache"), "--out", str(out / f"{self.model}-{self.seq}-z{self.stage}")]
        return [
            sys.executable,
            "-m",
            "benchmarks.lm",
            *shape,
            *course,
            *where,
            *(["--gpus", str(gpus)] if gpus else []),
        ]


def runs(stream: str, rounds: int, stages: Sequence[int], steps: int) -> Iterator[Run]:
    for _ in range(rounds):
        for each in stream.split(","):
            model, _, seq = each.partition(":")
            yield from (Run(model, int(seq), stage, steps) for stage in stages)


def main(a: Namespace) -> int:
    """Exit code 1 when a run fails."""
    end = time.monotonic() + a.seconds

    def follow(stream: str) -> tuple[int, int, int]:
        """Passed, failed and left out."""
        counts = [0, 0, 0]
        for run in runs(stream, a.rounds, a.stages, a.steps):
            begin = time.monotonic()
            if begin > end:
                counts[2] += 1
                continue
            command = run.command(a.gpus, a.lower, a.out, a.seconds)
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            counts[done.returncode != 0] += 1
            print(f"{'failed' if done.returncode else 'passed'}: {run}, {time.monotonic() - begin:.0f} s", flush=True)
            if done.returncode:
                print(done.stdout[-4000:], flush=True)
        return counts[0], counts[1], counts[2]

    streams = a.stream or list(STREAMS)
    with ThreadPoolExecutor(len(streams)) as pool:
        passed, failed, left = map(sum, zip(*pool.map(follow, streams), strict=True))
    print(f"{passed} runs passed, {failed} failed, {left} left out for time")
    return int(failed > 0 or not passed)

"""What compilation costs, and that it does not grow with the number of blocks.

    python -m benchmarks.compile_cost

Trains the demo's Llama (`zeroweave.demo`) for a few steps under Inductor, in fresh processes, with 8, 16 and 32
blocks and an empty cache, with the cache that was left, and on two gloo ranks that share an empty cache; beside it
`torch.compile(model)` whole, in the same run. Prints compilations, the time of the first step and that of each phase.
Exit code 1 if `--check` is given and something does not hold that must.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import launch
from zeroweave.demo import Llama, LlamaConfig

MOST_COMPILATIONS = 16
MOST_GROWTH = 1.3
STEPS = 4


@dataclass(frozen=True)
class Spec:
    """One measurement: `impl` is "zeroweave" or "whole"; `cache` names the folder of caches, cold or warm."""

    impl: str
    layers: int
    world: int
    cache: str
    warm: bool = False
    batch: int = 4
    length: int = 128


@dataclass(frozen=True)
class Record:
    """One rank's figures: seconds, and graphs lowered, of them found in Inductor's cache, of them compiled.

    `first_step` is time, `first_step_cpu` what the rank and its compilers took of the CPU in it.
    """

    rank: int
    first_step: float
    first_step_cpu: float
    later_step: float
    lowered: int
    found: int
    compiled: int
    phases: dict[str, float] = field(default_factory=dict)


def measure(spec: Spec) -> Record:
    """This rank's figures, in an environment as torchrun sets it."""
    import zeroweave as zw

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Llama(LlamaConfig(layers=spec.layers, max_length=spec.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(256, (spec.batch, spec.length))
    engine = zw.initialize(model, optimizer) if spec.impl == "zeroweave" else None
    whole = None if engine else torch.compile(model)
    times, cpu = [], []
    for _ in range(STEPS):
        began, before = time.perf_counter(), cpu_seconds()
        if engine is not None:
            engine.backward(engine(ids, ids).loss)
            engine.step()
        elif whole is not None:
            whole(ids, ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        cpu.append(cpu_seconds() - before)
    counts = torch._dynamo.utils.counters["inductor"]
    hits, misses = (counts[f"fxgraph_cache_{kind}"] for kind in ("hit", "miss"))
    stats = None if engine is None else engine.stats
    record = Record(
        rank=dist.get_rank(),
        first_step=times[0],
        first_step_cpu=cpu[0],
        later_step=min(times[1:]),
        lowered=hits + misses + counts["fxgraph_cache_bypass"] if stats is None else stats.templates,
        found=hits if stats is None else stats.found_templates,
        compiled=misses + counts["fxgraph_cache_bypass"],
        phases={} if stats is None else stats.compile_seconds,
    )
    if engine is not None:
        engine.destroy()
    dist.destroy_process_group()
    return record


def cpu_seconds() -> float:
    """Of this process and of its children that have ended (C++ compilers)."""
    return sum(os.times()[:4])


def run(spec: Spec, timeout: float) -> list[Record]:
    """The records of all ranks, each a fresh process. RuntimeError with what they printed when one fails."""
    command = [sys.executable, "-m", "benchmarks.compile_cost", "--worker", json.dumps(asdict(spec))]
    with launch.meeting() as port:
        processes = [
            subprocess.Popen(
                command,
                env=launch.environment(rank, spec.world, port, Path(spec.cache)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(spec.world)
        ]
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{spec} failed:\n" + "\n".join(output[-3000:] for output in outputs))
    return [Record(**json.loads(output.strip().splitlines()[-1])) for output in outputs]


def specs(layers: Sequence[int], folder: Path, batch: int, length: int) -> list[Spec]:
    """The measurements in their order: a warm one follows the cold one that filled its cache."""
    found = []
    for impl in ("zeroweave", "whole"):
        for count in layers:
            found.append(Spec(impl, count, 1, str(folder / f"{impl}{count}"), False, batch, length))
        found.append(Spec(impl, layers[-1], 1, str(folder / f"{impl}{layers[-1]}"), True, batch, length))
    for warm in (False, True):
        found.append(Spec("zeroweave", layers[0], 2, str(folder / "ranks"), warm, batch, length))
    return found


def table(results: Sequence[tuple[Spec, list[Record]]]) -> str:
    names = list(dict.fromkeys(name for _, records in results for r in records for name in r.phases))
    columns = ["implementation", "blocks", "rank", "cache", "lowered", "found", "compiled"]
    columns += ["first step s", "CPU s", "later s"]
    lines = [f"| {' | '.join(columns + [f'{name} s' for name in names])} |", "|" + "---|" * (len(columns) + len(names))]
    for spec, records in results:
        for r in records:
            cells = [
                "zeroweave" if spec.impl == "zeroweave" else "torch.compile(model)",
                str(spec.layers),
                f"{r.rank} of {spec.world}",
                "warm" if spec.warm else "cold",
                *(str(n) for n in (r.lowered, r.found, r.compiled)),
                f"{r.first_step:.2f}",
                f"{r.first_step_cpu:.2f}",
                f"{r.later_step:.3f}",
                *(f"{r.phases[name]:.2f}" if name in r.phases else "–" for name in names),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(results: Sequence[tuple[Spec, list[Record]]]) -> list[tuple[bool, str]]:
    """What must hold, and whether it does."""
    own = [(spec, records) for spec, records in results if spec.impl == "zeroweave"]
    alone = [(spec, records[0]) for spec, records in own if spec.world == 1 and not spec.warm]
    shared = next(records for spec, records in own if spec.world > 1 and not spec.warm)
    counts = {spec.layers: record.compiled for spec, record in alone}
    (_, fewest), (_, most) = alone[0], alone[-1]
    growth = most.first_step / fewest.first_step
    cpu = most.first_step_cpu / fewest.first_step_cpu
    templates = max(record.lowered for record in shared)
    compiled = sum(record.compiled for record in shared)
    misses = sum(record.compiled for spec, records in own if spec.warm for record in records)
    blocks = " / ".join(map(str, counts))
    return [
        (
            len(set(counts.values())) == 1 and max(counts.values()) <= MOST_COMPILATIONS,
            f"compilations at {blocks} blocks: {' / '.join(map(str, counts.values()))}, "
            f"equal and at most {MOST_COMPILATIONS}",
        ),
        (
            growth <= MOST_GROWTH,
            f"first step at {alone[-1][0].layers} blocks {growth:.3f} × that at {alone[0][0].layers}, "
            f"at most {MOST_GROWTH}; in seconds of the CPU {cpu:.3f} ×",
        ),
        (
            compiled == templates,
            f"{len(shared)} ranks compile {compiled} graphs together, one of them each of {templates}",
        ),
        (misses == 0, f"warm starts compile {misses} graphs, none"),
    ]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.compile_cost", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--layers", default="8,16,32", help="numbers of blocks, ascending")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--length", type=int, default=128)
    p.add_argument("--out", type=Path, default=None, help="folder for compile_cost.md")
    p.add_argument("--timeout", type=float, default=900.0, help="seconds for each measurement")
    p.add_argument("--check", action="store_true", help="exit with 1 where something does not hold")
    p.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    if a.worker is not None:
        print(json.dumps(asdict(measure(Spec(**json.loads(a.worker))))), flush=True)
        return 0
    layers = [int(part) for part in a.layers.split(",")]
    results = []
    with launch.temporary_folder() as folder:
        for spec in specs(layers, folder, a.batch, a.length):
            results.append((spec, run(spec, a.timeout)))
            first = max(record.first_step for record in results[-1][1])
            name = f"{spec.impl}, {spec.layers} blocks, {spec.world} rank(s), {'warm' if spec.warm else 'cold'}"
            print(f"{name}: first step {first:.2f} s", flush=True)
    found = verdicts(results)
    lines = [f"* {'holds' if holds else 'DOES NOT HOLD'}: {text}" for holds, text in found]
    where = f"Inductor on {os.cpu_count()} CPU cores, torch {torch.__version__}"
    title = f"demo Llama, batch {a.batch} × {a.length}, {where}"
    text = "\n".join([title, "", table(results), "", *lines])
    print(text)
    if a.out is not None:
        a.out.mkdir(parents=True, exist_ok=True)
        (a.out / "compile_cost.md").write_text(text + "\n")
    return int(a.check and not all(holds for holds, _ in found))


if __name__ == "__main__":
    raise SystemExit(main())

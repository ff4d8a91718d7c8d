"""What a window of several backwards costs in time, memory and bytes, beside DeepSpeed where it is installed.

    python -m benchmarks.coalesce --out out --check

An MLP of 8 Linear layers of 4096 × 4096 in bf16 trains with windows of 2, 4 and 8 backwards of 1024 rows, at stages 1,
2 and 3, in three ways: every backward as the stage has it ("baseline"), all but the last under `no_sync`, and all in
`coalesce_grad_reduction`. Each stage is one engine in processes of its own, which have a time limit. "plain" is the
same model under torch.compile alone, whole on each GPU, with nothing reduced: what no engine can be much faster than.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks import launch
from benchmarks.lm import overrides
from benchmarks.windows import ENGINES, MODES, Row, Spec

# DeepSpeed 0.19.8 on 2 × H200, the default MLP with 4 coalesced backwards: milliseconds of the backwards.
KNOWN_MS = {2: 13.1, 3: 59.4}
LIMITS = {2: 0.5, 3: 0.15}
"""Of `KNOWN_MS`, at most."""
KNOWN_RESIDENT = 256.0
"""MiB that its window of 2, 4 or 8 backwards held, at all stages; used where it is not beside, like the next."""
KNOWN_PEAK = {1: 1210.0, 2: 1210.0, 3: 656.0}
"""MiB that it took at most."""
SLACK = 1.0
"""MiB by which the allocator's rounding may differ."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.coalesce", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--width", type=int, default=4096)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--rows", type=int, default=1024, help="of the batch of each backward")
    p.add_argument("--backwards", default="2,4,8", help="in a window; several, separated by commas")
    p.add_argument("--stages", default="1,2,3")
    p.add_argument("--modes", default=",".join(MODES))
    p.add_argument("--engines", default=",".join(ENGINES))
    p.add_argument("--gpus", type=int, default=2, help="processes")
    p.add_argument("--warm", type=int, default=6, help="windows of a kind that are not counted")
    p.add_argument("--rounds", type=int, default=9, help="windows of a kind that are timed; the median counts")
    p.add_argument("--lower", choices=["inductor", "aot_eager", "none"], default="inductor", help="none: eager")
    p.add_argument("--blocks", action="store_true", help="each layer a block: a region and a bucket of its own")
    p.add_argument("--accumulate", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of local sums")
    p.add_argument("--graphs", action="store_true", help="zeroweave's windows as CUDA graphs; wants --warm 16")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="zeroweave's config, dotted key")
    p.add_argument("--timeout", type=float, default=50.0, help="seconds for each stage of zeroweave")
    p.add_argument("--peer-timeout", type=float, default=40.0, help="seconds for each stage of DeepSpeed")
    p.add_argument("--out", type=Path, default=None, help="folder for coalesce.md, coalesce.json and coalesce.log")
    p.add_argument("--check", action="store_true", help="exit code 1 unless the limits hold")
    return p


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def worst(ranks: Sequence[Row]) -> Row:
    """One row of all ranks: the slowest times, the most memory; counts are rank 0's, equal on all."""
    first = ranks[0]

    def most(name: str) -> Any:
        values = [getattr(row, name) for row in ranks]
        return None if None in values else max(values)

    figures = ("backwards_ms", "step_ms", "peak", "pool", "registered", "resident", "flushed")
    return replace(first, **{name: most(name) for name in figures})


def measure(
    spec: Spec, world: int, timeout: float, log: TextIO, cache: Path
) -> tuple[list[Row], dict[str, Any], str | None]:
    """The rows of one engine at one stage, what the ranks said of themselves, and why there are not all rows."""
    name, failure = f"{spec.engine} stage {spec.stage}", None
    about: dict[str, Any] = {}
    with launch.temporary_folder() as folder:
        try:
            about = launch.ranks("benchmarks.windows", name, asdict(spec), folder, world, timeout, log, cache)[0]
        except launch.LaunchError as error:
            failure = str(error)
        files = [folder / f"rank{rank}.rows" for rank in range(world)]
        texts = [file.read_text() if file.exists() else "" for file in files]
        lines = [text[: text.rfind("\n") + 1].splitlines() for text in texts]  # the last one may be half a row
    about.pop("rows", None)
    rows = [worst([Row(**json.loads(line)) for line in each]) for each in zip(*lines, strict=False)]
    if failure is not None:
        done = {(row.n, row.mode) for row in rows}
        why = reason_of(failure)
        rows += [
            Row(spec.engine, spec.stage, mode, n, missing=why)
            for n in spec.backwards
            for mode in spec.modes
            if (n, mode) not in done
        ]
    return rows, about, failure


def reason_of(failure: str) -> str:
    """What failed and the last thing that rank 0 said, in one line."""
    first, *tail = failure.split("--- rank 0:\n")
    said = tail[0].partition("\n--- rank")[0].strip().splitlines()[-1:] if tail else []
    return "; ".join([first.strip().partition(": ")[2], *said]).replace("|", "/")


COLUMNS = (
    "engine",
    "stage",
    "window",
    "backwards",
    "peak window MiB",
    "window resident MiB",
    "flushed resident MiB",
    "backwards ms",
    "× DeepSpeed",
    "step ms",
    "collectives",
    "MiB on the wire",
)


def table(rows: Sequence[Row]) -> str:
    def figure(value: float | None, digits: int = 1) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    peers = {(r.stage, r.mode, r.n): r.backwards_ms for r in rows if r.engine == "deepspeed"}

    def ratio(row: Row) -> str:
        peer = peers.get((row.stage, row.mode, row.n))
        if row.engine != "zeroweave" or not peer or not row.backwards_ms:
            return "–"
        return f"{row.backwards_ms / peer:.2f}"

    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in sorted(rows, key=lambda r: (r.n, r.stage, MODES.index(r.mode), ENGINES.index(r.engine))):
        cells = [row.engine, str(row.stage), row.mode, str(row.n)]
        if row.missing is not None:
            cells += [f"– ({row.missing})"] + [""] * (len(COLUMNS) - 5)
        else:
            beside = "" if row.pool is None else f" + {figure(row.pool)} of graphs"
            beside += f" + {figure(row.registered)} of registered buffers" if row.registered else ""
            cells += [figure(row.peak) + beside, figure(row.resident), figure(row.flushed)]
            cells += [figure(row.backwards_ms, 2), ratio(row), figure(row.step_ms, 2)]
            cells += [", ".join(f"{calls} {kind}" for kind, calls in sorted((row.collectives or {}).items()))]
            cells += [figure(row.wire)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(rows: Sequence[Row], known_size: bool) -> list[tuple[bool, str]]:
    """What must hold of coalesced windows: their time against the known one, their memory against DeepSpeed's.

    `known_size`: were those known taken with this model on as many GPUs?
    """
    by_key = {(r.engine, r.stage, r.mode, r.n): r for r in rows}
    found: list[tuple[bool, str]] = []
    for stage, known in KNOWN_MS.items() if known_size else ():
        row, limit = by_key.get(("zeroweave", stage, "coalesce", 4)), LIMITS[stage] * known
        measured = None if row is None else row.backwards_ms
        what = f"stage {stage}, 4 coalesced backwards"
        if measured is None:
            found.append((False, f"{what}: not measured"))
        else:
            found.append((measured <= limit, f"{what}: {measured:.2f} ms, at most {LIMITS[stage]} × {known} ms"))
    for row in rows:
        if row.engine != "zeroweave" or row.mode != "coalesce" or row.peak is None or row.resident is None:
            continue
        peer = by_key.get(("deepspeed", row.stage, row.mode, row.n))
        if peer is not None and peer.peak is not None and peer.resident is not None:
            resident, peak = peer.resident, peer.peak
        elif known_size:
            resident, peak = KNOWN_RESIDENT, KNOWN_PEAK[row.stage]
        else:
            continue
        limits = [("peak window", row.peak + row.registered + (row.pool or 0.0), peak)]
        if row.pool is None:  # graphs have all of that at any time: it has the peak's limit
            limits.insert(0, ("window resident", row.resident, resident))
        for what, mine, theirs in limits:
            text = f"stage {row.stage}, {row.n} coalesced backwards: {what} {mine:.1f} MiB, DeepSpeed's {theirs:.1f}"
            found.append((mine <= theirs + SLACK, text))
    return found


def title(a: argparse.Namespace, about: dict[str, Any]) -> str:
    compiled = "eager" if a.lower == "none" else f"compiled ({a.lower})"
    ours = ", ".join([f"zeroweave {compiled}{' as CUDA graphs' if a.graphs else ''}", *a.set])
    return (
        f"{a.layers} × Linear({a.width}, {a.width}){' in blocks' if a.blocks else ''}, bf16, {a.rows} rows, "
        f"local sums in {a.accumulate}, {a.gpus} × {about.get('device', '?')}, torch {about.get('torch', '?')}, "
        f"{ours}, DeepSpeed {about.get('version', 'not measured')}"
    )


def known_size(a: argparse.Namespace) -> bool:
    return torch.cuda.is_available() and (a.width, a.layers, a.rows, a.gpus) == (4096, 8, 1024, 2)


def write(out: Path, heading: str, rows: Sequence[Row], notes: Sequence[str], a: argparse.Namespace) -> None:
    checked = verdicts(rows, known_size(a))
    lines = [heading, "", table(rows), ""]
    lines += [f"* {note}" for note in notes]
    lines += [f"* {'holds' if holds else 'FAILS'}: {text}" for holds, text in checked]
    (out / "coalesce.md").write_text("\n".join(lines) + "\n")
    result = {
        "title": heading,
        "rows": [asdict(row) for row in rows],
        "notes": list(notes),
        "verdicts": [{"holds": holds, "text": text} for holds, text in checked],
        "arguments": {name: str(value) for name, value in vars(a).items()},
    }
    (out / "coalesce.json").write_text(json.dumps(result, indent=1) + "\n")


def plan(a: argparse.Namespace) -> tuple[list[Spec], list[str]]:
    """The engines to measure, zeroweave's first, and notes on what is not."""
    engines, modes = a.engines.split(","), tuple(a.modes.split(","))
    for what, given, known in (("--engines", engines, ENGINES), ("--modes", modes, MODES)):
        if unknown := [name for name in given if name not in known]:
            raise SystemExit(f"{what}: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    notes = []
    if "deepspeed" in engines and importlib.util.find_spec("deepspeed") is None:
        engines.remove("deepspeed")
        notes.append("DeepSpeed is not installed")
    sizes = (a.width, a.layers, a.rows, numbers(a.backwards), modes, a.warm, a.rounds, a.lower, a.blocks, a.accumulate)
    more = a.graphs, overrides(a.set)
    specs = [Spec(name, stage, *sizes, *more) for name in engines if name != "plain" for stage in numbers(a.stages)]
    if "plain" in engines:  # it has neither stages nor reductions
        specs.append(replace(Spec("plain", 0, *sizes), modes=("coalesce",)))
    return specs, notes


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    specs, notes = plan(a)
    rows: list[Row] = []
    about: dict[str, Any] = {}
    failed = False
    if a.out is not None:
        a.out.mkdir(parents=True, exist_ok=True)
    with launch.temporary_folder() as scratch, ((a.out or scratch) / "coalesce.log").open("w") as log:
        for spec in specs:
            name, begin = f"{spec.engine} stage {spec.stage}", time.monotonic()
            timeout = a.peer_timeout if spec.engine == "deepspeed" else a.timeout
            # one folder of compiler caches: the stages' graphs are much the same
            found, said, failure = measure(spec, a.gpus, timeout, log, scratch / "cache")
            rows += found
            about |= said
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
            if failure is not None:
                failed = failed or spec.engine != "deepspeed"
                notes.append(f"{name}: {reason_of(failure)}")
                print(failure, flush=True)
            if a.out is not None:  # after each one, so that a later failure costs nothing
                write(a.out, title(a, about), rows, notes, a)
    print(f"\n{title(a, about)}\n\n{table(rows)}\n")
    checked = verdicts(rows, known_size(a))
    for note in notes:
        print(f"note: {note}")
    for holds, text in checked:
        print(f"{'holds' if holds else 'FAILS'}: {text}")
    return int(failed or (a.check and not all(holds for holds, _ in checked)))


if __name__ == "__main__":
    raise SystemExit(main())

"""A profiler trace of one step, and what it says of the GPU's time: kernels, gaps, exposed communication."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]
GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work on the GPU; times in microseconds."""

    name: str
    stream: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing was computed for `us` microseconds, between `before` and `after`, `at` into the step."""

    us: float
    at: float
    before: str
    after: str
    communicating: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One step of one rank; times in milliseconds.

    `span`: first to last work on the GPU. `compute_busy`, `compute_idle`: of the computation in the span, see
    `analyse`. `communication`: union of all collectives' kernels. `exposed`: communication while nothing was computed.
    `other_busy`: what is neither computation nor a collective. `host`: Python's time for the step.
    """

    host: float
    span: float
    kernels: int
    compute_busy: float
    compute_idle: float
    communication: float
    exposed: float
    other_busy: float
    collectives: dict[str, tuple[int, float]]
    gaps: tuple[Gap, ...]
    top: tuple[tuple[str, int, float], ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """The figures, the collectives, the ten longest gaps and the ten most expensive kernels, to print."""
        head = (
            f"span {self.span:.2f} ms, host {self.host:.2f} ms, {self.kernels} kernels; computation busy "
            f"{self.compute_busy:.2f} ms, idle {self.compute_idle:.2f} ms; communication "
            f"{self.communication:.2f} ms, exposed {self.exposed:.2f} ms; other work {self.other_busy:.2f} ms"
        )
        lines = [head, "collectives:"]
        lines += [f"  {count:5d} × {total:9.2f} ms  {name}" for name, (count, total) in self.collectives.items()]
        lines += ["longest gaps of the computation (µs, at ms, of it communicating µs, before → after):"]
        lines += [
            f"  {gap.us:8.1f} at {gap.at / 1e3:8.2f} ({gap.communicating:8.1f})  {gap.before[:60]} → {gap.after[:60]}"
            for gap in self.gaps[:10]
        ]
        lines += ["most expensive kernels:"]
        lines += [f"  {count:5d} × {total:9.2f} ms  {name[:100]}" for name, count, total in self.top[:10]]
        return "\n".join(lines)


def is_collective(name: str) -> bool:
    """True if it is a kernel of NCCL."""
    return name.startswith("nccl")


def is_copy(name: str) -> bool:
    """Is it a copy by the driver? Gathers by copy engine are."""
    return name.startswith("Memcpy")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint intervals that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def overlap(intervals: Iterable[Interval], within: Interval) -> float:
    return sum(max(0.0, min(end, within[1]) - max(start, within[0])) for start, end in intervals)


def gpu_events(path: Path) -> list[dict[str, Any]]:
    """The GPU's work in a Chrome trace, as the profiler wrote it."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [e for e in json.loads(data)["traceEvents"] if e.get("cat") in GPU_WORK and "dur" in e]


def read(events: Iterable[dict[str, Any]]) -> list[Work]:
    """The GPU's work out of a Chrome trace's events, in order of its start."""
    work = [
        Work(
            e["name"],
            int(e.get("args", {}).get("stream", -1)),
            float(e["ts"]),
            float(e["ts"]) + float(e["dur"]),
        )
        for e in events
    ]
    return sorted(work, key=lambda w: w.start)


def analyse(work: list[Work], host_ms: float = 0.0) -> Profile | None:
    """None for a trace without work on a GPU.

    The computation is what the stream of most kernels does. A CUDA graph spreads it over streams of its own: where none
    has half of the kernels, it is all kernels but those of collectives.
    """
    if not work:
        return None
    begin, end = work[0].start, max(w.end for w in work)
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for w in work:
        totals[w.name][0] += 1
        totals[w.name][1] += (w.end - w.start) / 1e3
    rest = [w for w in work if not is_collective(w.name)]
    kernels = Counter(w.stream for w in rest if not is_copy(w.name))
    compute, most = kernels.most_common(1)[0] if kernels else (work[0].stream, 0)
    spread = 2 * most <= kernels.total()
    own = [w for w in rest if (not is_copy(w.name) if spread else w.stream == compute)]
    compute_busy = union((w.start, w.end) for w in own)
    communication = union((w.start, w.end) for w in work if is_collective(w.name))
    other = union((w.start, w.end) for w in rest if (is_copy(w.name) if spread else w.stream != compute))

    gaps = []
    last, before = begin, "start"
    for w in own:
        if w.start > last:
            gaps.append(Gap(w.start - last, last - begin, before, w.name, overlap(communication, (last, w.start))))
        if w.end > last:
            last, before = w.end, w.name
    if end > last:
        gaps.append(Gap(end - last, last - begin, before, "end", overlap(communication, (last, end))))
    ordered = sorted(((name, int(c), ms) for name, (c, ms) in totals.items()), key=lambda t: -t[2])
    return Profile(
        host=host_ms,
        span=(end - begin) / 1e3,
        kernels=len(work),
        compute_busy=length(compute_busy) / 1e3,
        compute_idle=(end - begin - length(compute_busy)) / 1e3,
        communication=length(communication) / 1e3,
        exposed=sum(gap.communicating for gap in gaps) / 1e3,
        other_busy=length(other) / 1e3,
        collectives={name: (count, ms) for name, count, ms in ordered if is_collective(name)},
        gaps=tuple(sorted(gaps, key=lambda gap: -gap.us)[:20]),
        top=tuple(t for t in ordered if not is_collective(t[0]))[:20],
    )


def capture(step: Callable[[], object], path: Path) -> None:
    """Runs `step` twice, first to warm the profiler, and writes the second as gzipped Chrome JSON."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(plain)),
    ) as profiler:
        for _ in range(2):
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiler.step()
    if plain != path:
        path.write_bytes(gzip.compress(plain.read_bytes(), compresslevel=6))
        plain.unlink()

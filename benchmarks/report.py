"""What a run says: a row for each implementation, ratios against FSDP2 at the same stage, what must hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cases import Case
from benchmarks.models import SHAPES, step_flops
from benchmarks.peers import fsdp2_of, peers_of
from benchmarks.worker import Record, Spec

KNOWN_FSDP2: Mapping[tuple[str, int, int, int, str], Mapping[str, tuple[str, float]]] = {
    ("qwen3-8b", 4096, 1, 4, "NVIDIA H200"): {"z3": ("fsdp2-ce-z3", 0.425), "z2": ("fsdp2-ce-z2", 0.4068)},
    ("qwen3-8b", 1024, 1, 4, "NVIDIA H200"): {"z3": ("fsdp2-ce-z3", 0.2537)},
    ("qwen3-8b", 4096, 1, 2, "NVIDIA H200"): {"z3": ("fsdp2-ce-z3", 0.4464), "z2": ("fsdp2-ce-z2", 0.4281)},
    ("qwen3-8b", 1024, 1, 2, "NVIDIA H200"): {"z3": ("fsdp2-ce-z3", 0.233), "z2": ("fsdp2-ce-z2", 0.192)},
    ("llama-1b", 2048, 2, 2, "NVIDIA H200"): {"z3": ("fsdp2-ce-z3", 0.0852)},
    ("llama-1b", 512, 1, 2, "NVIDIA H200"): {"z2": ("fsdp2-ce-z2", 0.0780)},
}
"""FSDP2's best known median step in seconds and its name, of our own models in one micro-step, by model, sequence,
micro-batch, number of GPUs and their name, and by stage. A run whose fastest FSDP2 is over 5 % slower says nothing."""
MAX_FSDP2_SLOWDOWN = 1.05
MIN_SPEED, MAX_FIRST_STEP_RATIO, MAX_LOSS_DIFFERENCE = 1.0, 2.0, 0.5e-3
ANY = Case()
"""What must hold of a comparison that has no name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation over all its ranks. Seconds and GiB are the worst rank's, losses the ranks' mean.

    `device_gib` is the most of the whole GPU that was in use after a step: it counts what the caching allocator does
    not know of.
    """

    impl: str
    world: int
    device: str
    torch_version: str
    step_s: float
    min_s: float
    max_s: float
    host_s: float
    tokens_s_gpu: float
    tflops_gpu: float
    peak_gib: float
    steady_gib: float
    peak_reserved_gib: float
    reserved: float
    """in the steps behind the warm-up, against what tensors took at most"""
    peak_setup_gib: float
    device_gib: float
    setup_s: float
    first_step_s: float
    losses: tuple[float, ...]
    details: dict[str, Any]
    note: str | None
    profile: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def row(spec: Spec, records: Sequence[Record]) -> Row:
    """A synchronous step follows its slowest rank: the median is taken per rank, then the largest one."""
    step = max(statistics.median(r.step_s) for r in records)
    tokens = spec.seq * spec.micro_batch * spec.gas
    first = records[0]
    return Row(
        impl=first.impl,
        world=len(records),
        device=first.device,
        torch_version=first.torch_version,
        step_s=step,
        min_s=max(min(r.step_s) for r in records),
        max_s=max(max(r.step_s) for r in records),
        host_s=max(r.host_s for r in records),
        tokens_s_gpu=tokens / step,
        tflops_gpu=step_flops(SHAPES[spec.model], tokens, spec.seq, spec.lora > 0) / step / 1e12,
        peak_gib=max(r.peak_gib for r in records),
        steady_gib=max(r.steady_gib for r in records),
        peak_reserved_gib=max(r.peak_reserved_gib for r in records),
        reserved=max(r.reserved_gib / r.steady_gib if r.steady_gib else 0.0 for r in records),
        peak_setup_gib=max(r.peak_setup_gib for r in records),
        device_gib=max(r.device_gib for r in records),
        setup_s=max(r.setup_s for r in records),
        first_step_s=max(r.first_step_s for r in records),
        losses=tuple(statistics.fmean(r.losses[i] for r in records) for i in range(spec.steps)),
        details=first.details,
        note=first.note,
        profile=first.profile,
    )


def peer_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """What a row is compared with: of its peers that were run, the fastest."""
    return fastest(peers_of(row.impl), rows)


def fastest(names: Sequence[str], rows: Sequence[Row]) -> Row | None:
    return min((r for r in rows if r.impl in names), key=lambda r: r.step_s, default=None)


def loss_difference(left: Row, right: Row) -> float:
    """The difference of the mean losses over all steps and ranks.

    Of single steps it says little: the order of sums in compiled kernels differs from run to run, and FSDP2
    against itself, resharding or not, was seen to differ by 8e-4 on single steps.
    """
    return abs(statistics.fmean(left.losses) - statistics.fmean(right.losses))


COLUMNS = (
    "implementation",
    "step s (min–max)",
    "peer ÷",
    "fastest peer",
    "host s",
    "tokens/s/GPU",
    "TFLOP/s/GPU",
    "peak GiB",
    "steady GiB",
    "× peer",
    "reserved GiB",
    "÷ steady",
    "GPU GiB",
    "× peer",
    "first step s",
    "× peer",
    "set-up s",
    "loss first, last",
)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table's cells, one list for each row, in the order of COLUMNS."""

    def ratio(r: Row, attribute: str) -> str:
        peer = peer_of(r, rows)
        below = getattr(peer, attribute) if peer is not None else 0.0
        return f"{getattr(r, attribute) / below:.3f}" if below else "–"

    def speed(r: Row) -> str:
        peer = peer_of(r, rows)
        return f"{peer.step_s / r.step_s:.3f}" if peer is not None else "–"

    return [
        [
            r.impl,
            f"{r.step_s:.4f} ({r.min_s:.4f}–{r.max_s:.4f})",
            speed(r),
            peer.impl if (peer := peer_of(r, rows)) is not None else "–",
            f"{r.host_s:.4f}",
            f"{r.tokens_s_gpu:.0f}",
            f"{r.tflops_gpu:.1f}",
            f"{r.peak_gib:.2f}",
            f"{r.steady_gib:.2f}",
            ratio(r, "steady_gib"),
            f"{r.peak_reserved_gib:.2f}",
            f"{r.reserved:.3f}",
            f"{r.device_gib:.2f}",
            ratio(r, "device_gib"),
            f"{r.first_step_s:.1f}",
            ratio(r, "first_step_s"),
            f"{r.setup_s:.1f}",
            f"{r.losses[0]:.4f}, {r.losses[-1]:.4f}",
        ]
        for r in rows
    ]


def title(spec: Spec, rows: Sequence[Row]) -> str:
    first = rows[0]
    words = [
        f"{spec.model} of transformers, {spec.hf}" if spec.hf else spec.model,
        f"{first.world} × {first.device}",
        f"sequence {spec.seq}",
        f"micro-batch {spec.micro_batch}",
        *([f"{spec.gas} micro-steps"] if spec.gas > 1 else []),
        *([f"low-rank layers of {spec.lora}"] if spec.lora else []),
        *([f"sharding groups of {spec.group_size}"] if spec.group_size else []),
        *(["plain loop"] if spec.loop == "plain" else []),
        f"{spec.steps} steps of which {spec.warm} are warm-up",
        *([f"{spec.in_a_row} in a row"] if spec.in_a_row > 1 else []),
        f"torch {first.torch_version}",
    ]
    return ", ".join(words)


def notes(rows: Sequence[Row]) -> list[str]:
    """What is not as an implementation's name has it, and which of its micro-steps were CUDA graphs."""
    found = []
    for r in rows:
        graphed, ungraphed = r.details.get("graphed_calls", 0), r.details.get("ungraphed_calls", {})
        if graphed or ungraphed:
            reasons = "".join(f"; {count} were not: {reason}" for reason, count in ungraphed.items())
            found.append(f"{r.impl}: {graphed} calls were launched as graphs{reasons}")
        if steps := r.details.get("graphed_steps", 0):
            found.append(f"{r.impl}: {steps} steps were launched as one graph each")
        if r.note is not None:
            found.append(f"{r.impl}: {r.note}")
    return found


def line(r: Row) -> str:
    """A row in short, to be printed as soon as it is there."""
    graphed = r.details.get("graphed_steps") or r.details.get("graphed_calls") or 0
    words = [
        f"{r.impl}: step {r.step_s:.4f} s ({r.min_s:.4f}–{r.max_s:.4f})",
        f"host {r.host_s:.4f}",
        f"steady {r.steady_gib:.2f} GiB",
        f"GPU {r.device_gib:.2f}",
        f"first step {r.first_step_s:.1f} s",
        f"losses {r.losses[0]:.4f} to {r.losses[-1]:.4f}, mean {statistics.fmean(r.losses):.5f}",
        *([f"graphs {graphed}"] if graphed else []),
        *([r.note] if r.note is not None else []),
    ]
    return ", ".join(words)


def summary(spec: Spec, rows: Sequence[Row]) -> list[str]:
    """Rows of the README's tables: each zeroweave of the run beside the fastest FSDP2 of its stage."""
    words = [
        f"transformers' {spec.model}" if spec.hf else spec.model,
        f"{spec.micro_batch} × {spec.seq:,} tokens" if spec.micro_batch > 1 else f"{spec.seq:,} tokens",
        *([f"{spec.gas} micro-steps"] if spec.gas > 1 else []),
        *([f"LoRA {spec.lora}"] if spec.lora else []),
        *([f"groups of {spec.group_size}"] if spec.group_size else []),
        *(["plain loop"] if spec.loop == "plain" else []),
    ]
    found = []
    for r in rows:
        if (peer := peer_of(r, rows)) is None:
            continue
        cells = [
            ", ".join([*words, r.impl.removeprefix("zeroweave-")]),
            f"{r.step_s:.4f}",
            f"{peer.step_s:.4f} `{peer.impl}`",
            f"{peer.step_s / r.step_s:.2f}",
            f"{r.device_gib:.2f}",
            f"{r.device_gib / peer.device_gib:.2f}" if peer.device_gib else "–",
        ]
        found.append("| " + " | ".join(cells) + " |")
    return found


def markdown(spec: Spec, rows: Sequence[Row], case: Case = ANY) -> str:
    lines = [title(spec, rows), "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(line) + " |" for line in cells(rows)]
    lines += ["", *(f"* {text}" for text in notes(rows))]
    lines += [f"* {'holds' if ok else 'FAILS'}: {text}" for ok, text in verdicts(spec, rows, case)]
    return "\n".join(lines) + "\n"


def plain(rows: Sequence[Row]) -> str:
    table = [list(COLUMNS), *cells(rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in table)


def verdicts(spec: Spec, rows: Sequence[Row], case: Case = ANY) -> list[tuple[bool, str]]:
    """What must hold of each pair that was run, with the figures; nothing for a pair that was not."""
    by_name = {r.impl: r for r in rows}
    found: list[tuple[bool, str]] = []
    workload = (spec.model, spec.seq, spec.micro_batch, rows[0].world, rows[0].device)
    known = {} if spec.hf or spec.gas > 1 or spec.lora or spec.group_size else KNOWN_FSDP2.get(workload, {})
    for stage, (name, best) in known.items():
        if (peer := fastest(fsdp2_of(stage), rows)) is not None:
            slowdown = peer.step_s / best
            text = f"{peer.impl}, the fastest FSDP2 here, takes {slowdown:.3f} of the known {best} s of {name}"
            found.append((slowdown <= MAX_FSDP2_SLOWDOWN, text))
    for graphed in rows:
        eager = by_name.get(graphed.impl.replace("graphs-", ""))
        if graphed.impl.startswith("fsdp2-") and eager is not None and eager is not graphed:
            found.append(alike(graphed, eager))
    for mine in rows:
        peer = peer_of(mine, rows)
        if peer is not None:
            found += compared(mine, peer, case)
        if (other := by_name.get(case.no_slower.get(mine.impl, ""))) is not None:
            found.append(as_fast(mine, other, MIN_SPEED))
        found += moved(mine)
    return found


def moved(row: Row) -> list[tuple[bool, str]]:
    """Did the last step move what its schedule says? Nothing of an implementation that has none."""
    scheduled, traffic = row.details.get("scheduled") or {}, row.details.get("traffic", {})
    found = []
    for kind, nbytes in scheduled.items():
        did = traffic.get(kind, {}).get("payload", 0)
        text = f"{row.impl}: {kind} of {did / 2**30:.2f} GiB in the last step, {nbytes / 2**30:.2f} by its schedule"
        found.append((did == nbytes, text))
    return found


def as_fast(mine: Row, other: Row, least: float) -> tuple[bool, str]:
    """Is the other's step at least so many times this one's?"""
    speed = other.step_s / mine.step_s
    return speed >= least, f"{other.impl} / {mine.impl}: median step {speed:.3f}, at least {least}"


def compared(mine: Row, peer: Row, case: Case) -> list[tuple[bool, str]]:
    """What must hold of an implementation beside its peer."""
    found = [as_fast(mine, peer, case.speed.get(mine.impl, MIN_SPEED))]
    if mine.impl in case.host:
        most = case.host[mine.impl]
        found.append((mine.host_s <= most, f"{mine.impl}: host {mine.host_s:.4f} s of a step, at most {most}"))
    pair = f"{mine.impl} against {peer.impl}"
    limits = [] if case.cached else [("first_step_s", "first step", MAX_FIRST_STEP_RATIO)]
    if peer.steady_gib:
        limits += [("steady_gib", "steady memory", case.memory), ("device_gib", "memory of the GPU", case.memory)]
    for attribute, label, limit in limits:
        ratio = getattr(mine, attribute) / getattr(peer, attribute)
        found.append((ratio <= limit, f"{pair}: {label} {ratio:.3f} ×, at most {limit}"))
    return [*found, alike(mine, peer)]


def alike(mine: Row, other: Row) -> tuple[bool, str]:
    """True if both trained alike, by their losses."""
    difference = loss_difference(mine, other)
    text = f"mean losses differ by {difference:.1e}, three decimals allow {MAX_LOSS_DIFFERENCE}"
    return difference <= MAX_LOSS_DIFFERENCE, f"{mine.impl} against {other.impl}: {text}"

"""What a run says: a row for each implementation, ratios against FSDP2 at the same stage, what must hold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.models import SHAPES, step_flops
from benchmarks.worker import Record, Spec

# FSDP2's best known median step in seconds on 4 × H200. A run in which it is over 5 % slower says nothing.
KNOWN_FSDP2 = {("qwen3-8b", 4096, 1, 4): {"fsdp2-z3": 0.450, "fsdp2-z2": 0.426}}
MAX_FSDP2_SLOWDOWN = 1.05
MAX_STEP_RATIO, MAX_PEAK_RATIO, MAX_FIRST_STEP_RATIO, MAX_LOSS_DIFFERENCE = 1.0, 1.05, 2.0, 0.5e-3


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation over all its ranks. Seconds and GiB are the worst rank's, losses the ranks' mean.

    `device_gib` is the whole GPU's use at the end, and counts what the caching allocator does not know of.
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
    peak_reserved_gib: float
    peak_setup_gib: float
    device_gib: float
    setup_s: float
    first_step_s: float
    losses: tuple[float, ...]
    details: dict[str, Any]
    profile: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def row(spec: Spec, records: Sequence[Record]) -> Row:
    """A synchronous step follows its slowest rank: the median is taken per rank, then the largest one."""
    step = max(statistics.median(r.step_s) for r in records)
    tokens = spec.seq * spec.micro_batch
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
        tflops_gpu=step_flops(SHAPES[spec.model], tokens, spec.seq) / step / 1e12,
        peak_gib=max(r.peak_gib for r in records),
        peak_reserved_gib=max(r.peak_reserved_gib for r in records),
        peak_setup_gib=max(r.peak_setup_gib for r in records),
        device_gib=max(r.device_gib for r in records),
        setup_s=max(r.setup_s for r in records),
        first_step_s=max(r.first_step_s for r in records),
        losses=tuple(statistics.fmean(r.losses[i] for r in records) for i in range(spec.steps)),
        details=first.details,
        profile=first.profile,
    )


def peer_of(impl: str) -> str | None:
    """The implementation that a ratio compares with."""
    return {"zeroweave-z3": "fsdp2-z3", "zeroweave-z2": "fsdp2-z2", "zeroweave-z1": "fsdp2-z2"}.get(impl)


def loss_difference(left: Row, right: Row) -> float:
    """The difference of the mean losses over all steps and ranks.

    Of single steps it says little: the order of sums in compiled kernels differs from run to run, and FSDP2
    against itself, resharding or not, was seen to differ by 8e-4 on single steps.
    """
    return abs(statistics.fmean(left.losses) - statistics.fmean(right.losses))


COLUMNS = (
    "implementation",
    "step s (min–max)",
    "× peer",
    "host s",
    "tokens/s/GPU",
    "TFLOP/s/GPU",
    "peak GiB",
    "× peer",
    "GPU GiB",
    "first step s",
    "× peer",
    "set-up s",
    "loss first, last",
)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table's cells, one list for each row, in the order of COLUMNS."""
    by_name = {r.impl: r for r in rows}

    def ratio(r: Row, attribute: str) -> str:
        peer = by_name.get(peer_of(r.impl) or "")
        below = getattr(peer, attribute) if peer is not None else 0.0
        return f"{getattr(r, attribute) / below:.3f}" if below else "–"

    return [
        [
            r.impl,
            f"{r.step_s:.4f} ({r.min_s:.4f}–{r.max_s:.4f})",
            ratio(r, "step_s"),
            f"{r.host_s:.3f}",
            f"{r.tokens_s_gpu:.0f}",
            f"{r.tflops_gpu:.1f}",
            f"{r.peak_gib:.2f}",
            ratio(r, "peak_gib"),
            f"{r.device_gib:.2f}",
            f"{r.first_step_s:.1f}",
            ratio(r, "first_step_s"),
            f"{r.setup_s:.1f}",
            f"{r.losses[0]:.4f}, {r.losses[-1]:.4f}",
        ]
        for r in rows
    ]


def title(spec: Spec, rows: Sequence[Row]) -> str:
    first = rows[0]
    return (
        f"{spec.model}, {first.world} × {first.device}, sequence {spec.seq}, micro-batch {spec.micro_batch}, "
        f"{spec.steps} steps of which {spec.warm} are warm-up, torch {first.torch_version}"
    )


def markdown(spec: Spec, rows: Sequence[Row]) -> str:
    lines = [title(spec, rows), "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(line) + " |" for line in cells(rows)]
    lines += [""] + [f"* {'holds' if ok else 'FAILS'}: {text}" for ok, text in verdicts(spec, rows)]
    return "\n".join(lines) + "\n"


def plain(rows: Sequence[Row]) -> str:
    table = [list(COLUMNS), *cells(rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in table)


def verdicts(spec: Spec, rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """What must hold of each pair that was run, with the figures; nothing for a pair that was not."""
    by_name = {r.impl: r for r in rows}
    found: list[tuple[bool, str]] = []
    known = KNOWN_FSDP2.get((spec.model, spec.seq, spec.micro_batch, rows[0].world), {})
    for name, best in known.items():
        if name in by_name and "H200" in by_name[name].device:
            slowdown = by_name[name].step_s / best
            found.append((slowdown <= MAX_FSDP2_SLOWDOWN, f"{name} takes {slowdown:.3f} of its known {best} s"))
    for mine in rows:
        peer = by_name.get(peer_of(mine.impl) or "")
        if peer is None:
            continue
        pair = f"{mine.impl} against {peer.impl}"
        limits = [
            ("step_s", "median step", MAX_STEP_RATIO),
            ("first_step_s", "first step", MAX_FIRST_STEP_RATIO),
        ]
        if peer.peak_gib:
            limits.append(("peak_gib", "peak memory", MAX_PEAK_RATIO))
        for attribute, label, limit in limits:
            ratio = getattr(mine, attribute) / getattr(peer, attribute)
            found.append((ratio <= limit, f"{pair}: {label} {ratio:.3f} ×, at most {limit}"))
        difference = loss_difference(mine, peer)
        text = f"{pair}: mean losses differ by {difference:.1e}, three decimals allow {MAX_LOSS_DIFFERENCE}"
        found.append((difference <= MAX_LOSS_DIFFERENCE, text))
    return found

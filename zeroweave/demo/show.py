"""What the demo found, its checks, and how it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

from zeroweave.comm.ledger import Traffic
from zeroweave.demo.measure import Count, State
from zeroweave.engine.stats import Memory, Stats
from zeroweave.report.tables import chart, size, table
from zeroweave.schedule import Schedule

SOURCES = ("measured", "schedule", "independent")
DIFFERENCE = 1e-5
LAST = 10
"""Steps whose mean is the final loss: one batch is noisy."""
SHOWN = "layers.1"
"""The block whose schedule is printed: one with neighbours on both sides."""


@dataclass(frozen=True)
class Profile:
    """Seconds of a step with communication and without; what one rank's step would have sent, and was to by schedule.

    In a short run the schedule changes after the others' figures: steps are timed here as well.
    """

    ordinary: float
    alone: float
    sent: dict[str, Traffic]
    scheduled: dict[str, Count]

    def figures(self) -> dict[str, Any]:
        return {
            "seconds_step": round(self.ordinary, 5),
            "seconds_step_without_communication": round(self.alone, 5),
            "would_send": {kind: asdict(traffic) for kind, traffic in self.sent.items()},
        }

    def report(self) -> Iterator[str]:
        share = f"{self.alone / self.ordinary:.0%}"
        yield f"a step takes {1000 * self.ordinary:.1f} ms, without communication {1000 * self.alone:.1f} ms ({share})"
        yield "what the step without communication would have sent, on each rank"
        rows = [(kind, t.calls, size(t.payload), size(t.wire)) for kind, t in self.sent.items()]
        yield from table(("", "calls", "payload", "wire"), rows)


@dataclass(frozen=True)
class Result:
    """The figures of one demo run; lists have one entry for each rank."""

    stage: int
    way: str
    world: int
    losses: list[float]
    seconds_training: float
    steps_before: int
    seconds: float
    stages_bit_equal: bool
    difference: float
    counts: list[dict[str, dict[str, Count]]]
    replayed: bool
    memory: list[tuple[Memory, State, State]]
    """measured; by the layout and the schedule; and the most that the layout allows"""
    schedule: Schedule
    stats: Stats
    profile: Profile | None
    parameters: int

    @property
    def loss_last(self) -> float:
        return fmean(self.losses[-LAST:])

    def problems(self) -> Iterator[str]:
        """Every check that failed, in words; none for a good run. The loss is reported, not checked."""
        if not self.stages_bit_equal:
            yield "stages 1, 2 and 3 did not give bit-equal gradients and parameters"
        if not self.difference <= DIFFERENCE:
            worst = f"{self.difference:.1e} of its norm, more than {DIFFERENCE:.0e}"
            yield f"a gradient differs from DDP's by {worst}"
        if not self.replayed:
            yield "the executed instructions are not the schedule's"
        for rank, counts in enumerate(self.counts):
            expected = counts["schedule"] if self.world > 1 else {}
            for source in ("measured", "independent"):
                if counts[source] != expected:
                    yield f"rank {rank}: collectives {source}: {counts[source]}, in the schedule: {expected}"
        if self.profile is not None:
            planned = {kind: Count(t.calls, t.payload) for kind, t in self.profile.sent.items()}
            expected = self.profile.scheduled if self.world > 1 else {}
            if planned != expected:
                yield f"a step without communication would have sent {planned}, in the schedule: {expected}"
        for rank, (measured, formula, bound) in enumerate(self.memory):
            for name, delta in formula.minus(measured).items():
                yield f"rank {rank}: {name} measured {-delta:+d} bytes off the formula"
            for name, delta in formula.minus(bound).items():
                if delta > 0:
                    yield f"rank {rank}: {name} of the schedule {delta:+d} bytes above what the layout allows"

    def figures(self) -> dict[str, Any]:
        """The JSON object; per-rank figures are rank 0's, payloads in bytes."""
        measured, formula, bound = self.memory[0]
        names = [field.name for field in fields(State)]
        return {
            "loss_first": round(self.losses[0], 4),
            "loss_last": round(self.loss_last, 4),
            "stages_bit_equal": self.stages_bit_equal,
            "grad_rel_diff_vs_ddp": self.difference,
            "steps": len(self.losses),
            "seconds": round(self.seconds, 2),
            "seconds_training": round(self.seconds_training, 2),
            "stage": self.stage,
            "ranks": self.world,
            "lower": self.way,
            "parameters": self.parameters,
            "replayed": self.replayed,
            "collectives": {s: {k: c.calls for k, c in self.counts[0][s].items()} for s in SOURCES},
            "bytes": {s: {k: c.payload for k, c in self.counts[0][s].items()} for s in SOURCES},
            "memory": {
                "measured": {name: getattr(measured, name) for name in names},
                "formula": asdict(formula),
                "bound": asdict(bound),
            },
            "compiled_calls": self.stats.compiled_calls,
            "eager_calls": self.stats.eager_calls,
            "on_demand_unshards": self.stats.on_demand_unshards,
            "profile": self.profile.figures() if self.profile else None,
            "ok": not any(self.problems()),
        }


def report(result: Result) -> Iterator[str]:
    """The report's lines."""
    steps, seconds = len(result.losses), result.seconds_training
    milliseconds = 1000 * seconds / (steps - result.steps_before)
    yield ""
    yield (
        f"loss {result.losses[0]:.2f} -> {result.loss_last:.2f} in {steps} steps, {seconds:.1f} s "
        f"({milliseconds:.0f} ms a step), {result.parameters:,} parameters"
    )
    yield from chart(result.losses)
    yield ""
    count = len(result.schedule.instructions)
    yield f"schedule of {SHOWN} (the lines that touch it; the whole step has {count} instructions)"
    yield from (f"  {line}" for line in result.schedule.of(SHOWN))
    yield ""
    yield "collectives of one step and rank: the engine's ledger, the schedule, PyTorch's profiler"
    yield from table(("", *SOURCES), list(count_rows(result)))
    yield ""
    if result.profile is not None:
        yield from result.profile.report()
        yield ""
    yield "model state of rank 0, peak bytes: measured, by layout and schedule, and the layout's limit"
    names = [field.name for field in fields(State)]
    rows = [(name, *(size(getattr(state, name)) for state in result.memory[0])) for name in names]
    yield from table(("", "measured", "formula", "bound"), rows)
    yield ""
    yield f"stages 1, 2 and 3, same seed: {'equal in every bit' if result.stages_bit_equal else 'NOT equal'}"
    yield f"gradients of the first step against DDP: differ by at most {result.difference:.1e} of their norm"
    stats = result.stats
    calls = f"{stats.compiled_calls} compiled, {stats.eager_calls} eager"
    yield f"calls: {calls}; gathers on demand: {stats.on_demand_unshards}"
    yield ""


def count_rows(result: Result) -> Iterator[tuple[object, ...]]:
    """One row of calls and one of bytes for each kind of collective."""
    counts = result.counts[0]
    for kind in dict.fromkeys(kind for source in SOURCES for kind in counts[source]):
        found = [counts[source].get(kind, Count()) for source in SOURCES]
        yield (kind, *(count.calls for count in found))
        yield ("  bytes", *(size(count.payload) for count in found))

"""Train a model of the zoo under the engine and beside it as the reference does, and compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zeroweave as zw
from tests.support.models import entry as find
from tests.support.reference import (
    CHECKED,
    SEED,
    TRAINED,
    Run,
    build,
    draw,
    judge,
    judge_numbers,
    set_lr,
    sgd,
    train_reference,
    worst,
)
from tests.support.zoo import Entry


@dataclass(frozen=True)
class Case:
    model: str
    stage: int
    mode: str
    gas: int
    world: int = 2
    group_size: int | None = None
    states: str = "all"

    def __str__(self) -> str:
        groups = f"-groups{self.group_size}{self.states}" if self.group_size else ""
        return f"{self.model}-z{self.stage}-{self.mode}-gas{self.gas}-world{self.world}{groups}"

    def config(self) -> dict[str, Any]:
        compile_ = {"enabled": False} if self.mode == "eager" else {"lower": self.mode}
        more = find(self.model).config
        return {
            "stage": self.stage,
            "gradient_accumulation_steps": self.gas,
            "deadline_seconds": 200.0,
            "sharding": {"group_size": self.group_size, "states": self.states},
            **more,
            "compile": {**compile_, **more.get("compile", {})},
        }


@dataclass(frozen=True)
class Report:
    """One rank's figures; differences are (part of the allowed error, name)."""

    losses: tuple[float, str]
    gradients: list[tuple[float, str]]
    parameters: tuple[float, str]
    saved: tuple[float, str]
    moved: bool
    digest: str
    compiled_calls: int
    written: int
    eager_regions: dict[str, str]
    scheduled: bool
    on_demand: int
    departures: int
    executed: str
    scheduled_text: str


def digest(runs: Iterable[dict[str, Tensor | None]]) -> str:
    """A hash of the bits of tensors by name."""
    total = hashlib.sha256()
    for tensors in runs:
        for name in sorted(tensors):
            value = tensors[name]
            total.update(name.encode())
            if value is not None:
                total.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def train_engine(
    case: Case, entry: Entry, initialize: Callable[..., Any]
) -> tuple[Run, dict[str, Any], dict[str, Tensor]]:
    """Train under the engine; returns the run, the path it took, and rank 0's state dict ({} elsewhere)."""
    rank = dist.get_rank()
    model = build(entry, SEED + rank)  # rank 0's values must reach the others
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    run = Run([], [], {})
    path: dict[str, Any] = {}
    with initialize(model, optimizer, case.config()) as engine:
        adopted = None
        for step in range(CHECKED + TRAINED):
            if adopted is None and engine.schedule is not None:
                adopted = engine.stats
            set_lr(engine.optimizer, step, entry.lr)
            for index in range(step * case.gas, (step + 1) * case.gas):
                draw(rank, index)
                assert engine.is_gradient_accumulation_boundary() == (index == (step + 1) * case.gas - 1)
                run.losses.append(float(entry.micro(engine, engine.module, entry.batch(rank, index), engine.backward)))
                if step < CHECKED and index == (step + 1) * case.gas - 1:
                    run.gradients.append(engine.gradients())
                engine.step()
        stats = engine.stats
        path |= {"compiled_calls": stats.compiled_calls, "eager_regions": dict(stats.eager_regions)}
        path |= {"written": stats.written_gradients}
        path |= {"scheduled": adopted is not None}
        path |= {"on_demand": stats.on_demand_unshards - (adopted.on_demand_unshards if adopted else 0)}
        path |= {"departures": stats.departures - (adopted.departures if adopted else 0)}
        path |= {"executed": "\n".join(map(repr, engine.executed))}
        path |= {"scheduled_text": "\n".join(map(repr, engine.schedule.instructions)) if engine.schedule else ""}
        saved = engine.state_dict()
        with engine.full_parameters():
            run.parameters.update({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    return run, path, saved


def run_case(case: Case, initialize: Callable[..., Any] = zw.initialize) -> Report:
    """The job of a parity test; collective."""
    entry = find(case.model)
    expected = train_reference(entry, case.gas)
    got, path, saved = train_engine(case, entry, initialize)
    start = {name: p.detach() for name, p in build(entry).named_parameters()}
    return Report(
        losses=judge_numbers(got.losses, expected.losses),
        gradients=[judge(a, b) for a, b in zip(got.gradients, expected.gradients, strict=True)],
        parameters=judge(got.parameters, expected.parameters),
        saved=judge(saved, expected.parameters) if dist.get_rank() == 0 else (float(bool(saved)), "not empty"),
        moved=worst(expected.parameters.plain, start)[0] > 1e-3,
        digest=digest([*got.gradients, got.parameters]),
        **path,
    )


def check(case: Case, reports: list[Report]) -> None:
    """Assert the bounds and that the path under test was taken, on every rank."""
    entry = find(case.model)
    for rank, report in enumerate(reports):
        where = f"{case}, rank {rank}"
        assert report.moved, f"{where}: the reference did not train"
        for step, difference in enumerate(report.gradients):
            assert difference[0] <= 1, f"{where}: gradient of step {step} differs: {difference}"
        assert report.parameters[0] <= 1, f"{where}: parameters differ: {report.parameters}"
        assert report.saved[0] <= 1, f"{where}: state_dict differs: {report.saved}"
        assert report.losses[0] <= 1, f"{where}: losses differ: {report.losses}"
        check_path(case, entry, report, where)
    assert len({report.digest for report in reports}) == 1, f"{case}: ranks hold different numbers"


def check_path(case: Case, entry: Entry, report: Report, where: str) -> None:
    compiled = case.mode != "eager"
    assert (report.compiled_calls > 0) == (compiled and entry.compiles), (
        f"{where}: {report.compiled_calls} compiled calls"
    )
    if not compiled:
        assert not report.eager_regions, f"{where}: {report.eager_regions}"
        assert report.written == 0, f"{where}: {report.written} gradients were not copied"
    else:
        assert set(report.eager_regions) == entry.eager_regions, f"{where}: {report.eager_regions}"
    if compiled and entry.name in ("mlp", "decoder", "hf_llama"):
        assert report.written > 0, f"{where}: all gradients were copied"
    if entry.steady:
        assert report.scheduled, f"{where}: no schedule was adopted"
        assert report.on_demand == 0, f"{where}: {report.on_demand} unshards on demand after the record was adopted"
        assert report.departures == 0, f"{where}: {report.departures} departures from the schedule"
        assert report.executed == report.scheduled_text, (
            f"{where}: executed\n{report.executed}\nnot\n{report.scheduled_text}"
        )

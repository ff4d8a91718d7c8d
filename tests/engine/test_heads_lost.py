"""What is gathered anew at the end of a step, and lost between two: one window gathers it, and graphs go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.marks import daily
from tests.support.replays import WIDTH, Case, batch_of, micro_step, started

STEPS, FIRST, EVERY = 48, 20, 4
"""How long is trained, and when something is done between two steps."""


def set_one(engine: Any, case: Case, step: int, folder: Path) -> None:
    engine.set_full("blocks.0.line.weight", torch.full((WIDTH, WIDTH), 0.01 * step))


def write(engine: Any, case: Case, step: int, folder: Path) -> None:
    with engine.full_parameters() as parameters, torch.no_grad():
        parameters["blocks.0.line.bias"].add_(0.01)


def load_values(engine: Any, case: Case, step: int, folder: Path) -> None:
    engine.load_state_dict({name: value * 0.9 for name, value in engine.state_dict().items()})


def load_checkpoint(engine: Any, case: Case, step: int, folder: Path) -> None:
    engine.save(folder / str(step))
    micro_step(engine, case, batch_of(case, 1000 + step, 0, engine.rank))
    engine.load(folder / str(step))


def profile(engine: Any, case: Case, step: int, folder: Path) -> None:
    with engine.profiling():
        micro_step(engine, case, batch_of(case, 1000 + step, 0, engine.rank))


def longer(engine: Any, case: Case, step: int, folder: Path) -> None:
    """A window of another kind, in which nothing stays."""
    engine.set_gradient_accumulation_boundary(False)
    micro_step(engine, case, batch_of(case, 1000 + step, 0, engine.rank))
    engine.set_gradient_accumulation_boundary(None)
    micro_step(engine, case, batch_of(case, 1000 + step, 1, engine.rank))


def fail(engine: Any, case: Case, step: int, folder: Path) -> None:
    """An evaluation has no memory, and its program goes on."""

    def refuse(*_: Any) -> None:
        raise MemoryError("no memory is left")

    hook = engine.module.blocks[1].register_forward_pre_hook(refuse)
    with pytest.raises(MemoryError), torch.no_grad():
        engine(*batch_of(case, step, 0, engine.rank))
    hook.remove()
    engine.zero_grad()
    assert engine._runtime.flats.now == 0


Cause = Callable[[Any, Case, int, Path], None]
CAUSES: list[Cause] = [set_one, write, load_values, load_checkpoint, profile, longer, fail]


def trained(case: Case, graphs: bool, cause: Cause, folder: Path) -> tuple[dict[str, Any], Any]:
    losses = []
    with started(case, graphs) as engine:
        torch.manual_seed(7 + engine.rank)
        for step in range(STEPS):
            losses.append(float(micro_step(engine, case, batch_of(case, step, 0, engine.rank))))
            if step >= FIRST and step % EVERY == 0:
                cause(engine, case, step, folder / str(graphs))
        found = {"losses": losses} | {name: value.tolist() for name, value in engine.state_dict().items()}
        stats = engine.stats
        assert bool(engine.schedule.regathers) == case.heads
    return found, stats


def least(cause: Cause) -> int:
    """So many steps are replayed: all behind the first trial but one each time, or two where memory goes as well.

    Windows of another kind are not foreseen: some depart, and are recorded anew.
    """
    return {fail: 25, longer: 20}.get(cause, 32)


DAILY = [(3, "train_step", fail)]
ALL = [(stage, loop, cause) for stage in (1, 2, 3) for loop in ("train_step", "plain") for cause in CAUSES]


@daily(("stage", "loop", "cause"), DAILY, [row for row in ALL if row not in DAILY])
def test_graphs_go_on_behind_one_window_without(stage: int, loop: str, cause: Cause, tmp_path: Path) -> None:
    case = Case(stage, loop=loop, dropout=0.1)
    found, stats = trained(Case(**{**vars(case), "heads": True}), True, cause, tmp_path)
    plain, _ = trained(case, False, cause, tmp_path)
    assert found == plain
    times = len(range(FIRST, STEPS, EVERY))
    assert stats.replayed_steps >= least(cause), stats.uncaptured_steps
    if cause in (set_one, write, load_values, profile):
        assert stats.captured_windows == 1
    assert stats.uncaptured_steps.get("what stays gathered has to be gathered first", 0) <= times + 1

"""Buckets that are gathered anew at the end of a step: the same numbers, whatever a program does, on all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_heads_lost import CAUSES, Cause, least, trained
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.placed import placed
from tests.support.replays import SAME, Case, batch_of, compared, micro_step, start, started, train

GRAPHED = [
    *(
        Case(stage, gas, loop, dropout=0.1)
        for stage, gas, loop in ((3, 1, "plain"), (2, 3, "train_step"), (1, 2, "plain"))
    ),
    Case(2, 2, "clipped", decay=True, overflow=20),
    Case(3, 1, "train_step", overflow=20, clipping=0.1, decay=True),
    *(Case(stage, 3, "busy", steps=64, dropout=0.1) for stage in (2, 3)),
    *(Case(stage, 4, loop, dropout=0.1) for loop in ("coalesced", "no_sync") for stage in (1, 2, 3)),
    Case(3, 1, frozen=True),
]
UNEVEN = [Case(stage, gas, "uneven", steps=40, dropout=0.1) for stage in (1, 2, 3) for gas in (1, 2)]


def with_heads(case: Case) -> tuple[list[str], dict[str, Any]]:
    """What differs between a program that gathers heads anew and one that does not, neither with graphs."""
    found, plain = train(replace(case, heads=True), graphs=False), train(case, graphs=False)
    return [what for what in SAME if repr(found[what]) != repr(plain[what])], found


@daily("case", GRAPHED[4:5], [*GRAPHED[:4], *GRAPHED[5:]], ids=str)
def test_they_are_exact(pools: Pools, case: Case) -> None:
    for differs, found in pools(2).run(with_heads, case):
        assert not differs and found["regathers"] == 2, (differs, found)


@daily("case", [], GRAPHED, ids=str)
def test_with_graphs_they_are_exact(pools: Pools, case: Case) -> None:
    least = 1 if case.loop == "coalesced" else case.gas
    for differs, graphed in pools(2).run(compared, replace(case, heads=True)):
        assert not differs and graphed["captured"] and graphed["replayed"] >= 8 * least, (differs, graphed)
        assert graphed["regathers"] == 2


@daily("case", [], UNEVEN, ids=str)
def test_what_one_rank_alone_does_ends_no_step(pools: Pools, case: Case) -> None:
    """One departs from its schedule, and still gathers what the others gather."""
    for differs, found in pools(2).run(with_heads, case):
        assert not differs and found["regathers"] == 2, (differs, found)
    for differs, graphed in pools(2).run(compared, replace(case, heads=True)):
        assert not differs and graphed["replayed"] >= 8 * case.gas, (differs, graphed)


@daily("stage", [3], [1, 2])
def test_a_capture_that_fails_changes_nothing(pools: Pools, stage: int) -> None:
    for differs, graphed in pools(2).run(compared, Case(stage, reads=True, dropout=0.1, steps=14, heads=True)):
        assert not differs and not graphed["captured"] and graphed["regathers"] == 2, (differs, graphed)


def lost(case: Case, cause: Cause, folder: Path) -> tuple[bool, Any]:
    """Is all the same with graphs and without, and how many steps were replayed?"""
    (found, stats), (plain, _) = (
        trained(replace(case, heads=graphs), graphs, cause, folder) for graphs in (True, False)
    )
    return repr(found) == repr(plain), stats


@daily(
    ("stage", "cause", "places"),
    [],
    [(stage, cause, places) for stage in (2, 3) for cause in CAUSES for places in (False, True)],
)
def test_graphs_go_on_behind_one_window_without(
    pools: Pools, stage: int, cause: Cause, places: bool, tmp_path: Path
) -> None:
    run = partial(placed, lost) if places else lost
    for found in pools(2).run(run, Case(stage, dropout=0.1), cause, tmp_path):
        same, stats = found[0] if places else found
        assert same and stats.replayed_steps >= least(cause), stats.uncaptured_steps


def in_places(case: Case, graphs: bool) -> tuple[list[str], dict[str, Any], int]:
    """As `with_heads`, or `compared`, where copy engines gather; and the gathers in places."""
    (differs, found), slabs = placed(compared if graphs else with_heads, replace(case, heads=True))
    return differs, found, slabs.gathers


@daily(("case", "graphs"), [(GRAPHED[0], True)], [(case, graphs) for case in GRAPHED[1:] for graphs in (False, True)])
def test_in_places_they_are_exact(pools: Pools, case: Case, graphs: bool) -> None:
    least = 1 if case.loop == "coalesced" else case.gas
    for differs, found, gathers in pools(2).run(in_places, case, graphs):
        assert not differs and found["regathers"] == 2 and gathers, (differs, found)
        assert not graphs or (found["captured"] and found["replayed"] >= 8 * least), found


def lying(stage: int) -> tuple[list[tuple[bool, ...]], tuple[int, int]]:
    """In steps with evaluations between them: is what is gathered anew in its place? Bytes of places, then without."""
    case = Case(stage, heads=True)
    engine = start(case, graphs=False)
    found = []
    for step in range(12):
        micro_step(engine, case, batch_of(case, step, 0, engine.rank))
        anew = [] if engine.schedule is None else engine.schedule.regathers
        found.append(tuple(engine._runtime.buckets[bucket].storage.nbytes() % 2 == 1 for bucket in anew))
        if step % 2:
            with torch.no_grad():
                engine(*batch_of(case, step, 0))
    before = engine.stats.memory.symmetric
    engine.reschedule(regather=False)
    after = engine.stats.memory.symmetric
    micro_step(engine, case, batch_of(case, 12, 0, engine.rank))
    engine.destroy()
    return found[-4:], (before, after)


@pytest.mark.parametrize("stage", [2, 3])
def test_they_are_gathered_into_their_places_and_stay_there(pools: Pools, stage: int) -> None:
    """As long as the schedule has them: their memory goes with the last one."""
    for (found, (before, after)), _ in pools(2).run(placed, lying, stage):
        assert found == [(True, True)] * 4
        assert stage == 2 or after < before, (before, after)


def in_turn(stage: int, graphs: bool, heads: bool) -> tuple[list[float], dict[str, Any], int, dict[int, set[int]]]:
    """Windows of one micro-step and of two, four of each in turn; of the latter one bucket less is gathered anew.

    The micro-steps that were replayed; and by bucket that is gathered anew, what its storage had, in bytes.
    """
    passes = {"passes": ["tests.support.heads:by_length"]} if heads else {}
    case, losses = Case(stage, heads=heads, dropout=0.1, config={"compile": passes}), []
    lay: dict[int, set[int]] = {}
    with started(case, graphs) as engine:
        torch.manual_seed(7 + engine.rank)
        for step in range(64):
            last = step // 4 % 2
            for micro in range(last + 1):
                engine.set_gradient_accumulation_boundary(micro == last)
                losses.append(float(micro_step(engine, case, batch_of(case, step, micro, engine.rank))))
            for bucket in () if engine.schedule is None else engine.schedule.regathers:
                if engine._runtime.buckets[bucket].standing:
                    lay.setdefault(bucket, set()).add(engine._runtime.buckets[bucket].storage.nbytes())
        values = {name: value.tolist() for name, value in engine.state_dict().items()}
        return losses, values, engine.stats.replayed_steps, lay


@daily("stage", [], [2, 3])
def test_where_kinds_of_windows_have_other_heads_each_bucket_keeps_its_place(pools: Pools, stage: int) -> None:
    """So a graph of the one kind finds it where it was, behind windows of the other."""
    plain, elsewhere = pools(2).run(in_turn, stage, False, False), pools(2).run(in_turn, stage, True, True)
    there = pools(2).run(placed, in_turn, stage, True, True)
    for one, other, (found, slabs) in zip(plain, elsewhere, there, strict=True):
        assert found[:2] == one[:2] == other[:2] and slabs.gathers
        # Elsewhere in memory they are captured anew, which takes a window. Ordinary memory may do so at each switch.
        assert min(found[2], other[2]) >= 32
        sizes = list(found[3].values())  # of each place another one, odd
        assert len(sizes) == 2 and all(len(each) == 1 and min(each) % 2 for each in sizes) and sizes[0] != sizes[1]


def heard(heads: bool, stage: int) -> tuple[list[float], dict[str, Any], int, tuple[int, int]]:
    """A run in which somebody begins to listen to the optimizer, so that it steps once for all buckets."""
    case = Case(stage, heads=heads)
    engine = start(case, graphs=False)
    losses, calls = [], [0]
    for step in range(16):
        if step == 10:
            engine.optimizer.register_step_post_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        losses.append(float(micro_step(engine, case, batch_of(case, step, 0, engine.rank))))
    regathers, stats = len(engine.schedule.regathers), engine.stats
    values = {name: value.tolist() for name, value in engine.state_dict().items()}
    engine.destroy()
    return losses, values, regathers, (calls[0], stats.departures)


@pytest.mark.parametrize("stage", [2, 3])
def test_where_updates_come_all_at_once_they_are_gathered_behind_them(pools: Pools, stage: int) -> None:
    for found, plain in zip(pools(2).run(heard, True, stage), pools(2).run(heard, False, stage), strict=True):
        assert found[:2] == plain[:2] and found[2] == 2 and found[3] == plain[3] == (6, 0)


def traffic(stage: int) -> tuple[list[int], list[int], bool]:
    """Gathers in each of three steps, before the second of them an evaluation; bytes of flats between them."""
    case = Case(stage, heads=True)
    engine = start(case, graphs=False)
    sent, rest = [], []
    for step in range(12):
        micro_step(engine, case, batch_of(case, step, 0, engine.rank))
        sent.append(engine.stats.last_step["all_gather"].calls)
        rest.append(engine._runtime.flats.now)
        if step == 9:
            with torch.no_grad():
                engine.eval()
                engine(*batch_of(case, step, 0))
                engine.train()
    followed = engine.executed == engine.schedule.instructions
    stands = sum(b.nbytes for b in engine.schedule.facts.buckets if b.id in engine.schedule.regathers)
    engine.destroy()
    return sent[-3:], [each - stands for each in rest[-3:]], followed


@pytest.mark.parametrize("stage", [2, 3])
def test_they_are_gathered_once_a_step(pools: Pools, stage: int) -> None:
    for sent, rest, followed in pools(2).run(traffic, stage):
        assert followed and rest == [0, 0, 0]
        # At stage 3 an evaluation gathers what does not stay, at stage 2 what the next step would.
        assert sent == {2: [4, 4, 4], 3: [5, 8, 5]}[stage]

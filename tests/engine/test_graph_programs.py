"""Programs that do what graphs could get wrong: all comes out as without them, and what cannot be one says why."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest

from tests.support import at_hand, numbers_at_hand, programs
from tests.support.marks import daily
from tests.support.programs import compared
from tests.support.replays import Case

LOOPS = ("train_step", "plain")
DRAW: list[Callable[[], float]] = [random.random, numpy.random.rand]
# program, case, replays at least, windows that are captured at most
EXACT: list[tuple[Callable[..., Any], Case, int, int]] = [
    (programs.autocast, Case(dropout=0.1), 17, 2),
    (programs.autocast_around, Case(), 12, 1),
    (programs.modes, Case(dropout=0.1), 12, 1),
    (programs.methods, Case(), 24, 6),
    (programs.criteria, Case(), 20, 2),
    (programs.counts, Case(), 12, 1),
    (at_hand.replaced, Case(), 100, 7),
    (at_hand.attributes, Case(), 20, 4),
    (at_hand.in_place, Case(), 12, 1),
    (at_hand.cycled, Case(cycle=True), 20, 2),
    (numbers_at_hand.set_now_and_then, Case(dropout=0.1), 60, 7),
    (numbers_at_hand.counted_and_not_used, Case(), 12, 1),
    (numbers_at_hand.two_losses, Case(), 20, 5),
    (programs.objects, Case(), 14, 2),
    (programs.shapes, Case(), 20, 8),
    (programs.given_up, Case(gas=2, dropout=0.1), 6, 1),
    (programs.failing, Case(dropout=0.1), 7, 1),
    (programs.seeded, Case(dropout=0.2), 12, 1),
    *((programs.given_up, Case(stage, gas, dropout=0.1), 6, 1) for stage in (1, 2) for gas in (1, 2)),
    *((programs.modes, Case(stage, 2, dropout=0.1), 4, 1) for stage in (1, 3)),
]
LONG = (programs.shapes, programs.methods, at_hand.replaced, at_hand.attributes)
LONG += (numbers_at_hand.set_now_and_then, numbers_at_hand.two_losses)
DAILY = [row for row in EXACT[:18] if row[0] not in LONG][::2]
WITHIN: list[tuple[Callable[..., Any], Case]] = [
    (numbers_at_hand.behind_backward, Case(gas=2)),
    (numbers_at_hand.in_a_block, Case()),
    (numbers_at_hand.by_a_scheduler, Case(decay=True)),
]
UNCAPTURED: list[tuple[Callable[..., Any], Case, str]] = [
    (programs.writes, Case(), "writes into the batch"),
    (programs.total, Case(), "keep loss.detach"),
    (programs.trained, Case(), "no parameter of the model"),
    (programs.numbers, Case(), "are rare so far"),
    (programs.fresh, Case(), "so far"),
    (at_hand.wrong, Case(), "its replay differs in"),
    (at_hand.stashed, Case(), "another tensor in the place of memory"),
    (at_hand.rebound, Case(), "another tensor in the place of buffer seen"),
    (at_hand.aside, Case(), "aux leads back into the model"),
    (numbers_at_hand.annealed, Case(), "change every few steps"),
    *(
        (partial(numbers_at_hand.set_within, loop=loop), Case(gas=2), "alpha is set anew within the step")
        for loop in LOOPS
    ),
    *((partial(at_hand.drawn, draw=draw), Case(), "draws random numbers on the CPU") for draw in DRAW),
]


@daily(("program", "case", "least", "most"), DAILY, [row for row in EXACT if row not in DAILY])
def test_replays_change_nothing(program: Any, case: Case, least: int, most: int) -> None:
    differs, done = compared(program, case)
    assert not differs and done.replayed >= least and 0 < done.captured <= most, done


@daily(("program", "case", "why"), UNCAPTURED[::2], UNCAPTURED[1::2])
def test_what_is_no_graph_is_exact_and_told_once(program: Any, case: Case, why: str) -> None:
    differs, done = compared(program, case)
    assert not differs and done.replayed == 0 and done.captured <= 3, done
    assert len(done.told) == 1 and why in done.told[0], done


def test_a_number_that_the_host_counts_is_not_taken_for_noise() -> None:
    """Runs that are compared count, too, so that the program comes out otherwise than without graphs."""
    _, done = compared(at_hand.counted, Case())
    assert done.captured == 0 and len(done.told) == 1 and "its replay differs in" in done.told[0], done


def test_steps_that_change_nothing_are_tried_less_and_less_often() -> None:
    differs, done = compared(at_hand.endless, Case(overflow=0))
    assert not differs and done.captured == 0, done
    assert done.uncaptured["its step changed nothing, so that no graph could be compared with it"] == 2 + 4 + 8 + 16, (
        done
    )
    assert not done.told


@daily("overflow", [6, 7, 8], [3, 4, 5, 9])
def test_a_step_that_changes_nothing_tells_nothing_of_gradients(overflow: int) -> None:
    """One of these is that in which graphs would be compared."""
    case = Case(overflow=overflow)
    differs, done = compared(partial(at_hand.wrong, overflow=overflow), case)
    assert not differs and done.captured == 0 and "its replay differs in" in done.told[0], done


@pytest.mark.matrix
def test_a_capture_that_fails_while_something_is_gathered(pools: Any) -> None:
    for differs, done in pools(2).run(compared, programs.failing, Case(dropout=0.1)):
        assert not differs and done.replayed >= 7, done

"""Every model of the zoo equals its unsharded reference, compiled and eager; the stages equal each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.distributed import cases
from tests.support.harness import Pool
from tests.support.models import ZOO
from tests.support.parity import Case, Report, check, run_case
from tests.support.reference import worst

QUICK = ("mlp", "decoder", "lstm", "leaf_list", "two_types", "called_outside")
"""The models of the daily rows, which have five minutes together with all others."""
Results = Callable[[Case], list[Report]]


@pytest.fixture(scope="session")
def results(pools: Callable[[int], Pool]) -> Results:
    """The reports of a case, computed once however many tests read them; a failed case fails each of them anew."""
    known: dict[Case, list[Report]] = {}

    def report(case: Case) -> list[Report]:
        if case not in known:
            known[case] = pools(case.world).run(run_case, case)
        return known[case]

    return report


def equal_groups(all_cases: list[Case]) -> list[tuple[Case, ...]]:
    """Cases without accumulation that differ only in their stage."""

    def setting(case: Case) -> tuple[str, str, int]:
        return case.model, case.mode, case.world

    chosen = sorted((case for case in all_cases if case.gas == 1), key=lambda case: (*setting(case), case.stage))
    groups = (tuple(group) for _, group in itertools.groupby(chosen, setting))
    return [group for group in groups if len(group) > 1]


GROUPS = equal_groups(cases.DAILY)
MORE_GROUPS = [group for group in equal_groups(cases.DAILY + cases.MATRIX) if group not in GROUPS]


def assert_equal_bits(group: tuple[Case, ...], results: Results) -> None:
    digests = {str(case): results(case)[0].digest for case in group}
    assert len(set(digests.values())) == 1, digests


def marked(case: Case) -> object:
    """One row of every model is also compared on the oldest PyTorch; those of a few models alone are daily."""
    oldest = (case.mode, case.stage, case.world) == ("aot_eager", 3, 2)
    marks = [pytest.mark.oldest] if oldest else []
    if not (oldest and case.model in QUICK):
        marks.append(pytest.mark.matrix)
    return pytest.param(case, id=str(case), marks=marks)


@pytest.mark.parity
@pytest.mark.parametrize("case", [marked(case) for case in cases.DAILY])
def test_equals_the_reference(case: Case, results: Results) -> None:
    check(case, results(case))


@pytest.mark.matrix
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: str(group[0]))
def test_stages_are_bit_equal(group: tuple[Case, ...], results: Results) -> None:
    assert_equal_bits(group, results)


@pytest.mark.matrix
@pytest.mark.parity
@pytest.mark.parametrize("case", cases.MATRIX, ids=str)
def test_equals_the_reference_in_the_matrix(case: Case, results: Results) -> None:
    check(case, results(case))


@pytest.mark.matrix
@pytest.mark.parametrize("group", MORE_GROUPS, ids=lambda group: str(group[0]))
def test_stages_are_bit_equal_in_the_matrix(group: tuple[Case, ...], results: Results) -> None:
    assert_equal_bits(group, results)


def test_the_matrix_holds_every_pair() -> None:
    for entry in ZOO:
        rows = [(c.stage, c.mode, c.gas, c.world) for c in cases.DAILY + cases.MATRIX if c.model == entry.name]
        modes = cases.WITH_INDUCTOR if entry.name in cases.INDUCTOR_MODELS else cases.MODES
        wanted = set().union(*map(cases.pairs, itertools.product(entry.stages, modes, cases.GAS, cases.WORLDS)))
        assert wanted <= set().union(*map(cases.pairs, rows)), entry.name


def test_the_comparison_sees_what_is_wrong() -> None:
    expected = {"a": torch.ones(8), "b": torch.full((4,), 1e-9), "c": None}
    right = {name: None if value is None else value.clone() for name, value in expected.items()}
    assert worst(right, expected)[0] == 0.0
    assert worst({**right, "a": torch.ones(8) * (1 + 1e-5)}, expected)[0] > 5e-6
    assert worst({**right, "a": torch.zeros(8)}, expected) == (1.0, "a")
    assert worst({**right, "c": torch.zeros(2)}, expected)[0] == float("inf")
    assert worst({**right, "a": None}, expected)[0] == float("inf")
    assert worst({**right, "a": torch.full((8,), float("nan"))}, expected)[0] == float("inf")
    assert worst({**right, "b": torch.zeros(4)}, expected)[0] < 1e-5  # noise beside the other gradients

"""Parameters sharded over groups of ranks, states over all: equal to the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.harness import Pool
from tests.support.models import ZOO
from tests.support.parity import Case, check, run_case

ROWS = [
    Case("mlp", 3, "aot_eager", 4, 4, group_size=2),
    Case("decoder", 1, "eager", 1, 4, group_size=2),
    Case("decoder", 3, "aot_eager", 4, 4, group_size=2, states="group"),
]
MORE = [
    Case("mlp", 2, "eager", 1, 4, group_size=2),
    Case("mlp", 3, "aot_eager", 1, 2, group_size=1),
    Case("mlp", 3, "eager", 4, 4, group_size=1),
    Case("decoder", 1, "aot_eager", 4, 4, group_size=2),
    Case("decoder", 3, "eager", 1, 4, group_size=2),
    *(
        Case("hf_llama", stage, mode, gas, 8, group_size=size)
        for stage, mode, gas, size in [
            (3, "aot_eager", 4, 4),
            (2, "aot_eager", 1, 2),
            (1, "eager", 4, 4),
            (3, "eager", 1, 2),
        ]
    ),
    *(Case(entry.name, max(entry.stages), "aot_eager", 4, 4, group_size=2) for entry in ZOO),
    *(Case(entry.name, min(entry.stages), "aot_eager", 1, 4, group_size=2, states="group") for entry in ZOO),
    Case("mlp", 2, "eager", 4, 4, group_size=1, states="group"),
    Case("hf_llama", 3, "aot_eager", 4, 8, group_size=4, states="group"),
    Case("hf_llama", 1, "eager", 1, 8, group_size=2, states="group"),
]


@pytest.mark.parity
@pytest.mark.parametrize(
    "case", [*ROWS, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE if each not in ROWS)], ids=str
)
def test_equals_the_reference(case: Case, pools: Callable[[int], Pool]) -> None:
    check(case, pools(case.world).run(run_case, case))

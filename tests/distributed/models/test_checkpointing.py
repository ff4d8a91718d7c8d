"""Activations that are computed again: by the user's checkpoints and by `compile.activation_budget`, at every stage."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import zeroweave as zw
from tests.distributed import cases
from tests.support.harness import Pools
from tests.support.parity import Case, check, run_case

pytestmark = pytest.mark.matrix

CHECKPOINTED = (
    "checkpoint",
    "checkpoint_selective",
    "checkpoint_reentrant",
    "checkpoint_inside",
    "checkpoint_inside_reentrant",
)
MORE = [
    case
    for model, stage, mode in itertools.product(CHECKPOINTED, (1, 2, 3), ("aot_eager", "eager"))
    if (case := Case(model, stage, mode, 1)) not in cases.DAILY
]


@pytest.mark.parametrize("case", MORE, ids=str)
def test_checkpoints_at_every_stage(pools: Pools, case: Case) -> None:
    """Beside the rows that `test_parity` has of these models."""
    check(case, pools(2).run(run_case, case))


def with_budget(model: Any, optimizer: Any, config: dict[str, Any]) -> zw.Engine:
    compile_ = {**config["compile"], "activation_budget": 0.1}
    return zw.initialize(model, optimizer, {**config, "compile": compile_})


@pytest.mark.parametrize(("model", "stage"), [("checkpoint_inside", 1), ("dropout", 3), ("decoder", 2)])
def test_a_budget_changes_no_gradient(pools: Pools, model: str, stage: int) -> None:
    """`tests/compile/test_templates.py` shows that fewer bytes are saved."""
    case = Case(model, stage, "aot_eager", 1)
    check(case, pools(2).run(run_case, case, with_budget))

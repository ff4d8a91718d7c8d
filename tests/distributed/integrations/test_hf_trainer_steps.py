"""transformers' Trainer on an engine takes the steps that the library's own takes on DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Pools
from tests.support.marks import daily


def side_by_side(folder: str, stage: int, mode: str, more: dict[str, Any]) -> dict[str, Any]:
    """Both Trainers' runs: how far apart the parameters are, and what was logged."""
    from tests.distributed.integrations import trainers  # not when tests are collected: it imports transformers
    from tests.distributed.integrations.trainers import apart, launched, logged, ours, theirs, whole

    zeroweave = trainers.config(stage, mode)
    with launched(folder):
        library, sharded = theirs(**more), ours(zeroweave, **more)
        library.train()
        sharded.train()
        start = trainers.llama().state_dict()
        want = {name: value.detach().clone() for name, value in library.model.state_dict().items()}
        found = {
            "apart": apart(whole(sharded), want),
            "moved": apart(start, want),
            "losses": (logged(library, "loss"), logged(sharded, "loss")),
            "norms": (logged(library, "grad_norm"), logged(sharded, "grad_norm")),
            "rates": (logged(library, "learning_rate", "epoch"), logged(sharded, "learning_rate", "epoch")),
            "evaluations": (logged(library, "eval_loss"), logged(sharded, "eval_loss")),
            "predictions": abs(
                library.predict(trainers.Sentences(7)).predictions - sharded.predict(trainers.Sentences(7)).predictions
            ).max(),
            "compiled": sharded.engine.stats.compiled_calls,
        }
        sharded.engine.destroy()
        return found


@daily(
    ("stage", "mode"),
    [(3, "eager")],
    [(1, "eager"), (2, "aot_eager"), (3, "aot_eager"), (3, "inductor")],
)
def test_parameters_after_20_steps_are_those_of_the_librarys_own_run(
    pools: Pools, tmp_path: Path, stage: int, mode: str
) -> None:
    pytest.importorskip("accelerate", minversion="1.15", reason="transformers' Trainer needs accelerate")
    for found in pools(2).run(side_by_side, str(tmp_path), stage, mode, {}):
        assert found["apart"] <= 1e-6 < 1e-3 < found["moved"]
        assert found["predictions"] <= 1e-5
        assert (found["compiled"] > 0) == (mode != "eager")
        norms, sharded = found["norms"]
        assert sharded == pytest.approx(norms, rel=1e-5)
        assert len(norms) == 20 and min(norms) > 0.5  # each step was clipped
        losses, sharded = found["losses"]
        assert sharded == pytest.approx(losses, abs=1.01e-4)  # logged with four decimals
        assert found["rates"][0] == found["rates"][1]

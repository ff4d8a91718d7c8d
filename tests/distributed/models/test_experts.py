"""Experts on different ranks train as they do with all of them on every rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import zeroweave as zw
from tests.distributed import experts
from tests.distributed.experts import CHECKED, TRAINED, train
from tests.support.harness import Pools
from tests.support.marks import slow

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"n": 2},
    "coalesced": {"n": 4, "coalesce": True},
    "clipped": {"n": 2, "config": {"gradient_clipping": 0.5}},
    "without tokens": {"avoid": (1, 3)},
    "compiled experts": {"config": {"compile": {"lower": "aot_eager", "regions": ["*.experts.*"], "dynamic": True}}},
    "idle": {"n": 2, "coalesce": True, "avoid": (3,), "idle": True},
    "predivide": {"config": {"reduce": {"op": "predivide", "depth": 1}, "bucket": {"bytes": 3000}}},
    "clipped and coalesced": {"n": 4, "coalesce": True, "config": {"gradient_clipping": 0.5}},
}
DAILY = [
    ("plain", 3, "aot_eager", 2),
    ("coalesced", 2, "eager", 2),
    ("clipped", 3, "eager", 2),
    ("without tokens", 1, "eager", 2),
]
PRODUCT = [
    each
    for each in itertools.product(SETTINGS, (1, 2, 3), ("aot_eager", "eager"), (1, 2, 4))
    if each[::2][:2] != ("compiled experts", "eager") and each[:2] != ("idle", 3)
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("what", "stage", "mode", "parallel_size"),
    DAILY + [pytest.param(*each, marks=pytest.mark.matrix) for each in PRODUCT if each not in DAILY],
)
def test_training_equals_that_with_all_experts_everywhere(
    pools: Pools, what: str, stage: int, mode: str, parallel_size: int
) -> None:
    for found in pools(4).run(_train, stage, mode, parallel_size, what):
        assert max(found.gradients)[0] <= 1 and found.parameters[0] <= 1, found
        assert found.norms[0] <= 1 and found.smallest_norm > 0.5, found
        assert found.departures == 0 and (found.compiled_calls > 0) == (mode != "eager")
        if what in ("coalesced", "plain"):
            assert found.reductions == found.buckets and found.calls == found.buckets.total()


def _train(stage: int, mode: str, parallel_size: int, what: str) -> Any:
    return train(stage, mode, parallel_size, **SETTINGS[what])


@pytest.mark.matrix
def test_only_the_ranks_of_an_idle_expert_miss_its_gradient(pools: Pools) -> None:
    for rank, found in enumerate(pools(4).run(_train, 2, "eager", 2, "idle")):
        parameters = 4 * 2  # weights and biases of an expert, in two blocks
        assert found.absent == [parameters * (rank % 2)] * (CHECKED + TRAINED)
        assert max(found.gradients)[0] <= 1 and found.parameters[0] <= 1, found


@slow("2-average", "2-predivide")
@pytest.mark.parametrize("op", ["average", "predivide"])
@pytest.mark.parametrize("parallel_size", [2, pytest.param(1, marks=pytest.mark.matrix), 4])
def test_gradients_are_divided_by_the_number_of_all_ranks(pools: Pools, op: str, parallel_size: int) -> None:
    for found, wrong in pools(4).run(experts.exact, op, parallel_size):
        assert found[0] <= 1e-12, found
        assert parallel_size == 1 or wrong > 0.5


@pytest.mark.parametrize(
    "stage", [2, pytest.param(1, marks=pytest.mark.matrix), pytest.param(3, marks=pytest.mark.matrix)]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(pools: Pools, stage: int) -> None:
    for scales, applied, moved, message in pools(4).run(experts.overflow, stage):
        assert "the gradients of 'blocks.0.mixture.experts.0.up.weight@1' are infinite or NaN" in message
        assert scales == [64.0, 32.0, 32.0]
        assert applied == moved == [True, False, True]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.matrix)])
def test_each_group_has_its_own_values(pools: Pools, stage: int) -> None:
    results = pools(4).run(experts.values, stage)
    name, expert = "blocks.0.mixture.experts.1.up.weight", "blocks.0.mixture.experts.0.up.weight"
    assert not torch.equal(results[0]["start"][name], results[1]["start"][name])
    for rank, found in enumerate(results):
        for each, value in found["full"].items():
            source = rank % 2 if ".experts." in each else 0
            assert torch.equal(value, results[source]["start"][each]), each
        assert found["gradient"] == (None if rank % 2 else (64, 32))  # expert 3 had no token
        assert found["moved"] == (rank % 2 == 0)
        assert "the optimizer holds no 'exp_avg' of 'blocks.0.mixture.experts.1.up.weight'" in found["state"]
        assert found["moment"] and found["loaded"] and found["filled"]
        assert "blocks.0.mixture.experts.0.up.weight:1" in found["refused"]
        for each, value in found["end"].items():
            assert each == name or torch.equal(value, found["full"][each])
    keys = results[0]["keys"]
    assert f"{expert}@0" in keys and f"{expert}@1" in keys and expert not in keys and "tokens.weight" in keys
    assert keys.index(f"{expert}@1") == keys.index(f"{expert}@0") + 1
    assert all(found["keys"] == [] for found in results[1:])


def test_profiling_plans_what_each_group_would_send(pools: Pools) -> None:
    for same, sent, planned in pools(4).run(experts.profiled):
        assert same and planned["reduce_scatter"] == sent["reduce_scatter"] > 0
        assert planned["all_gather"] == sent["all_gather"] > 0


def test_what_is_refused(pools: Pools) -> None:
    wrong = {"parameters": ["*.expert.*", "*.experts.*"], "parallel_size": 2}
    for kind, message, same in pools(4).run(experts.refused, wrong):
        assert kind == "ConfigError" and same
        assert "experts.parameters: no parameter matches '*.expert.*'" in message
    for kind, message, same in pools(4).run(experts.refused, {"parameters": ["*.experts.*"], "parallel_size": 3}):
        assert kind == "ConfigError" and same and "experts.parallel_size 3 does not divide the 4 ranks" in message


def test_groups_are_consecutive_ranks(pools: Pools) -> None:
    assert pools(4).run(experts.group_of, 2) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert pools(4).run(experts.group_of, 1) == [None] * 4
    assert all("3 does not divide the 4 ranks" in message for message in pools(4).run(experts.group_of, 3))
    with pytest.raises(zw.EngineError, match=r"expert_group\(\) needs a process group"):
        zw.expert_group(2)


@pytest.mark.matrix
def test_a_rank_that_fails_in_an_expert_ends_those_that_wait_for_its_tokens(disposable: Pools) -> None:
    broken, waiting = disposable(2).outcomes(experts.die, 2)
    assert broken.kind == "ValueError"
    assert waiting.exit_code == 1 and "this expert is broken" in waiting.stderr

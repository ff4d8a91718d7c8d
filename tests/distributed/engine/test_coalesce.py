"""Several backwards, one reduction: the same gradients as plain backwards, one collective for each bucket."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tests.distributed import experts
from tests.distributed.engine.coalescing import EPSILON, Setting, courses, distance, matrix, train
from tests.distributed.engine.nested import WAYS, nested
from tests.support.harness import Pools
from tests.support.reference import Expected, judge, judge_numbers

pytestmark = pytest.mark.matrix

SETTINGS = [
    Setting(1, "aot_eager"),
    Setting(2, "eager", bucket="slot"),
    Setting(2, "aot_eager", params="bfloat16"),
    Setting(3, "aot_eager", depth=1, bucket="tiny"),
    Setting(3, "eager", params="bfloat16"),
]
PRODUCT = [
    Setting(*each)
    for each in itertools.product(
        (1, 2, 3), ("aot_eager", "eager"), (1, 2), ("slot", "default", "tiny"), (None, "bfloat16")
    )
]


@pytest.mark.parametrize(
    ("setting", "name", "counts"),
    [(each, "mlp", (1, 4)) for each in SETTINGS] + [(each, "decoder", (1, 2, 4, 8)) for each in PRODUCT],
    ids=str,
)
def test_the_sum_is_that_of_plain_backwards(pools: Pools, setting: Setting, name: str, counts: tuple[int, ...]) -> None:
    for windows, buckets, compiled_once in pools(2).run(matrix, setting, name, counts):
        assert compiled_once
        assert tuple(each.n for each in windows) == counts
        for each in windows:
            often = 1 if setting.stage == 1 else each.n
            assert each.coalesced_reductions == buckets
            assert each.plain_reductions == {size: often * count for size, count in buckets.items()}
            if setting.params is None:
                assert each.bounded[0] <= 1, each
            else:
                assert each.difference <= EPSILON * math.sqrt(each.n), each
                assert each.coalesced_error <= each.plain_error, each


WITH = {
    "plain": ("mlp", {}),
    "tied": ("tied", {}),
    "frozen": ("frozen_inside", {}),
    "clipped": ("mlp", {"gradient_clipping": 1e6}),
    "unused": ("unused", {}),
    "recomputed": ("checkpoint_inside_reentrant", {}),
    "optimizer offloaded": ("tied", {"offload": {"optimizer": "all"}}),
    "parameters offloaded": ("frozen_inside", {"offload": {"optimizer": "all", "params": True}}),
}


def works(config: dict[str, Any], stage: int) -> bool:
    return stage == 3 or not config.get("offload", {}).get("params")


PATHS = [(1, "eager"), (2, "aot_eager"), (3, "aot_eager"), (3, "eager")]
ROWS = [row for row in itertools.product(WITH, (1, 2, 3), ("aot_eager", "eager")) if works(WITH[row[0]][1], row[1])]


@pytest.mark.parametrize(("what", "stage", "mode"), ROWS)
def test_training_is_exact_and_leaves_nothing_behind(pools: Pools, what: str, stage: int, mode: str) -> None:
    name, config = WITH[what]
    for gradients, parameters, (buckets, *reductions), departures in pools(2).run(
        train, Setting(stage, mode), name, 3, config
    ):
        assert max(gradients)[0] <= 1 and parameters[0] <= 1, (gradients, parameters)
        assert set(reductions) == {buckets} and departures == 0


@pytest.mark.parametrize(
    ("parallel_size", "stage", "mode", "n", "clip"),
    list(itertools.product((1, 2), (1, 2, 3), ("aot_eager", "eager"), (1, 4), (None, 0.5))),
)
def test_experts_of_all_ranks_and_of_some(
    pools: Pools, parallel_size: int, stage: int, mode: str, n: int, clip: float | None
) -> None:
    config = {} if clip is None else {"gradient_clipping": clip}
    for found in pools(2).run(experts.train, stage, mode, parallel_size, n, True, (), False, config):
        assert max(found.gradients)[0] <= 1 and found.parameters[0] <= 1 and found.norms[0] <= 1, found
        assert found.reductions == found.buckets and found.calls == found.buckets.total()
        assert found.departures == 0


NESTED = [(way, *path, coalesce) for way in WAYS for path in PATHS for coalesce in (True, False)]


@pytest.mark.parametrize(("way", "stage", "mode", "coalesce"), NESTED)
def test_backwards_inside_something_else(pools: Pools, way: str, stage: int, mode: str, coalesce: bool) -> None:
    for gradients, parameters, reductions in pools(2).run(nested, Setting(stage, mode), way, coalesce):
        assert max(gradients)[0] <= 1 and parameters[0] <= 1, (gradients, parameters)
        assert not coalesce or reductions == {1.0}


STEPS = 6
HALF = {"params": "float16", "initial_loss_scale": 2.0**20}
COURSES = {
    "clipped": {"gradient_clipping": 0.05},
    "predivide": {"reduce": {"op": "predivide"}},
    "clipped in bfloat16": {"gradient_clipping": 0.05, "precision": {"params": "bfloat16"}},
    "added up in bfloat16": {"precision": {"params": "bfloat16", "accumulate": "bfloat16"}},
    "reduced in bfloat16": {"precision": {"params": "bfloat16", "reduce": "bfloat16"}},
    "float16, overflowing": {"precision": HALF, "gradient_clipping": 0.05},
    "clipped, offloaded": {"gradient_clipping": 0.05, "offload": {"optimizer": "all"}},
    "float16, overflowing, all offloaded": {
        "precision": HALF,
        "gradient_clipping": 0.05,
        "offload": {"optimizer": "all", "params": True},
    },
}
COURSE_ROWS = [(what, *path) for what in COURSES for path in PATHS if works(COURSES[what], path[0])]


@pytest.mark.parametrize(("what", "stage", "mode"), COURSE_ROWS)
def test_several_steps_take_the_course_of_plain_windows(pools: Pools, what: str, stage: int, mode: str) -> None:
    n = 4
    low = "float16" in what  # bfloat16 as well
    # of so many backwards in all, each rounded by itself, and computed with weights that are rounded after each step
    bound = EPSILON * math.sqrt(n * STEPS)
    for plain, coalesced, exact in pools(2).run(courses, Setting(stage, mode), COURSES[what], "mlp", n, STEPS, not low):
        assert (coalesced.scales, coalesced.applied) == (plain.scales, plain.applied)
        assert any(plain.applied) and all(plain.applied) == ("overflowing" not in what)
        clips = "gradient_clipping" in COURSES[what]
        for ours, theirs, applied in zip(coalesced.norms, plain.norms, plain.applied, strict=True):
            assert (ours is None) == (theirs is None) and (ours is not None or not (clips and applied))
            assert ours is None or ours > 0.05
            assert ours is None or not low or ours == pytest.approx(theirs, rel=bound)
        if low:
            assert distance(coalesced.moved, plain.moved) <= bound
            continue
        moved = judge(coalesced.moved, Expected(plain.moved, exact.moved))
        assert moved[0] <= 1, moved
        if clips:
            norms = judge_numbers(coalesced.norms, (plain.norms, exact.norms))
            assert norms[0] <= 1, norms

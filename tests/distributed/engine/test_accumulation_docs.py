"""The formulas of docs/accumulation.md: computed from its table, beside what engines tell of their windows."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.distributed.engine.coalescing import Setting, initialize
from tests.support.commands import ROOT
from tests.support.harness import Pools
from tests.support.models import entry
from tests.support.reference import build, draw

TEXT = (ROOT / "docs" / "accumulation.md").read_text()
LAST = 3
"""Windows of each kind: recorded, adopted, followed."""
BF16 = {"params": "bfloat16"}
PRECISIONS = {
    "fp32": {},
    "bf16": BF16,
    "bf16 accumulated": {**BF16, "accumulate": "bfloat16"},
    "bf16 reduced": {**BF16, "reduce": "bfloat16"},
}
BYTES = {"fp32": "4444", "bf16": "2424", "bf16 accumulated": "2222", "bf16 reduced": "2422"}
"""Of b, a, t, s."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the table with that heading."""
    head = re.escape(heading)
    (body,) = re.findall(rf"^\| {head} .*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in body.splitlines()]


def evaluated(formulas: list[str], elements: float, world: int, n: int, sizes: str) -> list[float]:
    """The formulas of a row; `sizes`: of b, a, t, s."""
    values = dict(zip("bats", map(int, sizes), strict=True)) | {"P": elements, "N": world, "n": n}
    spelled = [formula.strip("`").replace("·", "*").replace("−", "-") for formula in formulas]
    return [float(eval(formula, {"__builtins__": {}}, values)) for formula in spelled]


def window(engine: Any, model: Any, kind: str, n: int) -> None:
    """One window and its step, as a row of the table names it."""

    def backward(index: int) -> None:
        draw(engine.rank, index)
        model.micro(engine, engine.module, model.batch(engine.rank, index), lambda loss: engine.backward(loss / n))

    if "coalesced" in kind:
        with engine.coalesce_grad_reduction():
            for index in range(n):
                backward(index)
    else:
        for index in range(n):
            engine.set_gradient_accumulation_boundary(index == n - 1)
            if "no_sync" in kind and index < n - 1:
                with engine.no_sync():
                    backward(index)
            else:
                backward(index)
    engine.step()


def measured(stage: int, mode: str, precision: str, kind: str, n: int) -> tuple[int, list[float]]:
    """Trained elements; the last window's local sums, reduced gradients, reductions of a bucket, and what was sent."""
    model = entry("mlp")
    config = Setting(stage, mode).config(gradient_clipping=1e6)  # so that all buckets settle before the first update
    config["precision"] = PRECISIONS[precision]
    with initialize(build(model), config) as engine:
        for _ in range(LAST):
            window(engine, model, kind, n)
        elements, buckets = sum(bucket.numel for bucket in engine.buckets), len(engine.buckets)
        memory, reduced = engine.stats.memory, engine.stats.last_step["reduce_scatter"]
        gathers = engine.stats.last_step["all_gather"].calls
        if stage < 3:
            assert memory.flats_peak == elements * int(BYTES[precision][0]) and gathers == buckets
        else:
            assert buckets <= gathers <= 2 * n * buckets
        return elements, [memory.local_sums, memory.gradients, reduced.calls / buckets, reduced.wire]


def told() -> list[tuple[int, str, list[str]]]:
    """(stage, window, formulas) of each row, for each of its stages."""
    return [
        (int(stage), kind, formulas)
        for stages, kind, *formulas in rows("stages | window")
        for stage in stages.split(", ")
    ]


DAILY = [(1, "eager", "bf16"), (3, "aot_eager", "bf16 reduced")]
ALL = [(stage, mode, precision) for stage in (1, 2, 3) for mode in ("eager", "aot_eager") for precision in PRECISIONS]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "mode", "precision"),
    DAILY + [pytest.param(*each, marks=pytest.mark.matrix) for each in ALL if each not in DAILY],
)
def test_the_table_is_what_engines_do(pools: Pools, stage: int, mode: str, precision: str) -> None:
    kinds = [(kind, formulas) for each, kind, formulas in told() if each == stage]
    assert len(kinds) == 4
    for kind, formulas in kinds:
        for n in (1,) if "one plain" in kind else (1, 3) if "one or" in kind else (3,):
            for elements, found in pools(2).run(measured, stage, mode, precision, kind, n):
                assert found == evaluated(formulas, elements, 2, n, BYTES[precision]), (kind, n)

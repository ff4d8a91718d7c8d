"""Which settings each model is compared in: a handful of rows daily, all pairs of values in the matrix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.support.models import ZOO
from tests.support.parity import Case
from tests.support.zoo import Entry

STAGES, MODES, GAS, WORLDS = (1, 2, 3), ("aot_eager", "eager"), (1, 4), (2, 3, 4)
WITH_INDUCTOR = ("inductor", *MODES)
INDUCTOR_MODELS = ("mlp", "decoder", "hf_qwen3")
PRODUCT_MODELS = ("mlp",)

Row = tuple[int, str, int, int]
ALWAYS: list[Row] = [(2, "aot_eager", 4, 2), (3, "eager", 1, 2), (1, "eager", 1, 2)]
"""What the matrix has of each model, and the MLP and the decoder daily."""


def pairs(row: Sequence[object]) -> set[tuple[int, object, int, object]]:
    """Every two values of a row with their positions."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def covering(factors: Sequence[Sequence[object]]) -> list[tuple[object, ...]]:
    """Rows of the factors' product, chosen greedily in a fixed order, that hold every pair of two values."""
    rows = list(itertools.product(*factors))
    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def daily(entry: Entry) -> list[Case]:
    """Stage 3 compiled on two ranks, or stage 2 with accumulation where that is not exact.

    The MLP and the decoder run in all stages, on three and four ranks and under Inductor as well.
    """
    every = entry.name in ("mlp", "decoder")
    rows = [(3, "aot_eager", 1, 2) if 3 in entry.stages else ALWAYS[0], *(ALWAYS if every else [])]
    if entry.name == "mlp":
        rows += [(3, "aot_eager", 4, 3), (2, "eager", 1, 4)]
    if entry.name == "decoder":
        rows += [(3, "inductor", 1, 2), (1, "aot_eager", 4, 3), (3, "aot_eager", 1, 4)]
    return [Case(entry.name, *row) for row in rows if row[0] in entry.stages]


def matrix(entry: Entry) -> list[Case]:
    """All pairs (the full product for the MLP) and what it always has, without what `daily` has."""
    modes = WITH_INDUCTOR if entry.name in INDUCTOR_MODELS else MODES
    factors = [entry.stages, modes, GAS, WORLDS]
    rows = list(itertools.product(*factors)) if entry.name in PRODUCT_MODELS else covering(factors)
    rows = [*dict.fromkeys([*rows, *(row for row in ALWAYS if row[0] in entry.stages)])]
    return [case for row in rows if (case := Case(entry.name, *row)) not in daily(entry)]


DAILY = [case for entry in ZOO for case in daily(entry)]
MATRIX = [case for entry in ZOO for case in matrix(entry)]

"""At stages 1 and 2 one rank alone may compute in the middle of a window, as it may without graphs."""

from __future__ import annotations

from tests.support import beside
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.replays import Case

ALONE = [
    (2, beside.read_alone),
    (2, beside.read_alone_then_shown),
    (1, beside.trained_alone_then_shown),
    (1, beside.in_a_hook),
    (2, beside.written_then_read_alone),
]
TOGETHER = [beside.given_up_with_head, beside.three_heads, beside.in_the_loss, beside.checkpointed, beside.written]


@daily(
    ("gas", "special"),
    [(2, beside.trained_alone_then_shown)],
    [(gas, special) for least, special in ALONE for gas in range(least, 3)],
)
def test_one_rank_alone(pools: Pools, gas: int, special: beside.Special) -> None:
    for stage in (1, 2):
        for same, replayed in pools(2).run(beside.both, Case(stage, gas, "plain", dropout=0.1), special):
            assert same and replayed >= 4, (stage, replayed)


@daily(("stage", "special"), [], [(stage, special) for stage in (1, 2, 3) for special in TOGETHER])
def test_all_ranks(pools: Pools, stage: int, special: beside.Special) -> None:
    for same, replayed in pools(2).run(beside.both, Case(stage, 1, "plain", dropout=0.1), special):
        assert same and replayed >= 4, replayed

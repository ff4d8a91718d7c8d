"""At stages 1 and 2 one rank alone may compute in the middle of a window, as it may without graphs."""

from __future__ import annotations

from tests.support import specials
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.replays import Case

ALONE = [
    (2, specials.read_alone),
    (2, specials.read_alone_then_shown),
    (1, specials.trained_alone_then_shown),
    (1, specials.in_a_hook),
    (2, specials.written_then_read_alone),
]
TOGETHER = [
    specials.given_up_with_head,
    specials.three_heads,
    specials.in_the_loss,
    specials.checkpointed,
    specials.written,
]


@daily(
    ("gas", "special"),
    [],
    [(2, specials.trained_alone_then_shown), *((gas, special) for least, special in ALONE for gas in range(least, 3))],
)
def test_one_rank_alone(pools: Pools, gas: int, special: specials.Special) -> None:
    for stage in (1, 2):
        for same, replayed in pools(2).run(specials.both, Case(stage, gas, "plain", dropout=0.1), special):
            assert same and replayed >= 4, (stage, replayed)


@daily(("stage", "special"), [], [(stage, special) for stage in (1, 2, 3) for special in TOGETHER])
def test_all_ranks(pools: Pools, stage: int, special: specials.Special) -> None:
    for same, replayed in pools(2).run(specials.both, Case(stage, 1, "plain", dropout=0.1), special):
        assert same and replayed >= 4, replayed

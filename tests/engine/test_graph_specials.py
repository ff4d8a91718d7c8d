"""What a program does beside a forward that was replayed comes out as without graphs, in every bit."""

from __future__ import annotations

from tests.support import specials
from tests.support.marks import daily
from tests.support.replays import Case

DAILY = [specials.given_up_and_read, specials.given_up_with_head, specials.in_the_loss, specials.written]
SPECIALS = [
    *DAILY,
    specials.given_up,
    specials.given_up_no_sync,
    specials.given_up_boundary,
    specials.checkpointed,
    specials.checkpointed_reentrant,
    specials.inference,
    specials.inference_and_head,
    specials.in_a_hook,
    specials.saved_on_cpu,
    specials.three_heads,
    specials.gradient_of_a_head,
]


@daily(
    ("stage", "gas", "special"),
    [(2, 1, special) for special in DAILY],
    [
        *((2, 1, special) for special in SPECIALS[len(DAILY) :]),
        *((stage, gas, special) for stage, gas in ((1, 2), (2, 2), (3, 1), (3, 2)) for special in SPECIALS),
    ],
)
def test_what_is_done_beside_a_replayed_forward_is_exact(stage: int, gas: int, special: specials.Special) -> None:
    same, replayed = specials.both(Case(stage, gas, "plain", dropout=0.1), special)
    assert same and replayed >= 4, replayed

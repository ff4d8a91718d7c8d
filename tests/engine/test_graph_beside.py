"""What a program does beside a forward that was replayed comes out as without graphs, in every bit."""

from __future__ import annotations

from tests.support import beside
from tests.support.marks import daily
from tests.support.replays import Case

SPECIALS = [
    beside.given_up,
    beside.given_up_no_sync,
    beside.given_up_and_read,
    beside.given_up_with_head,
    beside.given_up_boundary,
    beside.checkpointed,
    beside.checkpointed_reentrant,
    beside.inference,
    beside.inference_and_head,
    beside.in_a_hook,
    beside.saved_on_cpu,
    beside.three_heads,
    beside.gradient_of_a_head,
    beside.in_the_loss,
    beside.written,
]


@daily(
    ("stage", "gas", "special"),
    [(2, 1, special) for special in SPECIALS],
    [(stage, gas, special) for stage, gas in ((1, 2), (2, 2), (3, 1), (3, 2)) for special in SPECIALS],
)
def test_what_is_done_beside_a_replayed_forward_is_exact(stage: int, gas: int, special: beside.Special) -> None:
    same, replayed = beside.both(Case(stage, gas, "plain", dropout=0.1), special)
    assert same and replayed >= 4, replayed

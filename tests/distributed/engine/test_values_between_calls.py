"""What tests in a world of 1 say of values and gradients between calls holds on two ranks with their own data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.engine import test_gradients as gradients
from tests.engine import test_parameter_access as values
from tests.support.harness import Pools
from tests.support.marks import daily

PENALTY = gradients.test_a_penalty_on_full_parameters
GATHERED_PENALTY = gradients.test_a_penalty_on_what_is_gathered_after_the_step
INPUTS = gradients.test_gradients_of_inputs_leave_the_window_empty
READS = gradients.test_the_root_reads_parameters_of_its_parts
FLOAT64 = gradients.test_float64_accumulates_in_float64
LOADED = values.test_what_is_loaded_is_what_the_next_forward_sees
WRITTEN = values.test_full_parameters_between_backward_and_step
GIVEN_BACK = values.test_destroy_gives_the_masters_back


@daily(
    ("test", "row"),
    [
        (GATHERED_PENALTY, (2, "aot_eager", 1)),
        (PENALTY, (3, "eager", 1, "inside")),
        (READS, (3, "eager", gradients.Multiplying)),
        (INPUTS, (3, "eager", "leaf")),
        (FLOAT64, (3, "aot_eager", True)),
        (LOADED, (1, True, "eager")),
        (WRITTEN, (3, False, "aot_eager")),
        (WRITTEN, (2, True, "eager")),
        (GIVEN_BACK, (3, "aot_eager", 2)),
    ],
    [
        (GATHERED_PENALTY, (1, "eager", 1)),
        (PENALTY, (1, "aot_eager", 1, "outside")),
        (PENALTY, (3, "aot_eager", 2, "inside")),
        (READS, (3, "aot_eager", gradients.Multiplying)),
        (INPUTS, (2, "aot_eager", "inputs")),
        (FLOAT64, (1, "eager", False)),
        (LOADED, (3, False, "aot_eager")),
        (LOADED, (2, True, "aot_eager")),
        (LOADED, (2, False, "eager")),
        (WRITTEN, (1, True, "eager")),
        (WRITTEN, (1, False, "eager")),
        (GIVEN_BACK, (1, "eager", 2)),
        (GIVEN_BACK, (2, "aot_eager", 2)),
        (GIVEN_BACK, (3, "eager", 2)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_on_two_ranks(pools: Pools, test: Callable[..., None], row: tuple[Any, ...]) -> None:
    pools(2).run(test, *row)

"""What an optimizer keeps of a parameter's elements, and what of it as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeroweave.optim.states import Held, is_cut

SHAPES: list[tuple[int, ...]] = [(), (1,), (1, 1), (3,), (2, 4)]


def held(shapes: list[tuple[int, ...]], counter: tuple[int, ...], count: str, average: str) -> Held:
    return {
        torch.zeros(shape): {count: torch.zeros(counter), average: torch.zeros(shape), "number": 1} for shape in shapes
    }


@pytest.mark.parametrize("counter", [(), (1,), (1, 1)])
@pytest.mark.parametrize("names", [("step", "average"), ("average", "step")])
def test_others_tell_counters_from_elements(counter: tuple[int, ...], names: tuple[str, str]) -> None:
    """Of one element a counter may have the parameter's shape."""
    count, average = names
    states = held(SHAPES, counter, count, average)
    for parameter, state in states.items():
        assert isinstance(parameter, Tensor)
        found = {key for key, value in state.items() if is_cut(parameter, key, value, states.items())}
        assert found == {average}, parameter.shape


@pytest.mark.parametrize("shape", [(), (1,)])
def test_where_no_other_tells_the_name_does(shape: tuple[int, ...]) -> None:
    states = held([shape, shape], shape, "step", "average")
    for parameter, state in states.items():
        assert isinstance(parameter, Tensor)
        assert {key for key, value in state.items() if is_cut(parameter, key, value, states.items())} == {"average"}


def test_others_are_asked_until_one_tells() -> None:
    """So what is found out of all parameters of a model takes no more than a look at each."""
    one, state = torch.zeros(1), {"average": torch.zeros(1)}
    others = iter([(torch.zeros(3), {"average": torch.zeros(3)})] * 5)
    assert is_cut(one, "average", state["average"], others)
    assert len(list(others)) == 4

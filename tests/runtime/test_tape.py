"""The way back over a window's forward calls: the same steps whatever a rank's backward comes to."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.runtime.playing import Player
from tests.runtime.test_replay import FREE, facts
from zeroweave.runtime.tape import Frame, StepBack, Tape
from zeroweave.schedule import Call


def frames(*uses: tuple[int, ...]) -> list[Frame]:
    replay = Player(facts(4), FREE).runtime.replay
    return [Frame(Call("abcdef"[n], "forward"), each, replay) for n, each in enumerate(uses)]


def run(tape: Tape, *marks: Frame) -> None:
    """Each frame begins where it is met first, and ends where it is met again."""
    open_: list[Frame] = []
    for frame in marks:
        if frame in open_:
            open_.remove(frame)
            tape.left(frame)
        else:
            open_.append(frame)
            tape.entered(frame, silent=False)


def spelled(steps: list[StepBack]) -> str:
    names = [("begin " if s.begins else "end ") + s.frame.call.name + "".join(f" {b}!" for b in s.over) for s in steps]
    return " · ".join(names)


def test_calls_in_turn() -> None:
    tape = Tape()
    a, b, c = frames((0,), (1,), (2,))
    run(tape, a, a, b, b, c, c)
    assert spelled(list(tape.to(c))) == "begin c"
    assert spelled(list(tape.to(c))) == "", "it has begun"
    assert spelled(list(tape.to(b))) == "end c 2! · begin b"
    assert spelled(list(tape.rest())) == "end b 1! · begin a · end a 0!"


def test_a_call_that_the_backward_does_not_come_to_is_passed_in_its_place() -> None:
    tape = Tape()
    a, b, c = frames((0,), (1,), (2,))
    run(tape, a, a, b, b, c, c)
    assert spelled(list(tape.to(a))) == "begin c · end c 2! · begin b · end b 1! · begin a"


def test_a_call_around_others() -> None:
    tape = Tape()
    a, b, c = frames((0,), (1,), (2,))
    run(tape, a, b, b, c, c, a)
    assert spelled(list(tape.to(c))) == "begin a · begin c", "what is around it begins first, needed or not"
    assert spelled(list(tape.to(a))) == ""
    assert spelled(list(tape.rest())) == "end c 2! · begin b · end b 1! · end a 0!"


def test_a_bucket_has_its_turn_behind_the_first_call_that_used_it() -> None:
    tape = Tape()
    a, b, c = frames((0, 1), (1,), (0,))
    run(tape, a, a, b, b, c, c)
    assert spelled(list(tape.rest())) == "begin c · end c · begin b · end b · begin a · end a 1! 0!"


def test_a_graph_that_runs_twice_has_the_same_way() -> None:
    tape = Tape()
    a, b = frames((0,), (1,))
    run(tape, a, a, b, b)
    ways = []
    for _ in range(2):
        tape.begin_backward()
        ways.append(spelled(list(tape.rest())))
    assert ways == ["begin b · end b 1! · begin a · end a 0!"] * 2


def test_the_call_of_a_name_is_the_one_that_is_open_or_else_the_last() -> None:
    tape = Tape()
    one, other = frames((0,), (0,))
    other.call = one.call
    run(tape, one, one, other, other)
    assert tape.last("a") is other
    list(tape.to(other))
    assert tape.last("a") is other
    assert spelled(list(tape.past(other))) == "end a"
    assert tape.last("a") is one
    assert tape.last("z") is None
    assert spelled(list(tape.past(one))) == "", "it has not begun"


@pytest.mark.parametrize("together", [False, True])
def test_what_a_checkpoint_runs_again(together: bool) -> None:
    """One call alone is on its way back then; of several, none is before the last has run again."""
    tape = Tape()
    a, b, c = frames((0,), (1,), (2,))

    def ran(x: torch.Tensor, *calls: Frame) -> torch.Tensor:
        for each in calls:
            tape.entered(each, silent=False)
            x = x.sin()
            tape.left(each)
        return x

    x = torch.ones(2, requires_grad=True)
    for calls in [(a, b)] if together else [(a,), (b,)]:
        x = checkpoint(ran, x, *calls, use_reentrant=False)
    run(tape, c, c)
    assert a.saves and b.saves and not c.saves, "what runs again will keep something"
    if together:
        assert spelled(list(tape.to_recomputation(a))) == "begin c · end c 2!"
        assert spelled(list(tape.to(b))) == "begin b"
    else:
        assert spelled(list(tape.to_recomputation(b))) == "begin c · end c 2! · begin b"
        assert spelled(list(tape.to_recomputation(a))) == "end b 1! · begin a"


def test_a_call_without_a_graph_marks_where_it_runs_again() -> None:
    """As in a reentrant checkpoint: what it runs then is on the tape by itself."""
    tape = Tape()
    around, inside, behind = frames((0,), (1,), (2,))
    tape.entered(around, silent=False)
    tape.entered(inside, silent=True)
    tape.left(inside)
    tape.left(around)
    run(tape, behind, behind)
    assert spelled(list(tape.to_recomputation(inside))) == "begin c · end c 2! · begin a"
    (again,) = frames((1,))
    run(tape, again, again)
    assert spelled(list(tape.rest())) == "begin a · end a · begin b · end b 1! · end a 0!"


def test_a_trained_call_behind_another_is_taken_for_needed() -> None:
    """Whether its input has a gradient may differ between ranks and steps; the first one's has none."""
    tape = Tape()
    a, b, c = frames((0,), (1,), (2,))
    a.trains = b.trains = True
    run(tape, a, a, b, b, c, c)
    assert (a.saves, b.saves, c.saves) == (False, True, False)
    list(tape.rest())
    (d,) = frames((3,))
    d.trains = True
    run(tape, d, d)
    assert not d.saves, "the next forward begins anew"

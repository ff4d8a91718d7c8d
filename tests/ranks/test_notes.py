"""Notes of single ranks become what all ranks know."""

from __future__ import annotations

from zeroweave.ranks.signals import Notes


def test_a_note_is_taken_once_by_whom_it_is_for() -> None:
    one, other = Notes(("a", "b", "c")), Notes(("a", "b", "c"))
    one.note("b")
    other.note("c")
    assert (one.flags, other.flags) == (b"\0\1\0", b"\0\0\1")
    for each in (one, other):
        each.agree(b"\0\1\1")
        assert each.flags == b"\0\0\0"
        assert each.take(("a", "c")) == {"c"} and not each.take(("a", "c"))
        assert each.take(("b",)) == {"b"} and not each.take(("a", "b", "c"))


def test_what_comes_behind_the_agreement_is_noted_anew() -> None:
    notes = Notes(("a",))
    notes.note("a")
    notes.agree(notes.flags)
    notes.note("a")
    assert notes.take(("a",)) == {"a"} and notes.flags == b"\1"

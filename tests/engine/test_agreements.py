"""What an engine agrees on with the other ranks, and when it asks nobody."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from tests.support.schedules import stack, stack_facts
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import LocalTransport
from zeroweave.comm.wrappers import Wire
from zeroweave.engine.agreements import Agreements
from zeroweave.engine.guard import Progress
from zeroweave.errors import AgreementError
from zeroweave.optim.options import Options
from zeroweave.ranks.control import Agreement, Control, Decision
from zeroweave.ranks.signals import NUMBERS, Notes
from zeroweave.schedule import compile_schedule

SCHEDULE = compile_schedule(stack(2, 1, 1), stack_facts(2, 1))
OPTIONS: Options = {"'lr' of param_groups[0]": (0.1,)}


class Others:
    """Stands in for the control group; `told` is what this rank told the others."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.differ = False

    def agree(self, mine: Agreement, place: str = "agreement") -> Decision:
        self.told.append((place, mine))
        if self.differ:
            raise AgreementError("the ranks issued different collectives")
        return Decision(mine.flags, adopt=False)


def agreements() -> tuple[Agreements, Others, Wire, Ledger]:
    others, ledger, device = Others(), Ledger(2, 0), torch.device("cpu")
    transport = Wire(LocalTransport(device), device)
    made = Agreements(cast(Control, others), transport, Progress(ledger, step=4), Notes(NUMBERS))
    return made, others, transport, ledger


def test_each_backward_is_compared_by_its_number_in_the_step() -> None:
    made, others, _, ledger = agreements()
    ledger.record("all_gather", 0, "float32", 64)
    made.backward()
    first = Agreement(4, 1, ledger.hash, b"")
    ledger.record("reduce_scatter", 0, "float32", 64)
    made.backward()
    second = Agreement(4, 2, ledger.hash, b"")
    assert first.hash != second.hash
    assert others.told == [("the check after backward 1", first), ("the check after backward 2", second)]
    others.told.clear()
    found = made.step(b"\1", b"", b"", SCHEDULE, lambda: OPTIONS)
    assert found.decision == Decision(b"\1\0\0", adopt=False)
    [(place, mine)] = others.told
    assert place == "agreement" and mine.options
    told = Agreement(4, 2, ledger.hash, b"\1\0\0", SCHEDULE.fingerprint, SCHEDULE.shape, options=mine.options)
    assert mine == told
    made.backward()
    assert others.told[-1][0] == "the check after backward 1"


def test_what_is_not_finite_is_told() -> None:
    made, others, _, _ = agreements()
    made.step(b"", b"", b"", SCHEDULE, lambda: OPTIONS, lambda: True)
    assert others.told[-1][1].nonfinite


def test_an_error_says_after_which_backward_it_was_found() -> None:
    made, others, _, _ = agreements()
    made.backward()
    others.differ = True
    with pytest.raises(AgreementError) as caught:
        made.backward()
    assert caught.value.__notes__ == ["found in the check after backward 2 of step 4"]


def test_while_communication_is_skipped_nobody_is_asked() -> None:
    made, others, transport, _ = agreements()
    transport.skip(True)
    made.backward()
    found = made.step(b"\1\0", b"\1", b"\0", SCHEDULE, lambda: OPTIONS, lambda: True)
    assert found.decision == Decision(b"\1\0\1\0", adopt=True, nonfinite=True, record=SCHEDULE.shape)
    assert (found.had_gradient, found.late, found.viewed) == (b"\1\0", b"\1", b"\0")
    assert others.told == []
    transport.skip(False)
    made.backward()
    assert [place for place, _ in others.told] == ["the check after backward 1"]

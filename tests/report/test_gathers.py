"""What ranks that measure gathers tell the doctor."""

from __future__ import annotations

import pytest

from zeroweave.comm.choose import Choice, Cost
from zeroweave.report.doctor import gathers
from zeroweave.report.gathers import found, told

CHOICE = Choice("measured", 1 << 20, (Cost(1 << 20, 0.1, 0.2),), (Cost(1 << 20, 0.01, 0.2),))


@pytest.mark.parametrize("choice", [CHOICE, Choice("NCCL is too old")])
def test_what_is_told_is_found(choice: Choice) -> None:
    assert found(f"a warning\n{told(choice)}\n", "") == choice


def test_what_went_wrong_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"^the ranks told nothing$"):
        found("", "")
    with pytest.raises(RuntimeError, match="ValueError: no GPU"):
        found("", "Traceback\n  ValueError: no GPU\nclosing")


def test_a_machine_without_gpus_gathers_by_kernel() -> None:
    (check,) = gathers()
    assert check.state == "ok" and check.detail.startswith("by kernel")

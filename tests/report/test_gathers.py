"""What ranks that measure gathers tell the doctor."""

from __future__ import annotations

import pytest

from zeroweave.comm.choose import Choice, Cost
from zeroweave.report.doctor import by_size, gathers
from zeroweave.report.gathers import found, told

CHOICE = Choice("measured", 1 << 20, (Cost(1 << 20, 0.1, 0.2, 0.15),), (Cost(1 << 20, 0.01, 0.2, 0.18),))


@pytest.mark.parametrize("choice", [CHOICE, Choice("NCCL is too old")])
def test_what_is_told_is_found(choice: Choice) -> None:
    assert found(f"a warning\n{told(choice)}\n", "") == choice


def test_what_went_wrong_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"^the ranks told nothing$"):
        found("", "")
    with pytest.raises(RuntimeError, match="ValueError: no GPU"):
        found("", "Traceback\n  ValueError: no GPU\nclosing")


def test_each_size_is_a_line() -> None:
    (line,) = by_size(CHOICE)
    assert line.name == "gathers of 1 MiB" and line.detail == (
        "kernel 150.000 ms alone, 200.000 beside matmuls, which lose 100.000; "
        "copy engine 180.000 ms alone, 200.000 beside matmuls, which lose 10.000"
    )


def test_a_machine_without_gpus_gathers_by_kernel() -> None:
    (check,) = gathers()
    assert check.state == "ok" and check.detail.startswith("by kernel")

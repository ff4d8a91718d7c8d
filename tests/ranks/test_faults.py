"""What `ZEROWEAVE_FAULT` may say, and where and when a fault strikes."""

from __future__ import annotations

import time

import pytest

from zeroweave.errors import ConfigError
from zeroweave.ranks.faults import Fault, Faults


def asked(text: str, **more: str) -> Fault | None:
    return Fault.asked_for({"ZEROWEAVE_FAULT": text, **more})


def test_what_is_asked_for() -> None:
    assert asked("kill:rank=1,step=7,phase=backward") == Fault("kill", "backward", 1, 7)
    assert asked("hang:phase=forward") == Fault("hang", "forward")
    assert asked("slow:phase=publish,rank=0,seconds=0.5") == Fault("slow", "publish", 0, None, 0.5)
    assert Fault.asked_for({}) is None and asked("") is None


def test_a_job_that_was_started_again_has_no_fault() -> None:
    assert asked("kill:phase=update", TORCHELASTIC_RESTART_COUNT="0") is not None
    assert asked("kill:phase=update", TORCHELASTIC_RESTART_COUNT="1") is None
    with pytest.raises(ConfigError, match="one of the actions"):
        asked("die:phase=update", TORCHELASTIC_RESTART_COUNT="1")


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill:backward",
        "die:phase=forward",
        "kill:phase=forward,node=1",
        "kill:phase=forward,phase=update",
        "kill:rank=1",
        "kill:phase=sleep",
        "kill:phase=forward,rank=one",
        "kill:phase=forward,step=-1",
        "slow:phase=forward",
        "kill:phase=forward,seconds=1",
        "slow:phase=forward,seconds=nan",
        "slow:phase=forward,seconds=soon",
        "kill:phase=publish,rank=1",
    ],
)
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"ZEROWEAVE_FAULT must be like .*: one of the actions kill, hang, slow"
    ) as told:
        asked(text)
    assert str(told.value).endswith(f", not {text!r}")


def test_a_rank_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="no rank 2 among 2"):
        Faults(Fault("hang", "forward", rank=2), 0, 2, lambda: 0)


class Work:
    """Something whose method begins a phase."""

    name = "work"

    def begin(self, what: str) -> str:
        """Begins."""
        return f"began {what}"


def seconds_of(faults: Faults, target: Work) -> float:
    begin = time.monotonic()
    assert target.begin("it") == "began it" and target.name == "work"
    return time.monotonic() - begin


@pytest.mark.parametrize("fault", [None, Fault("hang", "update"), Fault("hang", "forward", rank=1)])
def test_nothing_stands_where_no_fault_is_to_strike(fault: Fault | None) -> None:
    work = Work()
    faults = Faults(fault, 0, 2, lambda: 0)
    assert faults.before(work, "begin", "forward") is work
    assert list(faults.amid([1, 2], "forward")) == [1, 2]


def test_it_strikes_once_in_its_step() -> None:
    step = 2
    faults = Faults(Fault("slow", "forward", step=3, seconds=0.2), 0, 2, lambda: step)
    work = faults.before(Work(), "begin", "forward")
    assert seconds_of(faults, work) < 0.2
    step = 3
    assert seconds_of(faults, work) >= 0.2
    assert seconds_of(faults, work) < 0.2


def test_without_a_step_it_strikes_in_each() -> None:
    step = 0
    faults = Faults(Fault("slow", "write", seconds=0.1), 1, 2, lambda: step)
    for step in (0, 1):  # noqa: B007
        begin = time.monotonic()
        items = faults.amid(iter("abc"), "write")
        assert next(items) == "a" and time.monotonic() - begin < 0.1
        assert list(items) == ["b", "c"] and time.monotonic() - begin >= 0.1
    step = 2
    begin = time.monotonic()
    assert list(faults.amid([], "write")) == [] and time.monotonic() - begin >= 0.1

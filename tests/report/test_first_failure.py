"""Which rank `zeroweave run` calls the first to fail, where torchrun has seen another process end first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from zeroweave.report.launch import cause, first_line


def noted(logs: Path, attempt: int, local_rank: int, message: str, when: int) -> Path:
    """What torchrun's `record` leaves of an exception."""
    path = logs / "none_x" / f"attempt_{attempt}" / str(local_rank) / "error.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": str(when)}}}))
    os.utime(path, (when, when))
    return path


def seen(exit_code: int, error_file: Path) -> ChildFailedError:
    """torchrun's error on the second machine of two with four ranks each: the process of rank 4 was gone first."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file=str(error_file))
    return ChildFailedError("train.py", {4: failure})


def test_who_noted_an_exception_comes_before_whom_the_alarm_ended(tmp_path: Path) -> None:
    noted(tmp_path, 0, 3, "ValueError: the attempt before", 10)
    noted(tmp_path, 1, 1, "ValueError: later", 40)
    noted(tmp_path, 1, 2, "ValueError: bad batch", 30)
    noted(tmp_path, 1, 3, "RankFailure: about rank 6", 20)
    assert cause(seen(1, tmp_path / "none"), tmp_path) == (6, 1, ": ValueError: bad batch")


def test_a_reason_or_a_signal_of_its_own_is_the_cause(tmp_path: Path) -> None:
    noted(tmp_path, 0, 1, "ValueError: earlier", 10)
    own = noted(tmp_path, 0, 0, "KeyError: own", 20)
    assert cause(seen(1, own), tmp_path) == (4, 1, ": KeyError: own")
    assert cause(seen(-9, tmp_path / "none"), tmp_path) == (4, -9, "")


def test_without_notes_it_is_who_was_gone_first(tmp_path: Path) -> None:
    assert cause(seen(3, tmp_path / "none"), tmp_path) == (4, 3, "")


def test_who_left_by_an_exit_code_comes_before_whom_that_made_fail(tmp_path: Path) -> None:
    missing = noted(tmp_path, 0, 0, "AgreementError: rank 5 did not arrive", 10)
    noted(tmp_path, 0, 1, "SystemExit: 7", 20)
    assert cause(seen(1, missing), tmp_path) == (5, 7, "")


@pytest.mark.parametrize(
    ("reason", "code"), [("ValueError: own", 1), ("AgreementError: rank 5 left", 1), ("KeyboardInterrupt: ", 130)]
)
@pytest.mark.parametrize("ended", [-15, -9, -6])
def test_who_noted_an_exception_has_its_code_though_torchrun_ended_it(
    tmp_path: Path, ended: int, reason: str, code: int
) -> None:
    assert cause(seen(ended, noted(tmp_path, 0, 0, reason, 10)), tmp_path) == (4, code, f": {reason.rstrip()}")


def test_whom_torchrun_ended_behind_another_is_not_the_cause() -> None:
    alarmed = ProcessFailure(local_rank=1, pid=2, exitcode=1, error_file="none")
    ended = ProcessFailure(local_rank=0, pid=1, exitcode=-15, error_file="none")
    assert cause(ChildFailedError("train.py", {1: alarmed, 0: ended}), Path("none")) == (1, 1, "")


def test_sigterm_at_a_rank_keeps_its_code(tmp_path: Path) -> None:
    assert cause(seen(-15, tmp_path / "none"), tmp_path) == (4, -15, "")
    saved = noted(tmp_path, 0, 0, "SystemExit: 143", 10)
    assert cause(seen(-15, saved), tmp_path) == (4, 143, "")


def test_the_reason_of_a_compiler_is_in_its_second_line() -> None:
    text = "BackendCompilerFailed: backend='inductor' raised:\nOSError: [Errno 28] No space left on device\n\nSet X"
    reason = ": BackendCompilerFailed: backend='inductor' raised: OSError: [Errno 28] No space left on device"
    assert first_line({"message": text}) == reason
    assert first_line("ValueError: one\ntwo") == ": ValueError: one"


def test_whom_others_have_waited_for_is_not_told_as_whom_torchrun_killed(tmp_path: Path) -> None:
    why = "RankFailure: rank 5 is ended by its alarm: rank 4 did not come to collective 9 within the deadline of 5 s"
    noted(tmp_path, 0, 1, why, 10)
    assert cause(seen(-9, tmp_path / "none"), tmp_path) == (5, 1, f": {why}")
    noted(tmp_path, 0, 2, "ValueError: own", 20)
    assert cause(seen(-9, tmp_path / "none"), tmp_path) == (6, 1, ": ValueError: own")


def test_who_lost_a_rank_that_was_killed_is_not_the_cause(tmp_path: Path) -> None:
    noted(tmp_path, 0, 1, "RankFailure: the ranks lost each other at 'agreement of step 3'", 10)
    assert cause(seen(-9, tmp_path / "none"), tmp_path) == (4, -9, "")

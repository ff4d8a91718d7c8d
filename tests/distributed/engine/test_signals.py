"""SIGTERM and SIGUSR1 at any rank save on all ranks at the end of the step, and change nothing of the run."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import zeroweave as zw
from tests.distributed.engine.stopping import EVERY, STEPS, train
from tests.support.harness import Pool, Pools
from tests.support.marks import daily, matrix

NUMBERS = (signal.SIGTERM, signal.SIGUSR1)
AT = 4
"""Behind so many steps the signal comes, in the middle of the next one."""
EQUAL = daily(("stage", "mode"), [(3, "eager")], [(1, "eager"), (2, "aot_eager"), (3, "aot_eager")])


def latest(folder: Path) -> str:
    return str(json.loads((folder / "latest").read_text())["tag"])


def send(number: int, engine: zw.Engine) -> None:
    if engine.rank == 1 and engine.global_steps == AT:
        os.kill(os.getpid(), number)


def signalled(folder: Path, stage: int, mode: str, number: int) -> Any:
    """What the run came to, and the exit code with which it was ended, if it was."""
    before = [signal.getsignal(each) for each in NUMBERS]
    try:
        return train(None, stage, mode, step_begins=partial(send, number), save_on_signal=str(folder))
    except SystemExit as stop:
        return stop.code
    finally:
        for each, handler in zip(NUMBERS, before, strict=True):
            signal.signal(each, handler)


@EQUAL
def test_sigterm_saves_and_ends_all_ranks(
    stage: int, mode: str, tmp_path: Path, pools: Pools, disposable: Callable[[int], Pool]
) -> None:
    ends = disposable(2)  # the engine is not left, and so the ranks are of no further use
    assert ends.run(signalled, tmp_path, stage, mode, signal.SIGTERM) == [143, 143]
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == [latest(tmp_path)] == ["step-00000005"]
    whole, resumed = (pools(2).run(train, folder, stage, mode) for folder in (None, tmp_path))
    for ours, theirs in zip(resumed, whole, strict=True):
        losses = {step: loss for step, loss in theirs["losses"].items() if step > AT + 1}
        assert ours == theirs | {"losses": losses}


@EQUAL
def test_sigusr1_saves_and_training_goes_on(stage: int, mode: str, tmp_path: Path, pools: Pools) -> None:
    whole = pools(2).run(train, None, stage, mode)
    assert pools(2).run(signalled, tmp_path, stage, mode, signal.SIGUSR1) == whole
    assert latest(tmp_path) == "step-00000005"


def handlers(folder: Path) -> list[bool]:
    before = [signal.getsignal(each) for each in NUMBERS]
    model = torch.nn.Linear(4, 4)
    seen = []
    for wanted in (None, str(folder)):
        engine = zw.initialize(model, config={"compile": {"enabled": False}, "checkpoint": {"save_on_signal": wanted}})
        seen.append([signal.getsignal(each) for each in NUMBERS] == before)
        engine.destroy()
        seen.append([signal.getsignal(each) for each in NUMBERS] == before)
    return seen


def test_handlers_are_there_only_if_asked_and_only_as_long_as_the_engine(tmp_path: Path, pools: Pools) -> None:
    assert pools(2).run(handlers, tmp_path) == [[True, True, False, True]] * 2


def not_in_the_main_thread(folder: Path) -> str:
    said = []

    def other() -> None:
        try:
            zw.initialize(torch.nn.Linear(4, 4), config={"checkpoint": {"save_on_signal": str(folder)}})
        except zw.errors.EngineError as error:
            said.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return said[0]


def test_only_the_main_thread_may_ask(tmp_path: Path, pools: Pools) -> None:
    assert all("in the main thread" in said for said in pools(2).run(not_in_the_main_thread, tmp_path))


@contextmanager
def shower(seed: int) -> Iterator[Callable[[], int]]:
    """SIGUSR1 comes again and again at any moment; how often until now."""
    over, count, chance = threading.Event(), 0, Random(seed)

    def pour() -> None:
        nonlocal count
        while not over.wait(chance.uniform(0, 0.03)):
            os.kill(os.getpid(), signal.SIGUSR1)
            count += 1

    thread = threading.Thread(target=pour)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)  # of those that come before and after the engine
    thread.start()
    try:
        yield lambda: count
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def in_a_shower(folder: Path, stage: int, mode: str, seed: int) -> tuple[dict[str, Any], int]:
    """A right run that saves by itself as well, with signals at every moment and ranks that are late."""
    rank = torch.distributed.get_rank()
    phase = ("forward", "backward", "update", "write")[seed % 4]
    fault = f"slow:rank={seed % 2},phase={phase},seconds=0.05"
    with shower(seed + rank) as count:
        return train(folder, stage, mode, fault, save_on_signal=str(folder), keep_last=3), count()


@pytest.mark.parametrize("seed", [*map(matrix, range(12))])
def test_signals_at_any_moment_change_nothing(seed: int, tmp_path: Path, pools: Pools) -> None:
    stage, mode = seed % 3 + 1, "eager" if seed % 4 else "aot_eager"
    whole = pools(2).run(train, None, stage, mode)
    ran = pools(2).run(in_a_shower, tmp_path, stage, mode, seed)
    assert [result for result, _ in ran] == whole
    assert all(count >= 3 for _, count in ran)
    tags = sorted(each.name for each in tmp_path.iterdir() if each.is_dir() and not each.name.startswith("."))
    assert latest(tmp_path) in tags and len(tags) == 3 and STEPS % EVERY

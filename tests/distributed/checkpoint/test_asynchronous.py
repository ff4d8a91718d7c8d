"""Saves that go on while steps run: what is saved is what there was, and what fails is told to all ranks."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroweave as zw
from tests.distributed.checkpoint.runs import batch, differing, everything, gone_on, make, saved_and_gone_on, train
from tests.distributed.checkpoint.test_failing import files_end_at
from tests.distributed.checkpoint.test_resume import AFTER, BEFORE, KINDS
from tests.distributed.checkpoint.test_resume import STAGES as STAGES_OF
from tests.support.harness import Pools
from tests.support.marks import daily
from zeroweave.ranks.faults import VARIABLE
from zeroweave.schedule import Stage

SLOW = ("none", "write", "stage")
"""The phase in which the writer is slow, so that the steps overtake it, or in which the steps are."""


@contextmanager
def slow(phase: str, seconds: float = 0.2) -> Iterator[None]:
    """Engines that are made inside are slow in this phase."""
    if phase != "none":
        os.environ[VARIABLE] = f"slow:phase={phase},seconds={seconds}"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def resume(folder: Path, kind: tuple[str, str, dict[str, Any]], stage: int, mode: str, phase: str) -> list[str]:
    """Saves beside the steps that follow, and goes on from there in a new engine; what differs."""
    model, optimizer, more = kind
    with slow(phase):
        engine = make(model, optimizer, stage, mode, 0, **more)
    run = saved_and_gone_on(folder, BEFORE, AFTER, engine, asynchronous=True)
    again = gone_on(folder, BEFORE, AFTER, make(model, optimizer, stage, mode, 1, **more))
    return differing(dict(zip("ab", run, strict=True)), dict(zip("ab", again, strict=True)))


@daily(
    ("stage", "mode", "phase"),
    [(1, "eager", "none")],
    [
        (stage, mode, phase)
        for stage in (1, 2, 3)
        for mode in ("eager", "aot_eager")
        for phase in SLOW
        if (stage, mode, phase) != (1, "eager", "none")
    ],
)
def test_what_is_saved_is_what_there_was(pools: Pools, tmp_path: Path, stage: int, mode: str, phase: str) -> None:
    assert pools(2).run(resume, tmp_path, ("noisy", "adamw", {}), stage, mode, phase) == [[], []]


@pytest.mark.matrix
@pytest.mark.parametrize("phase", ["none", "write"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_kinds(pools: Pools, tmp_path: Path, kind: str, phase: str) -> None:
    stage, _ = STAGES_OF.get(kind, (3, 1))
    assert pools(2).run(resume, tmp_path, KINDS[kind], stage, "eager", phase) == [[], []]


def same_files(folder: Path, stage: int) -> list[str]:
    with make("odd", "adamw", stage, "eager", 0) as engine:
        train(engine, 2)
        engine.save(folder, "here")
        engine.save(folder, "beside", asynchronous=True)
        train(engine, 3)
    return [name for name in os.listdir(folder / "here") if name.endswith("safetensors")]


@daily("stage", [3], [1, 2])
def test_files_are_those_of_an_ordinary_save(pools: Pools, tmp_path: Path, stage: int) -> None:
    for name in pools(2).run(same_files, tmp_path, stage)[0]:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "beside" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["beside", "here", "latest"]


def set_parameter(engine: zw.Engine) -> None:
    engine.set_full("enter.weight", torch.zeros(33, 6))


def set_state(engine: zw.Engine) -> None:
    engine.set_full("enter.weight", torch.ones(33, 6), "exp_avg")


def set_locally(engine: zw.Engine) -> None:
    engine.set_local("leave.bias", torch.ones(engine.fragment("leave.bias").numel))
    engine.set_local("leave.bias", torch.ones(engine.fragment("leave.bias").numel), "exp_avg_sq")


def load_state_dict(engine: zw.Engine) -> None:
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in engine.state_dict().items()})


def write_parameters(engine: zw.Engine) -> None:
    with engine.full_parameters() as parameters, torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(2.0)


def load_optimizer(engine: zw.Engine) -> None:
    assert engine.optimizer is not None
    state = engine.optimizer.state_dict()
    for held in state["state"].values():
        held["exp_avg"].fill_(3.0)
    engine.optimizer.load_state_dict(state)


def load(engine: zw.Engine) -> None:
    engine.load(engine.config.checkpoint.save_on_signal or "", "first")


def profile(engine: zw.Engine) -> None:
    with engine.profiling():
        train(engine, 2)


def write_buffers(engine: zw.Engine) -> None:
    with torch.no_grad():
        for buffer in engine.module.buffers():
            buffer.fill_(5)


WRITES: list[Callable[[zw.Engine], None]] = [
    set_parameter,
    set_state,
    set_locally,
    load_state_dict,
    write_parameters,
    load_optimizer,
    load,
    profile,
    write_buffers,
]


def written(folder: Path, write: Callable[[zw.Engine], None], offload: str) -> list[str]:
    """Values are written before the writer has come to them."""
    more = {"offload": {"optimizer": offload}, "checkpoint": {"save_on_signal": str(folder)}}
    with slow("write"), make("noisy", "adamw", 3, "eager", 0, **more) as engine:
        train(engine, 1)
        engine.save(folder, "first")
        train(engine, 1)
        expected = everything(engine)
        engine.save(folder, "second", asynchronous=True)
        write(engine)
        train(engine, 1)
    with make("noisy", "adamw", 3, "eager", 1) as engine:
        engine.load(folder, "second")
        return differing(expected, everything(engine))


@daily(
    ("write", "offload"),
    [(set_parameter, "none"), (set_state, "all"), (write_parameters, "none")],
    [(write, offload) for write in WRITES for offload in ("none", "all")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_users_write_does_not_get_into_it(
    pools: Pools, tmp_path: Path, write: Callable[[zw.Engine], None], offload: str
) -> None:
    assert pools(2).run(written, tmp_path, write, offload) == [[], []]


def full(folder: Path, stage: int, rank: int, nbytes: int, how: str) -> list[str]:
    """A save fails on one rank: some later call says so on all; training goes on."""
    with make("noisy", "adamw", stage, "eager", 0) as engine:
        train(engine, 2)
        engine.save(folder, "one")
        names = sorted(p.name for p in folder.rglob("*"))
        told = rf"'two' was not written to .*: rank {rank}: File too large"
        with files_end_at(nbytes if engine.rank == rank else None):
            engine.save(folder, "two", asynchronous=True)
            before = engine.global_steps
            with pytest.raises(zw.CheckpointError, match=told) as caught:
                if how == "step":
                    while engine.global_steps < before + 200:
                        train(engine, 1)
                elif how == "save":
                    engine.save(folder, "three")
                else:
                    engine.load(folder, "one")
        assert not hasattr(caught.value, "__notes__")
        assert sorted(p.name for p in folder.rglob("*")) == names
        expected = {"losses": train(engine, 1), "end": everything(engine)}
        engine.save(folder, "two", asynchronous=True)
        train(engine, 1)
        engine.load(folder, "two")
        found = differing(expected["end"], everything(engine), "loaded")
        assert not [each for each in threading.enumerate() if each.name == "zeroweave checkpoint"]
        return found


@daily(
    ("stage", "rank", "nbytes", "how"),
    [(3, 1, 500, "step"), (2, 0, 0, "save")],
    [(stage, rank, 500, how) for stage in (1, 3) for rank in (0, 1) for how in ("step", "save", "load")],
)
def test_a_disk_that_is_full(pools: Pools, tmp_path: Path, stage: int, rank: int, nbytes: int, how: str) -> None:
    assert pools(2).run(full, tmp_path, stage, rank, nbytes, how) == [[], []]


def within_a_window(folder: Path) -> None:
    """The `step()` of a micro-step tells of a failure, too, and the window goes on."""
    with make("plain", "adamw", 3, "eager", 0, gradient_accumulation_steps=400) as engine:
        with files_end_at(100 if engine.rank == 1 else None):
            engine.save(folder, "a", asynchronous=True)
            engine.backward(engine(batch(engine, 0)).square().mean())
            with pytest.raises(zw.CheckpointError, match="rank 1: File too large"):
                while not engine.is_gradient_accumulation_boundary():
                    engine.step()
                    engine.backward(engine(batch(engine, 0)).square().mean())
        assert engine.global_steps == 0
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(batch(engine, 1)).square().mean())
        engine.step()
        assert engine.global_steps == 1


def test_a_window_is_told_of_a_failure_before_its_end(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(within_a_window, tmp_path)


def cannot_be_held(folder: Path) -> None:
    """What cannot be saved at all is refused at once, on all ranks."""
    with make("plain", "adamw", 1, "eager", 0) as engine:
        with pytest.raises(zw.CheckpointError, match=r"rank 0: client_state\['f'\] is a function"):
            engine.save(folder, client_state={"f": print if engine.rank else cannot_be_held}, asynchronous=True)
        train(engine, 2)
        assert not list(folder.iterdir())


def test_what_cannot_be_saved_is_refused_at_once(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(cannot_be_held, tmp_path)


def one_after_the_other(folder: Path, mode: str) -> list[Any]:
    with slow("write", 0.1), make("odd", "adamw", 3, mode, 0, checkpoint={"keep_last": 2}) as engine:
        train(engine, 3)
        departures, graphs = engine.stats.departures, engine.stats.graphs
        for _ in range(4):
            engine.save(folder, asynchronous=True)
            train(engine, 1)
        staged = [i for i in engine.executed if isinstance(i, Stage)]
        assert len(staged) == len(engine.buckets) and engine.stats.departures == departures
        assert engine.stats.graphs == graphs
        assert engine.schedule is not None and engine.schedule.facts.stage
    return sorted(p.name for p in folder.iterdir())


@daily("mode", ["aot_eager"], ["eager"])
def test_the_next_save_waits_for_the_last_and_nothing_is_compiled_again(
    pools: Pools, tmp_path: Path, mode: str
) -> None:
    assert pools(2).run(one_after_the_other, tmp_path, mode)[0] == ["latest", "step-00000005", "step-00000006"]


def dropped(folder: Path) -> list[str]:
    """An engine that is dropped while it saves takes the save with it, and its thread."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = make("plain", "adamw", 1, "eager", 0)
        engine.save(folder, "a", asynchronous=True)
        del engine
        gc.collect()
    assert not [each for each in threading.enumerate() if each.name == "zeroweave checkpoint"]
    return [str(each.message) for each in caught if each.filename == __file__]


def test_an_engine_that_is_dropped_says_what_it_did_not_finish(tmp_path: Path) -> None:
    (told,) = dropped(tmp_path)
    assert f"the checkpoint {tmp_path}/a was not finished" in told and not (tmp_path / "a").exists()

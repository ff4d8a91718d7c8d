"""What a program may do between an asynchronous save and its end: what was saved is what there was, all the same."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroweave as zw
from tests.distributed.checkpoint.runs import batch, differing, everything, make, train
from tests.distributed.checkpoint.test_asynchronous import slow
from tests.distributed.checkpoint.test_failing import files_end_at
from tests.support.harness import Pools
from tests.support.marks import daily
from zeroweave.schedule import Schedule, Stage


def loss_of(engine: zw.Engine) -> torch.Tensor:
    loss: torch.Tensor = engine(batch(engine, 0)).square().mean()
    return loss


def saved_as_it_was(folder: Path, engine: zw.Engine, then: Callable[[zw.Engine], None]) -> list[str]:
    """Saves beside what `then` does; how a new engine that loads it differs from what there was."""
    with engine:
        expected = everything(engine)
        engine.save(folder, "a", asynchronous=True)
        then(engine)
    with make("noisy", "adamw", 3, "eager", 1) as engine:
        engine.load(folder, "a")
        return differing(expected, everything(engine))


def change_directory(engine: zw.Engine) -> None:
    os.chdir("elsewhere")
    train(engine, 2)
    os.chdir("..")


def test_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with slow("write"):
        engine = make("noisy", "adamw", 3, "eager", 0)
    train(engine, 1)
    assert saved_as_it_was(Path("runs"), engine, change_directory) == []


@pytest.mark.parametrize("steps", [0, 2])
def test_between_a_forward_and_its_backward(tmp_path: Path, steps: int) -> None:
    with slow("write"):
        engine = make("noisy", "adamw", 3, "eager", 0)
    train(engine, steps)
    loss = loss_of(engine)

    def go_on(engine: zw.Engine) -> None:
        engine.backward(loss)
        engine.step()
        train(engine, 1)

    assert saved_as_it_was(tmp_path, engine, go_on) == []


def test_a_pass_of_the_users_own_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing(schedule: Schedule) -> Schedule:
        raise RuntimeError("mine" if any(isinstance(i, Stage) for i in schedule.instructions) else "other")

    engine = make("plain", "adamw", 3, "eager", 0)
    train(engine, 1)
    engine.register_pass(failing)
    with pytest.raises(RuntimeError, match="mine"):
        engine.save(tmp_path, asynchronous=True)
    assert not list(tmp_path.iterdir())


def reading(engine: zw.Engine) -> None:
    assert all(parameter.isfinite().all() for parameter in engine.module.parameters())
    train(engine, 2)


def recording(engine: zw.Engine) -> None:
    with engine.record() as recorded:
        train(engine, 2)
    with engine.compile_schedule(recorded.operations, prefetch_ahead=2).execute():
        train(engine, 2)
        engine.save(Path(engine.config.checkpoint.save_on_signal or ""), "b", asynchronous=True)
        train(engine, 1)


def rescheduling(engine: zw.Engine) -> None:
    engine.reschedule(prefetch=2)
    train(engine, 1)
    engine.zero_grad()
    loss_of(engine).backward()
    engine.zero_grad()
    train(engine, 1)


def trying_out(engine: zw.Engine) -> None:
    with engine.profiling():
        loss_of(engine)
    train(engine, 1)


def departing(engine: zw.Engine) -> None:
    for _ in range(2):
        with torch.no_grad():
            loss_of(engine)
        engine.backward(loss_of(engine) + loss_of(engine))
        engine.step()
        train(engine, 1)


def beside(folder: Path, then: Callable[[zw.Engine], None], stage: int, steps: int, more: dict[str, Any]) -> list[str]:
    with slow("write"):
        engine = make("noisy", "adamw", stage, "eager", 0, checkpoint={"save_on_signal": str(folder)}, **more)
    train(engine, steps)
    return saved_as_it_was(folder, engine, then)


@daily(
    ("then", "stage", "steps", "more"),
    [(reading, 2, 2, {"gather_after_step": True}), (trying_out, 3, 1, {})],
    [
        (reading, 1, 0, {"gather_after_step": True}),
        (recording, 3, 3, {}),
        (recording, 1, 3, {}),
        (rescheduling, 3, 2, {}),
        (departing, 3, 2, {}),
        (departing, 2, 0, {}),
        (trying_out, 1, 2, {"offload": {"optimizer": "all"}}),
    ],
)
def test_what_engines_do(
    pools: Pools, tmp_path: Path, then: Callable[[zw.Engine], None], stage: int, steps: int, more: dict[str, Any]
) -> None:
    assert pools(2).run(beside, tmp_path, then, stage, steps, more) == [[], []]


def save_that_fails(engine: zw.Engine, folder: Path) -> None:
    with files_end_at(500):
        engine.save(folder, "broken", asynchronous=True)
        for thread in threading.enumerate():
            if thread.name == "zeroweave checkpoint":
                thread.join()


def test_an_engine_whose_save_has_failed_ends_all_the_same(tmp_path: Path) -> None:
    with (
        pytest.raises(zw.CheckpointError, match="rank 0: File too large"),
        make("noisy", "adamw", 3, "eager", 0) as engine,
    ):
        train(engine, 1)
        expected = engine.full("enter.weight")
        save_that_fails(engine, tmp_path)
    assert torch.equal(engine.module.get_parameter("enter.weight"), expected)
    with pytest.raises(zw.EngineError, match="destroyed"):
        train(engine, 1)


@daily("number", [signal.SIGTERM], [signal.SIGUSR1])
def test_a_save_that_a_signal_asks_for_is_made_although_another_has_failed(
    tmp_path: Path, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    with make("noisy", "adamw", 3, "eager", 0, checkpoint={"save_on_signal": str(tmp_path)}) as engine:
        train(engine, 1)
        save_that_fails(engine, tmp_path)
        os.kill(os.getpid(), number)
        with pytest.raises(SystemExit if number == signal.SIGTERM else zw.CheckpointError):
            train(engine, 1)
        expected = everything(engine)
        engine.load(tmp_path)
        assert engine.global_steps == 2 and differing(expected, everything(engine)) == []
    assert "'broken' was not written" in caplog.text and "saved as" in caplog.text


def test_what_the_program_itself_writes_into_the_optimizer_is_no_silent_part_of_it(tmp_path: Path) -> None:
    with make("noisy", "adamw", 3, "eager", 0) as engine:
        train(engine, 1)
        engine.save(tmp_path, asynchronous=True)
        assert engine.optimizer is not None
        for state in engine.optimizer.state.values():
            state["exp_avg"].zero_()
        with pytest.raises(zw.CheckpointError, match="not by the engine"):
            train(engine, 1)
            engine.save(tmp_path, "next")  # waits for it, if the step was too early
        assert not list(tmp_path.iterdir())
        train(engine, 1)


def taken_meanwhile(folder: Path) -> None:
    """Another program gives its own checkpoint the tag, before this one is published."""
    with slow("write"):
        engine = make("noisy", "adamw", 3, "eager", 0)
    with engine:
        train(engine, 1)
        engine.save(folder, "a", asynchronous=True)
        if engine.rank == 0:
            (folder / "a").mkdir()
            (folder / "a" / "theirs").touch()
        told = r"'a' was not written to .*: rank 0: .* cannot be published: Directory not empty"
        with pytest.raises(zw.CheckpointError, match=told) as caught:
            train(engine, 1)
            engine.save(folder, "b")
        assert not hasattr(caught.value, "__notes__")
        assert [str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))] == ["a", "a/theirs"]
        train(engine, 1)
        engine.save(folder, "b", asynchronous=True)


@pytest.mark.matrix
def test_a_tag_that_another_program_takes_meanwhile(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(taken_meanwhile, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "latest"]


@pytest.mark.matrix
def test_a_parameter_that_is_read_in_pieces(tmp_path: Path) -> None:
    model = torch.nn.Linear(4096, 4111)
    with slow("write"), zw.initialize(model, torch.optim.AdamW(model.parameters()), {"stage": 3}) as engine:
        for saved in ("first", "here", "beside"):
            engine.train_step(torch.ones(2, 4096), lambda output, _: output.square().mean())
            if saved == "here":
                engine.save(tmp_path, saved)
                engine.save(tmp_path, "beside", asynchronous=True)
    file = "rank-00000.safetensors"
    assert (tmp_path / "here" / file).read_bytes() == (tmp_path / "beside" / file).read_bytes()


@pytest.mark.matrix
def test_engines_that_save_at_once(tmp_path: Path) -> None:
    with slow("write", 0.05):
        engines = [make("noisy", "adamw", stage, "eager", stage) for stage in (1, 2, 3)]
    expected = []
    for engine in engines:
        train(engine, 1)
        expected.append(everything(engine))
        engine.save(tmp_path, f"stage-{engine.config.stage}", asynchronous=True)
    for _ in range(3):
        for engine in engines:
            train(engine, 1)
    for engine in engines:
        engine.destroy()
    with make("noisy", "adamw", 3, "eager", 0) as engine:
        for stage, state in enumerate(expected, 1):
            engine.load(tmp_path, f"stage-{stage}")
            assert differing(state["values"], everything(engine)["values"]) == []

"""Accelerate scripts under an engine train what they train with Accelerate's own DistributedDataParallel."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zeroweave as zw
from tests.support.harness import Pools

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from tests.distributed.integrations import accelerating as runs

pytestmark = pytest.mark.matrix

STEPS = 20


def distance(
    stage: int, mode: str, accumulate: int, precision: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """How far a run of `STEPS` optimizer steps is from the library's own. `precision`: of zeroweave's config."""
    micro_steps = STEPS * accumulate  # an epoch's last accumulation is shorter, so that there are some steps more
    expected = runs.trained(runs.library, micro_steps, accumulate=accumulate, **more)
    made = runs.zeroweave(stage, mode, precision=precision or {})
    found = runs.trained(made, micro_steps, accumulate=accumulate, **more)
    weights = [float((value - expected["weights"][name]).abs().max()) for name, value in found["weights"].items()]
    pairs = zip(found["norms"] + found["losses"], expected["norms"] + expected["losses"], strict=True)
    return {
        "names": list(found["weights"]) == list(expected["weights"]),
        "weights": max(weights, default=0.0),
        "rest": max(abs(a - b) for a, b in pairs),
        "steps": (found["steps"], expected["steps"]),
        "lr": found["lr"] == expected["lr"],
    }


ROWS = [(stage, mode, n) for stage in (1, 2, 3) for mode in ("eager", "aot_eager") for n in (1, 3)]


@pytest.mark.parametrize(("stage", "mode", "accumulate"), ROWS)
def test_a_script_trains_what_it_trains_with_ddp(pools: Pools, stage: int, mode: str, accumulate: int) -> None:
    for rank, told in enumerate(pools(2).run(distance, stage, mode, accumulate)):
        assert told["weights"] <= 1e-6 and told["rest"] <= 1e-5 and told["lr"], told
        assert told["names"] == (rank == 0)
        assert told["steps"][0] == told["steps"][1] >= STEPS


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("plugin", [{"sync_each_batch": True}, {"sync_with_dataloader": False}])
def test_ways_to_accumulate(pools: Pools, stage: int, plugin: dict[str, bool]) -> None:
    for told in pools(2).run(accumulated, stage, plugin):
        assert told["weights"] <= 1e-6 and told["rest"] <= 1e-5 and told["lr"], told


def accumulated(stage: int, plugin: dict[str, bool]) -> dict[str, Any]:
    return distance(stage, "eager", 3, plugin=plugin)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_scaled_and_gradients_unscaled_once(pools: Pools, stage: int) -> None:
    """A loss scale changes nothing, neither weights nor the norms that clipping returns."""
    for told in pools(2).run(distance, stage, "eager", 3, {"loss_scale": 1024.0}):
        assert told["weights"] <= 1e-6 and told["rest"] <= 1e-5, told


def mixed(stage: int, mode: str) -> tuple[dict[str, Any], float, torch.dtype]:
    """Also how far bfloat16 is from float32, and the dtype of outputs."""
    plain = runs.trained(runs.library, STEPS)["losses"]
    mixed = runs.trained(runs.zeroweave(stage, mode), STEPS, mixed_precision="bf16")["losses"]
    with runs.environment():
        run = runs.Run(runs.zeroweave(stage, mode), mixed_precision="bf16")
        dtype = run.model(torch.ones(1, runs.WIDTH)).dtype
    return (
        distance(stage, mode, 1, mixed_precision="bf16"),
        max(abs(a - b) for a, b in zip(plain, mixed, strict=True)),
        dtype,
    )


@pytest.mark.parametrize(("stage", "mode"), [(2, "eager"), (3, "aot_eager"), (1, "eager")])
def test_mixed_precision_is_accelerates(pools: Pools, stage: int, mode: str) -> None:
    for told, apart, dtype in pools(2).run(mixed, stage, mode):
        assert told["weights"] <= 1e-6 and told["rest"] <= 1e-5, told
        assert apart > 1e-4 and dtype == torch.float32


# ---------------------------------------------------------------------- save and resume
AT, ALL = 6, 25


def stopped_and_not(folder: Path, stages: tuple[int, int], accumulate: int) -> dict[str, bool]:
    """A run that was saved and went on, and one that loaded it, at another stage perhaps."""
    with runs.environment():
        run = runs.Run(runs.zeroweave(stages[0]), accumulate, dropout=0.2)
        run.train(ALL, between={AT: lambda: run.accelerator.save_state(folder)})
        expected = runs.facts(run)
    found = runs.resumed(runs.zeroweave(stages[1]), folder, AT, ALL - AT, accumulate=accumulate, dropout=0.2)
    return {
        "weights": all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items()),
        "losses": found["losses"] == expected["losses"][AT:],
        "norms": found["norms"] == expected["norms"][-len(found["norms"]) :],
        "lr": found["lr"] == expected["lr"],
    }


@pytest.mark.parametrize(
    ("stages", "accumulate"),
    [((3, 3), 3), ((1, 1), 3), ((2, 2), 3), ((3, 1), 1), ((1, 2), 1)],
)
def test_a_run_goes_on_bit_by_bit(pools: Pools, tmp_path: Path, stages: tuple[int, int], accumulate: int) -> None:
    """Behind 6 micro-steps, which is the end of a window of 3; dropout and the schedule included."""
    for told in pools(2).run(stopped_and_not, tmp_path, stages, accumulate):
        assert all(told.values()), told


def saved_alone(folder: Path) -> dict[str, torch.Tensor]:
    with runs.environment():
        run = runs.Run(runs.zeroweave(2), accumulate=3)
        run.train(4)
        (folder / "zeroweave").mkdir()
        with pytest.raises(zw.EngineError, match=r"save_state\(\) in the middle of an accumulation"):
            run.accelerator.save_state(folder)
        assert (folder / "zeroweave").exists(), "what an earlier call has left is removed by one that saves only"
        run.train(2)
        run.accelerator.save_state(folder)
        return run.weights()


def loaded(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    with runs.environment():
        run = runs.Run(runs.zeroweave(3), accumulate=3)
        run.accelerator.load_state(folder)
        return run.accelerator.step, run.weights()


def test_more_ranks_go_on_with_the_same_micro_step(pools: Pools, tmp_path: Path) -> None:
    saved = saved_alone(tmp_path)
    (step, weights), (other_step, _) = pools(2).run(loaded, tmp_path)
    assert step == other_step == 6
    assert all(torch.equal(weights[name], value) for name, value in saved.items())


def saved_again(folder: Path) -> list[Any]:
    """Into one folder twice, and into numbered ones; what is loaded is what was saved last."""
    told: list[Any] = []
    with runs.environment():
        run = runs.Run(runs.zeroweave(3))
        for _ in range(2):
            run.train(2)
            run.accelerator.save_state(folder / "one")
        weights = run.weights()
        run.train(1)
        run.accelerator.load_state(folder / "one")
        told += [torch.equal(value, weights[name]) for name, value in run.weights().items()]
    told.append(len(list((folder / "one" / "zeroweave").glob("step-*"))))
    naming = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    with runs.environment():
        run = runs.Run(runs.zeroweave(3), project_config=naming)
        for _ in range(3):
            run.train(1)
            run.accelerator.save_state()
        weights = run.weights()
        run.train(1)
        run.accelerator.load_state()
        told += [torch.equal(value, weights[name]) for name, value in run.weights().items()]
    return [*told, sorted(path.name for path in (folder / "checkpoints").iterdir())]


def test_folders_are_accelerates(pools: Pools, tmp_path: Path) -> None:
    first, second = pools(2).run(saved_again, tmp_path)
    assert first == [True] * 10 + [1] + [True] * 10 + [["checkpoint_1", "checkpoint_2"]]
    assert second == [1, ["checkpoint_1", "checkpoint_2"]]


def torn(folder: Path) -> tuple[str, bool]:
    """A save that ended before the engine's checkpoint was there."""
    with runs.environment():
        run = runs.Run(runs.zeroweave(3))
        run.train(2)
        run.accelerator.save_state(folder)
        run.accelerator.wait_for_everyone()
        if run.accelerator.is_main_process:
            shutil.rmtree(folder / "zeroweave")
        run.accelerator.wait_for_everyone()
        run.train(2)
        before = run.weights(), run.schedule.get_last_lr(), torch.get_rng_state()
        try:
            run.accelerator.load_state(folder)
        except zw.CheckpointError as error:
            same = all(torch.equal(value, before[0][name]) for name, value in run.weights().items())
            same = same and before[1] == run.schedule.get_last_lr() and torch.equal(before[2], torch.get_rng_state())
            return str(error), same and len(run.accelerator._models) == 1
    return "", False


def test_a_state_without_its_engine_is_refused_and_changes_nothing(pools: Pools, tmp_path: Path) -> None:
    for message, same in pools(2).run(torn, tmp_path):
        assert "has no checkpoint of an engine" in message and same, message


# ---------------------------------------------------------------------- other loops
def by_hand(make: Callable[..., Accelerator], way: str) -> dict[str, torch.Tensor]:
    """Loops without `accumulate`."""
    with runs.environment():
        run = runs.Run(make)
        accelerator, model, optimizer = run.accelerator, run.model, run.optimizer
        for index, batch in enumerate(run.loader):
            if way == "zero_grad first":
                optimizer.zero_grad()
            if way == "no_sync" and index % 2 == 0:
                with accelerator.no_sync(model):
                    accelerator.backward(model(batch).square().mean() / 2)
                continue
            accelerator.backward(model(batch).square().mean() / 2, retain_graph=way == "dropped")
            if way.startswith("dropped") and index % 3 == 0:
                (model if way == "dropped by the model" else optimizer).zero_grad()
                continue
            if way == "counted" and index % 2 == 0:
                continue
            optimizer.step()
            run.schedule.step()
            optimizer.zero_grad()
        return run.weights()


def distance_by_hand(stage: int, way: str) -> float:
    expected, found = by_hand(runs.library, way), by_hand(runs.zeroweave(stage), way)
    return max((float((value - expected[name]).abs().max()) for name, value in found.items()), default=0.0)


NAMED = ("zero_grad first", "no_sync", "counted", "dropped", "dropped by the model")
WAYS = [(stage, way) for way in NAMED for stage in (1, 2, 3)]


@pytest.mark.parametrize(("stage", "way"), WAYS)
def test_loops_without_accumulate(pools: Pools, stage: int, way: str) -> None:
    assert max(pools(2).run(distance_by_hand, stage, way)) <= 1e-6


def with_plain_backwards(make: Callable[..., Accelerator]) -> dict[str, torch.Tensor]:
    """`loss.backward()` divides nothing, and zero_grad() inside of `accumulate` waits for its end."""
    with runs.environment():
        run = runs.Run(make, accumulate=2)
        for batch in run.loader:
            with run.accelerator.accumulate(run.model):
                run.model(batch).square().mean().backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
        return run.weights()


def distance_of_plain_backwards(stage: int) -> float:
    expected, found = with_plain_backwards(runs.library), with_plain_backwards(runs.zeroweave(stage))
    return max((float((value - expected[name]).abs().max()) for name, value in found.items()), default=0.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plain_backwards(pools: Pools, stage: int) -> None:
    assert max(pools(2).run(distance_of_plain_backwards, stage)) <= 1e-6


# ---------------------------------------------------------------------- models
def kept(folder: Path) -> dict[str, Any]:
    with runs.environment():
        run = runs.Run(runs.zeroweave(3))
        run.train(3)
        accelerator, weights = run.accelerator, run.weights()
        accelerator.save_model(run.model, folder / "model")
        accelerator.wait_for_everyone()
        other = torch.nn.Linear(2, 2)
        frozen = accelerator.prepare(runs.Model().requires_grad_(False))  # a second model, for evaluation
        with torch.no_grad():
            seen = accelerator.gather_for_metrics(frozen(torch.full((1, runs.WIDTH), float(accelerator.process_index))))
        plain = runs.Model()
        plain.load_state_dict(load_file(folder / "model" / "model.safetensors"))
        told = {
            "unwrapped": type(accelerator.unwrap_model(run.model)) is runs.Model,
            "saved": all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
            if weights
            else True,
            "wrapped": set(accelerator.get_state_dict(run.model, unwrap=False))
            == {f"module.{name}" for name in weights},
            "gathered": tuple(seen.shape) == (2, runs.WIDTH),
            "other": accelerator.unwrap_model(other) is other,
        }
        accelerator.save_state(folder / "state")
        told["both saved"] = {"zeroweave", "zeroweave_1"} <= {path.name for path in (folder / "state").iterdir()}
        accelerator.load_state(folder / "state")
        accelerator.free_memory()
        told["freed"] = accelerator._models == []
        del run, frozen
        again = runs.Run(runs.zeroweave(2))
        again.train(2)
        told["again"] = again.accelerator.engine.global_steps == 2
        return told


def test_models_are_saved_unwrapped_and_evaluated(pools: Pools, tmp_path: Path) -> None:
    for told in pools(2).run(kept, tmp_path):
        assert all(told.values()), told


def skipping() -> tuple[bool, bool, bool]:
    with runs.environment():
        run = runs.Run(runs.zeroweave(3, on_nonfinite="skip"))
        before = run.schedule.scheduler.last_epoch
        loss = run.model(torch.ones(1, runs.WIDTH)).square().mean()
        run.accelerator.backward(loss * (float("inf") if run.accelerator.is_main_process else 1.0))
        run.optimizer.step()
        run.schedule.step()
        skipped = run.accelerator.optimizer_step_was_skipped
        moved = run.schedule.scheduler.last_epoch != before
        run.train(1)
        return skipped, moved, run.accelerator.optimizer_step_was_skipped


def test_a_skipped_step_does_not_move_the_schedule(pools: Pools) -> None:
    assert pools(2).run(skipping) == [(True, False, False)] * 2

"""A run that is saved and loaded goes on with the bits that it would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroweave as zw
from tests.distributed.checkpoint.runs import OPTIMIZERS, differing, everything, gone_on, make, saved_and_gone_on, train
from tests.support.harness import Pools
from tests.support.marks import MODES, daily, slow

BEFORE, AFTER = 3, 3
HALF = {"precision": {"params": "float16", "initial_loss_scale": 2.0**20, "loss_scale_window": 2}}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "odd": ("odd", "adamw", {}),
    "tiny buckets": ("odd", "groups", {"bucket": {"bytes": 600}}),
    "bfloat16": ("odd", "adamw", {"precision": {"params": "bfloat16"}}),
    "compact": ("odd", "groups", {"precision": {"params": "bfloat16", "optimizer": "compact"}}),
    "compact, offloaded": (
        "odd",
        "groups",
        {"precision": {"params": "bfloat16", "optimizer": "compact"}, "offload": {"optimizer": "all"}},
    ),
    "float16": ("plain", "adamw", HALF),
    "autocast": ("plain", "adamw", {"precision": {"autocast": "bfloat16"}}),
    "offloaded optimizer": ("odd", "adamw", {"offload": {"optimizer": "all"}}),
    "offloaded parameters": ("odd", "momentum", {"offload": {"params": True}}),
    "all offloaded": ("odd", "adamw", {"offload": {"params": True, "optimizer": "all"}}),
    "clipping": ("plain", "momentum", {"gradient_clipping": 0.01}),
    "accumulation": ("noisy", "adamw", {"gradient_accumulation_steps": 2}),
    "offloaded muon": ("plain", "muon", {"offload": {"optimizer": "all"}}),
    "float16 muon": ("plain", "muon", HALF),
    "gathered after the step": ("odd", "adamw", {"gather_after_step": True}),
    **{f"optimizer {name}": ("plain", name, {}) for name in OPTIMIZERS if name not in ("adamw", "groups")},
}

STAGES = {
    "offloaded parameters": (3, 3),
    "all offloaded": (3, 3),
    "gathered after the step": (2, 1),
    "accumulation": (3, 3),  # stage 1 adds gradients up before it reduces them, in another order
}
"""Of kinds that not every stage has, or not with the same bits: where it is saved, and where it is loaded."""
DAILY = ("odd", "compact", "float16", "offloaded optimizer")


def resume(folder: Path, kind: tuple[str, str, dict[str, Any]], stage: int, mode: str, other: int) -> list[str]:
    """Saves at one stage, goes on there and, in new engines, at that stage and another; what differs."""
    model, optimizer, more = kind
    run = saved_and_gone_on(folder, BEFORE, AFTER, make(model, optimizer, stage, mode, 0, **more))
    found = []
    for loading in dict.fromkeys((stage, other)):
        again = gone_on(folder, BEFORE, AFTER, make(model, optimizer, loading, mode, 1, **more))
        found += differing(dict(zip("ab", run, strict=True)), dict(zip("ab", again, strict=True)), f"stage {loading}")
    return found


@slow("3-aot_eager")
@daily(
    ("stage", "mode"),
    [(3, "aot_eager"), (1, "eager")],
    [(1, "aot_eager"), (2, "eager"), (2, "aot_eager"), (3, "eager")],
)
def test_dropout_and_batch_norm(pools: Pools, tmp_path: Path, stage: int, mode: str) -> None:
    kind = ("noisy", "adamw", {})
    assert pools(2).run(resume, tmp_path, kind, stage, mode, stage % 3 + 1) == [[], []]


@slow("odd", "compact", "offloaded optimizer")
@daily("kind", DAILY, [kind for kind in KINDS if kind not in DAILY])
def test_kinds(pools: Pools, tmp_path: Path, kind: str) -> None:
    stage, other = STAGES.get(kind, (3, 1))
    assert pools(2).run(resume, tmp_path, KINDS[kind], stage, "eager", other) == [[], []]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in STAGES])
def test_kinds_at_other_stages(pools: Pools, tmp_path: Path, kind: str, stage: int) -> None:
    assert pools(2).run(resume, tmp_path, KINDS[kind], stage, "aot_eager", 3) == [[], []]


def trained_already(folder: Path, stage: int, mode: str, more: dict[str, Any]) -> list[str]:
    """Goes back with the engine itself, and with one that has trained something else."""
    with make("noisy", "adamw", stage, mode, 0, **more) as engine:
        train(engine, 2)
        engine.save(folder)
        run = {"saved": everything(engine), "losses": train(engine, 3), "end": everything(engine)}
        engine.load(folder)
        again = {"saved": everything(engine), "losses": train(engine, 3), "end": everything(engine)}
        found = differing(run, again, "itself")
    with make("noisy", "adamw", stage, mode, 1, **more) as engine:
        train(engine, 4)
        engine.load(folder)
        again = {"saved": everything(engine), "losses": train(engine, 3), "end": everything(engine)}
        return found + differing(run, again, "another")


MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "gathered": {"gather_after_step": True},
    "offloaded": {"offload": {"optimizer": "all"}},
    "all offloaded": {"offload": {"optimizer": "all", "params": True}},
}


@slow("3-aot_eager-offloaded")
@daily(
    ("stage", "mode", "more"),
    [(3, "aot_eager", "offloaded")],
    [
        *((stage, mode, more) for stage in (1, 2) for mode in MODES for more in ("plain", "gathered", "offloaded")),
        *((3, mode, more) for mode in MODES for more in ("plain", "all offloaded")),
    ],
)
def test_engines_that_have_trained(pools: Pools, tmp_path: Path, stage: int, mode: str, more: str) -> None:
    assert pools(2).run(trained_already, tmp_path, stage, mode, MORE[more]) == [[], []]


def one_left(folder: Path, optimizer: str) -> list[str]:
    with make("left", optimizer, 3, "eager", 0) as engine:
        mine = engine.local("many")
        assert mine is not None and mine.numel() == (96, 1)[engine.rank]
    return resume(folder, ("left", optimizer, {}), 3, "eager", 1)


@pytest.mark.parametrize("optimizer", ["adamw", "counting"])
def test_a_fragment_of_one_element_beside_a_counter_of_its_shape(pools: Pools, tmp_path: Path, optimizer: str) -> None:
    """What the optimizer keeps of other fragments tells them apart."""
    assert pools(2).run(one_left, tmp_path, optimizer) == [[], []]


def without_optimizer(folder: Path) -> list[str]:
    with make("odd", "adamw", 3, "eager", 0) as engine:
        train(engine, 2)
        engine.save(folder / "with")
        expected = engine.state_dict()
    with make("odd", None, 2, "eager", 1) as engine:
        engine.load(folder / "with")
        found = differing(expected, engine.state_dict())
        assert engine.global_steps == 2
        engine.save(folder / "without")
    with make("odd", "adamw", 1, "eager", 2) as engine:
        with pytest.raises(zw.CheckpointError, match="it has no optimizer's state"):
            engine.load(folder / "without")
        engine.load(folder / "without", strict=False)
        return found + differing(expected, engine.state_dict())


def test_engines_without_an_optimizer(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(without_optimizer, tmp_path) == [[], []]


def before_the_first_step(folder: Path) -> list[str]:
    with make("plain", "adamw", 3, "eager", 0) as engine:
        engine.save(folder)
        expected = everything(engine)
        train(engine, 2)
        engine.load(folder)
        return differing(expected, everything(engine))


def test_nothing_is_kept_of_steps_behind_the_checkpoint(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(before_the_first_step, tmp_path) == [[], []]


def test_alone(tmp_path: Path) -> None:
    """Without torch.distributed."""
    state = torch.get_rng_state()
    assert resume(tmp_path, KINDS["odd"], 3, "eager", 1) == []
    torch.set_rng_state(state)

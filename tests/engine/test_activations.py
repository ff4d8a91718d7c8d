"""Saved activations that no backward uses up: freed before the optimizer step, where the config asks for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine import offloading
from tests.engine.offloading import BLOCKS, BYTES, resident, rows
from tests.support.marks import MODES, slow
from zeroweave.schedule import Free

pytestmark = pytest.mark.oldest


def engine_of(threshold: int | None, stage: int = 3, mode: str = "eager", **settings: Any) -> Any:
    return offloading.engine_of(False, mode, stage=stage, activations={"free_threshold_bytes": threshold}, **settings)


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    gc.collect()
    yield


@slow("1-aot_eager", "2-aot_eager", "3-aot_eager")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_retained_graph_is_freed_before_the_update(stage: int, mode: str) -> None:
    values, losses, left = [], [], []
    for threshold in (None, BYTES):
        before = resident()
        with engine_of(threshold, stage, mode) as engine:
            for index in range(3):  # the first step is recorded, the others follow a schedule
                loss = engine(rows(index)).pow(2).mean()
                loss.backward(retain_graph=True)
                kept = resident() - before
                freed = engine.stats.freed_activations
                engine.step()
                dropped = kept - (resident() - before)
                assert engine.stats.freed_activations - freed == dropped
                assert (dropped > 0) == (threshold is not None)
                assert engine.executed.count(Free()) == (threshold is not None)
                assert ("Free" in engine.schedule.text()) == (threshold is not None)
                left.append(kept - dropped)
                losses.append(loss.detach())
            with engine.full_parameters() as full:
                values.append({name: p.clone() for name, p in full.items()})
        del loss, engine
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))
    # The loss's own graph, outside of the engine's forward, keeps the output.
    assert min(left[:3]) >= BLOCKS * BYTES and left[3:] == [BYTES] * 3


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_leaves_nothing_to_free(mode: str) -> None:
    with engine_of(0, 3, mode) as engine:
        for index in range(3):
            loss = engine(rows(index)).pow(2).mean()
            loss.backward()
            engine.step()
        assert loss.isfinite() and engine.stats.freed_activations == 0


@pytest.mark.parametrize("mode", MODES)
def test_what_somebody_holds_stays(mode: str) -> None:
    with engine_of(0, 3, mode) as engine:
        seen: list[Tensor] = []
        for block in engine.module.blocks:
            block.register_forward_hook(lambda _, args, output: seen.extend((args[0], output[1:].detach())))
        for index in range(2):
            seen.clear()
            x = rows(index)
            y = engine(x)
            y.pow(2).mean().backward(retain_graph=True)
            copies = [tensor.detach().clone() for tensor in (x, y, *seen)]
            engine.step()
            assert engine.stats.freed_activations > 0
            assert len(copies) == 2 + 2 * BLOCKS and all(map(torch.equal, copies, (x, y, *seen)))


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_without_backward_is_freed(mode: str) -> None:
    with engine_of(BYTES, 3, mode) as engine:
        metric = engine(rows(0)).mean()
        engine.backward(engine(rows(1)).pow(2).mean())
        engine.step()
        assert engine.stats.freed_activations >= BLOCKS * BYTES and metric.isfinite()


def test_smaller_ones_stay() -> None:
    freed = []
    for threshold in (BYTES, BYTES + 1):
        with engine_of(threshold) as engine:
            loss = engine(rows(0)).pow(2).mean()
            loss.backward(retain_graph=True)
            engine.step()
            freed.append(engine.stats.freed_activations)
            del loss
    assert freed[0] > 0 and freed[1] == 0


@slow("1-aot_eager", "3-aot_eager")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_freed_inside_a_window(stage: int, mode: str) -> None:
    gradients = []
    for threshold in (None, 0):
        with engine_of(threshold, stage, mode, gradient_accumulation_steps=2) as engine:
            loss = engine(rows(0)).pow(2).mean()
            engine.backward(loss, retain_graph=True)
            engine.step()
            engine.backward(loss)
            gradients.append(engine.gradients())
            engine.step()
            assert engine.stats.freed_activations == 0
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@slow("2-aot_eager", "3-aot_eager")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_later_backward_is_refused_and_training_goes_on(stage: int, mode: str) -> None:
    with engine_of(0, stage, mode) as engine, engine_of(None, stage, mode) as other:
        loss = engine(rows(0)).pow(2).mean()
        loss.backward(retain_graph=True)
        engine.step()
        # Compiled code asks for its parameters first, which have changed.
        reason = "what it saved was freed in" if mode == "eager" else "modified since the forward, by"
        with pytest.raises(RuntimeError, match=rf"{reason}.* engine\.step\(\)"):
            loss.backward()
        engine.zero_grad()
        other.backward(other(rows(0)).pow(2).mean())
        other.step()
        for each in (engine, other):
            each.backward(each(rows(1)).pow(2).mean())
            each.step()
        with engine.full_parameters() as mine, other.full_parameters() as wanted:
            assert all(torch.equal(mine[name], wanted[name]) for name in wanted)

"""A run that is saved in the middle of a window goes on there: with the same bits, or with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import zeroweave as zw
from tests.distributed.checkpoint.runs import (
    WIDTH,
    Facts,
    Plain,
    batch,
    differing,
    distant,
    everything,
    make,
    seed_ranks,
)
from tests.support.harness import Pools
from tests.support.marks import daily
from zeroweave.checkpoint.folder import Folder

WINDOW, BEFORE, AFTER = 3, 4, 5
"""Micro-steps: of a window, up to the checkpoint, and behind it. So the second window is the one that is cut."""
TINY = {"bucket": {"bytes": 600}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("odd", {}),
    "tiny buckets": ("odd", TINY),
    "two tiny buckets": ("plain", TINY),
    "bfloat16": ("odd", {"precision": {"params": "bfloat16"}}),
    "float16": ("plain", {"precision": {"params": "float16", "initial_loss_scale": 2.0**10, "loss_scale_window": 1}}),
    "bfloat16 sums": ("odd", {"precision": {"params": "bfloat16", "accumulate": "bfloat16"}}),
    "float32 reductions": ("odd", {"precision": {"params": "bfloat16", "reduce": "float32"}}),
    "presum": ("plain", {"reduce": {"op": "predivide"}}),
    "clipping": ("noisy", {"gradient_clipping": 0.01}),
    "offloaded": ("odd", {"offload": {"optimizer": "all"}}),
}
HELD = {"plain": False, "no_sync": True}


def made(kind: str, stage: int, mode: str = "eager", seed: int = 0, **more: Any) -> zw.Engine:
    model, config = KINDS[kind]
    return make(model, "momentum", stage, mode, seed, **{"gradient_accumulation_steps": WINDOW, **config, **more})


def micro(engine: zw.Engine, count: int, held: bool) -> list[float]:
    """So many micro-steps, on from where the engine is; `held`: all but the boundaries' in `no_sync`."""
    losses = []
    for _ in range(count):
        boundary = engine.is_gradient_accumulation_boundary()
        with engine.no_sync() if held and not boundary else nullcontext():
            loss = engine(batch(engine, engine.micro_steps)).float().square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses


def end(engine: zw.Engine, held: bool) -> Facts:
    """The run at its end, with the losses up to there."""
    losses = micro(engine, AFTER, held)
    return {**everything(engine), "losses": losses}


def saved(folder: Path, kind: str, stage: int, mode: str, held: bool) -> Facts:
    """Saves in the middle of the second window; the run at its end."""
    with made(kind, stage, mode) as engine:
        seed_ranks()
        micro(engine, BEFORE, held)
        engine.save(folder)
        return end(engine, held)


def same(folder: Path, kind: str, stage: int, mode: str, held: bool) -> list[str]:
    """Whether runs that go on there come to the end of one that was never saved; and so does the one that was."""
    with made(kind, stage, mode) as engine:
        seed_ranks()
        micro(engine, BEFORE, held)
        expected = end(engine, held)
    with made(kind, stage, mode) as engine:
        seed_ranks()
        micro(engine, BEFORE, held)
        engine.save(folder)
        found = differing(expected, end(engine, held), "saved")
        engine.load(folder)
        found += differing(expected, end(engine, held), "loaded by itself")
    with made(kind, stage, mode, seed=1) as engine:
        engine.load(folder)
        assert engine.micro_steps == BEFORE and engine.global_steps == BEFORE // WINDOW
        return found + differing(expected, end(engine, held), "loaded by another")


@daily(
    ("stage", "kind", "held", "mode"),
    [(1, "float32", "plain", "eager"), (3, "bfloat16", "plain", "eager")],
    [
        *((stage, kind, held, "eager") for stage in (1, 2, 3) for kind in KINDS for held in HELD),
        *((stage, kind, held, "aot_eager") for stage in (1, 2, 3) for kind in ("clipping", "float16") for held in HELD),
    ],
)
def test_same_bits(pools: Pools, tmp_path: Path, stage: int, kind: str, held: str, mode: str) -> None:
    assert pools(2).run(same, tmp_path, kind, stage, mode, HELD[held]) == [[], []]


def run(folder: Path, kind: str, stage: int, held: bool) -> tuple[Facts, Facts]:
    """Saves; the gradients of the open window then, and the run at its end."""
    with made(kind, stage) as engine:
        micro(engine, BEFORE, held)
        engine.save(folder)
        facts = end(engine, held)
        engine.load(folder)
        return engine.gradients(), facts


def go_on(folder: Path, kind: str, stage: int, held: bool) -> tuple[Facts, Facts]:
    with made(kind, stage, seed=1) as engine:
        engine.load(folder)
        return engine.gradients(), end(engine, held)


ROUNDING = {"bfloat16": 1e-2, "float16": 1e-2, "bfloat16 sums": 4e-2}
"""Of masters behind a step, relative to the largest of each: by the dtype in which gradients add up. Else float32's."""


@daily(
    ("of", "to", "kind", "held"),
    [((2, 1), [(2, 3)], "float32", "plain")],
    [
        *(
            ((2, stage), [(1, 3), (2, stage % 3 + 1), (3, stage), (4, 1)], kind, held)
            for stage in (1, 2, 3)
            for kind in ("float32", "float16", "bfloat16", "bfloat16 sums")
            for held in HELD
        ),
        *(((world, 1), [(2, 2), (3, 1)], "tiny buckets", "plain") for world in (1, 3, 4)),
    ],
)
def test_other_worlds_and_stages(
    pools: Pools, tmp_path: Path, of: tuple[int, int], to: list[tuple[int, int]], kind: str, held: str
) -> None:
    gradients, facts = pools(of[0]).run(run, tmp_path, kind, of[1], HELD[held])[0]
    for world, stage in to:
        for loaded, later in pools(world).run(go_on, tmp_path, kind, stage, HELD[held]):
            assert distant(gradients, loaded, 1e-2 if kind == "bfloat16 sums" else 1e-6) == []
            masters = [{n: v for n, v in each["values"].items() if " " not in n} for each in (facts, later)]
            assert distant(*masters, ROUNDING.get(kind, 1e-5)) == []
            assert facts["own"]["counters"] == later["own"]["counters"]


def into(folder: Path, stage: int, precision: dict[str, Any]) -> Facts:
    with made("float16", stage, seed=1, precision=precision) as engine:
        engine.load(folder)
        return engine.gradients()


@pytest.mark.matrix
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", [{}, {"params": "float16", "loss_scale": 96.0}, {"params": "bfloat16"}], ids=str)
def test_other_loss_scales(pools: Pools, tmp_path: Path, stage: int, held: str, precision: dict[str, Any]) -> None:
    """Gradients are those of the losses, whatever these were multiplied by."""
    gradients, _ = pools(2).run(run, tmp_path, "float16", stage, HELD[held])[0]
    for loaded in pools(2).run(into, tmp_path, stage, precision):
        assert distant(gradients, loaded, 1e-6) == []


def beside(folder: Path, stage: int, held: bool, staged: bool) -> list[str]:
    """Saves beside the steps that follow; `staged`: by a schedule that an earlier such save has changed."""
    with made("float32", stage) as engine:
        seed_ranks()
        micro(engine, WINDOW, held)
        if staged:
            engine.save(folder, asynchronous=True)
        micro(engine, BEFORE - WINDOW, held)
        engine.save(folder, "there")
        engine.save(folder, "beside", asynchronous=True)
        expected = end(engine, held)
    there, other = (Folder(folder).manifest(tag) for tag in ("there", "beside"))
    assert there.files == other.files
    with made("float32", stage, seed=1) as engine:
        engine.load(folder, "beside")
        return differing(expected, end(engine, held))


@pytest.mark.matrix
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_asynchronous_saves(pools: Pools, tmp_path: Path, stage: int, held: str, staged: bool) -> None:
    assert pools(2).run(beside, tmp_path, stage, HELD[held], staged) == [[], []]


ROWS_OF_A_RANK, ALL = 3, 72


def from_data(engine: zw.Engine, sampler: zw.data.GlobalBatchSampler, count: int) -> None:
    rows = torch.randn(ALL, WIDTH, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(rows), batch_sampler=sampler)
    for _, (x,) in zip(range(count), sampler.counted(loader), strict=False):
        engine.backward(engine(x).square().mean())
        engine.step()


def global_batches(folder: Path, stage: int, steps: int, load: bool) -> tuple[Facts, Any]:
    """Windows of 24 rows: of 4 ranks in 2 micro-steps, or of 2 in 4."""
    world = int(torch.distributed.get_world_size())
    with make("plain", "momentum", stage, "eager", 0, gradient_accumulation_steps=8 // world) as engine:
        sampler = zw.data.GlobalBatchSampler(ALL, ROWS_OF_A_RANK, seed=2)
        if load:
            engine.load(folder, data=sampler)
        else:
            from_data(engine, sampler, 3)
            engine.save(folder, data=sampler)
        from_data(engine, sampler, steps)
        facts = everything(engine)["values"]
        return facts, (engine.global_steps, sampler.position, engine.is_gradient_accumulation_boundary())


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_a_window_stays_half_a_window(pools: Pools, tmp_path: Path, stage: int) -> None:
    """The second half of the global batch is cut into other micro-steps, and weighs what it did."""
    facts, place = pools(4).run(global_batches, tmp_path, stage, 1, False)[0]
    assert place == (2, 48, False)
    for later, where in pools(2).run(global_batches, tmp_path, stage, 2, True):
        assert where == place and distant(facts, later, 1e-5) == []


def late(folder: Path, stage: int) -> list[str]:
    """Gradients of a backward inside another one come when their buckets are reduced already, and wait for the next."""

    def step(engine: zw.Engine) -> None:
        x = batch(engine, engine.micro_steps).requires_grad_()

        def again(_: Tensor) -> None:
            with torch.enable_grad():
                engine.scale(engine(x.detach() * 2).square().mean()).backward()

        x.register_hook(again)
        engine.backward(engine(x).square().mean())
        engine.step()

    runs = []
    for how in ("never saved", "saved", "loaded"):
        with made("two tiny buckets", stage, seed=int(how == "loaded")) as engine:
            if how == "loaded":
                engine.load(folder)
            else:
                for _ in range(BEFORE):
                    step(engine)
            if how == "saved":
                engine.save(folder)
            for _ in range(2):
                step(engine)
            runs.append(everything(engine))
    found = []
    for there in (stage, 1):
        with made("two tiny buckets", there, seed=1) as engine:
            engine.load(folder)
            found.append(engine.gradients())
    assert distant(*found, 1e-6) == []
    names = Folder(folder).manifest().tensors
    assert {"grad/down.weight", "rank/0/grad/down.weight", "rank/1/grad/down.weight"} <= names.keys()
    return [line for other in runs[1:] for line in differing(runs[0], other)]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_are_late(pools: Pools, tmp_path: Path, stage: int) -> None:
    assert pools(2).run(late, tmp_path, stage) == [[], []]


def refusals(folder: Path) -> None:
    def message(call: Callable[[], object]) -> str:
        with pytest.raises(zw.EngineError) as caught:
            call()
        assert not hasattr(caught.value, "__notes__"), caught.value.__notes__
        return str(caught.value)

    with made("float32", 1) as engine:
        micro(engine, WINDOW, held=False)
        engine.save(folder, "between")
        loss = engine(batch(engine, 0)).square().mean()
        engine.backward(loss)
        told = message(lambda: engine.save(folder, "unstepped"))
        assert told == "[ZW402] save() between a backward and its step(): call it after step() or zero_grad()"
        engine.step()
        engine.save(folder, "open")
        with engine.no_sync():
            engine.save(folder, "in-no_sync")
        with engine.coalesce_grad_reduction():
            assert "gradients are not reduced: leave it first" in message(lambda: engine.save(folder, "coalescing"))
        assert sorted(path.name for path in folder.iterdir()) == ["between", "in-no_sync", "latest", "open"]
        assert "accumulation" not in Folder(folder).manifest("between").values
        engine.zero_grad()
        engine.load(folder, "open")
        waiting = "while gradients wait: call it after the step() that ends the window, or zero_grad()"
        assert message(lambda: engine.load(folder, "open")) == f"load() {waiting}"
        assert message(lambda: engine.export(folder / "exported")) == f"export() {waiting}"
        assert "in the middle of a window" in message(lambda: engine.profiling().__enter__())
        assert "between two optimizer steps only" in message(lambda: engine.reschedule(prefetch=2))
        engine.zero_grad()
        assert set(engine.gradients().values()) == {None}
        assert not differing({}, engine.load(folder, "between"))
    with made("float32", 1, gradient_accumulation_steps=2) as engine:
        for strict in (True, False):
            told = message(lambda strict=strict: engine.load(folder, "open", strict=strict))
            assert "it was saved behind 1 of 3 micro-steps of a window, which is no whole number of 2" in told
            assert "set gradient_accumulation_steps to 3" in told
        engine.load(folder, "between")
    with made("float32", 3, gradient_accumulation_steps=6) as engine:
        engine.load(folder, "open")
        micro(engine, 3, held=False)
        assert not engine.was_step_applied()
        micro(engine, 1, held=False)
        assert engine.was_step_applied()


def test_what_is_refused_in_a_window(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(refusals, tmp_path)


def frozen(folder: Path) -> None:
    with made("presum", 3) as engine:
        micro(engine, 1, held=False)
        engine.save(folder)
    torch.manual_seed(1)
    model = Plain()
    model.up.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"stage": 3, "compile": {"enabled": False}, "gradient_accumulation_steps": WINDOW}
    with zw.initialize(model, optimizer, config) as engine:
        with pytest.raises(zw.CheckpointError, match=r"with gradients of what is frozen: up.bias, up.weight"):
            engine.load(folder)
        engine.load(folder, strict=False)
        assert {name for name, value in engine.gradients().items() if value is not None} == {"down.bias", "down.weight"}


def test_what_is_frozen_since(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(frozen, tmp_path)


def boundaries(folder: Path) -> None:
    """A window that the program ends by itself."""
    with made("float32", 2, gradient_accumulation_steps=1) as engine:
        engine.set_gradient_accumulation_boundary(False)
        micro(engine, 2, held=False)
        engine.save(folder)
    with made("float32", 2, gradient_accumulation_steps=1) as engine:
        assert engine.is_gradient_accumulation_boundary()
        engine.load(folder)
        assert not engine.is_gradient_accumulation_boundary()
        micro(engine, 1, held=False)
        assert (engine.global_steps, engine.micro_steps) == (0, 3)
        engine.set_gradient_accumulation_boundary(True)
        micro(engine, 1, held=False)
        assert engine.global_steps == 1


def coalesced(folder: Path) -> None:
    """A window that the next step ends, since a block has reduced what came before it."""
    with made("float32", 1) as engine:
        micro(engine, 1, held=False)
        with engine.coalesce_grad_reduction():
            pass
        assert engine.is_gradient_accumulation_boundary()
        engine.save(folder)
    with made("float32", 1) as engine:
        engine.load(folder)
        micro(engine, 1, held=False)
        assert engine.global_steps == 1 and not engine.is_gradient_accumulation_boundary()


@pytest.mark.matrix
@pytest.mark.parametrize("job", [boundaries, coalesced])
def test_ends_of_windows(pools: Pools, tmp_path: Path, job: Callable[[Path], None]) -> None:
    pools(2).run(job, tmp_path)


def evaluated(folder: Path) -> None:
    """An engine without an optimizer has no window."""
    with made("float32", 2) as engine:
        micro(engine, 1, held=False)
        engine.save(folder)
    with make("odd", None, 3, "eager", 1) as engine:
        engine.load(folder)
        engine.save(folder)
        assert "accumulation" not in Folder(folder).manifest().values


def test_engines_without_an_optimizer(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(evaluated, tmp_path)

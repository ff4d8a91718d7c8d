"""Gradients that are not finite: the step is skipped, or raises, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroweave as zw
from tests.distributed.optim.low_precision import DTYPES, MLP, STAGES, adamw, loss_of, plan, rows_of, settings
from tests.support.harness import Pools
from tests.support.marks import MODES
from tests.support.reference import build, worst
from zeroweave.schedule import Settle, Update


def values(engine: zw.Engine) -> dict[str, Any]:
    """Everything that a step may change, in bits."""
    result: dict[str, Any] = {}
    for name, _ in engine.module.named_parameters():
        for what in ("param", "exp_avg", "exp_avg_sq", "step"):
            found = engine.local(name, what)
            assert found is not None
            result[f"{what} of {name}"] = found.numpy().tobytes()
    result["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    result["scheduler"] = engine.lr_scheduler.state_dict()
    result["steps"] = engine.global_steps
    return result


def one_bad_step(stage: int, mode: str, precision: str, bad_rank: int) -> tuple[list[str], list[int], float]:
    """Steps 2 and 5 are bad on one rank: names of what they changed, the counters, the difference at the end.

    The other engine never sees the bad steps.
    """
    factors = [1.0, 1.0, float("nan"), 1.0, 1.0, float("inf"), 1.0, 1.0]
    engines = []
    changed: list[str] = []
    for skipping in (True, False):
        module = build(MLP)
        optimizer = adamw(list(module.parameters()))
        config = settings(stage, mode, on_nonfinite="skip", precision=DTYPES[precision])
        with zw.initialize(module, optimizer, config, plan(optimizer)) as engine:
            for index, factor in enumerate(factors):
                if factor != 1.0 and not skipping:
                    continue
                before = values(engine) if factor != 1.0 else {}
                here = factor if dist.get_rank() == bad_rank else 1.0
                engine.backward(loss_of(engine, index, torch.float32, here))
                engine.step()
                assert engine.was_step_applied() == (factor == 1.0)
                if before:
                    changed += [name for name, value in values(engine).items() if value != before[name]]
            if skipping:
                counters = [engine.skipped_steps, engine.global_steps, engine.micro_steps]
            engines.append({name: engine.full(name) for name, _ in engine.module.named_parameters()})
    return changed, counters, worst(*engines)[0]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "mode", "precision"),
    rows_of(
        [(1, "eager", "bfloat16"), (2, "aot_eager", "float32"), (3, "aot_eager", "float16"), (3, "eager", "bfloat16")],
        STAGES,
        MODES,
        DTYPES,
    ),
)
def test_a_skipped_step_changes_nothing(pools: Pools, stage: int, mode: str, precision: str) -> None:
    outcomes = pools(2).outcomes(one_bad_step, stage, mode, precision, 1)
    for outcome in outcomes:
        assert not outcome.failed, outcome.describe()
        changed, counters, difference = outcome.value
        assert changed == [] and counters == [2, 6, 8] and difference == 0.0, (changed, counters, difference)
    told = [line for line in outcomes[0].stderr.splitlines() if "skipped" in line]
    assert ["optimizer step 2 skipped" in told[0], "optimizer step 5 skipped" in told[1], len(told)] == [True, True, 2]
    assert "2 skipped so far" in told[1] and "skipped" not in outcomes[1].stderr


def one_element(stage: int, bad_rank: int, value: float) -> list[bool]:
    """One element of one rank's shard is not finite: which steps were applied."""
    module = build(MLP)
    applied = []
    with zw.initialize(
        module, adamw(list(module.parameters())), settings(stage, "eager", on_nonfinite="skip")
    ) as engine:
        for index in range(3):
            engine.backward(loss_of(engine, index, torch.float32, 1.0))
            left = index == 1 and dist.get_rank() == bad_rank
            for name, _ in engine.module.named_parameters():
                gradient = engine.local(name, "grad")
                if left and gradient.numel():
                    gradient[-1], left = value, False
                engine.set_local(name, gradient, "grad")
            engine.step()
            applied.append(engine.was_step_applied())
    return applied


@pytest.mark.matrix
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_rank_alone_finds_it(pools: Pools, value: float) -> None:
    for stage, bad_rank in ((1, 0), (2, 1), (3, 1)):
        assert pools(2).run(one_element, stage, bad_rank, value) == [[True, False, True]] * 2


def refusing(stage: int, precision: str) -> list[str]:
    """A bad step that raises, on all ranks; then `zero_grad()`, and steps that equal those of an engine without it."""
    errors, results = [], []
    for bad in (True, False):
        module = build(MLP)
        optimizer = adamw(list(module.parameters()))
        config = settings(stage, "eager", on_nonfinite="raise", precision=DTYPES[precision])
        with zw.initialize(module, optimizer, config, plan(optimizer)) as engine:
            for index in range(4):
                if bad and index == 2:
                    here = float("nan") if dist.get_rank() == 0 else 1.0
                    engine.backward(loss_of(engine, index, torch.float32, here))
                    try:
                        engine.step()
                    except zw.NonFiniteError as error:
                        errors.append(str(error))
                    engine.zero_grad()
                engine.backward(loss_of(engine, index, torch.float32))
                engine.step()
            assert (engine.global_steps, engine.skipped_steps) == (4, 0)
            results.append({name: engine.full(name) for name, _ in engine.module.named_parameters()})
    assert worst(*results)[0] == 0.0
    return errors


@pytest.mark.parametrize(
    ("stage", "precision"), rows_of([(1, "float32"), (2, "float16"), (3, "bfloat16")], STAGES, DTYPES)
)
def test_a_step_that_raises_names_the_parameters_on_all_ranks(pools: Pools, stage: int, precision: str) -> None:
    first, second = pools(2).run(refusing, stage, precision)
    assert first == second and len(first) == 1
    assert (
        first[0].startswith("[ZW408] step 2: the gradients of 'blocks.0.mlp.down.bias', ")
        and " more are inf" in first[0]
    )
    assert "nothing was written" in first[0] and "engine.zero_grad()" in first[0]


def at_the_minimum() -> tuple[list[float], str]:
    """A dynamic scale with `on_nonfinite: raise`: skips while a lower scale might help, and then raises."""
    module = build(MLP)
    precision = {"params": "float16", "initial_loss_scale": 4.0, "min_loss_scale": 1.0}
    config = settings(2, "eager", on_nonfinite="raise", precision=precision)
    scales = []
    with zw.initialize(module, adamw(list(module.parameters())), config) as engine:
        for index in range(4):
            engine.backward(loss_of(engine, index, torch.float32, float("inf")))
            try:
                engine.step()
            except zw.NonFiniteError as error:
                engine.zero_grad()
                return scales, str(error)
            scales.append(engine.loss_scale)
    return scales, ""


def test_a_dynamic_scale_raises_at_its_minimum(pools: Pools) -> None:
    for scales, error in pools(2).run(at_the_minimum):
        assert scales == [2.0, 1.0] and error.startswith("[ZW408] step 2: the gradients of ")


def without_looking() -> tuple[bool, bool]:
    """Without `on_nonfinite` nobody looks in bfloat16, and buckets are updated as they settle; with it they wait."""
    orders = []
    for more in ({}, {"on_nonfinite": "skip"}):
        module = build(MLP)
        config = settings(2, "eager", precision={"params": "bfloat16"}, **more)
        with zw.initialize(module, adamw(list(module.parameters())), config) as engine:
            for index in range(2):
                engine.backward(loss_of(engine, index, torch.float32))
                engine.step()
            kinds = [type(i) for i in engine.executed if isinstance(i, Settle | Update)]
            orders.append(kinds.index(Update) > len(kinds) - 1 - kinds[::-1].index(Settle))
    return orders[0], orders[1]


def test_updates_wait_only_where_somebody_looks(pools: Pools) -> None:
    assert pools(2).run(without_looking) == [(False, True)] * 2

"""Steps without communication: nothing is sent, and nothing remains of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.counting import silent
from tests.support.harness import Pools
from tests.support.marks import slow
from tests.support.zoo import WIDTH, Stack, rows


class Busy(nn.Module):
    """Changes all that a forward can: running statistics, a buffer that is replaced, random numbers."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), norm(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x + F.dropout(torch.tanh(self.norm(self.linear(x))), 0.25)


class Failing(Busy):
    """Raises when told to, on all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise FloatingPointError("not a number")
        return super().forward(x)


SETTINGS: list[dict[str, Any]] = [
    {"stage": 3, "compile": {"lower": "aot_eager"}},
    {"stage": 3, "compile": {"enabled": False}, "precision": {"params": "bfloat16"}, "gradient_clipping": 1.0},
    {"stage": 2, "compile": {"lower": "aot_eager"}, "gather_after_step": True},
    {"stage": 1, "compile": {"enabled": False}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
    {
        "stage": 2,
        "compile": {"enabled": False},
        "precision": {"params": "float16", "initial_loss_scale": 16.0, "loss_scale_window": 1},
    },
]
NAMES = [
    "stage 3, aot_eager",
    "stage 3, eager, bf16",
    "stage 2, gathered after the step",
    "stage 1, accumulating",
    "stage 2, a loss scale that grows",
]


@contextmanager
def started(settings: dict[str, Any]) -> Iterator[Any]:
    torch.manual_seed(1)
    norm = nn.LayerNorm if "precision" in settings else nn.BatchNorm1d  # whose statistics are float32
    module = Stack(lambda index: Failing(norm), depth=3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with zw.initialize(module, optimizer, settings, lr_scheduler=scheduler) as engine:
        yield engine


def steps(engine: Any, count: int, first: int = 0) -> list[float]:
    losses = []
    gas = engine.config.gradient_accumulation_steps
    for index in range(first * gas, (first + count) * gas):
        x, y = rows(engine.rank, index)
        output = engine(x)
        loss = F.mse_loss(output, y.to(output.dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine: Any) -> dict[str, Any]:
    """Copies of all that steps change on this rank."""
    optimizer = engine.optimizer
    flat: dict[str, Any] = {f"shard {b}": bucket.values() for b, bucket in engine._runtime.buckets.items()}
    for index, state in enumerate(optimizer.state.values()):
        flat |= {f"state {index} {name}": value for name, value in state.items()}
    for group in optimizer.param_groups:
        flat |= {f"group {name}": value for name, value in group.items() if name != "params"}
    flat |= {f"scheduler {name}": value for name, value in engine.lr_scheduler.state_dict().items()}
    flat |= {f"buffer {name}": value for name, value in engine.module.named_buffers()}
    stats = engine.stats
    flat |= {
        "steps": (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.was_step_applied()),
        "norm": engine.get_global_grad_norm(),
        "loss scale": (engine.loss_scale, *vars(engine._step.scaler.loss_scale).values()),
        "schedule": engine.schedule,
        "executed": engine.executed,
        "calls": (stats.compiled_calls, stats.eager_calls, stats.on_demand_unshards, stats.departures),
        "traffic": stats.last_step,
        "random": torch.get_rng_state(),
    }
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in flat.items()}


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        return bool(one == other)

    return sorted(
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not same(before[name], after[name])
    )


def profile_and_train(settings: dict[str, Any]) -> None:
    """Profiles before the first step and later; each rank as many steps as it likes, as none waits for another."""
    with started(settings) as engine:
        plain = steps(engine, 4)
        with engine.full_parameters() as parameters:
            expected = {name: p.detach().clone() for name, p in parameters.items()}
    with started(settings) as engine:
        losses = []
        for first in (0, 2):
            before, count = everything(engine), 1 + engine.rank + first
            sent = sum(t.calls for t in engine.stats.total.values())
            with engine.profiling() as planned, silent():
                inside = steps(engine, count)
                assert engine.global_steps == first + count and engine.executed
                assert changed(before, everything(engine))
                if first:
                    sizes = {bucket.id: bucket.nbytes for bucket in engine.buckets}
                    scheduled = engine.schedule.collectives()
                    calls, payload = len(scheduled), sum(sizes[bucket] for _, bucket in scheduled)
                    moved = {kind: t for kind, t in planned.totals().items() if kind != "all_reduce"}
                    # Stage 3 gathers nothing twice; a window's reductions are in its schedule.
                    assert sum(t.calls for t in moved.values()) == count * calls
                    assert sum(t.payload for t in moved.values()) == count * payload
                    norms = planned.totals().get("all_reduce")
                    assert (norms.calls if norms else 0) == (count if engine.config.gradient_clipping else 0)
            assert all(torch.tensor(inside).isfinite())
            assert changed(before, everything(engine)) == []
            gathered_again = len(engine.buckets) if engine.config.gather_after_step else 0
            assert sum(t.calls for t in engine.stats.total.values()) == sent + gathered_again
            losses += steps(engine, 2, first)
        assert losses == plain
        assert engine.stats.departures == engine.stats.on_demand_unshards == 0
        with engine.full_parameters() as parameters:
            assert changed(expected, {name: p.detach() for name, p in parameters.items()}) == []


@slow(
    "stage 1, accumulating",
    "stage 2, a loss scale that grows",
    "stage 2, gathered after the step",
    "stage 3, aot_eager",
)
@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_nothing_is_sent_and_nothing_changes(pools: Pools, settings: dict[str, Any]) -> None:
    pools(2).run(profile_and_train, settings)


def gathered_values() -> None:
    """After the step the user reads the model's parameters: fake ones inside, and the real ones afterwards."""
    with started({**SETTINGS[2], "compile": {"enabled": False}}) as engine:
        steps(engine, 1)
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        with engine.profiling() as planned:
            assert not planned.count
            shown = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
            assert changed(before, shown)
        assert changed(before, {name: p.detach() for name, p in engine.module.named_parameters()}) == []


@pytest.mark.matrix
def test_parameters_that_stay_gathered_are_the_real_ones_again(pools: Pools) -> None:
    pools(2).run(gathered_values)


def broken_off() -> None:
    """Exceptions, of the script and of the engine, in the middle of a window: restored, and the engine works on."""
    with started({"stage": 3, "compile": {"enabled": False}, "gradient_accumulation_steps": 2}) as engine:
        steps(engine, 1)
        before = everything(engine)
        x, y = rows(engine.rank, 0)
        with pytest.raises(KeyError), engine.profiling():
            steps(engine, 1)
            engine.backward(F.mse_loss(engine(x), y))
            raise KeyError("enough")
        assert changed(before, everything(engine)) == []
        with pytest.raises(FloatingPointError), engine.profiling():
            engine.backward(F.mse_loss(engine(x), y))
            engine(x * torch.nan)
        assert changed(before, everything(engine)) == []
        steps(engine, 2, 1)
        assert engine.global_steps == 3 and engine.stats.departures == 0


def test_an_exception_inside_restores_as_well(pools: Pools) -> None:
    pools(2).run(broken_off)


def written() -> None:
    """A parameter is written inside the block, which leaving it refuses; the engine trains on as before."""
    settings = {"stage": 2, "compile": {"enabled": False}, "gather_after_step": True}
    with started(settings) as engine:
        plain = steps(engine, 3)
    with started(settings) as engine:
        losses = steps(engine, 2)
        before = everything(engine)
        with pytest.raises(zw.ParameterError, match="written in place"), engine.profiling():
            steps(engine, 1)
            with torch.no_grad():
                engine.module.blocks[0].linear.weight.clamp_(-0.01, 0.01)
        assert changed(before, everything(engine)) == []
        sent = engine.stats.total
        losses += steps(engine, 1, 2)
        assert losses == plain
        assert all(engine.stats.total[kind].calls > sent[kind].calls for kind in ("all_gather", "reduce_scatter"))


def raised_while_leaving() -> None:
    """An exception, and then another one from what it left behind: the engine asks for zero_grad, and works on."""
    with started({"stage": 3, "compile": {"enabled": False}}) as engine:
        steps(engine, 2)
        before = everything(engine)

        def boom(module: Any, *_: Any) -> None:
            with torch.no_grad():
                module.weight.add_(1.0)
            raise KeyError("enough")

        hook = engine.module.blocks[1].linear.register_forward_hook(boom)
        with pytest.raises((KeyError, zw.ParameterError)), engine.profiling():
            steps(engine, 1)
        hook.remove()
        assert changed(before, everything(engine)) == []
        engine.zero_grad()
        losses = steps(engine, 2, 2)
        assert engine.stats.last_step["reduce_scatter"].calls
    with started({"stage": 3, "compile": {"enabled": False}}) as engine:
        assert steps(engine, 4)[2:] == losses


@pytest.mark.parametrize("job", [written, raised_while_leaving])
def test_whatever_raises_while_it_is_left_communication_is_back(pools: Pools, job: Callable[[], None]) -> None:
    pools(2).run(job)


def refused() -> None:
    with started({"stage": 2, "compile": {"enabled": False}, "gradient_accumulation_steps": 2}) as engine:
        steps(engine, 1)
        x, y = rows(engine.rank, 0)

        def profiling_is_refused(why: str) -> None:
            with pytest.raises(zw.EngineError, match=why), engine.profiling():
                pass

        output = engine(x)
        loss = F.mse_loss(output, y.to(output.dtype))
        profiling_is_refused("in the middle of a window")
        engine.backward(loss)
        profiling_is_refused("in the middle of a window")
        engine.step()
        profiling_is_refused("in the middle of a window")  # the second micro-step is to come
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        with engine.full_parameters():
            profiling_is_refused("full_parameters")
        with engine.profiling():
            profiling_is_refused("inside `with engine.profiling")
            for call in (engine.state_dict, engine.gradients, engine.destroy, lambda: engine.load_state_dict({})):
                with pytest.raises(zw.EngineError, match="inside"):
                    call()
            with pytest.raises(zw.EngineError, match="inside"), engine.full_parameters():
                pass
        steps(engine, 1)
        assert engine.global_steps == 3


def test_what_cannot_be_is_refused(pools: Pools) -> None:
    pools(2).run(refused)

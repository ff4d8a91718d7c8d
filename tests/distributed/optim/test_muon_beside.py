"""Whole matrices beside what else an engine does: clipping, schedules, offload, skipped steps, state dicts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

import zeroweave as zw
from tests.distributed.optim.test_muon import Net, build, config, optimizers, tokens, train
from tests.support.harness import Pools
from tests.support.marks import daily

BOUND = 1e-9
"""How far weights in float64 may be from those of one process."""
STEPS = 5
Facts = dict[str, torch.Tensor]


class Own(torch.optim.Optimizer):
    """Of whole parameters of any shape: a step by the gradient over its norm, with momentum and a counted decay."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})
        for parameter in self.param_groups[0]["params"]:  # which some do, to mark their matrices
            self.state[parameter]["factor"] = 1.0 if parameter.ndim > 1 else 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                average = state.setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
                average.lerp_(parameter.grad.float(), 0.5)
                rows = average.flatten(1) if parameter.ndim > 1 else average
                update = average / rows.norm(dim=0).max()
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * state["factor"] / state["steps"])


def values(engine: zw.Engine) -> Facts:
    """Masters and states of all that is trained. Collective."""
    found: Facts = {}
    for name, parameter in engine.module.named_parameters():
        for key in ("param", "momentum_buffer", "exp_avg", "average", "steps") if parameter.requires_grad else ():
            try:
                value = engine.full(name, key)
            except zw.EngineError:  # it has none
                continue
            assert value is not None
            found[f"{name} {key}"] = value.cpu()
    return found


def weights(model: nn.Module) -> Facts:
    return {f"{name} param": p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def differing(a: Facts, b: Facts) -> list[str]:
    """Names of what differs in any bit, or that only one has."""
    same = [n for n in a.keys() & b.keys() if a[n].dtype == b[n].dtype and torch.equal(a[n], b[n])]
    return sorted((a.keys() | b.keys()) - set(same))


def distant(a: Facts, b: Facts) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not (a[name] - b[name]).abs().max() <= BOUND]


def in_one_process(
    world: int,
    steps: range = range(STEPS),
    model: Net | None = None,
    both: list[Any] | None = None,
    before: Callable[[Net, list[Any]], object] = lambda model, both: None,
    seldom: Callable[[int, int], bool] = lambda step, rank: step > 1,
) -> Net:
    """As the engine trains it; `before` each step of the optimizers."""
    model = build() if model is None else model
    both = optimizers(model) if both is None else both
    for step in steps:
        for rank in range(world):
            (model(tokens(step, 0, rank), seldom(step, rank)) / world).backward()
        before(model, both)
        for each in both:
            each.step()
            each.zero_grad()
    return model


# ---------------------------------------------------------------------- beside one process
def clipped(stage: int) -> list[str]:
    def clip(model: Net, both: list[Any]) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    model = build()
    with zw.initialize(model, optimizers(model), config(stage, gradient_clipping=0.5)) as engine:
        train(engine, range(STEPS))
        world, norm = engine.world, engine.get_global_grad_norm()
    assert norm is not None and norm > 0.5
    return distant(weights(model), weights(in_one_process(world, before=clip)))


def compiled(stage: int) -> list[str]:
    model = build()
    with zw.initialize(model, optimizers(model), config(stage, compile={"lower": "aot_eager"})) as engine:
        train(engine, range(STEPS))
        world = engine.world
        assert engine.stats.compiled_calls
    return distant(weights(model), weights(in_one_process(world)))


def scheduled(stage: int, listed: bool) -> list[str]:
    """Schedulers of each optimizer, or one of all; groups with learning rates of their own."""

    def grouped(model: Net) -> list[torch.optim.Optimizer]:
        muon, adamw = optimizers(model)
        first, *others = muon.param_groups[0]["params"]
        groups = [{"params": [first], "lr": 0.05}, {"params": others, "weight_decay": 0.3}]
        return [torch.optim.Muon(groups, lr=0.01), adamw]

    def scheduler_of(both: list[Any]) -> list[Any]:
        return [ExponentialLR(both[0], 0.5), LambdaLR(both[1], lambda step: 1.0 / (1 + step))]

    model, reference = build(), build()
    both, others = grouped(model), grouped(reference)
    given: Any = scheduler_of(both) if listed else partial(ExponentialLR, gamma=0.5)
    with zw.initialize(model, both, config(stage), lr_scheduler=given) as engine:
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.05, 0.01, 3e-3]
        train(engine, range(STEPS))
        world, rates = engine.world, engine.lr_scheduler.get_last_lr()
    theirs = scheduler_of(others) if listed else [ExponentialLR(each, 0.5) for each in others]
    for step in range(STEPS):
        in_one_process(world, range(step, step + 1), reference, others)
        for each in theirs:
            each.step()
    assert rates == [rate for each in theirs for rate in each.get_last_lr()] and rates[0] == 0.05 / 2**STEPS
    return distant(weights(model), weights(reference))


def on_some_ranks(stage: int) -> list[str]:
    """A matrix that one rank alone computes with, in some steps, and nobody in others."""

    def seldom(step: int, rank: int) -> bool:
        return step % 2 == 1 and rank == 0

    model = build()
    with zw.initialize(model, optimizers(model), config(stage)) as engine:
        for step in range(STEPS):
            engine.backward(engine(tokens(step, 0, engine.rank), seldom(step, engine.rank)))
            engine.step()
        world = engine.world
    return distant(weights(model), weights(in_one_process(world, seldom=seldom)))


def written(stage: int) -> list[str]:
    """Weights and states that are written between steps."""

    def write(model: Net, both: list[Any], step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.layers[1].up.weight.mul_(0.5)
            both[0].state[model.layers[2].down.weight]["momentum_buffer"].fill_(0.25)

    model, reference = build(), build()
    with zw.initialize(model, optimizers(model), config(stage)) as engine:
        train(engine, range(2))
        with engine.full_parameters() as full, torch.no_grad():
            full["layers.1.up.weight"].mul_(0.5)
        engine.set_full("layers.2.down.weight", torch.full((24, 52), 0.25, dtype=torch.float64), "momentum_buffer")
        train(engine, range(2, STEPS))
        world = engine.world
    others = optimizers(reference)
    for step in range(STEPS):
        write(reference, others, step)
        in_one_process(world, range(step, step + 1), reference, others)
    return distant(weights(model), weights(reference))


def given_back(stage: int) -> list[str]:
    """After `destroy` the optimizers, each with its states, go on by themselves, and into another engine."""
    model, reference = build(), build()
    both, others = optimizers(model), optimizers(reference)
    with zw.initialize(model, both, config(stage)) as engine:
        train(engine, range(3))
        world = engine.world
    in_one_process(world, range(3), reference, others)
    momenta = [held["momentum_buffer"] for held in both[0].state.values()]
    assert [tuple(each.shape) for each in momenta] == [tuple(p.shape) for p in both[0].param_groups[0]["params"]]
    for mine, theirs in zip(both, others, strict=True):
        mine.load_state_dict(mine.state_dict())
        assert mine.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    for each in (model, reference):
        in_one_process(world, range(3, 5), each, both if each is model else others)
    found = distant(weights(model), weights(reference))
    with zw.initialize(model, both, config(stage % 3 + 1)) as engine:
        train(engine, range(5, 7))
    in_one_process(world, range(5, 7), reference, others)
    return found + distant(weights(model), weights(reference))


class Small(nn.Module):
    """Matrices smaller than the world, a convolution, and one element."""

    def __init__(self) -> None:
        super().__init__()
        self.thin, self.one = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.thin(x)).square().mean() + self.conv(x.new_ones(1, 3, 4, 4) * x.mean()).square().mean()


def small(stage: int) -> list[str]:
    def made() -> Small:
        torch.manual_seed(0)
        return Small().double()

    def data(step: int, rank: int) -> torch.Tensor:
        return torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)

    model, reference = made(), made()
    with zw.initialize(model, zw.WholeMatrices(Own(model.parameters())), config(stage)) as engine:
        for step in range(STEPS):
            engine.backward(engine(data(step, engine.rank)))
            engine.step()
        world, found = engine.world, values(engine)
    plain = Own(reference.parameters())
    for step in range(STEPS):
        for rank in range(world):
            (reference(data(step, rank)) / world).backward()
        plain.step()
        plain.zero_grad()
    state = plain.state[reference.conv.weight]
    assert found["conv.weight average"].dtype == torch.float32 and found["conv.weight steps"] == state["steps"] == STEPS
    assert (found["conv.weight average"] - state["average"]).abs().max() < 1e-6
    return distant(weights(model), weights(reference))


BESIDE: dict[str, tuple[int, Callable[..., list[str]], tuple[Any, ...]]] = {
    "clipped": (2, clipped, ()),
    "compiled": (2, compiled, ()),
    "schedulers of each": (2, scheduled, (True,)),
    "a scheduler of all": (2, scheduled, (False,)),
    "written between steps": (2, written, ()),
    "given back": (2, given_back, ()),
    "small matrices": (3, small, ()),
}
TELLING = [("written between steps", 3)]


@daily(("what", "stage"), TELLING, [(what, s) for what in BESIDE for s in (1, 2, 3) if (what, s) not in TELLING])
def test_as_in_one_process(pools: Pools, what: str, stage: int) -> None:
    world, job, more = BESIDE[what]
    assert pools(world).run(job, stage, *more) == [[]] * world


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2])
def test_a_matrix_that_some_ranks_use(pools: Pools, stage: int) -> None:
    assert pools(2).run(on_some_ranks, stage) == [[], []]


# ---------------------------------------------------------------------- the same bits
def course(stage: int, dtype: torch.dtype, more: dict[str, Any], steps: int = STEPS) -> tuple[Facts, list[bool]]:
    """What a training ends with, and which steps were applied."""
    model, applied = build(dtype), []
    with zw.initialize(model, optimizers(model), config(stage, **more)) as engine:
        for step in range(steps):
            before = values(engine) if step == 4 else {}
            train(engine, range(step, step + 1))
            applied.append(engine.was_step_applied())
            assert applied[-1] or not before or differing(before, values(engine)) == []
        return values(engine), applied


HALF = {"precision": {"params": "float16", "initial_loss_scale": 2.0**17, "loss_scale_window": 2}}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "offloaded": ({}, {"offload": {"optimizer": "all"}}),
    "offloaded at times": ({}, {"offload": {"optimizer": "adaptive", "memory_budget": 20_000}}),
    "parameters offloaded": ({}, {"offload": {"optimizer": "all", "params": True}}),
    "tiny buckets": ({}, {"bucket": {"bytes": 3000}}),
    "gathered after the step": ({}, {"gather_after_step": True}),
    "fenced": ({}, {"debug": {"sync_before_reduce": True, "sync_after_reduce": True, "check_every_step": True}}),
    "overflowing": (HALF, {**HALF, "offload": {"optimizer": "all"}}),
    "bfloat16": (
        {"precision": {"params": "bfloat16"}},
        {"precision": {"params": "bfloat16"}, "bucket": {"bytes": 900}},
    ),
}
NOT_THERE = {("parameters offloaded", 1), ("parameters offloaded", 2), ("gathered after the step", 3)}
"""what these stages do not have"""
REST = [(what, s) for what in SAME for s in (1, 2, 3) if (what, s) not in NOT_THERE]


@daily(("what", "stage"), [], REST)
def test_the_same_bits(pools: Pools, what: str, stage: int) -> None:
    for found, applied in pools(2).run(beside, what, stage):
        skipped = [0, 1, 4] if what == "overflowing" else []
        assert found == [] and [step for step, done in enumerate(applied) if not done] == skipped


def beside(what: str, stage: int) -> tuple[list[str], list[bool]]:
    steps = 7 if what == "overflowing" else STEPS
    (one, applied), (other, also) = (course(stage, torch.float32, more, steps) for more in SAME[what])
    assert applied == also and any("momentum_buffer" in name for name in one)
    return differing(one, other), applied


def as_fragments(stage: int) -> list[str]:
    """AdamW that is given whole parameters, of which it needs none, with a step counter for each."""
    found = []
    for whole in (False, True):
        model = build(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with zw.initialize(model, zw.WholeMatrices(optimizer) if whole else optimizer, config(stage)) as engine:
            assert engine.optimizer is optimizer
            train(engine, range(3))
            with engine.profiling():
                train(engine, range(9, 11))
            train(engine, range(3, STEPS))
            found.append(values(engine))
    return differing(*found)


def profiled(stage: int) -> list[str]:
    """Steps that are tried out leave no trace: neither before the optimizer has states, nor later."""
    found = []
    for tried in (False, True):
        model = build(torch.float32)
        with zw.initialize(model, optimizers(model), config(stage)) as engine:
            for steps in (range(2), range(2, STEPS)):
                if tried:
                    with engine.profiling() as planned:
                        train(engine, range(9, 11))
                        assert planned.totals()["all_to_all"].calls
                train(engine, steps)
            found.append(values(engine))
            traffic = engine.stats.last_step["all_to_all"]
            assert traffic.calls == 2 * len([b for b in engine.buckets if b.trainable and "layers" in b.name]) + 2
    return differing(*found)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("job", [as_fragments, profiled])
def test_nothing_is_left_of_it(pools: Pools, job: Callable[[int], list[str]], stage: int) -> None:
    assert pools(2).run(job, stage) == [[], []]


# ---------------------------------------------------------------------- state dicts
def loaded(stages: tuple[int, int], more: dict[str, Any]) -> list[str]:
    """A training that was saved by the optimizer's own `state_dict`, and goes on in an engine of other weights."""
    model = build(torch.float32)
    with zw.initialize(model, optimizers(model), config(stages[0], **more)) as engine:
        train(engine, range(3))
        saved = engine.state_dict(), engine.optimizer.state_dict()
        train(engine, range(3, STEPS))
        expected = values(engine)
    other = build(torch.float32, seed=1)
    with zw.initialize(other, optimizers(other), config(stages[1], **more)) as engine:
        train(engine, range(20, 21))
        engine.load_state_dict(saved[0] if engine.rank == 0 else {})
        engine.optimizer.load_state_dict(saved[1] if engine.rank == 0 else {})
        train(engine, range(3, STEPS))
        trained = sum(p.requires_grad for p in other.parameters())
        assert [len(group["params"]) for group in saved[1]["param_groups"]] == [7, 11]
        assert len(saved[1]["state"]) == (0 if engine.rank else trained)
        return differing(expected, values(engine))


OFFLOAD: dict[str, Any] = {"offload": {"optimizer": "all"}}


@pytest.mark.matrix
@pytest.mark.parametrize(("stages", "more"), [((a, b), m) for a in (1, 2, 3) for b in (1, 2, 3) for m in ({}, OFFLOAD)])
def test_a_training_goes_on_with_what_was_saved(pools: Pools, stages: tuple[int, int], more: dict[str, Any]) -> None:
    assert pools(2).run(loaded, stages, more) == [[], []]

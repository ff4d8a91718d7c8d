"""Jobs that train the model of examples/moe.py with experts on different ranks, beside the unsharded one with all."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from examples.moe import EXPERTS, Expert, Mixture, Model, sentences, whole
from tests.support.counting import counted
from tests.support.marks import WITH_INDUCTOR as MODES
from tests.support.reference import Expected, Plain, judge, judge_numbers, worst

PATTERN = "*.experts.*"
CHECKED, TRAINED = 3, 3
"""Steps with a learning rate of 0, whose gradients are compared, and steps that train, before the parameters are."""


class Idle(Expert):
    """Not computed with where no token came, so that its parameters have no gradient then.

    Which gradients there are differs between ranks then, so a backward that reduces would wait for them at other places
    on other ranks: for stages 1 and 2 and windows that reduce at their end only.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) else x


def build(parallel_size: int, avoid: tuple[int, ...] = (), idle: bool = False, seed: int = 0) -> Model:
    """The model, with its share of the experts on this rank; no token goes to those of `avoid`.

    `idle`: experts that nobody sent anything to are left out.
    """
    torch.manual_seed(seed)
    model = Model(zw.expert_group(parallel_size))
    for module in model.modules():
        if isinstance(module, Expert) and idle:
            module.__class__ = Idle
        if isinstance(module, Mixture):
            for expert in avoid:
                nn.init.constant_(module.router.bias[expert : expert + 1], -30.0)
    return model


def own(values: Mapping[str, Any], parallel_size: int) -> dict[str, Any]:
    """What is this rank's of the values of a model with all experts, under this rank's names."""
    share = EXPERTS // parallel_size
    first = dist.get_rank() % parallel_size * share
    found = {}
    for name, value in values.items():
        before, mark, rest = name.partition(".experts.")
        index, _, leaf = rest.partition(".")
        if not mark:
            found[name] = value
        elif first <= int(index) < first + share:
            found[f"{before}{mark}{int(index) - first}.{leaf}"] = value
    return found


def mine(expected: Expected, parallel_size: int) -> Expected:
    return expected.map(lambda values: own(values, parallel_size))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=0.1)


def set_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if step < CHECKED else 0.05


@dataclass(frozen=True)
class Reference:
    gradients: list[Expected]
    """of the steps with a learning rate of 0, clipped"""
    norms: tuple[list[float], list[float]]
    parameters: Expected


def reference(n: int, clip: float | None, avoid: tuple[int, ...], idle: bool) -> Reference:
    """All experts on all ranks, eager, gradients averaged by all-reduce; windows of `n` batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = Plain(build(1, avoid, idle), optimizer_of)
    found: list[Expected] = []
    norms: tuple[list[float], list[float]] = [], []
    for step in range(CHECKED + TRAINED):
        for optimizer in plain.optimizers:
            set_lr(optimizer, step)
        for index in range(step * n, (step + 1) * n):
            plain.each(lambda module, data: (module(data) / n).backward(), sentences(index, rank, world))
        plain.average()
        if clip is not None:
            for net, each in zip(plain.nets, norms, strict=True):
                each.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip)))
        found.append(plain.gradients())
        plain.step()
    return Reference(found, norms, plain.values())


@dataclass(frozen=True)
class Result:
    """What `judge` says of one rank's numbers beside the reference.

    `absent`: parameters without a gradient, of each step. `reductions`: elements of a flat -> how often such a one was
    reduced in the last step, as the profiler tells; `planned`: what the engine's ledger says, beside the buckets.
    """

    gradients: list[tuple[float, str]]
    parameters: tuple[float, str]
    norms: tuple[float, str]
    smallest_norm: float
    absent: list[int]
    reductions: Counter[int]
    buckets: Counter[int]
    calls: int
    departures: int
    compiled_calls: int


def train(
    stage: int,
    mode: str,
    parallel_size: int,
    n: int = 1,
    coalesce: bool = False,
    avoid: tuple[int, ...] = (),
    idle: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Result:
    config = dict(config or {})
    expected = reference(n, config.get("gradient_clipping"), avoid, idle)
    settings = {
        "stage": stage,
        "compile": MODES[mode],
        "experts": {"parameters": [PATTERN], "parallel_size": parallel_size},
        "gradient_accumulation_steps": 1 if coalesce else n,
        "deadline_seconds": 200.0,
        **config,
    }
    module = build(parallel_size, avoid, idle)
    gradients, norms, absent = [], [], []
    with zw.initialize(module, optimizer_of(module.parameters()), settings) as engine:
        for step in range(CHECKED + TRAINED):
            set_lr(engine.optimizer, step)
            last = step == CHECKED + TRAINED - 1
            with counted() if last else contextlib.nullcontext([]) as seen:
                with engine.coalesce_grad_reduction() if coalesce else contextlib.nullcontext():
                    for index in range(step * n, (step + 1) * n):
                        loss = engine(sentences(index, engine.rank, engine.world))
                        engine.backward(loss / n if coalesce else loss)
                        if not coalesce and index + 1 < (step + 1) * n:
                            engine.step()
                if "gradient_clipping" in config:
                    norms.append(float(engine.clip_grad_norm_(config["gradient_clipping"])))
                found = engine.gradients()  # which waits for all reductions: the profiler must not end before them
            absent.append(sum(value is None for value in found.values()))
            if step < CHECKED:
                gradients.append(judge(found, mine(expected.gradients[step], parallel_size)))
            engine.step()
        reductions = Counter(numel for kind, numel in seen if kind == "reduce_scatter")
        with engine.full_parameters() as full:
            parameters = judge(full, mine(expected.parameters, parallel_size), TRAINED)
        saved = whole(engine.state_dict())
        if engine.rank == 0:
            assert list(saved) and saved.keys() == expected.parameters.exact.keys()
            parameters = max(parameters, judge(saved, expected.parameters, TRAINED))
        return Result(
            gradients,
            parameters,
            judge_numbers(norms, expected.norms),
            min(norms, default=1.0),
            absent,
            reductions,
            Counter(b.numel for b in engine.buckets if b.trainable and b.world > 1),
            engine.stats.last_step["reduce_scatter"].calls,
            engine.stats.departures,
            engine.stats.compiled_calls,
        )


def exact(op: str, parallel_size: int) -> tuple[tuple[float, str], float]:
    """fp64 gradients beside those of one process with all experts and all ranks' data; and how far w/o the divisor."""
    world = dist.get_world_size()
    dense = build(1).double()
    (sum(dense(sentences(0, rank, world)) for rank in range(world)) / world).backward()
    expected = own({name: p.grad for name, p in dense.named_parameters()}, parallel_size)
    module = build(parallel_size).double()
    settings = {"stage": 2, "reduce": {"op": op}, "compile": MODES["eager"], "deadline_seconds": 200.0}
    experts = {"parameters": [PATTERN], "parallel_size": parallel_size}
    with zw.initialize(module, optimizer_of(module.parameters()), {**settings, "experts": experts}) as engine:
        engine.backward(engine(sentences(0, engine.rank, engine.world)))
        full = {name: engine.full(name, "grad") for name in expected}
        wrong = {name: value * (parallel_size if ".experts." in name else 1) for name, value in full.items()}
        return worst(full, expected), worst(wrong, expected)[0]


class Boost(torch.autograd.Function):
    """A tensor as it is; its gradient times `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Overflowing(Expert):
    """The gradient of one weight, and of nothing else, is multiplied by `factor`."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, Boost.apply(self.up.weight, self.factor), self.up.bias)
        return self.down(nn.functional.gelu(hidden))


def overflow(stage: int) -> tuple[list[float], list[bool], list[bool], str]:
    """fp16, an expert's gradient overflows on rank 1 in the second step: scales, steps applied, values that moved.

    And once more where the loss scale cannot be lowered: what is raised then.
    """
    module = build(2)
    (expert, *_) = (m for m in module.modules() if isinstance(m, Expert))
    expert.__class__ = Overflowing
    settings = {
        "stage": stage,
        "compile": MODES["eager"],
        "experts": {"parameters": [PATTERN], "parallel_size": 2},
        "precision": {"params": "float16", "initial_loss_scale": 64.0, "min_loss_scale": 32.0},
        "on_nonfinite": "raise",
        "deadline_seconds": 200.0,
    }
    scales, applied, moved = [], [], []
    with zw.initialize(module, torch.optim.SGD(module.parameters(), lr=0.1), settings) as engine:
        before = None
        for step in range(3):
            expert.factor = float("inf") if (step, engine.rank) == (1, 1) else 1.0
            engine.backward(engine(sentences(step, engine.rank, engine.world)))
            engine.step()
            scales.append(engine.loss_scale)
            applied.append(engine.was_step_applied())
            with engine.full_parameters() as full:
                now = {name: p.detach().clone() for name, p in full.items()}
            moved.append(before is None or any(not torch.equal(now[name], before[name]) for name in now))
            before = now
        expert.factor = float("inf") if engine.rank == 1 else 1.0
        engine.backward(engine(sentences(3, engine.rank, engine.world)))
        message = ""
        try:
            engine.step()
        except zw.NonFiniteError as error:
            message = str(error)
        engine.zero_grad()
    return scales, applied, moved, message


def values(stage: int) -> dict[str, Any]:
    """What accessors, state dicts and `destroy` make of experts; see the test."""
    rank = dist.get_rank()
    module = build(2, avoid=(3,), idle=True, seed=rank)  # rank 0's and rank 1's weights are to count
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    name = "blocks.0.mixture.experts.1.up.weight"  # expert 1 on ranks 0 and 2; 3, which is idle, on ranks 1 and 3
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    settings = {"stage": stage, "compile": MODES["eager"], "deadline_seconds": 200.0}
    experts = {"parameters": [PATTERN], "parallel_size": 2}
    found: dict[str, Any] = {"start": expected}
    with zw.initialize(module, optimizer, {**settings, "experts": experts}) as engine:
        found["full"] = {each: engine.full(each) for each in expected}
        start = engine.state_dict()
        found["keys"] = list(start)
        with engine.coalesce_grad_reduction():
            engine.backward(engine(sentences(0, engine.rank, engine.world)))
        gradient = engine.full(name, "grad")
        found["gradient"] = None if gradient is None else tuple(gradient.shape)
        engine.step()
        found["moved"] = not torch.equal(engine.full(name), found["full"][name])
        try:
            engine.full(name, "exp_avg")
        except zw.EngineError as error:
            found["state"] = str(error)
        moment = engine.full("blocks.0.mixture.experts.0.up.weight", "exp_avg")
        found["moment"] = moment is not None and bool(moment.any())
        engine.load_state_dict(start)
        found["loaded"] = all(torch.equal(engine.full(each), found["full"][each]) for each in expected)
        try:
            engine.load_state_dict({each.replace("@", ":"): value for each, value in start.items()})
        except zw.ParameterError as error:
            found["refused"] = str(error)
            engine.zero_grad()
        with engine.full_parameters() as full, torch.no_grad():
            full[name].fill_(float(rank % 2))
    found["end"] = {each: p.detach() for each, p in module.named_parameters()}
    found["filled"] = bool((module.get_parameter(name) == rank % 2).all())
    return found


def profiled() -> tuple[bool, dict[str, int], dict[str, int]]:
    """Steps without communication change nothing and plan what real ones send."""
    module = build(1)
    share = Model(None)  # experts that exchange nothing, of which every second rank has the same: no all-to-all here
    share.load_state_dict(module.state_dict())
    settings = {"stage": 3, "compile": MODES["eager"], "deadline_seconds": 200.0}
    experts = {"parameters": [PATTERN], "parallel_size": 2}
    with zw.initialize(share, optimizer_of(share.parameters()), {**settings, "experts": experts}) as engine:
        batch = sentences(0, engine.rank, engine.world)
        for _ in range(2):
            engine.train_step(batch)
        before = engine.state_dict()
        sent = {kind: traffic.wire for kind, traffic in engine.stats.last_step.items()}
        with engine.profiling() as planned:
            engine.train_step(batch)
        totals = {kind: traffic.wire for kind, traffic in planned.totals().items()}
        same = all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        return same, sent, totals


def die(parallel_size: int) -> None:
    """Rank 0 raises in an expert, while the others of its group wait for its tokens."""
    module = build(parallel_size)
    settings = {"stage": 3, "compile": MODES["eager"], "deadline_seconds": 200.0}
    experts = {"parameters": [PATTERN], "parallel_size": parallel_size}
    engine = zw.initialize(module, optimizer_of(module.parameters()), {**settings, "experts": experts})
    if engine.rank == 0:

        def fail(*_: object) -> None:
            raise ValueError("this expert is broken")

        next(m for m in module.modules() if isinstance(m, Expert)).register_forward_pre_hook(fail)
    engine.backward(engine(sentences(0, engine.rank, engine.world)))


def refused(config: dict[str, Any]) -> tuple[str, str, bool]:
    """What `initialize` says to a config of experts, and whether the model is as it was."""
    module = Model(None)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    kind = message = ""
    try:
        zw.initialize(module, None, {"experts": config, "deadline_seconds": 200.0})
    except zw.ZeroweaveError as error:
        kind, message = type(error).__name__, str(error)
    return kind, message, all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def group_of(parallel_size: int) -> list[int] | str | None:
    """The ranks of `expert_group(parallel_size)`, or what it says."""
    try:
        group = zw.expert_group(parallel_size)
    except zw.ZeroweaveError as error:
        return str(error)
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    dist.barrier()  # a rank that is still connecting would lose those that have left
    dist.destroy_process_group(group)
    return ranks

"""Models whose ranks use different parts of what they enter, and training beside a reference that cannot get lost.

Beside the engine train the same model unsharded in float32 ("plain") and in float64 ("exact"), with the mean of all
ranks' gradients: zeros for a rank that has none, None where no rank has one. A gradient's error is its distance from
the exact one, and zeroweave's may be twice the plain one's, plus one ulp per element. Where gradients are compared in
every step, all three go on from zeroweave's gradients, so that errors do not grow with the steps and the parameters
must end bit-equal to those of a plain optimizer which was given these gradients. Where they are not (reading them ends
the window's reductions early), each goes on from its own, and the parameters are held to the same bound at the end.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroweave as zw
from tests.support.marks import WITH_INDUCTOR as MODES

WIDTH = 8
Gradients = dict[str, Tensor | None]
Break = Literal["none", "before", "between"]


# ---------------------------------------------------------------------- models
class Scale(nn.Module):
    """One vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


BRANCHES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "scale": Scale,
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH)),
}


class Gated(nn.Module):
    """A block of two layers, `body`, and branches that are each used or not, with a graph break where it is told.

    `detached`: its output does not lead back to its parameters.
    """

    def __init__(self, branches: Sequence[str] = ("linear",), breaks: Break = "none") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gates = nn.ModuleList(BRANCHES[kind]() for kind in branches)
        self.breaks: Break = breaks
        self.use = [True] * len(branches)
        self.body, self.detached = True, False

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.b(torch.tanh(self.a(x))) if self.body else torch.tanh(x)
        if self.breaks == "before":
            torch._dynamo.graph_break()
        for index, (used, gate) in enumerate(zip(self.use, self.gates, strict=True)):
            if index and self.breaks == "between":
                torch._dynamo.graph_break()
            if used:
                y = y + 0.5 * gate(y)
        return x + y.detach() if self.detached else y


class Stack(nn.Module):
    """`cut`: the output leads back to the last layer only, `lost`: to nothing. `checkpointed`: blocks are computed
    again in the backward.

    `prepare` changes the finished layers: ties, freezes, converts.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        checkpointed: bool = False,
        prepare: Callable[[Stack], object] = lambda stack: None,
    ) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.cut, self.lost, self.checkpointed = False, False, checkpointed
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        x = self.end(x.detach() if self.cut else x)
        return x.detach().requires_grad_() if self.lost else x


@dataclass
class Choice:
    """What one rank uses of a `Stack` in one micro-step.

    `off`: (block, branch) that it does not use, `bare`: blocks whose body it does not.
    """

    off: frozenset[tuple[int, int]] = frozenset()
    bare: frozenset[int] = frozenset()
    detached: frozenset[int] = frozenset()
    cut: bool = False
    lost: bool = False
    factor: float = 1.0
    """of the loss"""

    def set(self, stack: nn.Module) -> None:
        assert isinstance(stack, Stack)
        stack.cut, stack.lost = self.cut, self.lost
        for number, block in enumerate(stack.blocks):
            assert isinstance(block, Gated)
            block.use = [(number, index) not in self.off for index in range(len(block.gates))]
            block.body, block.detached = number not in self.bare, number in self.detached


def inputs(rank: int, step: int, micro: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


# ---------------------------------------------------------------------- training beside the reference
@dataclass(frozen=True)
class Setting:
    """`windows`: how many micro-steps each step has; another length than the last one departs from the schedule.

    `quiet`: gradients are not looked at, see the module. `config` goes over all.
    """

    stage: int
    mode: str
    windows: tuple[int, ...] = (1, 1, 1, 1)
    window: Literal["plain", "no_sync", "coalesce"] = "plain"
    quiet: bool = False
    optimizer: Literal["sgd", "adamw", "still"] = "sgd"
    config: Mapping[str, Any] = field(default_factory=dict)

    def full(self) -> dict[str, Any]:
        config = {"stage": self.stage, "deadline_seconds": 300.0, **self.config}
        return {**config, "compile": {**MODES[self.mode], **self.config.get("compile", {})}}

    def optimize(self, module: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(module.parameters(), lr=0.01)
        return torch.optim.SGD(module.parameters(), lr=0.0 if self.optimizer == "still" else 0.05, momentum=0.9)


@dataclass
class Job:
    """`loss(model or engine, rank, step, micro)` has chosen what is used by `choose(module, rank, step, micro)`."""

    make: Callable[[], nn.Module]
    choose: Callable[[nn.Module, int, int, int], float]
    """Prepares the module for one rank's micro-step; returns a factor for its loss."""
    loss: Callable[[Any, int, int, int, torch.dtype], Tensor]


@dataclass
class Result:
    """What one rank saw. `wrong`: complaints. `followed`: for each step, did it follow a schedule to its end?"""

    wrong: list[str]
    followed: list[bool]
    applied: list[bool]
    departures: int


def mean(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """The ranks' mean of `.grad` in its own dtype, at least float32; absent on some: zero there, on all: None."""
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    present = torch.tensor([p.grad is not None for p in trainable.values()], dtype=torch.int32)
    dist.all_reduce(present)
    found: Gradients = {}
    for (name, p), count in zip(trainable.items(), present.tolist(), strict=True):
        if not count:
            found[name] = None
            continue
        total = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        total = total.to(torch.promote_types(p.dtype, torch.float32))
        dist.all_reduce(total)
        found[name] = total / dist.get_world_size()
    return found


def allowed(plain: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """The largest error: twice the plain one, and one ulp of the largest element for each."""
    ulp = torch.finfo(dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0
    return 2 * float((plain.double() - exact).norm()) + ulp * exact.numel() ** 0.5


def complaints(got: Mapping[str, Tensor | None], plain: Gradients, exact: Gradients, dtypes: Any) -> list[str]:
    wrong = []
    for name, value in exact.items():
        ours, theirs = got[name], plain[name]
        if value is None or theirs is None or ours is None:
            if not (value is None and theirs is None and ours is None):
                wrong.append(f"{name}: None here {ours is None}, plain {theirs is None}, exact {value is None}")
            continue
        error, most = float((ours.double() - value).norm()), allowed(theirs, value, dtypes[name])
        if not error <= most:
            wrong.append(f"{name}: error {error:.2e}, allowed {most:.2e}, norm {float(value.norm()):.2e}")
    return wrong


def give(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor | None]) -> None:
    for name, p in parameters.items():
        if p.requires_grad:
            value = gradients[name]
            p.grad = None if value is None else value.to(p.dtype)


def beside(job: Job, setting: Setting, seed: int) -> Result:
    """Trains under the engine and beside it; collective."""
    rank, clip = dist.get_rank(), setting.config.get("gradient_clipping")
    torch.manual_seed(seed)
    plain = job.make()
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    ours, theirs = dict(plain.named_parameters()), dict(exact.named_parameters())
    dtypes = {name: p.dtype for name, p in ours.items()}
    optimizers = [setting.optimize(plain), setting.optimize(exact)]
    gas = setting.windows[0] if len(set(setting.windows)) == 1 else 1
    config = {**setting.full(), "gradient_accumulation_steps": gas}
    result = Result([], [], [], 0)
    with zw.initialize(model, setting.optimize(model), config) as engine:
        for step, count in enumerate(setting.windows):

            def value(net: Any, module: nn.Module, micro: int, dtype: torch.dtype, step: int = step) -> Tensor:
                factor = job.choose(module, rank, step, micro)
                return factor * job.loss(net, rank, step, micro, dtype)

            _window(engine, setting, count, lambda micro: value(engine, model, micro, torch.float32) / count)  # noqa: B023
            got = None if setting.quiet else engine.gradients()
            schedule = engine.schedule
            _step(engine, setting)
            result.applied.append(engine.was_step_applied())
            result.followed.append(schedule is not None and engine.executed == schedule.instructions)
            for micro in range(count):
                (value(plain, plain, micro, torch.float32) / count).backward()
                (value(exact, exact, micro, torch.float64) / count).backward()
            averages = [mean(ours), mean(theirs)]
            finite = all(bool(g.isfinite().all()) for g in averages[0].values() if g is not None)
            if finite != result.applied[-1]:
                result.wrong.append(f"step {step}: applied {result.applied[-1]}, finite {finite}")
            if got is not None and finite:
                result.wrong += [f"step {step}: {each}" for each in complaints(got, *averages, dtypes)]
                averages = [dict(got), dict(got)]
            for parameters, gradients, optimizer in zip((ours, theirs), averages, optimizers, strict=True):
                give(parameters, gradients)
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
                if finite:
                    optimizer.step()
                optimizer.zero_grad()
            if result.wrong:
                break  # what follows is noise
            if got is not None:
                exact.load_state_dict({name: v.double() for name, v in plain.state_dict().items()})
        result.departures = engine.stats.departures
        with engine.full_parameters() as full:
            if setting.quiet:
                values = {name: p.detach() for name, p in full.items()}
                means: list[Gradients] = [{n: p.detach() for n, p in each.items()} for each in (ours, theirs)]
                result.wrong += [f"at the end: {each}" for each in complaints(values, *means, dtypes)]
            elif not result.wrong:
                odd = [name for name, p in ours.items() if not torch.equal(full[name], p)]
                result.wrong += [f"the optimizer's {name} is not what its gradients make" for name in odd]
    return result


def _window(engine: Any, setting: Setting, count: int, loss: Callable[[int], Tensor]) -> None:
    """The backwards of one window, and the `step()` of all but the last."""
    uneven = len(set(setting.windows)) > 1
    with engine.coalesce_grad_reduction() if setting.window == "coalesce" else nullcontext():
        for micro in range(count):
            last = micro == count - 1
            if uneven and setting.window != "coalesce":
                engine.set_gradient_accumulation_boundary(last)
            with engine.no_sync() if setting.window == "no_sync" and not last else nullcontext():
                engine.backward(loss(micro), scale_wrt_gas=False)
            if not last and setting.window != "coalesce":
                engine.step()


def _step(engine: Any, setting: Setting) -> None:
    engine.step()
    if len(set(setting.windows)) > 1:
        engine.set_gradient_accumulation_boundary(None)


def stack_job(make: Callable[[], Stack], plan: Callable[[int, int, int], Choice]) -> Job:
    """A regression with a `Stack`, of which rank, step and micro-step use what `plan` says."""

    def choose(module: nn.Module, rank: int, step: int, micro: int) -> float:
        choice = plan(rank, step, micro)
        choice.set(module)
        return choice.factor

    def loss(net: Any, rank: int, step: int, micro: int, dtype: torch.dtype) -> Tensor:
        out: Tensor = net(inputs(rank, step, micro).to(dtype))
        return out.pow(2).mean()

    return Job(make, choose, loss)


def say(text: str) -> None:
    """For the report of a rank that is ended: what it was at."""
    print(text, file=sys.stderr, flush=True)

"""Hooks on modules inside compiled regions are called as often as in a plain model, whenever they come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroweave as zw
from tests.support.marks import daily

BLOCKS, STEPS = 3, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


class Seen:
    """What hooks saw: the name that each was given, in their order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def hook(self, name: str, factor: float) -> Callable[..., Tensor]:
        def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            self.names.append(name)
            return output * factor

        return scaled


Change = Callable[[nn.Sequential, int, Seen, list[Any]], None]


def on_one_block(model: nn.Sequential, step: int, seen: Seen, handles: list[Any]) -> None:
    if step == 0:
        handles.append(model[1].up.register_forward_hook(seen.hook("one", 0.5)))


def another_on_each(model: nn.Sequential, step: int, seen: Seen, handles: list[Any]) -> None:
    if step == 0:
        for i in range(BLOCKS):
            handles.append(model[i].register_forward_hook(seen.hook(str(i), 0.5 + 0.25 * i)))


def in_the_middle(model: nn.Sequential, step: int, seen: Seen, handles: list[Any]) -> None:
    if step == 2:
        handles.append(model[2].down.register_forward_hook(seen.hook("late", 0.5)))
    if step == 4:
        handles.pop().remove()


def exchanged(model: nn.Sequential, step: int, seen: Seen, handles: list[Any]) -> None:
    if step:
        handles.pop().remove()
    handles.append(model[0].up.register_forward_hook(seen.hook(str(step), 1.0 - 0.1 * step)))


def of_the_backward(model: nn.Sequential, step: int, seen: Seen, handles: list[Any]) -> None:
    def halved(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        seen.names.append("backward")
        return tuple(None if each is None else each * 0.5 for each in inputs)

    if step == 3:
        handles.append(model[1].register_full_backward_hook(halved))


def on_all_modules(model: nn.Sequential, step: int, seen: Seen, handles: list[Any]) -> None:
    def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not isinstance(module, nn.Linear):
            return None
        seen.names.append("all")
        return output * 0.5

    if step == 2:
        handles.append(torch.nn.modules.module.register_module_forward_hook(doubled))
    if step == 4:
        handles.pop().remove()


def train(change: Change, when: str, config: dict[str, Any] | None) -> tuple[list[float], list[str], list[set[str]]]:
    """Losses, what hooks saw, and the eager regions behind each step; without a config of the plain model."""
    model, seen, handles = made(), Seen(), list[Any]()
    if when == "before":
        change(model, 0, seen, handles)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = None if config is None else zw.initialize(model, optimizer, config=config)
    losses, eager = [], []
    for step in range(STEPS):
        if step or when == "under":
            change(model, step, seen, handles)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(x) if engine is None else engine(x)).square().mean()
        if engine is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
            eager.append(set(engine.stats.eager_regions))
        losses.append(loss.item())
    for handle in handles:
        handle.remove()
    if engine is not None:
        engine.destroy()
    return losses, seen.names, eager


@daily("lower", ["aot_eager"], ["inductor"])
@daily("when", ["under"], ["before"])
@pytest.mark.parametrize(
    "change", [on_one_block, another_on_each, in_the_middle, exchanged, of_the_backward, on_all_modules]
)
def test_hooks_are_called_as_in_a_plain_model(change: Change, when: str, lower: str) -> None:
    expected, names, _ = train(change, when, None)
    losses, found, eager = train(change, when, {"compile": {"lower": lower}})
    assert losses == pytest.approx(expected, rel=1e-5)
    assert found == names
    if change in (on_one_block, another_on_each) and when == "before":
        assert not any(eager), "they were there when the regions were compiled"
    if change is in_the_middle:
        assert eager == [set(), set(), {"2"}, {"2"}, set(), set()]
    if change is on_all_modules:
        assert [len(each) for each in eager] == [0, 0, BLOCKS, BLOCKS, 0, 0]


def exchanged_dictionary(model: nn.Sequential, step: int, seen: Seen, handles: list[Any]) -> None:
    if step == 2:
        model[1].up._forward_hooks = OrderedDict()
        handles.append(model[1].up.register_forward_hook(seen.hook("new", 0.5)))


def exchanged_module(model: nn.Sequential, step: int, seen: Seen, handles: list[Any]) -> None:
    if step == 2:
        model[1].act = nn.ReLU()
        handles.append(model[1].act.register_forward_hook(seen.hook("new", 0.5)))


def of_the_old_kind(model: nn.Sequential, step: int, seen: Seen, handles: list[Any]) -> None:
    def halved(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        seen.names.append("old")
        return tuple(None if each is None else each * 0.5 for each in inputs)

    if step == 0:
        handles.append(model[1].register_backward_hook(halved))


@pytest.mark.parametrize("change", [exchanged_dictionary, exchanged_module, of_the_old_kind])
def test_what_is_exchanged_and_hooks_of_the_old_kind(change: Change) -> None:
    expected, names, _ = train(change, "before", None)
    losses, found, eager = train(change, "before", {"compile": {"lower": "aot_eager"}})
    assert losses == pytest.approx(expected, rel=1e-5) and found == names and names
    assert eager == ([{"1"}] * STEPS if change is of_the_old_kind else [set(), set(), *[{"1"}] * (STEPS - 2)])


class Dropping(nn.Module):
    """One block runs twice in a forward. What it lets through the first time is its weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mask() for _ in range(2)])
        self.between: Callable[[], object] = lambda: None
        self.let_through: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        first = checkpoint(self.blocks[0], x, use_reentrant=True)
        other = checkpoint(self.blocks[1], x, use_reentrant=True)
        self.let_through = first.detach().clone()
        self.between()
        second = checkpoint(self.blocks[0], x * 0, use_reentrant=True)
        return first.sum() + other.sum() * 0 + second.sum()


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.drop, self.linear = nn.Parameter(torch.ones(16)), nn.Dropout(0.5), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) * self.weight + 0 * self.linear(x[:, :1])


@pytest.mark.matrix
@pytest.mark.parametrize("between", ["nothing", "hook", "evaluation"])
def test_what_runs_again_runs_as_it_did(between: str) -> None:
    """Compiled and eager code draw other numbers: a mask that is drawn again must be the forward's."""
    torch.manual_seed(0)
    model = Dropping()
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), config={"stage": 3}) as engine:
        for step in range(3):
            before = engine.state_dict()["blocks.0.weight"].clone()
            if step == 2 and between == "hook":
                model.between = lambda: model.blocks[0].register_forward_hook(lambda *_: None)
            loss = engine(torch.ones(6, 16).requires_grad_())
            if step == 2 and between == "evaluation":
                with torch.no_grad():
                    engine.module.blocks[0](torch.ones(6, 16))
            engine.backward(loss)
            engine.step()
            gradient = before - engine.state_dict()["blocks.0.weight"]
            assert model.let_through is not None
            torch.testing.assert_close(gradient * before, model.let_through.sum(0))

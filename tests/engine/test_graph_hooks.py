"""Hooks that come and go between windows: those on modules belong to a graph, and no replay leaves one out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from tests.support.marks import daily
from tests.support.programs import STEPS, batches, compared, run, step_of
from tests.support.replays import Case, batch_of, loss_fn

Register = Callable[[Any], RemovableHandle]


def doubled(module: Any, *given: Any) -> Any:
    """As a forward hook: what the module returns, doubled."""
    return given[-1] * 2.0


def halved(module: nn.Module, args: Any, *_: Any) -> Any:
    """As a forward pre-hook."""
    return tuple(each * 0.5 for each in args)


def halved_with_kwargs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return halved(module, args), kwargs


def steeper(module: nn.Module, gradients: Any, *_: Any) -> Any:
    """As a backward hook or pre-hook."""
    return tuple(None if each is None else each * 3.0 for each in gradients)


def only(hook: Any, *classes: type[nn.Module]) -> Any:
    """A hook for all modules that does something on some."""
    return lambda module, *given: hook(module, *given) if isinstance(module, classes) else None


def line(model: Any) -> nn.Module:
    found: nn.Module = model.blocks[1].line
    return found


HOOKS: dict[str, Register] = {
    "forward": lambda model: line(model).register_forward_hook(doubled),
    "forward with kwargs": lambda model: line(model).register_forward_hook(doubled, with_kwargs=True),
    "forward always": lambda model: line(model).register_forward_hook(doubled, always_call=True),
    "pre": lambda model: line(model).register_forward_pre_hook(halved),
    "pre with kwargs": lambda model: line(model).register_forward_pre_hook(halved_with_kwargs, with_kwargs=True),
    "backward": lambda model: line(model).register_full_backward_hook(steeper),
    "backward pre": lambda model: line(model).register_full_backward_pre_hook(steeper),
    "global forward": lambda _: register_module_forward_hook(only(doubled, nn.LayerNorm)),
    "global pre": lambda _: register_module_forward_pre_hook(only(halved, nn.LayerNorm)),
    "global backward": lambda _: register_module_full_backward_hook(only(steeper, nn.LayerNorm)),
    "global backward pre": lambda _: register_module_full_backward_pre_hook(only(steeper, nn.LayerNorm)),
}


def come_and_go(register: Register, engine: Any) -> Iterator[Tensor]:
    """A hook is registered when windows are replayed, and removed when those with it are."""
    handle: RemovableHandle | None = None
    for step, batch in batches(36):
        if step == 12:
            handle = register(engine.module)
        if step == 26 and handle is not None:
            handle.remove()
        yield engine.train_step(batch, loss_fn)


@daily("kind", ["forward"], [kind for kind in HOOKS if kind != "forward"])
def test_a_hook_belongs_to_the_graph(kind: str) -> None:
    differs, done = compared(partial(come_and_go, HOOKS[kind]), Case(dropout=0.1))
    assert not differs
    assert done.captured == 2 and not done.told, done
    # Windows of each kind are rare at first: those with the hook, too, but not those without it when it has gone.
    assert done.replayed >= 5 + 8 + 10, done


def in_between(engine: Any) -> Iterator[Tensor]:
    """Hooks come and go between a forward and its backward, and between the micro-steps of a window."""
    handles: list[RemovableHandle] = []
    for step, batch in batches(64):
        loss = engine(*batch)["loss"]
        if step == 29:  # too late for this backward
            handles.append(line(engine.module).register_full_backward_hook(steeper))
        if step == 45:
            handles.pop().remove()
        engine.backward(loss)
        engine.step()
        if step == 22:  # the first micro-step of this window was replayed without it
            handles.append(line(engine.module).register_forward_hook(doubled))
        if step == 26:
            handles.pop().remove()
        yield loss.detach()


def test_a_hook_may_come_in_the_middle_of_a_window() -> None:
    differs, done = compared(in_between, Case(gas=2, dropout=0.1))
    assert not differs
    assert done.replayed >= 20, done


def orders(engine: Any) -> Iterator[Tensor]:
    """Of two hooks on one module the one or the other comes first."""
    module, first = line(engine.module), None
    module.register_forward_hook(lambda module, args, out: out + 1.0)
    for step, batch in batches(32):
        if step == 0:
            first = module.register_forward_hook(doubled)
        if step == 14 and first is not None:
            first.remove()
            module.register_forward_hook(doubled, prepend=True)
        yield engine.train_step(batch, loss_fn)


def test_the_order_of_hooks_belongs_to_the_graph() -> None:
    differs, done = compared(orders, Case())
    assert not differs and done.captured == 2, done


# ---------------------------------------------------------------------- on parameters
def on_a_parameter(method: str, engine: Any) -> Iterator[Tensor]:
    """A forward of the model registers a hook on a real parameter, in an evaluation between replays."""
    handles: list[RemovableHandle] = []
    mean = engine.module.norm.running_mean

    def change(given: Tensor) -> Any:
        if method == "register_hook":
            return given * 3.0
        mean.add_(1.0)  # the gradient has been taken before
        return None

    def look(module: Any, args: Any) -> None:
        handles.append(getattr(module.weight, method)(change))

    for step, batch in batches(36):
        if step == 12:
            watch = line(engine.module).register_forward_pre_hook(look)
            engine.eval()
            with torch.no_grad():
                engine(*batch)
            engine.train()
            watch.remove()
        if step == 26:
            handles.pop().remove()
        yield engine.train_step(batch, loss_fn)
        yield mean.sum()


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_real_parameter_belongs_to_the_graph(method: str) -> None:
    differs, done = compared(partial(on_a_parameter, method), Case(dropout=0.1))
    assert not differs
    assert done.captured == 2 and done.replayed >= 5 + 8 + 10, done


# ---------------------------------------------------------------------- what hooks do beside
def test_the_next_windows_call_a_new_hook() -> None:
    called: list[int] = []

    def program(engine: Any) -> Iterator[Tensor]:
        for step, batch in batches():
            if step == 14:
                line(engine.module).register_forward_hook(lambda *_: called.append(engine.global_steps))
            yield engine.train_step(batch, loss_fn)

    _, done = run(program, Case(), graphs=True)
    assert called[:2] == [14, 15] and done.replayed, (called, done)


def test_a_hook_that_is_another_one_in_each_step_is_called_in_each() -> None:
    called: list[int] = []

    def program(engine: Any) -> Iterator[Tensor]:
        for step, batch in batches(STEPS + 40):
            handle = line(engine.module).register_forward_hook(lambda *_, step=step: called.append(step))
            yield engine.train_step(batch, loss_fn)
            handle.remove()

    _, done = run(program, Case(), graphs=True)
    assert called == list(range(STEPS + 40)) and done.replayed == 0, done
    assert len(done.told) == 1 and "hooks" in done.told[0], done


def test_a_hook_that_no_graph_can_have_is_called_in_each_step() -> None:
    found: list[float] = []

    def program(engine: Any) -> Iterator[Tensor]:
        for step, batch in batches(28):
            if step == 14:
                line(engine.module).register_forward_hook(lambda module, args, out: found.append(out.mean().item()))
            yield step_of(engine, batch)

    _, done = run(program, Case(), graphs=True)
    # One more call in the capture, which fails.
    assert 14 <= len(found) <= 15, len(found)
    assert done.replayed and done.captured == 1, done
    assert len(done.told) == 1 and "not permitted" in done.told[0], done


def on_one_rank(engine: Any) -> Iterator[Tensor]:
    """Only rank 0 has the hook."""
    handle = None
    for step in range(40):
        if step == 12 and engine.rank == 0:
            handle = line(engine.module).register_forward_hook(doubled)
        if step == 26 and handle is not None:
            handle.remove()
        yield engine.train_step(batch_of(Case(), step, 0, engine.rank), loss_fn)


@pytest.mark.matrix
def test_a_hook_on_one_rank(pools: Any) -> None:
    for differs, done in pools(2).run(compared, on_one_rank, Case(dropout=0.1)):
        assert not differs and done.replayed >= 12, done

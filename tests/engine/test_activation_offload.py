"""Activations in host memory on one rank: who else holds them, and what else happens before their backward."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.offloading import BLOCKS, BYTES, Net, engine_of, in_both, resident, rows, train
from tests.support.marks import MODES, slow
from zeroweave.runtime.copies import CopyStream
from zeroweave.schedule import Free, Offload, Release, Reload

pytestmark = pytest.mark.oldest

LARGER = ["eager", pytest.param("aot_eager", marks=pytest.mark.matrix)]


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    gc.collect()
    yield


@slow("aot_eager")
@pytest.mark.parametrize("mode", MODES)
def test_the_memory_is_given_back_during_the_forward(mode: str) -> None:
    left, moved = [], 0
    for wanted in (False, True):
        with engine_of(wanted, mode) as engine:
            for index in range(3):
                before = resident()
                loss = engine(rows(index)).pow(2).mean()
                left.append(resident() - before)
                engine.backward(loss)
                engine.step()
                del loss
            moved = engine.stats.offloaded_activations
    # of each block its input and its tanh, and the output; the first input is held until the forward is over
    everything = (2 * BLOCKS + 1) * BYTES
    assert left[:4] == [everything] * 4  # nothing is moved in the step that is recorded
    assert left[4:] == [everything - moved] * 2 and moved == (2 * (BLOCKS - 2) - 1) * BYTES


@pytest.mark.parametrize("mode", LARGER)
def test_storages_are_empty_between_release_and_reload(mode: str) -> None:
    with engine_of(True, mode) as engine:
        train(engine, 0)
        x = rows(1)
        loss = engine(x).pow(2).mean()
        homes = list(engine._runtime.activations.offloading._homes.values())
        away = [home for home in homes if home.away]
        assert sum(home.nbytes for home in away) == (2 * (BLOCKS - 2) - 1) * BYTES
        assert all(t.untyped_storage().nbytes() == 0 for home in away for t in home.tensors())
        assert all(home.host is None for home in homes if not home.away)
        engine.backward(loss)
        assert not any(home.away for home in homes)
        engine.step()


@pytest.mark.parametrize("mode", LARGER)
def test_what_the_program_holds_stays_and_keeps_its_values(mode: str) -> None:
    seen: list[Tensor] = []
    copies: list[Tensor] = []

    def keep(index: int, x: Tensor) -> Tensor:
        if index % 2:
            seen.append(x)
            seen.append(x[1:].detach())
            copies.extend(t.detach().clone() for t in seen[-2:])
        return x

    def course(engine: Any) -> list[Tensor]:
        seen.clear()
        copies.clear()
        loss = engine(rows(2)).pow(2).mean()
        assert len(seen) == BLOCKS and all(map(torch.equal, seen, copies))
        engine.backward(loss)
        assert all(map(torch.equal, seen, copies))
        engine.step()
        return [each.detach() for each in seen]

    stats = in_both(course, mode, between=keep)
    assert stats.offloaded_activations == 6 * BYTES and not stats.on_demand_reloads


class Late(CopyStream):
    """Copies as late as a stream of its own may make them: not before somebody waits. Until then there is no value."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.issued = self.done = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.fill_(0xFF)
        self.waiting.append((target, source))
        self.issued += 1

    def mark(self) -> Any:
        return self.issued

    def wait(self, mark: Any) -> None:
        while self.done < mark:
            target, source = self.waiting.pop(0)
            assert target.untyped_storage().nbytes() == source.untyped_storage().nbytes() > 0
            target.copy_(source)
            self.done += 1


@pytest.mark.parametrize("mode", LARGER)
def test_every_copy_is_waited_for(mode: str) -> None:
    def course(engine: Any) -> list[Tensor]:
        late = None
        if (offloading := engine._runtime.activations.offloading) is not None:
            late = offloading._copies = Late()
        losses = [train(engine, index) for index in (2, 3)]
        if late is not None:
            assert late.issued == 4 * (2 * (BLOCKS - 2) - 1)  # out and back, in two steps
        engine.module.depth = BLOCKS - 1
        losses.append(train(engine, 4))  # leaves a block out when some are leaving and others are away
        engine(rows(5))
        engine.zero_grad()
        assert late is None or not late.waiting
        return losses

    assert in_both(course, mode).departures == 0


def test_what_the_program_lets_go_of_later_moves_later() -> None:
    """A residual that a parent holds while its children run leaves with the call behind them."""
    held: dict[int, Tensor] = {}

    def hold(index: int, x: Tensor) -> Tensor:
        held[index] = x
        held.pop(index - 2, None)  # the next block and the one after it run meanwhile
        return x

    def course(engine: Any) -> list[Tensor]:
        return [train(engine, 2)]

    stats = in_both(course, between=hold)
    held.clear()
    assert stats.offloaded_activations == 6 * BYTES and not stats.on_demand_reloads


class Odd(torch.autograd.Function):
    """Saves views that share a storage: shifted, transposed, repeated, overlapping."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        base = torch.cat([x.detach(), x.detach() * 2]).t().contiguous()
        row = base[3]
        ctx.save_for_backward(
            base[:, ::3], base.t()[5:], row.expand(4, -1), base.as_strided((5, 7), (2, 1), 11), row.view(torch.int32)
        )
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        thirds, late, repeated, overlapping, bits = ctx.saved_tensors
        assert repeated.stride() == (0, 1) and overlapping.stride() == (2, 1) and bits.dtype == torch.int32
        factor = thirds.sum() + late[:, 1].sum() + repeated.sum() + overlapping.sum() + (bits % 7).sum()
        return gradient * factor.sigmoid()


def test_views_of_one_storage_come_back_as_they_were() -> None:
    def course(engine: Any) -> list[Tensor]:
        return [train(engine, index) for index in (2, 3)]

    stats = in_both(course, between=lambda index, x: Odd.apply(x))  # type: ignore[no-untyped-call]
    # a block's input and its tanh, and twice as much once for all five views
    assert stats.offloaded_activations == (4 * (1 + 1 + 2) - 1 - 2) * BYTES


@pytest.mark.parametrize("mode", LARGER)
@pytest.mark.parametrize("index", [0, BLOCKS - 2])
def test_a_saved_tensor_that_was_written_is_refused(mode: str, index: int) -> None:
    """The first one's call moves, the last one's does not."""
    kept: list[Tensor] = []
    with engine_of(True, mode, Net(lambda i, x: kept.append(x) or torch.exp(x) if i == index else x)) as engine:
        for step in range(2):
            kept.clear()
            train(engine, step)
        kept.clear()
        loss = engine(rows(2)).pow(2).mean()
        node = next_exp(loss)
        saved = node._saved_result
        with torch.no_grad():
            saved.mul_(2)
        with pytest.raises(RuntimeError, match="modified since the forward, by an inplace operation"):
            engine.backward(loss)
        engine.zero_grad()
        del saved, node, loss
        kept.clear()
        train(engine, 3)
        assert engine.stats.offloaded_activations > 0


def next_exp(loss: Tensor) -> Any:
    """The node of `torch.exp` behind a loss."""
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if "ExpBackward" in type(node).__name__:
            return node
        waiting += [each for each, _ in node.next_functions if each is not None]  # type: ignore[union-attr]
    raise AssertionError("no exp")


@slow("aot_eager")
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_departs_finds_its_activations(mode: str) -> None:
    def course(engine: Any) -> list[Tensor]:
        losses = []
        for step, depth in enumerate((BLOCKS, BLOCKS, BLOCKS, BLOCKS)):
            engine.module.depth, engine.module.backwards = depth, step >= 2
            losses.append(train(engine, step + 2))
        return losses

    stats = in_both(course, mode)
    assert stats.departures >= 1 and stats.offloaded_activations > 0


@pytest.mark.parametrize("mode", LARGER)
@pytest.mark.parametrize("where", ["forward", "between", "backward"])
def test_an_exception_leaves_nothing_behind(mode: str, where: str) -> None:
    armed = {"forward": False, "backward": False}

    def between(index: int, x: Tensor) -> Tensor:
        if index == 3 and armed["forward"]:
            raise ValueError("forward")
        if index == 3 and x.requires_grad:

            def hook(gradient: Tensor) -> None:
                if armed["backward"]:
                    raise ValueError("backward")

            x.register_hook(hook)
        return x

    def course(engine: Any) -> list[Tensor]:
        armed[where] = True
        if where == "between":
            engine(rows(2)).pow(2).mean()
        else:
            with pytest.raises(ValueError, match=where):
                train(engine, 2)
        armed[where] = False
        engine.zero_grad()
        return [train(engine, index) for index in (3, 4)]

    stats = in_both(course, mode, between=between)
    assert stats.offloaded_activations > 0


@pytest.mark.parametrize("mode", LARGER)
def test_forwards_in_between_change_nothing(mode: str) -> None:
    def course(engine: Any) -> list[Tensor]:
        loss = engine(rows(2)).pow(2).mean()
        with torch.no_grad():
            metric = engine(rows(3)).mean()
        engine.eval()
        with torch.inference_mode():
            other = engine(rows(4)).mean().clone()
        engine.train()
        engine.backward(loss)
        engine.step()
        return [loss.detach(), metric, torch.tensor(other.item())]

    stats = in_both(course, mode)
    assert stats.offloaded_activations > 0 and not stats.on_demand_reloads


@pytest.mark.parametrize("mode", LARGER)
@pytest.mark.parametrize("index", [1, 2, BLOCKS - 1])
def test_a_backward_inside_the_forward_finds_what_is_leaving_and_what_is_away(mode: str, index: int) -> None:
    inputs: list[Tensor] = []

    def between(at: int, x: Tensor) -> Tensor:
        if at == index and inputs:
            (gradient,) = torch.autograd.grad(x.pow(2).mean(), inputs[0], retain_graph=True)
            return x + gradient
        return x

    def course(engine: Any) -> list[Tensor]:
        losses = []
        for step in range(3):
            inputs[:] = [rows(step).requires_grad_()]
            loss = engine(inputs[0]).pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        inputs.clear()
        return losses

    stats = in_both(course, mode, between=between)
    assert stats.departures > 0


def test_a_penalty_on_the_gradient_differentiates_twice() -> None:
    def course(engine: Any) -> list[Tensor]:
        losses = []
        for index in range(3):
            x = rows(index).requires_grad_()
            output = engine(x)
            (gradient,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
            loss = output.pow(2).mean() + gradient.pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return losses

    stats = in_both(course)
    assert stats.offloaded_activations > 0


def test_what_no_backward_uses_is_freed_in_host_memory_as_well() -> None:
    settings = {"activations": {"free_threshold_bytes": BYTES}}
    with engine_of(True, "eager", **settings) as engine:
        for index in range(3):
            x = rows(index)
            metric = engine(x)  # nobody differentiates it
            engine.backward(engine(x).pow(2).mean())
            engine.step()
            assert engine.executed.count(Free()) == 1
        assert engine.stats.offloaded_activations > 0 and engine.stats.freed_activations > 0
        engine.module.depth = 4  # a departure, while copies are on their way
        loss = engine(x).pow(2).mean()
        engine.backward(loss, retain_graph=True)
        engine.step()
        with pytest.raises(RuntimeError, match="was freed in"):
            engine.backward(loss)
        engine.zero_grad()
        del metric, loss
        gc.collect()
        assert engine._runtime.activations.offloading.host.now == 0


def test_what_a_graph_of_an_earlier_window_keeps_comes_back_on_demand() -> None:
    kept: list[Tensor] = []

    def between(index: int, x: Tensor) -> Tensor:
        if index != 1:
            return x
        kept[:] = [x, torch.exp(x) * 0.5]  # what `exp` has saved is its result, which nobody else keeps
        return kept[1]

    with engine_of(True, "eager", Net(between)) as engine:
        for index in range(2):
            train(engine, index)
        engine(rows(2))
        x, y = kept
        engine.zero_grad()
        train(engine, 3)
        before = engine.stats.on_demand_reloads
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, y.detach())
        assert engine.stats.on_demand_reloads == before + 1
        kept.clear()


def test_small_activations_stay() -> None:
    offload = {"activations": True, "activations_threshold_bytes": BYTES + 1}
    with engine_of(True, offload=offload) as engine:
        for index in range(2):
            train(engine, index)
        assert not any(isinstance(i, Offload | Release | Reload) for i in engine.executed)
        assert engine.stats.offloaded_activations == 0

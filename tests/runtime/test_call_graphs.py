"""Graphs of calls give what the code gives, whatever the program keeps, leaves out, or does in another order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.graph_double import GraphDouble
from tests.support.marks import daily
from zeroweave.runtime.call_graphs import CallGraphs

WIDTH, LAYERS = 6, 3
CPU = torch.device("cpu")
Execute = Callable[[Any, list[Any], Callable[[], set[int]]], Any]


def forward(args: list[Any]) -> list[Any]:
    """(weight, x, mask, factor) -> (y, x itself, a view of memory of its own, the weight, the mask itself)"""
    weight, x, mask, factor = args
    args.clear()
    hidden = torch.tanh(x @ weight)
    return [hidden * mask * factor, x, hidden.view(-1), weight, mask]


def backward(args: list[Any]) -> list[Any]:
    """(x, hidden, weight, mask, factor, dy, into, adds) -> (dx, None)"""
    x, hidden, weight, mask, factor, dy, into, adds = args
    args.clear()
    inner = dy * mask * factor * (1 - hidden.view(x.shape) ** 2)
    if adds:
        into.addmm_(x.t(), inner)
    else:
        if not into.untyped_storage().nbytes():
            into.untyped_storage().resize_(into.nbytes)
        torch.mm(x.t(), inner, out=into)
    return [inner @ weight.t(), None]


class Program:
    """A model of equal layers, each step as autograd would run it. `kept`: what the user keeps, with its values."""

    def __init__(self, execute: Execute, lend: Callable[[int], Tensor | None]) -> None:
        self.weights = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(LAYERS)]
        self.sums = [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.execute, self.lend = execute, lend

    def step(
        self, x: Tensor, layers: list[int], factor: float, adds: bool, keep: set[int]
    ) -> tuple[Tensor, list[Tensor]]:
        row = torch.stack([(torch.arange(WIDTH) % 3 > 0).float()] * 2).add(torch.tensor([[0.0], [1.0]]))[
            int(factor == 2)
        ]
        mask, saved, kept = row.expand(len(x), WIDTH), [], []
        for layer in layers:
            if factor > 2:  # masks of the layers' own, instead of one
                mask = (row + layer).expand(len(x), WIDTH)
            x, *rest = self.execute(forward, [self.weights[layer], x, mask, 1.5], lambda: {0})
            saved.append((layer, rest))
            if layer in keep:
                kept.append(x)
        loss = x.square().sum()
        dy = 2 * x
        del x
        while saved:
            layer, rest = saved.pop()
            into = self.sums[layer] if adds else self.place(layer)
            dy, _ = self.execute(backward, [*rest, 1.5, dy, into, torch.tensor(adds)], lambda: {2, 6})
            if not adds:
                self.sums[layer].copy_(into)
            del rest, into
        return loss, [dy, *kept]

    def place(self, layer: int) -> Tensor:
        if layer == 1:  # has its memory when it is written
            into = torch.empty(WIDTH, WIDTH)
            into.untyped_storage().resize_(0)
            return into
        flat = self.lend(WIDTH * WIDTH)
        return torch.empty(WIDTH, WIDTH) if flat is None else flat.view(WIDTH, WIDTH)


def plainly(run: Any, args: list[Any], bound: Any) -> Any:
    return run(args)


class Both:
    """The same program with graphs and without. `told`: what was said of templates without graphs."""

    def __init__(self, fails: Callable[[Any], bool] = lambda run: False) -> None:
        self.double, self.told = GraphDouble(fails=fails), list[str]()
        self.graphs = CallGraphs(CPU, self.double, self.told.append)
        self.plain = Program(plainly, lambda numel: None)
        self.graphed = Program(self.graphs.execute, lambda numel: self.graphs.lend(numel, torch.float32))
        self.kept: list[tuple[Tensor, Tensor]] = []

    def step(
        self,
        rows: int,
        seed: int = 0,
        layers: Any = range(LAYERS),
        adds: bool = False,
        keep: Any = (),
        factor: float = 1.5,
    ) -> None:
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.graphs.begin((rows, adds), settled=True)
        wanted = self.plain.step(x.clone(), list(layers), factor, adds, set(keep))
        got = self.graphed.step(x.clone(), list(layers), factor, adds, set(keep))
        torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=0)
        for one, other in zip([*got[1], *self.graphed.sums], [*wanted[1], *self.plain.sums], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        self.kept += zip(got[1], wanted[1], strict=True)
        self.check_kept()
        if not keep:
            self.kept.clear()

    def check_kept(self) -> None:
        for one, other in self.kept:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_third_unit_of_a_kind_is_launched() -> None:
    both = Both()
    for seed in range(6):
        both.step(4, seed)
    assert both.double.captures == 2 * LAYERS and both.graphs.launched == 5 * 2 * LAYERS
    assert both.graphs.plain == 2 * LAYERS and not both.told and not both.graphs.why


def test_lengths_and_accumulation_in_turn() -> None:
    both = Both()
    for seed in range(24):
        both.step(rows=(3, 5, 8)[seed % 3], seed=seed, adds=seed % 2 > 0)
    assert both.double.captures == 6 * 2 * LAYERS
    before = both.graphs.plain
    for seed in range(12):
        both.step(rows=(3, 5, 8)[seed % 3], seed=seed, adds=seed % 2 > 0)
    assert both.graphs.plain == before


def test_what_the_program_keeps_is_not_overwritten() -> None:
    both = Both()
    for seed in range(4):
        both.step(4, seed)
    for seed in range(4):
        both.step(4, seed, keep={0, 2})  # until a step that keeps nothing
    assert len(both.kept) > 4 and both.graphs.why["tensors of an earlier call are still referenced"] == 1
    before = both.graphs.launched
    both.step(4, 9)
    both.step(4, 10)
    assert both.graphs.launched > before


def test_calls_that_are_left_out_end_the_graphs_of_a_unit() -> None:
    both = Both()
    for seed in range(4):
        both.step(4, seed)
    launched = both.graphs.launched
    both.step(4, 5, layers=[0, 2])
    assert both.graphs.launched == launched + 1, "the first forward is that of the recording, the second is not"
    both.step(4, 6)
    assert both.graphs.launched == launched + 1 + 2 * LAYERS


def test_code_that_cannot_be_captured_trains() -> None:
    both = Both(lambda run: run is backward)
    for seed in range(6):
        both.step(4, seed)
    [why] = both.told
    assert "operation not permitted" in why and both.graphs.why == {why: 1 + LAYERS}
    assert both.double.cleared == 1, "the pool that was captured into, when the unit had ended"
    assert both.graphs.launched == 5 * LAYERS, "the forwards, from the second step on"


def test_a_recording_that_breaks_off_is_not_kept() -> None:
    both = Both()
    both.step(4)
    both.graphs.begin((4, False), settled=True)
    both.graphed.step(torch.zeros(4, WIDTH), [0], 1.5, False, set())
    both.graphs.abort()
    for seed in range(4):
        both.step(4, seed)
    assert both.double.captures == 2 + 2 * LAYERS


def test_recordings_are_given_up_where_memory_is_short() -> None:
    both = Both()
    for seed in range(4):
        both.step(4, seed)
    both.double.roomy = False
    both.step(4, 5)  # needs no further memory
    assert both.double.cleared == 0 and not both.told
    for seed in range(4):
        both.step(5, seed)
        both.step(4, seed)
    short = "the device has no room for a call's memory twice"
    assert both.told == [short] and both.double.cleared == 1 and both.double.captures == 2 * LAYERS
    assert both.graphs.why == {short: 8}, "each of these units"
    both.double.roomy = True
    launched = both.graphs.launched
    both.step(4, 9)
    both.step(4, 10)
    assert both.graphs.launched == launched + 4 * LAYERS


def test_code_that_has_not_run_is_not_captured() -> None:
    """It may compile and measure kernels. Here the first unit ends before it has run anything."""
    both = Both()
    both.graphs.begin((4, False), settled=True)
    both.graphs.abort()
    both.graphs.begin((4, False), settled=True)
    both.graphs.execute(forward, [torch.zeros(WIDTH, WIDTH), torch.zeros(4, WIDTH), torch.zeros(4, WIDTH), 1.5], set)
    assert both.double.captures == 0
    both.graphs.abort()
    both.step(4)
    assert both.double.captures == LAYERS, "the forwards: the backward runs for the first time"
    both.step(4)
    assert both.double.captures == 3 * LAYERS


def test_an_argument_without_memory_that_the_code_leaves_alone() -> None:
    def doubles(args: list[Any]) -> list[Any]:
        return [args[0] * 2]

    graphs, nothing = CallGraphs(CPU, GraphDouble(), print), torch.empty(4)
    nothing.untyped_storage().resize_(0)
    for value in range(4):
        graphs.begin("unit", settled=True)
        [found] = graphs.execute(doubles, [torch.full((2,), float(value)), nothing], set)
        assert found.tolist() == [2.0 * value] * 2 and not nothing.untyped_storage().nbytes()
        del found
    assert graphs.launched == 3


def test_nothing_is_recorded_while_parameters_move() -> None:
    both = Both()
    for _ in range(4):
        both.graphs.begin((4, False), settled=False)
        both.graphed.step(torch.zeros(4, WIDTH), [0, 1], 1.5, False, set())
    assert both.double.captures == 0


@daily("seed", range(15), range(15, 400))
def test_random_programs(seed: int) -> None:
    choose = random.Random(seed)
    both = Both(lambda run: both.double.captures > 2 and choose.random() < 0.05)
    for index in range(40):
        layers = choose.choices([range(LAYERS), [0, 2], [1, 1, 2], [2, 1, 0]], [6, 1, 1, 1])[0]
        keep = set(choose.sample(range(LAYERS), choose.choice([0, 0, 0, 1, 2])))
        both.step(
            choose.choice([2, 3]), index, layers, choose.random() < 0.3, keep, choose.choice([1.5, 1.5, 2.0, 2.5])
        )
        if choose.random() < 0.1:
            both.graphs.abort()
        if choose.random() < 0.1:  # other memory for a parameter, or other values in the same
            layer = choose.randrange(LAYERS)
            for program in (both.plain, both.graphed):
                program.weights[layer] = program.weights[layer] * 1.01
            both.plain.weights[0].mul_(0.99)
            both.graphed.weights[0].mul_(0.99)
        if choose.random() < 0.3 and both.kept:
            both.kept.pop(choose.randrange(len(both.kept)))
    assert both.graphs.launched > 0


class Copies(TorchDispatchMode):
    """Counts copies into tensors of this shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.count, self._shape = 0, shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default and tuple(args[0].shape) == self._shape
        return func(*args, **(kwargs or {}))


def test_an_argument_that_calls_have_in_common_is_copied_once() -> None:
    both = Both()
    for seed in range(4):
        with Copies((1, WIDTH)) as copies:  # of the mask's expanded rows the first one is copied
            both.step(4, seed)
    assert both.graphs.launched == 3 * 2 * LAYERS and copies.count == 1


def doubled(args: list[Any]) -> list[Any]:
    (x,) = args
    args.clear()
    return [x * 2]


def test_an_argument_that_was_written_between_calls_is_another_one() -> None:
    graphs = CallGraphs(CPU, GraphDouble(), lambda why: None)
    for unit in range(5):
        graphs.begin("unit", settled=True)
        x = torch.full((3,), float(unit))
        (first,) = graphs.execute(doubled, [x], set)
        if unit == 3:
            x.add_(1)
        (second,) = graphs.execute(doubled, [x], set)
        assert first.tolist() == [2.0 * unit] * 3 and second.tolist() == [2.0 * (unit + (unit == 3))] * 3
        del first, second
    assert graphs.why == {"calls that had one argument in common have several": 1}
    assert graphs.launched == 2 + 2 + 1 + 2


def test_arguments_in_inference_mode_are_copied_for_each_call() -> None:
    graphs = CallGraphs(CPU, GraphDouble(), lambda why: None)
    with torch.inference_mode():
        for unit in range(4):
            graphs.begin("unit", settled=True)
            x = torch.full((3,), float(unit))
            for _ in range(2):
                (found,) = graphs.execute(doubled, [x], set)
                assert torch.equal(found, 2 * x)
                del found
                x.add_(1)  # which nobody counts
    assert graphs.launched == 3 * 2 and not graphs.why

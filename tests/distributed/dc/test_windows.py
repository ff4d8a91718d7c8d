"""Windows by name: what the backwards up to an updating one add up to, against plain data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.dc_world import Use, World, draw, mean_of
from tests.support.harness import Pools
from tests.support.marks import daily, slow
from tests.support.reference import judge
from zeroweave import dc
from zeroweave.errors import EngineError

DAILY = [(1, "taken"), (2, "cut")]
REST = [(1, "whole"), (1, "cut"), (2, "whole"), (2, "taken"), (3, "cut"), (3, "taken")]
matrix = pytest.mark.matrix
WIDER = pytest.param(torch.bfloat16, "float32", marks=matrix)
every_row = pytest.mark.parametrize(("stage", "held"), [*DAILY, *(pytest.param(*row, marks=matrix) for row in REST)])


def pattern(stage: int, held: str, updates: str, end: bool) -> list[float]:
    """A backward for each letter, T where it updates; the differences of the windows."""
    found = []
    with World(stage, held) as world:
        for micro, update in enumerate(updates):
            world.micro_step(micro, update == "T", end=end or update == "T")
            if update == "T":
                found.append(world.difference())
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("world", [3, 4])
@every_row
def test_more_ranks(pools: Pools, stage: int, held: str, world: int) -> None:
    for found in pools(world).run(pattern, stage, held, "FFTFT", True):
        assert max(found) <= 1, found


def shared(stage: int, held: str, order: list[Use]) -> list[float]:
    """Parameters 0 and 2 belong to two graphs, and contribute through one, the other, or both in one backward."""
    found = []
    with World(stage, held, graphs={3: [0, 1, 2], 5: [0, 2, 3, 4]}) as world:
        for first in (0, 10):
            for micro, update in enumerate((False, False, True)):
                uses = order if micro != 1 else [(5, 0), (3, 2), (3, 1)]
                world.micro_step(first + micro, update, uses)
            found.append(world.difference())
    return found


def recompiled(stage: int, held: str) -> list[float]:
    """The graph is forgotten and registered anew between micro-steps 2 and 3 of 4."""
    found = []
    with World(stage, held) as world:
        for first in (0, 10):
            for micro in range(4):
                if micro == 2:
                    world.recompile()
                world.micro_step(first + micro, update=micro == 3)
            found.append(world.difference())
    return found


def grown(stage: int, held: str) -> float:
    """The second graph is compiled when the first one has reduced already."""
    with World(stage, held, graphs={0: [0, 1]}) as world:
        world.micro_step(0, update=False, end=True)
        world.runtime.reset()
        world.graphs = {0: [1], 1: [0, 2, 3, 4]}
        world.register_graphs()
        world.micro_step(1, update=True)
        return world.difference()


@daily(("stage", "held"), [(2, "cut")], [(1, "taken"), (2, "taken"), (3, "taken")])
def test_a_graph_that_comes_in_the_middle_of_a_window(pools: Pools, stage: int, held: str) -> None:
    assert max(pools(2).run(grown, stage, held)) <= 1


def absent(stage: int, held: str) -> list[float]:
    """Parameters 1 and 2 have no gradient in a micro-step, in a whole window, and in the first one ever: then zero."""
    rest: list[Use] = [(0, 0), (0, 3), (0, 4)]
    found = []
    with World(stage, held) as world:
        windows: list[list[list[Use] | None]] = [[rest, rest], [None, rest], [rest, None], [rest, rest], [None, None]]
        for index, window in enumerate(windows):
            for micro, uses in enumerate(window):
                world.micro_step(10 * index + micro, update=micro == 1, uses=uses)
            if index in (0, 3):
                assert all(world.plain[i].grad is None for i in (1, 2))
            found.append(world.difference())
    return found


class Boom(Exception):
    pass


def refusals(world: World) -> list[str]:
    """What the runtime says to the next calls after a backward that broke off."""
    said = []
    for call in (world.runtime.start_forward, world.runtime.take_gradients):
        with pytest.raises(EngineError) as raised:
            call()
        said.append(str(raised.value))
    for call in (world.runtime.start_backward, world.runtime.end_backward):
        with pytest.raises(EngineError) as raised:
            call(0)
        said.append(str(raised.value))
    with pytest.raises(EngineError) as raised:
        world.runtime.reduce_grad(torch.ones(()), 0, 3)
    return [*said, str(raised.value)]


def broken(stage: int, held: str, where: str) -> tuple[list[str], list[float]]:
    """A window, one that an exception breaks off, and a clean one; what calls in between said."""
    said: list[str] = []
    found: list[float] = []

    def boom(*_: object) -> None:
        raise Boom

    with World(stage, held) as world:
        runtime = world.runtime
        world.micro_step(0, update=True)
        found.append(world.difference())
        world.micro_step(1, update=False)
        oldest = torch.ones((), requires_grad=True)  # the last to get its gradient
        loss = oldest * 2 + world.loss(2)
        runtime.start_backward(update=where != "before")
        if where == "hook":
            oldest.register_hook(boom)
            with pytest.raises(Boom):
                loss.backward()
            said = refusals(world)
        elif where == "between":
            runtime.reduce_grad(draw(1, world.rank, shape=(5, 7)), 0, 0)
        runtime.zero_grad()
        assert [world.ledger.gauge(name).now for name in ("gradients", "reduce buckets")] == [0, 0]
        world.forget()
        for micro in (3, 4):
            world.micro_step(micro, update=micro == 4)
        found.append(world.difference())
    return said, found


@daily("where", ["hook"], ["between", "before"])
@every_row
def test_an_exception_in_the_middle_and_a_clean_step(pools: Pools, stage: int, held: str, where: str) -> None:
    for said, found in pools(2).run(broken, stage, held, where):
        assert max(found) <= 1, found
        if where == "hook":
            assert len(said) == 5 and "take_gradients: call it once, after the end" in said[1], said
            assert all("an earlier backward did not finish" in text for text in said[:1] + said[2:]), said


def skipped(stage: int, held: str) -> list[float]:
    """A window whose step is skipped (its gradients are never read), zero_grad, and another one."""
    found = []
    with World(stage, held) as world:
        for first in (0, 10, 20):
            world.micro_step(first, update=False)
            world.micro_step(first + 1, update=True)
            if first == 10:
                world.runtime.zero_grad()
                world.forget()
            else:
                found.append(world.difference())
        world.micro_step(30, update=False)  # a window that is aborted half-way
        world.runtime.zero_grad()
        world.forget()
        world.micro_step(31, update=True, uses=[(0, 1)])
        found.append(world.difference())
    return found


def dtypes(stage: int, held: str, buffer: torch.dtype, reduce_dtype: str | None) -> float:
    """bfloat16 and float32 gradients of the same parameters, whose sums are exact in both."""
    config = {"reduce_dtype": reduce_dtype}
    with World(stage, held, config, shapes=[(64,), (5, 3)], buffer_dtype=buffer) as world:
        runtime, wanted = world.runtime, [torch.zeros(64), torch.zeros(5, 3)]
        for micro, update in enumerate((False, True)):
            runtime.start_backward(update)
            for dtype in (torch.bfloat16, torch.float32, torch.bfloat16) if micro else (torch.bfloat16,):
                for i, p in enumerate(world.mine):
                    value = 2.0 ** (i + micro)
                    runtime.reduce_grad(torch.full(p.shape, value * (1 + 2 * world.rank)).to(dtype), 0, i)
                    wanted[i] += value * world.world
            if update:
                runtime.end_backward(0)
        worst = 0.0
        for i, got in enumerate(world.gradients()):
            start, numel = world.shares[i]
            worst = max(worst, float((got.float() - wanted[i].flatten()[start : start + numel]).abs().sum()))
        return worst


@pytest.mark.parametrize(("buffer", "reduce_dtype"), [(torch.float32, None), WIDER])
@every_row
def test_gradients_of_two_dtypes(
    pools: Pools, stage: int, held: str, buffer: torch.dtype, reduce_dtype: str | None
) -> None:
    assert pools(2).run(dtypes, stage, held, buffer, reduce_dtype) == [0.0, 0.0]


def in_flight(bucket: int) -> list[Any]:
    """A reduction that could write its target directly, while an earlier one of the same parameter is in flight."""
    numel, found = 64, []
    for order in ([(0, 1), (0,)], [(0,), (0, 1)], [(0,), (0,)]):
        with World(2, "whole", shapes=[(numel,), (3,)], bucket=bucket) as world:
            for micro, ids in enumerate(order):
                world.micro_step(micro, update=False, uses=[(0, i) for i in ids])
            world.runtime.start_backward(True)
            world.runtime.end_backward(0)
            found.append(world.difference())
    return found


@daily("bucket", [64], [1, 1000])
def test_results_arrive_in_the_order_of_their_reductions(pools: Pools, bucket: int) -> None:
    for found in pools(2).run(in_flight, bucket):
        assert max(found) <= 1, found


def moved(stage: int, held: str) -> list[float]:
    """Every buffer is replaced in mid-window: while reductions are in flight, and when they are over."""
    found = []
    with World(stage, held, shapes=[(64,), (5, 7), ()], bucket=1) as world:
        for end in (False, True):
            world.micro_step(0, update=False, end=end)
            old = list(world.buffers)
            for i, buffer in enumerate(old):
                assert buffer is not None
                world.buffers[i] = torch.full_like(buffer, float("nan"))
                world.runtime.update_param_grad_buffer(i, world.buffers[i])
            seen = [buffer.clone() for buffer in old if buffer is not None]
            world.micro_step(1, update=True)
            for before, after in zip(seen, old, strict=True):
                torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
            found.append(world.difference())
    return found


@daily(("stage", "held"), [(3, "cut")], [(1, "cut"), (2, "whole"), (2, "cut")])
def test_another_buffer_in_the_middle(pools: Pools, stage: int, held: str) -> None:
    for found in pools(2).run(moved, stage, held):
        assert max(found) <= 1, found


def nested(stage: int, held: str) -> list[float]:
    """A backward inside a backward (a reentrant checkpoint) hands gradients over, as well as the outer one."""
    with World(stage, held) as world:

        class Recomputes(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                with torch.enable_grad():
                    world.loss(1, [(0, 0), (0, 2)]).backward()
                return grad

        for micro in (0, 1):
            x = torch.ones((), requires_grad=True)
            inner = Recomputes.apply(world.loss(0, [(0, 3)]) + x)
            loss = world.loss(0, [(0, 1), (0, 2)]) + inner + world.loss(2, [(0, 4)])
            world.runtime.start_backward(update=micro == 1)
            loss.backward()
            world.runtime.end_backward(0)
            for seed, uses in ((1, [(0, 0), (0, 2)]), (0, [(0, 3)]), (0, [(0, 1), (0, 2)]), (2, [(0, 4)])):
                world.plain_backward(seed, uses)
        return [world.difference()]


def retained(stage: int, held: str) -> list[float]:
    """The same graph is differentiated twice in one window."""
    with World(stage, held) as world:
        loss, copies = world.loss(0), [world.loss(0, among=each) for each in (world.plain, world.exact)]
        for update in (False, True):
            world.runtime.start_backward(update)
            loss.backward(retain_graph=True)
            for each in copies:
                each.backward(retain_graph=True)
        world.runtime.end_backward(0)
        return [world.difference()]


PROGRAMS: dict[str, tuple[int, Callable[[int, str], list[float]]]] = {
    "updates": (3, partial(pattern, updates="TFTT", end=False)),
    "late updates": (1, partial(pattern, updates="FFFT", end=False)),
    "a parameter in two graphs": (2, partial(shared, order=[(3, 0), (3, 1), (3, 2), (5, 0), (5, 3), (5, 2), (5, 4)])),
    "twice in one graph": (2, partial(shared, order=[(3, 0), (3, 0), (3, 2), (3, 1), (5, 4), (5, 3), (3, 0)])),
    "recompiled in the middle": (2, recompiled),
    "without a gradient": (5, absent),
    "a skipped step": (3, skipped),
    "a backward in a backward": (1, nested),
    "a graph differentiated twice": (1, retained),
}
"""How many windows of which there are differences, and the program."""


@slow("1-taken-a parameter in two graphs", *(f"{s}-{h}-{p}" for s, h in DAILY for p in ("updates", "late updates")))
@pytest.mark.parametrize("program", PROGRAMS)
@every_row
def test_windows(pools: Pools, stage: int, held: str, program: str) -> None:
    windows, run = PROGRAMS[program]
    for found in pools(2).run(run, stage, held):
        assert len(found) == windows and max(found) <= 1, found


def strided() -> float:
    """Expanded and transposed gradients, as autograd makes them."""
    with World(2, "cut", shapes=[(6, 4), (40,)]) as world:
        world.runtime.start_backward(True)
        rank = world.rank
        grads = [draw(7, rank, shape=(4, 6)).t(), torch.full((), 1.0 + rank).expand(40)]
        for i, grad in enumerate(grads):
            world.assign(i, grad)
            world.runtime.reduce_grad(grad, 0, i)
        world.runtime.end_backward(0)
        return world.difference()


def test_gradients_of_any_stride(pools: Pools) -> None:
    assert max(pools(2).run(strided)) <= 1


def taken_twice() -> str:
    with World(2, "taken") as world:
        world.micro_step(0, update=True)
        assert world.difference() <= 1
        try:
            world.runtime.take_gradients()
        except EngineError as error:
            return str(error)
    return ""


def test_gradients_are_taken_once(pools: Pools) -> None:
    """A second partition would hold undefined values."""
    assert all("call it once" in said for said in pools(2).run(taken_twice))


def default_runtime() -> float:
    """The functions of the module, as one would use them."""
    weight = draw(1, shape=(3, 4))
    buffer = torch.full((12,), float("nan"))
    dc.init(None, {"double_buffer": False}, 8)
    try:
        dc.register_param(7, [3, 4], weight, buffer.view(3, 4), 100)
        dc.register_graph_z2(11, [7])
        for micro in range(3):
            dc.start_backward(micro == 2)
            assert dc.reduce_grad(draw(2 + dist.get_rank(), micro, shape=(3, 4)), 11, 7).numel() == 0
        dc.end_backward(11)
        drawn = [draw(2 + rank, micro, shape=(3, 4)) for micro in range(3) for rank in range(dist.get_world_size())]
        return judge({"": buffer.view(3, 4)}, mean_of(drawn, dist.get_world_size()))[0]
    finally:
        dc.cleanup()


def test_the_default_runtime(pools: Pools) -> None:
    assert max(pools(2).run(default_runtime)) <= 1
